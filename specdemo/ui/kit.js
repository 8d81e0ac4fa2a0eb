// What lanes.js and lab.js share. Model text enters the page through textContent alone.

const SVG = "http://www.w3.org/2000/svg";
const GLYPHS = { "\n": "⏎", "\r": "␍", "\t": "⇥" };

const $ = (selector) => element.querySelector(selector);
const make = (tag, cls = "", text = "") => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text) node.textContent = text;
  return node;
};
const svg = (tag, attributes, text = "") => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
};
const isNumber = (x) => typeof x === "number" && isFinite(x);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const fixed = (x, digits) => (isNumber(x) ? x.toFixed(digits) : "–");
const percent = (x) => (isNumber(x) ? `${(100 * x).toFixed(0)} %` : "–");
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const visible = (text) => (text === "" ? "∅" : text.replace(/[\n\r\t]/g, (c) => GLYPHS[c]).replace(/^ | $/g, "·"));

// The new lines of an append-only log. A log whose first line is another one is another log: `opened` comes first.
function reader(opened, receive) {
  let seen = { head: "", length: 0 };
  return (log) => {
    const head = log.slice(0, log.indexOf("\n"));
    if (head !== seen.head || log.length < seen.length) {
      seen = { head, length: 0 };
      opened();
    }
    const end = log.lastIndexOf("\n") + 1;
    const lines = log.slice(seen.length, end).split("\n");
    seen.length = Math.max(end, seen.length);
    for (const line of lines) if (line) receive(JSON.parse(line));
  };
}

// A small line chart as wide as its box. lines: [{name, points: [[x, y], ...]}], told apart by their dash. y runs from 0 to
// `high`, by default to the largest value; `whole` ones hold until the next; `unit` names the x axis, `say` writes a y.
function lineChart(box, lines, { unit, words, high, whole, height = 130, say = (y) => fixed(y, 2) }) {
  const width = Math.max(240, box.clientWidth);
  const [left, right, top, bottom] = [44, 12, 10, 24];
  const all = lines.flatMap((line) => line.points);
  const most = Math.max(1, ...all.map(([x]) => x));
  const ceiling = high ?? Math.max(whole ? 1 : 1e-9, ...all.map(([, y]) => y));
  const px = (x) => left + ((width - left - right) * x) / most;
  const py = (y) => height - bottom - ((height - top - bottom) * y) / ceiling;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "sd-chart", role: "img", "aria-label": words });
  for (const y of whole ? [0, ceiling] : [0, ceiling / 2, ceiling]) {
    picture.append(svg("line", { x1: left, x2: width - right, y1: py(y), y2: py(y), class: "sd-grid-line" }));
    picture.append(svg("text", { x: left - 6, y: py(y) + 4, class: "sd-y" }, say(y)));
  }
  picture.append(svg("text", { x: left, y: height - 7, class: "sd-x0" }, "0"));
  picture.append(svg("text", { x: width - right, y: height - 7, class: "sd-x1" }, `${Math.round(most)} ${unit}`));
  lines.forEach((line, i) => {
    const points = line.points.flatMap(([x, y], j) => {
      const before = line.points[j - 1];
      return whole && before ? [`${px(x)},${py(before[1])}`, `${px(x)},${py(y)}`] : [`${px(x)},${py(y)}`];
    });
    picture.append(svg("polyline", { points: points.join(" "), class: "sd-curve", "data-line": i }));
  });
  return picture;
}

// The names of a chart's lines, each behind a piece of its line.
function chartKey(lines) {
  const key = make("p", "sd-small sd-chart-key");
  lines.forEach((line, i) => {
    const sample = svg("svg", { viewBox: "0 0 26 8", width: 26, height: 8, "aria-hidden": "true" });
    sample.append(svg("polyline", { points: "0,4 26,4", class: "sd-curve", "data-line": i }));
    const entry = make("span");
    entry.append(sample, line.name);
    key.append(entry);
  });
  return key;
}
