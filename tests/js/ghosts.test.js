import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const { tried, verdictWords } = load(["kit", "tree", "ghosts"], "tried, verdictWords");

const chain = {
  drafted: [" a", " b", " c"], parents: [0, 1, 2], fates: ["accepted", "rejected", "not reached"],
  path: [0, 1], kinds: ["accepted", "corrected"], text: [" a", " x"],
};
const tree = {
  drafted: ["a", "b", "c", ""], parents: [0, 0, 1, 2], fates: ["accepted", "rejected", "rejected", null],
  path: [0, 1], kinds: ["accepted", "corrected"], text: ["a", "x"],
};

test("of a chain every draft is shown, of a tree its kept path and what was refused at its end", () => {
  assert.deepEqual(plain(tried(chain).map(({ text }) => text)), [" a", " b", " c"]);
  assert.deepEqual(plain(tried(tree).map(({ text }) => text)), ["a", "c"]);
});

test("a step is told in words", () => {
  assert.equal(verdictWords(chain), "1 guess right; then the target said “x” and not “b”: 2 tokens from one pass.");
  const bonus = { ...chain, fates: ["accepted", "accepted", "accepted"], kinds: ["accepted", "accepted", "accepted", "bonus"], text: [" a", " b", " c", " d"] };
  assert.equal(verdictWords({ ...bonus, notes: { by_chance: 1 } }), "By chance, whatever the target says, 3 of 3 guesses kept: 4 tokens from one pass.");
  assert.match(verdictWords(bonus), /gave “d” for free: 4 tokens from one pass\.$/);
});
