import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.js";

const { layOut, isTree } = load(["kit", "tree"], "layOut, isTree");

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

test("nodes stand in reading order, the target's own token before the drafts it refused", () => {
  const nodes = layOut(line, "root");
  assert.equal(nodes.map((node) => `${node.text}${node.depth}${node.row}`).join(" "), "root00 a10 x20 c21 b12");
});

test("a chain is no tree, whatever is absent", () => {
  assert.equal(isTree(line), true);
  assert.equal(isTree({ fates: ["accepted", "rejected", null], parents: [0, 1, 0] }), false);
});
