import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.js";

const { layOut, isTree } = load(["helpers", "tree"], "layOut, isTree");

const line = {
  drafted: ["a", "b", "c", ""],
  parents: [0, 0, 1, 2],
  fates: ["accepted", "rejected", "rejected", null],
  q: [0.5, 0.3, 0.2, null],
  p: [0.6, 0.1, 0.1, null],
  path: [0, 1],
  kinds: ["accepted", "corrected"],
  text: ["a", "x"],
};

test("nodes are in reading order, the target's token before the rejected siblings", () => {
  const nodes = layOut(line, "root");
  assert.equal(nodes.map((node) => `${node.text}${node.depth}${node.row}`).join(" "), "root00 a10 x20 c21 b12");
});

test("a chain is not a tree, even with absent nodes", () => {
  assert.equal(isTree(line), true);
  assert.equal(isTree({ fates: ["accepted", "rejected", null], parents: [0, 1, 0] }), false);
});
