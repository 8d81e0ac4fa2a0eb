import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const { displayedDrafts, describeStep, isShown, phases } = load(["helpers", "tree", "pending_tokens"], "displayedDrafts, describeStep, isShown, phases");

const chain = {
  drafted: [" a", " b", " c"], parents: [0, 1, 2], draft_outcomes: ["accepted", "rejected", "not reached"],
  path: [0, 1], output_outcomes: ["accepted", "corrected"], text: [" a", " x"],
};
const tree = {
  drafted: ["a", "b", "c", ""], parents: [0, 0, 1, 2], draft_outcomes: ["accepted", "rejected", "rejected", null],
  path: [0, 1], output_outcomes: ["accepted", "corrected"], text: ["a", "x"],
};

test("a chain shows all draft tokens, a tree its accepted path and the rejected token at its end", () => {
  assert.deepEqual(plain(displayedDrafts(chain).map(({ text }) => text)), [" a", " b", " c"]);
  assert.deepEqual(plain(displayedDrafts(tree).map(({ text }) => text)), ["a", "c"]);
});

test("a step is described in one sentence", () => {
  assert.equal(describeStep(chain), "1 draft token accepted; then the target chose “x” and not “b”: 2 tokens from one pass.");
  const bonus = { ...chain, draft_outcomes: ["accepted", "accepted", "accepted"], output_outcomes: ["accepted", "accepted", "accepted", "bonus"], text: [" a", " b", " c", " d"] };
  assert.equal(describeStep({ ...bonus, notes: { by_chance: 1 } }), "Synthetic acceptance: 3 of 3 draft tokens accepted at random, 4 tokens from one pass.");
  assert.match(describeStep(bonus), /gave the bonus token “d”: 4 tokens from one pass\.$/);
});

test("a slow speed shows every step, other speeds the steps that are long enough", () => {
  assert.deepEqual([[0.25, 26], [0.0625, 104], ["auto", 104], ["auto", 1000], [1, 6], [1, 400]].map(([pace, ms]) => isShown(pace, ms)), [true, true, false, true, false, true]);
});

test("the phases of an animation follow one another within its time", () => {
  for (const ms of [26, 104, 1000]) {
    for (const parts of [{}, { draft: 9, verify: 1 }, { draft: 0, verify: 0 }]) {
      const { sweep, outcome, target } = phases(parts, ms);
      assert.ok(0 < sweep && sweep < outcome && outcome < target && target < ms);
    }
  }
});
