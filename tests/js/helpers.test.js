import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

const { reader, visible, percent, fixed, timeLeft } = load(["helpers"], "reader, visible, percent, fixed, timeLeft");

function read() {
  const lines = [];
  let opened = 0;
  const take = reader(() => opened++, (line) => lines.push(line.n));
  return { take, lines, opened: () => opened };
}

test("only new complete lines are read", () => {
  const { take, lines } = read();
  take('{"n":1}\n{"n":2}\n{"n"');
  take('{"n":1}\n{"n":2}\n{"n":3}\n');
  assert.deepEqual(lines, [1, 2, 3]);
});

test("a different first line starts a new log, and a shorter log is ignored", () => {
  const { take, lines, opened } = read();
  take('{"n":1}\n{"n":2}\n');
  take('{"n":7}\n');
  take('{"n":7}\n{"n":8}\n');
  take('{"n":7}\n');
  take('{"n":7}\n{"n":8}\n{"n":9}\n');
  assert.deepEqual(lines, [1, 2, 7, 8, 9]);
  assert.equal(opened(), 2);
});

test("invisible characters are shown as symbols", () => {
  assert.equal(visible(" a\n"), "·a⏎");
  assert.equal(visible(""), "∅");
});

test("parts of a sentence between backticks are code, and nothing else is", () => {
  const createElement = (tag) => ({ tag, children: [], append(...added) { this.children.push(...added); } });
  const { coded } = load(["helpers"], "coded", { document: { createElement } });
  const drawn = (text) => plain(coded(text)).map((part) => (typeof part === "string" ? part : { [part.tag]: part.children[0] }));
  assert.deepEqual(drawn("start it with `specdemo ui`, or `a`"), ["Start it with ", { code: "specdemo ui" }, ", or ", { code: "a" }, ""]);
  for (const text of ["", "A ` alone", "<b>A</b>", "``"]) assert.deepEqual(drawn(text), [text]);
});

test("missing numbers are shown as a dash", () => {
  assert.deepEqual([percent(0.256), percent(null), fixed(NaN, 2), fixed(1.005, 1)], ["26 %", "–", "–", "1.0"]);
});

test("the remaining time is known after two seconds and some progress", () => {
  assert.equal(timeLeft(10_000, 0.25), "about 30 s left");
  assert.equal(timeLeft(600_000, 0.5), "about 10 min left");
  for (const [ms, share] of [[1000, 0.5], [10_000, 0.01], [10_000, 1], [0, 0]]) assert.equal(timeLeft(ms, share), "");
});
