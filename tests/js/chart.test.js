import assert from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.js";

/** A minimal DOM node. */
function node(tag) {
  const made = { tag, attributes: {}, children: [], textContent: "", classList: { add() {} }, clientWidth: 400, clientHeight: 200, offsetHeight: 0, offsetWidth: 80, style: {}, listeners: {}, get firstChild() { return this.children[0]; } };
  const append = (...more) => more.forEach((one) => (typeof one === "string" ? (made.textContent += one) : made.children.push(one)));
  return Object.assign(made, { append, replaceChildren: (...more) => made.children.splice(0, made.children.length, ...more), setAttribute: (name, value) => (made.attributes[name] = value), addEventListener: (name, call) => (made.listeners[name] = call), getBoundingClientRect: () => ({ left: 0, top: 0, height: 200 }), remove() {} });
}

const document = { createElementNS: (_, tag) => node(tag), createElement: node };
class ResizeObserver {
  observe() {}
}
const { plot, doublings, ticks } = load(["helpers", "chart"], "plot, doublings, ticks", { document, ResizeObserver });

function boxOf(options, clientWidth = 400) {
  const box = Object.assign(node("div"), { clientWidth });
  plot(box, { label: "", unit: "", ...options });
  return box;
}
const drawn = (options, width) => boxOf(options, width).children.at(-1).children;
const ofClass = (parts, name) => parts.filter(({ attributes }) => attributes.class === name);
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

test("wide charts name the lines at their ends, apart from each other; narrow ones have a legend", () => {
  const lines = ["a", "b", "c"].map((name, i) => ({ name, series: 1, points: [[0, 1], [1, 1 + i / 1000]] }));
  const heights = ofClass(drawn({ lines }, 900), "sd-line-name").map(({ attributes }) => attributes.y).sort((x, y) => x - y);
  assert.equal(heights.length, 3);
  assert.ok(heights.every((y, i) => !i || y - heights[i - 1] >= 14) && heights.at(-1) <= 200);
  const narrow = boxOf({ lines }, 390);
  assert.equal(ofClass(narrow.children.at(-1).children, "sd-line-name").length, 0);
  assert.deepEqual(narrow.children[0].children.map((item) => item.children[1].textContent), ["a", "b", "c"]);
});

test("measured points have whiskers from the lower to the upper end of the interval", () => {
  const [whisker] = ofClass(drawn({ lines: [{ series: 1, marks: true, points: [[1, 2]], band: [[1, 1, 3]] }], places: [1, 2] }), "sd-whisker");
  const [, low, high] = whisker.attributes.d.match(/,([\d.]+) V([\d.]+)/).map(Number);
  assert.ok(high < low && high >= 8);
});

test("ticks are at the measured places, and the axis begins at the first", () => {
  const parts = drawn({ lines: [{ series: 1, points: [[16, 1], [64, 2], [256, 1]] }], places: [16, 64, 256], doubling: true });
  assert.deepEqual(parts.filter(({ tag, textContent }) => tag === "text" && ["16", "64", "256"].includes(textContent)).length, 3);
  const [first, middle, last] = corners(ofClass(parts, "sd-curve")[0]).map(([x]) => x);
  assert.ok(first === 46 && Math.abs(middle - first - (last - middle)) < 0.2);
});

const textAt = (box, clientX, clientY) => {
  box.children.at(-1).listeners.pointermove({ clientX, clientY });
  return box.children.at(-1).children.map(({ textContent }) => textContent);
};

test("vertical bars have numbers where there is room, and always under the pointer", () => {
  const rates = { bars: [0.5, null, 1], first: 1, high: 1, percentage: true, unit: "position" };
  const rects = (options, width) => drawn(options, width).filter(({ tag }) => tag === "rect").map(({ attributes }) => attributes);
  const [half, none, whole] = rects(rates).map(({ height }) => height);
  assert.ok(Math.abs(whole - 2 * half) < 0.1 && none === 1);
  assert.deepEqual(ofClass(drawn(rates), "sd-count").map(({ textContent }) => textContent), ["50 %", "–", "100 %"]);
  assert.deepEqual(textAt(boxOf(rates), 68, 100), ["position: 1", "50 %"]);
  const many = { bars: Array(40).fill(0.5), first: 1, percentage: true, unit: "position" };
  assert.equal(ofClass(drawn(many), "sd-count").length, 0);
  const names = drawn(many).filter(({ tag }) => tag === "text").map(({ textContent }) => textContent);
  assert.ok(names.length < 22 && names[0] === "1");
  assert.deepEqual(textAt(boxOf(many), 395, 100), ["position: 40", "50 %"]);
});

const bar = (value, more = {}) => ({ value, low: value - 0.1, high: value + 0.1, series: 1, ...more });
const groups = [{ name: "fast", bars: [bar(2, { predicted: 1.9 })] }, { name: "slow", bars: [bar(1)] }];

test("a horizontal bar has its value, its interval and its prediction", () => {
  const parts = drawn({ groups, suffix: "×", digits: 2, level: 1, baseline: "plain decoding" }, 900);
  const [fast, slow] = ofClass(parts, "sd-measured").map(({ attributes }) => attributes);
  assert.ok(Math.abs(fast.width - 2 * slow.width) < 0.3 && fast.x === slow.x && fast.y < slow.y);
  assert.deepEqual(ofClass(parts, "sd-count").map(({ textContent }) => textContent), ["2.00×", "1.00×"]);
  assert.equal(ofClass(parts, "sd-whisker").length, 2);
  assert.equal(ofClass(parts, "sd-predicted").length, 1);
  assert.ok(parts.some(({ textContent }) => textContent === "plain decoding"));
});

test("stacked bars follow one another in one row", () => {
  const parts = drawn({ groups: [{ name: "a", bars: [{ name: "draft", value: 1, series: 1 }, { name: "verify", value: 3, series: 2 }] }], stacked: true }, 900);
  const [draft, verify] = parts.filter(({ tag }) => tag === "rect").map(({ attributes }) => attributes);
  assert.ok(draft.y === verify.y && Math.abs(draft.x + draft.width - verify.x) < 0.2);
});

test("the pointer shows the value and the interval of every line at its place, as text", () => {
  const names = ["<b>wide</b>", "deep"];
  const lines = names.map((name, i) => ({ name, series: 1, marks: true, points: [[1, 1], [2, 1.5 + i]], band: [[2, 1.4, 1.6]] }));
  const box = boxOf({ lines, places: [1, 2], suffix: "×", digits: 2, unit: "tokens" });
  assert.deepEqual(textAt(box, 385, 150), ["tokens: 2", "<b>wide</b> 1.50× [1.40× to 1.60×]", "deep 2.50× [1.40× to 1.60×]"]);
});

test("the pointer shows the values of a row", () => {
  const box = boxOf({ groups, suffix: "×", digits: 2 }, 900);
  assert.deepEqual(textAt(box, 10, 6), ["fast", "2.00× [1.90× to 2.10×] predicted 1.90×"]);
});

test("an axis that does not begin at 0 has a round number below all values at its lower end", () => {
  const lines = [{ series: 1, points: [[0, 10.9], [1, 9.8]] }];
  const [curve] = ofClass(drawn({ lines, zoom: true }), "sd-curve");
  const [[, first], [, last]] = corners(curve);
  assert.ok(last - first > 60, "the curve uses the height");
  assert.ok(drawn({ lines, zoom: true }).some(({ textContent }) => textContent === "9"));
});

test("names of dots at one place are on both sides of them, whichever is higher", () => {
  const dots = [{ x: 4, y: 0.94, name: "predicted" }, { x: 4, y: 1.21, name: "measured" }];
  for (const order of [dots, [...dots].reverse()]) {
    const parts = drawn({ dots: order });
    const [low, high] = dots.map(({ name }) => parts.find(({ textContent }) => textContent === name).attributes.y);
    assert.ok(low > high + 28, "more than a line apart");
  }
});
