import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.js";

const { Player } = load(["helpers", "player"], "Player");

const step = (clock_ms) => ({ type: "step", so_far: { clock_ms } });
const done = { type: "done" };

/** A player whose frames are drawn by hand, and what it has shown. */
function staged({ schedule = "race", recorded = false, replay = false, pace = 1 } = {}) {
  const shown = [];
  let [frame, frames] = [null, 0];
  const lanes = [0, 1].map((index) => ({ index, lines: [], received: 0, offset: null, over: false, next: 0 }));
  const run = { recorded, start: { schedule }, end: null, lanes };
  const player = new Player({
    pace: () => pace,
    show: (lane, lines) => shown.push(...lines.map((line) => `${lane.index}:${line.type === "done" ? "end" : line.at}`)),
    after: () => {},
    request: (draw) => ((frame = draw), (frames += 1)),
    cancel: () => (frame = null),
    now: () => 0,
  });
  player.load(run, replay);
  return { player, run, shown, at: (ms) => frame?.(ms), frames: () => frames, waits: () => frame !== null && player.playing };
}

test("live lines are shown as they come", () => {
  const { player, run, shown } = staged();
  player.receive(run.lanes[0], step(10));
  player.play();
  player.receive(run.lanes[1], step(4));
  player.play();
  assert.deepEqual(shown, ["0:10", "1:4"]);
  assert.equal(player.playing, false);
});

test("in real time a player that is on waits for the next line without frames, and can be paused", () => {
  const { player, run, shown, at, frames } = staged();
  for (const lane of run.lanes) player.receive(lane, step(10));
  player.start();
  at(5);
  player.receive(run.lanes[0], step(20));
  player.play();
  assert.deepEqual([shown, frames(), player.playing], [["0:10", "1:10", "0:20"], 1, true]);
  player.pause();
  assert.equal(player.playing, false);
});

test("a slower pace shows lines at their device time, in the order of the clocks", () => {
  const { player, run, shown, at } = staged({ pace: 0.5 });
  for (const ms of [10, 20]) player.receive(run.lanes[0], step(ms));
  for (const ms of [15, 30]) player.receive(run.lanes[1], step(ms));
  player.play();
  at(20); // 10 ms of device time
  assert.deepEqual(shown, ["0:10"]);
  at(32);
  assert.deepEqual(shown, ["0:10", "1:15"]);
});

test("the display waits for the lane that the engine knows least of", () => {
  const { player, run, shown, at } = staged({ pace: 0.5 });
  for (const ms of [10, 20, 30]) player.receive(run.lanes[0], step(ms));
  player.receive(run.lanes[1], step(12));
  player.play();
  at(1000);
  assert.deepEqual(shown, ["0:10", "1:12"]);
  player.receive(run.lanes[1], step(25));
  at(1002); // no jump: one more millisecond has passed
  assert.equal(player.clock, 13);
});

test("lanes that ran one after the other are shown so, and together when they are replayed", () => {
  const { player, run, shown, at } = staged({ schedule: "sequential", pace: 0.5 });
  for (const line of [step(10), step(20), done]) player.receive(run.lanes[0], line);
  for (const line of [step(5), done]) player.receive(run.lanes[1], line);
  run.end = {};
  player.play();
  at(48);
  assert.deepEqual(shown, ["0:10", "0:20", "0:end"]);
  at(52);
  assert.deepEqual(shown.slice(3), ["1:5", "1:end"]);
  assert.equal(player.over, true);
  assert.equal(player.playing, false);

  shown.length = 0;
  for (const lane of run.lanes) lane.next = 0;
  player.load(run, true);
  player.start();
  at(12);
  assert.deepEqual(shown, ["1:5", "1:end"]);
  player.skip();
  assert.deepEqual(shown.slice(2), ["0:10", "0:20", "0:end"]);
});

test("a recorded run stands still until somebody replays it", () => {
  const { player, run, shown } = staged({ recorded: true, pace: 0.25 });
  for (const line of [step(10), done]) player.receive(run.lanes[0], line);
  run.end = {};
  player.play();
  assert.deepEqual(shown, ["0:10", "0:end"]);
});

/** Steps of a lane that is over: a token every so many milliseconds. */
function whole(player, lane, count, each) {
  for (let i = 1; i <= count; i += 1) player.receive(lane, { type: "step", so_far: { clock_ms: i * each, tokens: i } });
  player.receive(lane, { type: "done" });
}

test("pace auto stretches the faster lane to four seconds and begins with the first token", () => {
  const { player, run, shown, at } = staged({ pace: "auto" });
  whole(player, run.lanes[0], 101, 4);
  whole(player, run.lanes[1], 101, 2);
  run.end = {};
  assert.equal(player.speed, 200 / 4000);
  player.play();
  at(0);
  assert.deepEqual(shown, ["1:2"]);
  at(3999);
  assert.equal(player.run.lanes[1].next, 100);
  at(4001);
  assert.deepEqual(shown.slice(-1), ["1:end"]);
});

test("pace auto makes nobody wait for a few tokens, or for a lane that is very slow", () => {
  const short = staged({ pace: "auto" });
  for (const lane of short.run.lanes) whole(short.player, lane, 11, 3);
  short.run.end = {};
  assert.equal(short.player.speed, 30 / 660);
  const uneven = staged({ pace: "auto" });
  whole(uneven.player, uneven.run.lanes[0], 101, 60);
  whole(uneven.player, uneven.run.lanes[1], 101, 2);
  uneven.run.end = {};
  assert.equal(uneven.player.speed, 6000 / 12000);
});

test("pace auto shows a slow model at its own speed, as it comes", () => {
  const { player, run, shown } = staged({ pace: "auto" });
  run.start.limit = 100;
  for (const lane of run.lanes) for (const i of [1, 2]) player.receive(lane, { type: "step", so_far: { clock_ms: 90 * i, tokens: i } });
  assert.equal(player.speed, 1); // 99 more tokens of 90 ms
  player.play();
  assert.equal(shown.length, 4);
});

test("a run is shown as it was at any time, before and behind", () => {
  const { player, run, shown } = staged({ pace: 0.5 });
  whole(player, run.lanes[0], 4, 10);
  whole(player, run.lanes[1], 4, 5);
  run.end = {};
  player.skip();
  shown.length = 0;
  player.seek(12);
  assert.deepEqual(shown, ["0:10", "1:5", "1:10"]);
  assert.equal(player.playing, false);
  player.seek(15);
  assert.deepEqual(shown.slice(3), ["1:15"]);
  assert.equal(player.stepTime(run.lanes[0], 1), 20);
  assert.equal(player.stepTime(run.lanes[0], -1), null);
  assert.equal(player.stepTime(run.lanes[1], -1), 10);
});

test("a pause holds the clock and Skip ends it", () => {
  const { player, run, shown, at, waits } = staged({ pace: 0.5 });
  whole(player, run.lanes[0], 3, 10);
  whole(player, run.lanes[1], 3, 10);
  run.end = {};
  player.play();
  at(20);
  player.pause();
  player.play(); // more lines came
  assert.equal(waits(), false);
  assert.equal(shown.length, 2);
  player.skip();
  assert.equal(player.over, true);
});

test("a step that takes a while is told of as it begins, once", () => {
  const begun = [];
  const { player, run, at } = staged({ pace: 0.1 });
  player.does.begin = (lane, line, ms) => begun.push(`${lane.index}:${line.at} in ${ms}`);
  whole(player, run.lanes[0], 2, 10);
  run.lanes[1].over = true;
  run.end = {};
  player.play();
  at(100);
  at(110);
  assert.deepEqual(begun, ["0:20 in 100"]);
});

/** Steps of which every one drafts tokens, each with `tokens` tokens and of `ms` milliseconds. */
function drafting(player, lane, count, ms, tokens = 4) {
  player.receive(lane, { type: "step", so_far: { clock_ms: 9, tokens: 1 }, draft_outcomes: [] });
  for (let i = 1; i <= count; i += 1) player.receive(lane, { type: "step", so_far: { clock_ms: 9 + i * ms, tokens: 1 + i * tokens }, draft_outcomes: ["accepted"] });
  player.receive(lane, { type: "done" });
}

test("a scene stops the clock at its time for as long as it takes, then the run plays on", () => {
  const told = [];
  const { player, run, at } = staged({ pace: "auto" });
  whole(player, run.lanes[0], 121, 4);
  drafting(player, run.lanes[1], 30, 8);
  run.end = {};
  const scene = { at: 17, show: () => (told.push(`shown at ${player.clock}`), 5000) };
  player.does.scene = () => (told.length ? null : scene);
  player.does.sceneOver = () => told.push("over");
  player.play();
  for (let ms = 0; ms <= 5200; ms += 50) at(ms); // it begins after 250 ms
  assert.deepEqual([told, player.clock, run.lanes[1].next], [["shown at 17"], 17, 2]);
  at(5450);
  assert.deepEqual([told.at(-1), player.clock > 17, player.clock <= 30], ["over", true, true]);
  at(20000); // one long frame
  assert.ok(player.over);
});

test("one long frame passes a scene and shows the rest", () => {
  const { player, run, at } = staged({ pace: "auto" });
  for (const lane of run.lanes) whole(player, lane, 20, 4);
  run.end = {};
  let shown = 0;
  player.does.scene = () => (shown ? null : { at: 8, show: () => ((shown += 1), 1000) });
  player.play();
  for (let ms = 0; ms < 400; ms += 100) at(ms);
  at(60000);
  assert.deepEqual([shown, player.over], [1, true]);
});

test("a slow speed passes no step in one long frame", () => {
  const begun = [];
  const { player, run, at } = staged({ pace: 0.25 });
  player.does.begin = (lane, line) => begun.push(line.at);
  drafting(player, run.lanes[1], 4, 8);
  run.lanes[0].over = true;
  run.end = {};
  player.play();
  for (let frame = 1; !player.over && frame < 20; frame += 1) at(frame * 400);
  assert.deepEqual(begun, [17, 25, 33, 41]);
  assert.equal(player.over, true);
});

test("a restarted lane shows its lines from the first one again", () => {
  const { player, run, shown } = staged();
  for (const ms of [10, 20]) player.receive(run.lanes[1], step(ms));
  player.play();
  player.restart(run.lanes[1]);
  for (const line of [step(20), done]) player.receive(run.lanes[1], line);
  player.play();
  assert.deepEqual(shown, ["1:10", "1:20", "1:20", "1:end"]);
});

test("draft steps that arrived together do not stop the clock", () => {
  const { player, run, at, waits } = staged({ pace: "auto" });
  whole(player, run.lanes[0], 20, 4);
  drafting(player, run.lanes[1], 4, 0);
  run.end = {};
  player.play();
  for (let ms = 0; ms < 20000 && waits(); ms += 100) at(ms);
  assert.ok(player.over);
});
