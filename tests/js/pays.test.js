import assert from "node:assert/strict";
import test from "node:test";

import { load, plain } from "./load.js";

const { stageParts, barRows } = load(["helpers", "pays"], "stageParts, barRows");
const STAGES = [["loading the model", 20.2], ["measuring passes", 9.8], ["loading drafters", 3], ["racing", 0]];

test("the last stage that has begun is at work, and its seconds run on", () => {
  const seen = plain(stageParts(STAGES, true, 2.4));
  assert.deepEqual(seen.map(({ state }) => state), ["over", "over", "now", "ahead"]);
  assert.deepEqual(seen.map(({ seconds }) => seconds), [20, 10, 5, 0]);
  assert.deepEqual(plain(stageParts(STAGES, false, 9)).map(({ state, seconds }) => `${state} ${seconds}`), ["over 20", "over 10", "over 3", "ahead 0"]);
  assert.equal(stageParts([["loading the model", 0], ["racing", 0]], true, 7)[0].state, "now");
});

test("rows of all work with a speed-up are bars, and a wide interval does not set the scale", () => {
  const row = (lane, value, high, state = "") => ({ category: "mixed", lane, "speed-up": value && { value, high }, state });
  const one = { category: "chat", lane: "a", "speed-up": { value: 3 } };
  const { measured, top, idle } = barRows([one, row("a", 1.5, 9), row("b", 1.8, 2), row("c", null, null, "not raced: no time")]);
  assert.deepEqual(plain(measured).map(({ lane }) => lane), ["a", "b"]);
  assert.deepEqual(plain(idle).map(({ lane }) => lane), ["c"]);
  assert.ok(Math.abs(top - 3.15) < 1e-9);
  assert.equal(barRows([row("slow", 0.4, 0.5)]).top, 1.2); // the line at 1 has its place
});
