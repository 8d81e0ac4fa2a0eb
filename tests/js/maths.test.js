import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const maths = load(["kit", "maths"], "expectedTokens, speedUp, acceptanceOf, residual, speculate, withValue, batchSpeedUp");
const near = (x, y, within = 1e-9) => assert.ok(Math.abs(x - y) <= within, `${x} is not ${y}`);

/** Numbers from 0 to 1, the same every time. */
function seeded(state = 7) {
  return () => ((state = (state * 1103515245 + 12345) % 2 ** 31), state / 2 ** 31);
}

test("tokens a pass: one without a hit, all and one more when every draft is kept", () => {
  near(maths.expectedTokens(0, 4), 1);
  near(maths.expectedTokens(1, 4), 5);
  near(maths.expectedTokens(0.5, 2), 1.75);
});

test("an acceptance is read back from what it yields", () => {
  for (const alpha of [0.2, 0.61, 0.95]) near(maths.acceptanceOf(maths.expectedTokens(alpha, 5), 5), alpha, 1e-6);
});

test("drafts that cost nothing and passes that cost no more give the tokens a pass; dear ones lose", () => {
  near(maths.speedUp({ alpha: 0.8, k: 4, draft: 0, wide: 1 }), maths.expectedTokens(0.8, 4));
  assert.ok(maths.speedUp({ alpha: 0.2, k: 8, draft: 0.3, wide: 1.2 }) < 1);
});

test("tokens drawn by the rule follow p, whatever q is", () => {
  const [p, q] = [[0.5, 0.3, 0.15, 0.05], [0.1, 0.1, 0.2, 0.6]];
  const [counts, random, draws] = [[0, 0, 0, 0], seeded(), 40000];
  for (let i = 0; i < draws; i += 1) counts[maths.speculate(p, q, random).token] += 1;
  counts.forEach((count, i) => near(count / draws, p[i], 0.012));
});

test("what is left of p once q is taken away is a distribution, p itself when nothing is left", () => {
  assert.deepEqual(plain(maths.residual([0.5, 0.5], [0.5, 0.5])), [0.5, 0.5]);
  assert.deepEqual(plain(maths.residual([0.75, 0.25], [0.25, 0.75])), [1, 0]);
});

test("a dragged value moves the others in proportion", () => {
  const moved = maths.withValue([0.5, 0.3, 0.2], 0, 0.75);
  near(moved[1], 0.15);
  near(moved.reduce((a, b) => a + b), 1);
});

test("the gain of a batch shrinks as arithmetic fills the pass", () => {
  const at = (b) => maths.batchSpeedUp({ alpha: 0.75, k: 4, draft: 0.1, balance: 64 }, b);
  assert.ok(at(1) > 1.5 && at(1) > at(8) && at(8) > at(64) && at(128) < 1);
});
