import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.js";

const { layOut, isTree, nodeWords, isAccepted } = load(["helpers", "tree"], "layOut, isTree, nodeWords, isAccepted");

const line = {
  drafted: ["a", "b", "c", ""],
  parents: [0, 0, 1, 2],
  draft_outcomes: ["accepted", "rejected", "rejected", null],
  draft_probs: [0.5, 0.3, 0.2, null],
  target_probs: [0.6, 0.1, 0.1, null],
  path: [0, 1],
  output_outcomes: ["accepted", "corrected"],
  text: ["a", "x"],
};

test("nodes are in reading order, the target's token before the rejected siblings", () => {
  const nodes = layOut(line, "root");
  assert.equal(nodes.map((node) => `${node.text}${node.depth}${node.row}`).join(" "), "root00 a10 x20 c21 b12");
});

test("a chain is not a tree, even with absent nodes", () => {
  assert.equal(isTree(line), true);
  assert.equal(isTree({ draft_outcomes: ["accepted", "rejected", null], parents: [0, 1, 0] }), false);
});

test("a node names its rank among its siblings, and no p if it was not reached", () => {
  const unverified = { ...line, draft_outcomes: ["accepted", "not reached", "rejected", null] };
  const words = layOut(unverified, "root").map(nodeWords);
  assert.ok(words.includes("“a” · rank 1 of 2 · depth 1 · draft q 0.50 · target p 0.60 · ✓ accepted"));
  assert.ok(words.includes("“b” · rank 2 of 2 · depth 1 · draft q 0.30 · · not reached"));
});

test("an accepted token that the grammar drafted is shown as forced", () => {
  const forced = { ...line, draft_outcomes: ["forced", "rejected", "rejected", null], output_outcomes: ["forced", "corrected"] };
  assert.deepEqual(forced.draft_outcomes.map(isAccepted), [true, false, false, false]);
  const nodes = layOut(forced, "root");
  assert.equal(nodes[1].outcome, "forced");
  assert.match(nodeWords(nodes[1]), /forced by the grammar/);
});
