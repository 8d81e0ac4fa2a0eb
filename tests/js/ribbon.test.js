import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.js";

const { cellCounts, cellPaths, chartStart } = load(["helpers", "ribbon"], "cellCounts, cellPaths, chartStart", { player: { span: 40 } });

test("a cell rises by the tokens of its step and falls by the discarded ones", () => {
  const counts = cellCounts({ output_outcomes: ["accepted", "forced", "corrected"], draft_outcomes: ["accepted", "forced", "rejected", "not reached", null] });
  assert.deepEqual(Object.values(counts), [2, 1, 0, 0, 0, 2]);
  assert.deepEqual(Object.fromEntries(cellPaths(counts, 10, 20)), Object.fromEntries([
    ["accepted", "M10.00 0v-2h8.60v2z"],
    ["corrected", "M10.00 -2v-1h8.60v1z"],
    ["rejected", "M10.00 0v2h8.60v-2z"],
  ]));
});

test("a step of plain decoding is one token, and a piece of a server's text is of unknown outcome", () => {
  assert.equal(String(cellPaths(cellCounts({ output_outcomes: ["target"], draft_outcomes: [] }), 0, 5)), "target,M0.00 0v-1h4.30v1z");
  assert.equal(cellCounts({ output_outcomes: ["unknown", "unknown"], draft_outcomes: [] }).unknown, 2);
});

test("the charts over time begin with the first token of any lane, not with the prefill", () => {
  const lane = (...times) => ({ lines: times.map((at) => ({ at, so_far: { tokens: 1 } })) });
  assert.equal(chartStart([lane(24, 25), lane(21, 23), lane()]), 21);
  assert.equal(chartStart([{ lines: [{ at: 0, type: "done" }] }, lane(30)]), 30); // a lane that failed at once
  assert.equal(chartStart([lane()]), 40);
});
