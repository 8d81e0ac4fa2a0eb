import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const of = (run) => load(["helpers", "tiles"], "numbers, speedup, headline, speedTile, outputTile, numberTile", { run });
const lane = (speed, more = {}) => ({ exact: true, soFar: { tokens: 9, tokens_per_s: speed }, summary: null, comparison: null, ...more });

test("numbers are those of the step on show, then the engine's summary", () => {
  const { numbers } = of({});
  assert.deepEqual(plain(numbers(lane(10))), { tokens: 9, tokens_per_s: 10 });
  assert.deepEqual(plain(numbers(lane(10, { summary: { tokens_per_s: 12 } }))), { tokens: 9, tokens_per_s: 12 });
});

test("the speed-up is the engine's as soon as it has one", () => {
  const run = { lanes: [lane(10), lane(25)] };
  const { speedup } = of(run);
  assert.equal(speedup(run.lanes[1]), 2.5);
  run.lanes[1].comparison = { speedup: 2.4 };
  assert.equal(speedup(run.lanes[1]), 2.4);
});

test("lanes with different prompts have no speed-up", () => {
  const asked = (content) => ({ messages: [{ role: "user", content }], comparison: { speedup: 2 } });
  const run = { lanes: [lane(10, asked("Why?")), lane(25, asked("Why?")), lane(25, asked("How?"))] };
  const { speedup } = of(run);
  assert.deepEqual(run.lanes.map(speedup), [2, 2, null]);
});

test("pieces of a server are compared with nothing before their tokens are known", () => {
  const run = { lanes: [lane(10), lane(25, { timing: "requests" })] };
  const { speedup } = of(run);
  assert.equal(speedup(run.lanes[1]), null);
  run.lanes[1].summary = { tokens: 20, tokens_per_s: 30 };
  assert.equal(speedup(run.lanes[1]), 3);
});

test("a slow-down is said as plainly as a gain, and what nobody can tell as such", () => {
  const { speedTile } = of({ lanes: [lane(10)] });
  const told = (row) => plain(speedTile({ lane: lane(1, { comparison: row }) })).slice(0, 3);
  assert.deepEqual(told({ speedup: 1.97, interval: "1.86 to 2.07", word: "faster" }), ["1.97×", "1.86 to 2.07, ▲ faster", "gain"]);
  assert.deepEqual(told({ speedup: 0.7, interval: "0.65 to 0.75", word: "slower" }), ["0.70×", "0.65 to 0.75, ▼ slower", "bad"]);
  assert.deepEqual(told({ speedup: 1.02, interval: "0.97 to 1.07", word: "no clear difference" }), ["1.02×", "0.97 to 1.07, no clear difference", ""]);
  assert.deepEqual(told({ speedup: 7.5, interval: "", word: "no clear difference" }), ["7.50×", "no clear difference", ""]);
  assert.deepEqual(told({ speedup: 2.16, interval: "2.00 to 2.32", word: "so far" }), ["2.16×", "2.00 to 2.32, so far", ""]);
});

test("a verdict nobody knows is shown as it is", () => {
  const { outputTile } = of({});
  const told = (row) => plain(outputTile(lane(1, { comparison: row })));
  assert.deepEqual(told({ verdict: "toString" }), ["toString", "", "", "toString"]);
  assert.deepEqual(told({ verdict: "differs", first_divergence: 4 }), ["✗ differs", "from token 5", "bad", "differs"]);
});

/** Three lanes that are as far as their speeds say. */
const race = (...speeds) => ["Baseline", "Draft model", "Prompt lookup"].map((name, i) => ({ ...lane(speeds[i]), name, index: i }));

test("the headline names the winner and not the first lane", () => {
  const lanes = race(100, 261, 379);
  lanes[1].comparison = { speedup: 2.61, word: "faster" };
  lanes[2].comparison = { speedup: 3.79, word: "faster" };
  const end = { finish: "done", headline: { lane: 2, tone: "gain", caption: "Prompt lookup is fastest: 3.79× as fast as plain decoding" } };
  assert.deepEqual(plain(of({ lanes, done: true, end }).headline()), { tone: "gain", text: "Prompt lookup is fastest: 3.79× as fast as plain decoding" });
});

test("before the end the headline is the leader so far, without a verdict", () => {
  const end = { finish: "done", headline: { lane: 1, tone: "gain", caption: "Draft model is fastest" } };
  const { headline } = of({ lanes: race(100, 120, 150), done: false, end }); // the playhead stands in the middle
  assert.deepEqual(plain(headline()), { tone: "", text: "Prompt lookup is 1.50× as fast as plain decoding so far" });
});

test("a stopped run without a headline of the server has none either", () => {
  const { headline } = of({ lanes: race(100, 216, undefined), done: true, end: { finish: "cancelled" } });
  assert.deepEqual(plain(headline()), { tone: "", text: "Draft model is 2.16× as fast as plain decoding so far" });
});

test("a run that could not start is the headline, whatever result is on show", () => {
  const end = { finish: "done", headline: { lane: 1, tone: "gain", caption: "Draft model is 1.45× as fast" } };
  const { headline } = of({ lanes: race(100, 145), done: true, end, failure: "smollm2 cannot run here: no GPU (none was found); choose another model" });
  assert.deepEqual(plain(headline()), { tone: "bad", text: "Not run here" });
});

test("the first few tokens of a lane have no speed-up, in the headline and in the tile", () => {
  const at = (tokens, done = false) => of({ lanes: race(100, 86).map((one) => ({ ...one, soFar: { ...one.soFar, tokens } })), done, end: null });
  assert.deepEqual([at(4).headline().text, at(4).speedTile({ lane: race(100, 86)[1] })[0]], ["No result yet", "–"]);
  assert.deepEqual(plain(at(8).speedTile({ lane: race(100, 86)[1] }))[0], "0.86×");
  assert.equal(plain(at(4, true).speedTile({ lane: race(100, 86)[1] }))[0], "0.86×"); // a text of four tokens
});

test("at the start there is no result", () => {
  const { headline } = of({ lanes: race(undefined, undefined, undefined), done: false, end: { headline: { lane: 1, tone: "gain" } } });
  assert.deepEqual(plain(headline()), { tone: "", text: "No result yet" });
});

test("a text that was stopped is never called identical in green", () => {
  const { outputTile } = of({});
  const cells = (verdict) => plain(outputTile(lane(1, { comparison: { verdict, word: "so far" } }))).slice(0, 3);
  assert.deepEqual(cells("identical"), ["identical", "so far", ""]);
  assert.deepEqual(cells("differs"), ["✗ differs", "", "bad"]);
  assert.deepEqual(cells("lossy"), ["⚠ lossy", "", "fair"]);
});

test("a tile shows its number in its format, with its parts or its source", () => {
  const { numberTile } = of({});
  const cells = (tile, key, format, n, more) => plain(numberTile({ tile, key, format }, lane(1, more), n));
  const rate = { acceptance_rate: 0.456, drafted: 20, accepted: 9 };
  assert.deepEqual(cells("acceptance", "acceptance_rate", "percent", rate), ["46 %", "9 of 20", "", 0.456]);
  assert.deepEqual(cells("per-pass", "tokens_per_step", "decimal", { tokens_per_step: 1, steps: 1 }), ["1.00", "1 pass", "", 1]);
  assert.deepEqual(cells("memory", "peak_memory_bytes", "bytes", { peak_memory_bytes: 46.2e6 }), ["46.2 MB", "", "", 46.2e6]);
  assert.deepEqual(cells("rejected", "rejected", "count", { rejected: 11 }), ["11", "", "", 11]);
  const served = { timing: "requests" };
  assert.deepEqual(cells("acceptance", "acceptance_rate", "percent", { acceptance_rate: 0.5, drafted: null }, served).slice(0, 2), ["50 %", "from the server's metrics"]);
  assert.deepEqual(cells("acceptance", "acceptance_rate", "percent", { acceptance_rate: null, drafted: null }, served).slice(0, 2), ["–", "unknown"]);
});

test("the acceptance rate of a finished lane is shown with the rate that would break even", () => {
  const { numberTile } = of({});
  const tile = { tile: "acceptance", key: "acceptance_rate", format: "percent" };
  const n = { acceptance_rate: 0.5, drafted: 8, accepted: 4 };
  const small = (row) => plain(numberTile(tile, lane(1, { comparison: row }), n))[1];
  assert.equal(small(null), "4 of 8");
  assert.equal(small({ break_even: 0.375 }), "4 of 8, break-even 38 %");
  assert.equal(small({ break_even: 1.2 }), "4 of 8, break-even above 100 %");
});

test("the tokens of a step at each draft length follow from how many were accepted", () => {
  const { tokensPerStep } = load(["helpers", "tiles", "panels"], "tokensPerStep", {});
  assert.deepEqual(plain(tokensPerStep([2, 1, 1])), [[1, 1], [2, 1.5], [3, 1.75]]); // 4 steps, 7 tokens
});
