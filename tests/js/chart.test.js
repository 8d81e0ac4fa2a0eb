import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

/** A minimal DOM node. */
function node(tag) {
  const made = { tag, attributes: {}, children: [], textContent: "", classList: { add() {} }, clientWidth: 400, clientHeight: 200, offsetHeight: 0 };
  const append = (...more) => made.children.push(...more);
  return Object.assign(made, { append, replaceChildren: (...more) => made.children.splice(0, made.children.length, ...more), setAttribute: (name, value) => (made.attributes[name] = value), get firstChild() { return made.children[0]; } });
}

const document = { createElementNS: (_, tag) => node(tag), createElement: node };
class ResizeObserver {
  observe() {}
}
const { plot, doublings, ticks } = load(["helpers", "chart"], "plot, doublings, ticks", { document, ResizeObserver });

function drawn(options) {
  const box = node("div");
  plot(box, { label: "", unit: "", ...options });
  return box.children.at(-1).children;
}
const corners = (path) => path.attributes.d.match(/[\d.]+,[\d.]+/g).map((pair) => pair.split(",").map(Number));

test("round numbers up to the largest, and doublings", () => {
  assert.deepEqual(plain(ticks(2.4, 5)), [0, 0.5, 1, 1.5, 2]);
  assert.deepEqual(plain(doublings(256)), [1, 2, 4, 8, 16, 32, 64, 128, 256]);
  assert.deepEqual(plain(doublings(1)), [1]);
});

test("a band follows its upper end and returns along its lower end, below its curve", () => {
  const points = [[1, 1], [2, 2], [3, 2]];
  const band = [[1, 0.5, 1.5], [2, 1, 3], [3, 1, 4]];
  const paths = drawn({ lines: [{ series: 1, points, band }] }).filter(({ attributes }) => /^sd-(band|curve)/.test(attributes.class));
  assert.deepEqual(paths.map(({ attributes }) => attributes.class), ["sd-band", "sd-curve"]);
  const [area, curve] = paths.map(corners);
  assert.equal(area.length, 6);
  assert.ok(area.every(([, up]) => up >= 8), "nothing is cut off at the top");
  curve.forEach(([x, up], i) => {
    const [[, most], [, least]] = area.filter(([at]) => at === x);
    assert.ok(most < up && up < least, `point ${i} is in the band`);
  });
});

test("on a logarithmic axis, every doubling has the same width", () => {
  const [curve] = drawn({ lines: [{ series: 1, points: [[1, 1], [4, 1], [16, 1], [256, 1]] }], doubling: true }).filter(({ attributes }) => attributes.class === "sd-curve");
  const [one, four, sixteen, last] = corners(curve).map(([x]) => x);
  assert.ok(Math.abs(four - one - (sixteen - four)) < 0.2 && Math.abs(last - one - 4 * (four - one)) < 0.5);
});

test("an empty chart has words instead of axes", () => {
  for (const options of [{}, { lines: [] }, { lines: [{ series: 1, points: [] }] }]) {
    const parts = drawn(options);
    assert.deepEqual(parts.map(({ textContent }) => textContent), ["No data yet"]);
  }
});

test("the label of a dot ends within the chart", () => {
  const name = "measured 1.80×";
  const label = drawn({ dots: [{ x: 8, y: 1, name }] }).find(({ textContent }) => textContent === name);
  assert.ok(label.attributes.x + 8 * name.length <= 400);
});
