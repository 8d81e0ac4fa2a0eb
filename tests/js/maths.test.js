import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const maths = load(["helpers", "maths"], "expectedTokens, speedUp, acceptanceOf, residual, speculate, withValue, batchSpeedUp");
const near = (x, y, within = 1e-9) => assert.ok(Math.abs(x - y) <= within, `${x} is not ${y}`);

/** Returns a reproducible random number generator. */
function seeded(state = 7) {
  return () => ((state = (state * 1103515245 + 12345) % 2 ** 31), state / 2 ** 31);
}

test("mean accepted length is 1 without acceptance and k + 1 with full acceptance", () => {
  near(maths.expectedTokens(0, 4), 1);
  near(maths.expectedTokens(1, 4), 5);
  near(maths.expectedTokens(0.5, 2), 1.75);
});

test("the acceptance rate follows from the mean accepted length", () => {
  for (const alpha of [0.2, 0.61, 0.95]) near(maths.acceptanceOf(maths.expectedTokens(alpha, 5), 5), alpha, 1e-6);
});

test("free drafts reach the mean accepted length; expensive drafts are slower than plain decoding", () => {
  near(maths.speedUp({ alpha: 0.8, k: 4, draft: 0, verify: 1 }), maths.expectedTokens(0.8, 4));
  assert.ok(maths.speedUp({ alpha: 0.2, k: 8, draft: 0.3, verify: 1.2 }) < 1);
});

test("sampled tokens follow p for any q", () => {
  const [p, q] = [[0.5, 0.3, 0.15, 0.05], [0.1, 0.1, 0.2, 0.6]];
  const [counts, random, draws] = [[0, 0, 0, 0], seeded(), 40000];
  for (let i = 0; i < draws; i += 1) counts[maths.speculate(p, q, random).token] += 1;
  counts.forEach((count, i) => near(count / draws, p[i], 0.012));
});

test("the residual is a distribution, or p if it is zero", () => {
  assert.deepEqual(plain(maths.residual([0.5, 0.5], [0.5, 0.5])), [0.5, 0.5]);
  assert.deepEqual(plain(maths.residual([0.75, 0.25], [0.25, 0.75])), [1, 0]);
});

test("changing one value keeps the proportions of the others", () => {
  const moved = maths.withValue([0.5, 0.3, 0.2], 0, 0.75);
  near(moved[1], 0.15);
  near(moved.reduce((a, b) => a + b), 1);
});

test("speed-up falls with batch size", () => {
  const at = (b) => maths.batchSpeedUp({ alpha: 0.75, k: 4, draft: 0.1, ridge: 64 }, b);
  assert.ok(at(1) > 1.5 && at(1) > at(8) && at(8) > at(64) && at(128) < 1);
});
