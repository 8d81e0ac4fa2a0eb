import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const scripts = ["helpers", "player", "tree", "lanes", "bars", "pending_tokens", "tiles", "result_image"];
const { animatedWebP, breakLines, laneAt, laneNumbersAt, legendKinds, piecesAt, provenance, resultAt, subject } = load(scripts, "animatedWebP, breakLines, laneAt, laneNumbersAt, legendKinds, piecesAt, provenance, resultAt, subject");

const step = (at, tokens, text, more = {}) => ({ type: "step", at, so_far: { tokens, clock_ms: at, tokens_per_s: (1000 * tokens) / at }, text, output_outcomes: text.map(() => "target"), ...more });
const lane = (index, each) => ({
  index, name: ["Baseline", "Draft model"][index], options: { k: 2 }, summary: { tokens: 2 },
  lines: [step(each, 1, ["a"]), step(2 * each, 2, [" b"], { draft_outcomes: ["rejected", "not reached"], drafted: [" x", " y"], parents: [0, 1], path: [0] }), { type: "done", at: 2 * each, finish: "length" }],
});
const headline = { tone: "gain", caption: "Draft model is 2.00× as fast as plain decoding" };
const source = { start: { prompt: "Once upon", title: "stories", environment: { device: "CPU", threads: 2, dtype: "float32", date: "2026-11-22T10:00" } }, end: { headline }, lanes: [lane(0, 10), lane(1, 5)] };

test("a lane at a time has the numbers and the end of that time", () => {
  const [before, end] = [7, Infinity].map((clock) => laneAt(source.lanes[1], clock));
  assert.deepEqual([before.soFar.tokens, before.finish, before.summary, before.next], [1, null, null, 1]);
  assert.deepEqual([end.soFar.tokens, end.finish, plain(end.summary), end.next], [2, "length", { tokens: 2 }, 3]);
});

test("the result is marked as preliminary until every lane has ended, and missing in the first few tokens", () => {
  const longer = source.lanes.map((one) => ({ ...one, lines: one.lines.map((line) => ({ ...line, so_far: line.so_far && { ...line.so_far, tokens: 8 * line.so_far.tokens } })) }));
  const at = (clock, lanes = longer) => resultAt(source, lanes.map((one) => laneAt(one, clock)));
  assert.deepEqual([at(0).caption, at(10, source.lanes).caption], ["", ""]);
  assert.equal(at(10).caption, "Draft model is 2.00× as fast as plain decoding so far");
  assert.equal(at(20).caption, headline.caption);
});

test("a lane of the image has its tokens/s, at its end its speed-up, and a mark if that is noisy", () => {
  const comparison = { speedup: 2, interval: "1.9 to 2.1", noisy: true };
  const lanes = source.lanes.map((one) => ({ ...one, comparison: one.index ? comparison : null, summary: { tokens: 2, tokens_per_s: 204.4 } }));
  const at = (clock) => laneNumbersAt(laneAt(lanes[1], clock), { tokens: 2, length: 2 }, lanes);
  assert.equal(at(Infinity), "2 of 2 tokens   0.01 s   204 tok/s   2.00× (1.9 to 2.1)   noisy");
  assert.equal(at(7), "2 of 2 tokens   200 tok/s");
});

test("the legend of the image has the kinds of tokens that it shows", () => {
  const lanes = [{ lines: [step(1, 1, ["a"]), { type: "done" }] }, { lines: [step(1, 2, ["b", "c"], { output_outcomes: ["accepted", "corrected"], draft_outcomes: ["accepted", "rejected"] })] }];
  assert.deepEqual(plain(legendKinds({ lanes }, false)), ["accepted", "corrected"]);
  assert.deepEqual(plain(legendKinds({ lanes }, true)), ["accepted", "rejected", "corrected"]);
});

test("text is broken at the width, without the space before a word, and at newlines", () => {
  const pieces = ["aaaa", " bb", " cc", "x\ny"].map((text) => ({ text, kind: "target" }));
  const lines = breakLines(pieces, 8, (text) => text.length).map((line) => line.map(({ text, x }) => `${x}:${text}`));
  assert.deepEqual(plain(lines), [["0:aaaa", "4: bb"], ["0:cc", "2:x"], ["0:y"]]);
});

test("the draft of a step appears only in a step that lasts, first undecided", () => {
  const words = (clock, ms) => plain(piecesAt(source, laneAt(source.lanes[1], clock), clock, () => ms).slice(2).map(({ text, kind }) => [text, kind]));
  assert.deepEqual(words(6, 1000), [["a", "target"], [" x", "pending"], [" y", "pending"]]);
  assert.deepEqual(words(9, 1000), [["a", "target"], [" x", "rejected"], [" y", "not reached"]]);
  assert.deepEqual(words(9, 20), [["a", "target"]]);
  assert.deepEqual(words(Infinity, 1000), [["a", "target"], [" b", "target"]]);
});

test("an answer is a paragraph of its own, a continued text is not", () => {
  const words = (messages) => piecesAt({ ...source, start: { prompt: "Why?\n" } }, laneAt({ ...source.lanes[0], messages }, 10), 10, () => 0).map(({ text }) => text).join("");
  assert.deepEqual([words([]), words([{ role: "user", content: "Why?\n" }])], ["Why?\na", "Why?\n\na"]);
});

test("the model is named, then the kind of work; below, drafters, machine and date", () => {
  const named = (title, work) => subject({ start: { title, work } });
  assert.equal(named("Qwen3 8B · Q4_K_M", "edit"), "Qwen3 8B · Q4_K_M  ·  edit");
  assert.equal(named("Qwen3 8B", ""), "Qwen3 8B");
  assert.deepEqual(plain(provenance(source)), ["Draft model, k = 2", "CPU, 2 threads, float32", "2026-11-22"]);
});

test("still images become frames of an animation, without their other chunks", () => {
  const still = (...letters) => Uint8Array.from(`RIFF....WEBPICCP\x01\0\0\0p\0VP8 \x03\0\0\0${letters.join("")}\0`, (letter) => letter.charCodeAt(0));
  const file = animatedWebP([{ image: still("a", "b", "c"), ms: 80 }, { image: still("d", "e", "f"), ms: 2000 }], 960, 540);
  const text = String.fromCharCode(...file);
  assert.equal(file[4] + 256 * file[5] + 8, file.length);
  const names = text.match(/VP8X|ANIM|ANMF|ICCP|VP8 .{7}/gs).map((found) => found.replace(/[^A-Za-z0-9]/g, ""));
  assert.deepEqual(names, ["VP8X", "ANIM", "ANMF", "VP8abc", "ANMF", "VP8def"]);
});
