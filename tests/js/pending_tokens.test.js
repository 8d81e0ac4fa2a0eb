import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const { displayedDrafts, describeStep } = load(["helpers", "tree", "pending_tokens"], "displayedDrafts, describeStep");

const chain = {
  drafted: [" a", " b", " c"], parents: [0, 1, 2], fates: ["accepted", "rejected", "not reached"],
  path: [0, 1], kinds: ["accepted", "corrected"], text: [" a", " x"],
};
const tree = {
  drafted: ["a", "b", "c", ""], parents: [0, 0, 1, 2], fates: ["accepted", "rejected", "rejected", null],
  path: [0, 1], kinds: ["accepted", "corrected"], text: ["a", "x"],
};

test("a chain shows all draft tokens, a tree its accepted path and the rejected token at its end", () => {
  assert.deepEqual(plain(displayedDrafts(chain).map(({ text }) => text)), [" a", " b", " c"]);
  assert.deepEqual(plain(displayedDrafts(tree).map(({ text }) => text)), ["a", "c"]);
});

test("a step is described in one sentence", () => {
  assert.equal(describeStep(chain), "1 draft token accepted; then the target chose “x” and not “b”: 2 tokens from one pass.");
  const bonus = { ...chain, fates: ["accepted", "accepted", "accepted"], kinds: ["accepted", "accepted", "accepted", "bonus"], text: [" a", " b", " c", " d"] };
  assert.equal(describeStep({ ...bonus, notes: { by_chance: 1 } }), "Synthetic acceptance: 3 of 3 draft tokens accepted at random, 4 tokens from one pass.");
  assert.match(describeStep(bonus), /gave the bonus token “d”: 4 tokens from one pass\.$/);
});
