import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const { tokensAt, barLength, barStates, progress } = load(["helpers", "tiles", "bars"], "tokensAt, barLength, barStates, progress");

/** A lane that generates a token every `each` ms, displayed up to `now`; it ends after `count` tokens if `finish` is given. */
function lane(index, each, count, now, finish = "length") {
  const lines = [];
  for (let i = 1; i <= count; i += 1) lines.push({ at: i * each, so_far: { tokens: i, clock_ms: i * each } });
  if (finish) lines.push({ at: count * each, finish });
  const next = lines.filter(({ at }) => at <= now).length;
  const ended = Boolean(finish) && next === lines.length;
  const soFar = lines.slice(0, next).findLast((line) => line.so_far)?.so_far ?? {};
  return { index, name: ["Baseline", "Draft model", "Prompt lookup"][index], lines, soFar, finish: ended ? finish : null };
}

const states = (now, lanes, limit = 100) => plain(barStates(lanes, lanes.map((one) => (one.finish ? one.soFar.clock_ms : now)), limit));
const race = (now, ...finish) => [lane(0, 4, 100, now, ...finish), lane(1, 2, 100, now, ...finish)];

test("the number of tokens at a time, also after the last line", () => {
  const one = lane(0, 4, 10, 0);
  assert.deepEqual([0, 3.9, 4, 39, 40, 1000].map((ms) => tokensAt(one, ms)), [0, 0, 1, 9, 10, 10]);
});

test("a bar ends at the lane's own last token, or at max new tokens while the text is incomplete", () => {
  assert.equal(barLength(lane(0, 4, 61, 0, "stop"), 96), 61);
  assert.equal(barLength(lane(0, 4, 61, 0, null), 96), 96);
  assert.equal(barLength(lane(0, 4, 61, 0, "cancelled"), 96), 96);
});

test("on one clock the faster lane fills first", () => {
  const [slow, fast] = states(100, race(100));
  assert.deepEqual([slow.share, fast.share], [0.25, 0.5]);
  assert.deepEqual([slow.lead, fast.lead], ["", "25 tokens ahead"]);
  assert.deepEqual([slow.first, fast.first, fast.reached], [false, false, null]);
});

test("the first lane at the end is marked and the others show where they were", () => {
  const [slow, fast] = states(300, race(300));
  assert.deepEqual([fast.share, fast.first, fast.lead], [1, true, "25 tokens ahead"]);
  assert.deepEqual([slow.share, slow.first, slow.reached], [0.75, false, 0.5]);
});

test("at the end the lead is a time", () => {
  const [slow, fast] = states(400, race(400));
  assert.deepEqual([slow.share, slow.reached, fast.lead], [1, 0.5, "0.20 s ahead"]);
});

test("in a stopped run bars stay where the lanes stopped", () => {
  const [slow, fast] = states(100, race(100, null));
  assert.deepEqual([slow.share, fast.share, fast.lead], [0.25, 0.5, "25 tokens ahead"]);
});

test("plain decoding can lead, and among several lanes the lead names the other lane", () => {
  const lanes = [lane(0, 2, 100, 100), lane(1, 4, 100, 100), lane(2, 5, 100, 100)];
  assert.deepEqual(states(100, lanes).map(({ lead }) => lead), ["25 tokens ahead of Draft model", "", ""]);
});

test("no lane leads in the first few tokens", () => {
  const early = [lane(0, 10, 100, 40), lane(1, 20, 100, 40)];
  assert.deepEqual(states(40, early).map(({ lead }) => lead), ["", ""]);
  const short = [lane(0, 10, 4, 60, "stop"), lane(1, 15, 4, 60, "stop")];
  assert.deepEqual(states(60, short).map(({ lead }) => lead), ["0.02 s ahead", ""]);
});

test("a lane that ran earlier is compared at the clock of the lane that runs", () => {
  const [first, second] = states(50, [lane(0, 4, 100, 400), lane(1, 2, 100, 50)]);
  assert.deepEqual([first.first, first.lead, second.lead], [false, "", "13 tokens ahead"]);
});

test("texts of different lengths say so", () => {
  const lanes = [lane(0, 4, 96, 400), lane(1, 2, 61, 400, "stop")];
  const shown = states(400, lanes, 96);
  assert.deepEqual(lanes.map((one, i) => progress(one, shown[i], lanes)), ["96 of 96 tokens", "stopped after 61 tokens"]);
  assert.deepEqual(shown.map(({ share, lead, first, reached }) => [share, lead, first, reached]), [[1, "", false, null], [61 / 96, "", false, null]]);
});

test("no lane wins because its text is shorter, at any time and in any lane", () => {
  const [plain96, short] = [(now) => lane(0, 4, 96, now), (now) => lane(1, 5, 61, now, "stop")];
  for (const now of [100, 310, 384, 400]) {
    for (const lanes of [[plain96(now), short(now)], [lane(0, 4, 61, now, "stop"), lane(1, 5, 96, now)], [plain96(now), short(now), lane(2, 2, 96, now)]]) {
      const shown = states(now, lanes, 96);
      assert.ok(shown.every(({ first, lead, reached }) => !first && !lead && reached === null));
      lanes.forEach(({ soFar }, i) => assert.equal(shown[i].share, (soFar.tokens ?? 0) / 96)); // one scale
    }
  }
});

test("a lane that is still running behind a shorter text is compared until it is longer", () => {
  const running = (tokens, now) => lane(0, 4, tokens, now, null);
  const at = (now, tokens) => states(now, [running(tokens, now), lane(1, 2, 61, now, "stop")], 96);
  assert.deepEqual(at(160, 40).map(({ first }) => first), [false, true]);
  assert.deepEqual(at(252, 62).map(({ first }) => first), [false, false]);
});

test("lanes with different prompts are not compared", () => {
  const lanes = race(400).map((one, i) => ({ ...one, messages: [{ role: "user", content: `prompt ${i}` }] }));
  assert.ok(states(400, lanes).every(({ first, lead, share }) => !first && !lead && share === 1));
});

test("an empty lane has no number of tokens to reach", () => {
  assert.equal(progress({ index: 1, soFar: {}, finish: null }, { tokens: 0, length: 0 }, []), "0 tokens");
});

test("a lane that finished first gets no flag if another one has more tokens/s", () => {
  const lanes = [lane(0, 2, 100, 300), lane(1, 3, 100, 300)];
  const flags = (...rates) => states(300, lanes.map((one, i) => ({ ...one, soFar: { ...one.soFar, tokens_per_s: rates[i] } }))).map(({ first }) => first);
  assert.deepEqual(flags(500, 333), [true, false]);
  assert.deepEqual(flags(300, 333), [false, false]); // its prompt took less time
});

test("once there is a result, the flag goes to its winner or to nobody", () => {
  const flags = (headline) => {
    const lanes = race(400);
    return plain(barStates(lanes, [400, 200], 100, headline)).map(({ first }) => first);
  };
  assert.deepEqual(flags(undefined), [false, true]);
  assert.deepEqual(flags({ lane: 1, tone: "gain" }), [false, true]);
  assert.deepEqual(flags({ lane: 1, tone: "" }), [false, false]); // no clear difference
  assert.deepEqual(flags({ lane: 1, tone: "bad" }), [false, false]);
});
