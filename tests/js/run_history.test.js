import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const curvesOf = (lanes) => lanes.map(({ points }) => points);
const scripts = load(["helpers", "run_history"], "keepRun, lanesOf, pastRuns, speedsOf", { curvesOf, initialStream: () => ({ lines: [], received: 0, offset: null }) });
const { keepRun, lanesOf, pastRuns, speedsOf } = scripts;

const row = (lane, speedup) => ({ lane, speedup });
const finished = (id, more = {}) => ({
  id, key: "", recorded: false, start: { lanes: [{ name: "Baseline" }] }, end: { comparison: [row("Draft 0.5B", 0.77), row("Adaptive lookup", 1.654), row("Server", null)] },
  lanes: [{ name: "Baseline", lines: [{ at: 5 }], received: 5, offset: 0, over: true, points: [[1, 2]], view: {} }], ...more,
});

test("a run is named by its speed-ups, the greatest first", () => {
  assert.deepEqual(plain(speedsOf(finished("a").end)), ["1.65× Adaptive lookup", "0.77× Draft 0.5B"]);
});

test("the last eight runs of the page are kept, each once, with what a replay needs", () => {
  for (const id of "abcdefghijj") keepRun(finished(id));
  keepRun(finished("recorded", { recorded: true }));
  keepRun(finished("stopped", { end: { comparison: [] } }));
  assert.equal(pastRuns.map(({ id }) => id).join(""), "cdefghij");
  const [{ start, streams, curves }] = pastRuns;
  assert.deepEqual(plain(lanesOf(start, streams)), [{ name: "Baseline", index: 0, lines: [{ at: 5 }], received: 5, offset: 0, over: true }]);
  assert.deepEqual(plain(curves), [[[1, 2]]]);
  assert.deepEqual(plain(lanesOf(start)), [{ name: "Baseline", index: 0, lines: [], received: 0, offset: null, over: false }]);
});
