import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./load.js";

const { reader, visible, percent, fixed } = load(["kit"], "reader, visible, percent, fixed");

function read() {
  const lines = [];
  let opened = 0;
  const take = reader(() => opened++, (line) => lines.push(line.n));
  return { take, lines, opened: () => opened };
}

test("of a longer log the new lines are read, and half a line waits for its end", () => {
  const { take, lines } = read();
  take('{"n":1}\n{"n":2}\n{"n"');
  take('{"n":1}\n{"n":2}\n{"n":3}\n');
  assert.deepEqual(lines, [1, 2, 3]);
});

test("a log with another first line is another log, a shorter one was overtaken", () => {
  const { take, lines, opened } = read();
  take('{"n":1}\n{"n":2}\n');
  take('{"n":7}\n');
  take('{"n":7}\n{"n":8}\n');
  take('{"n":7}\n');
  take('{"n":7}\n{"n":8}\n{"n":9}\n');
  assert.deepEqual(lines, [1, 2, 7, 8, 9]);
  assert.equal(opened(), 2);
});

test("what cannot be seen is made visible", () => {
  assert.equal(visible(" a\n"), "·a⏎");
  assert.equal(visible(""), "∅");
});

test("what is no number is a dash", () => {
  assert.deepEqual([percent(0.256), percent(null), fixed(NaN, 2), fixed(1.005, 1)], ["26 %", "–", "–", "1.0"]);
});
