// SVG charts of the page and of exported results: curves, bars of counts, and horizontal bars with intervals. Lines differ in
// dash pattern and in colour. Values appear under the pointer.

const CHART_MS = 200; // interval between updates of a growing chart
const DASHES = ["2 3", "", "8 4", "8 3 2 3", "14 4", "4 2", "12 3 3 3"]; // the first is plain decoding
const CHARACTER = 6.7; // px of one character of a label
const NARROW = 480; // px; narrower charts have a legend instead of labels at the lines, and names above the bars
const NEAR = 40; // px between the pointer and a point whose value is shown
const ROW = 21; // px of a horizontal bar
const charts = new WeakMap(); // the chart of a box, to redraw it at another width
const widths = new ResizeObserver((boxes) => boxes.forEach(({ target }) => redraw(/** @type {HTMLElement} */ (target))));

/** Returns about `count` round numbers from 0 to `high`. */
function ticks(high, count) {
  const rough = high / count || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * size).find((fine) => fine >= rough * 0.99);
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, i) => i * step);
}

/** Returns a round number below all values, at most three times their range below the largest one. */
function zoomed(values) {
  const most = Math.max(...values);
  const step = 10 ** Math.floor(Math.log10(most - Math.min(...values) || most || 1));
  return Math.max(0, Math.floor((Math.min(...values) - step / 2) / step) * step);
}

/** Returns 1, 2, 4, ... up to `high`. */
const doublings = (high) => Array.from({ length: Math.floor(Math.log2(high) + 1e-9) + 1 }, (_, i) => 2 ** i);

const brief = (x) => (x >= 10000 ? `${+(x / 1000).toFixed(1)}k` : String(+x.toPrecision(3)));
const seriesAttributes = (series, dashed = false) => ({ "data-series": series, "stroke-dasharray": dashed ? "5 4" : DASHES[series % DASHES.length] });
const widest = (names) => Math.max(0, ...names.map((name) => CHARACTER * name.length));
const shorten = (name, room) => (CHARACTER * name.length > room ? `${name.slice(0, Math.max(1, Math.floor(room / CHARACTER) - 1))}…` : name);

/** Returns a value as the chart shows it. */
const withUnit = (x, { percentage, suffix, digits }) => (percentage ? percent(x) : `${isNumber(digits) ? fixed(x, digits) : brief(x)}${suffix ?? ""}`);
const withInterval = (x, low, high, options) => withUnit(x, options) + (isNumber(low) && isNumber(high) ? ` [${withUnit(low, options)} to ${withUnit(high, options)}]` : "");

/** Draws a chart into a box, or redraws it. The box has a fixed height, unless the chart has groups.
 * @param {HTMLElement} box @param {Chart} options */
function plot(box, options) {
  if (!charts.has(box)) widths.observe(box);
  charts.set(box, { options, width: 0 });
  box.classList.add("sd-figure");
  redraw(box);
}

function redraw(box) {
  const chart = charts.get(box);
  const { options } = chart;
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", options.label);
  const width = box.clientWidth;
  if (!width || chart.width === width) return;
  chart.width = width;
  const names = chartNames(options);
  const inLegend = options.groups ? names : options.direct ? [] : width < NARROW || widest(names.map(({ name }) => name)) > 0.3 * width ? names : [];
  const picture = svg("svg", { "aria-hidden": "true", width });
  box.replaceChildren(...(inLegend.length ? [legend(inLegend, Boolean(options.groups))] : []), picture);
  box.style.height = options.groups ? "auto" : "";
  const height = Math.max(90, box.clientHeight - (inLegend.length ? /** @type {HTMLElement} */ (box.firstChild).offsetHeight : 0));
  picture.setAttribute("height", String(height));
  const size = { width, height, direct: !inLegend.length };
  const spots = options.groups ? groupedBars(picture, size, options) : options.bars ? barChart(picture, size, options) : curves(picture, size, options);
  if (spots.length) showValues(box, picture, spots, options);
}

// Returns names and colours for the legend.
function chartNames({ lines = [], groups = [] }) {
  if (!groups.length) return lines.filter((line) => line.name && line.points.length);
  const bars = groups.flatMap((group) => group.bars).filter(({ name }) => name);
  return bars.filter(({ name }, i) => bars.findIndex((bar) => bar.name === name) === i);
}

function legend(named, filled) {
  const sample = ({ series, dashed }) => (filled ? svg("rect", { width: 11, height: 10, rx: 2, "data-series": series }) : svg("path", { d: "M1,5 H25", ...seriesAttributes(series, dashed) }));
  const box = { width: filled ? 12 : 26, height: 10, "aria-hidden": "true" };
  return make("p", "sd-chart-legend", ...named.map((one) => make("span", "", svg("svg", box, sample(one)), make("span", "sd-chart-name", one.name))));
}

// Draws vertical bars, with their numbers where there is room, and returns what the pointer shows.
function barChart(picture, { width, height }, options) {
  const { bars, series = 1, first = 0, unit, high } = options;
  const [each, top] = [width / bars.length, high ?? Math.max(...bars, 1)];
  const room = height - 42;
  const values = bars.map((value) => withUnit(value, options));
  const every = Math.ceil((widest([String(bars.length)]) + 6) / each); // of the names below the bars
  const valued = widest(values) < each;
  return bars.map((value, i) => {
    const tall = (room * (value ?? 0)) / top;
    const thick = Math.min(0.62 * each, 46);
    const middle = (i + 0.5) * each;
    picture.append(svg("rect", { x: middle - thick / 2, y: 20 + room - tall, width: thick, height: Math.max(tall, 1), rx: 2, "data-series": series }));
    if (valued) picture.append(svg("text", { x: middle, y: 14 + room - tall, "text-anchor": "middle", class: "sd-count" }, values[i]));
    if (i % every === 0) picture.append(svg("text", { x: middle, y: height - 6, "text-anchor": "middle" }, String(i + first)));
    return { x: middle, y: 20 + room - tall, line: 0, title: `${unit}: ${i + first}`, rows: [values[i]] };
  });
}

// Draws one row per bar, or per group if stacked, and returns what the pointer shows.
function groupedBars(picture, { width }, options) {
  const { groups, stacked, level, baseline, unit = "" } = options;
  const ends = groups.flatMap(({ bars }) => (stacked ? [sum(bars.map(({ value }) => value))] : bars.flatMap(({ value, high, predicted }) => [value, high ?? 0, predicted ?? 0])));
  const top = Math.max(...ends, level ?? 0, 1e-9) * 1.02;
  const above = width < NARROW;
  const left = above ? 2 : Math.min(widest(groups.map(({ name }) => name)) + 10, 0.34 * width);
  const inner = width - left - (stacked ? 10 : 58);
  const at = (value) => +(left + (inner * value) / top).toFixed(1);
  const start = baseline ? 18 : 4;
  const spots = [];
  let y = start;
  for (const { name, bars } of groups) {
    const tall = ROW * (stacked ? 1 : bars.length);
    picture.append(svg("text", { x: above ? left : left - 8, y: y + (above ? 12 : tall / 2 + 4), "text-anchor": above ? "start" : "end", class: "sd-bar-name" }, shorten(name, above ? width : left - 8)));
    if (above) y += 17;
    let from = 0;
    bars.forEach((bar, i) => {
      horizontalBar(picture, at, bar, from, stacked ? y : y + ROW * i, options);
      if (stacked) from += bar.value;
    });
    const values = bars.map(({ name: series, value, low, high, predicted }) => [series, withInterval(value, low, high, options), isNumber(predicted) ? `predicted ${withUnit(predicted, options)}` : ""]);
    spots.push({ x: left, y: y + tall / 2, line: 0, title: name, rows: values.map((words) => words.filter(Boolean).join(" ")) });
    y += tall + (above || bars.length > 1 ? 9 : 4);
  }
  if (isNumber(level)) picture.append(svg("path", { d: `M${at(level)},${start - 4} V${y}`, class: "sd-level" }));
  if (baseline) picture.append(svg("text", { x: at(level), y: 11, "text-anchor": "middle" }, baseline));
  if (unit) picture.append(svg("text", { x: width - 4, y: y + 14, "text-anchor": "end", class: "sd-unit" }, unit));
  picture.setAttribute("height", String(y + (unit ? 20 : 4)));
  return spots;
}

function horizontalBar(picture, at, { value, low, high, predicted, series }, from, y, options) {
  const middle = y + ROW / 2;
  picture.append(svg("rect", { x: at(from), y: y + 2, width: Math.max(1, at(from + value) - at(from)), height: ROW - 4, rx: 2, "data-series": series, class: options.stacked ? "" : "sd-measured" }));
  if (options.stacked) return;
  if (isNumber(low) && isNumber(high)) picture.append(svg("path", { d: `M${at(low)},${middle} H${at(high)} M${at(low)},${middle - 4} v8 M${at(high)},${middle - 4} v8`, class: "sd-whisker", "data-series": series }));
  if (isNumber(predicted)) picture.append(svg("path", { d: `M${at(predicted)},${middle - 6} l6,6 l-6,6 l-6,-6 Z`, class: "sd-predicted" }));
  picture.append(svg("text", { x: at(Math.max(value, high ?? 0, predicted ?? 0)) + 8, y: middle + 4, class: "sd-count" }, withUnit(value, options)));
}

// Draws lines and dots, and returns what the pointer shows.
function curves(picture, { width, height, direct }, options) {
  const { lines = [], dots = [], unit = "", high, zoom, from, wide, whole, level, baseline, doubling, places } = options;
  const bands = lines.flatMap((line) => line.band ?? []);
  const points = [...lines.flatMap((line) => line.points), ...dots.map(({ x, y }) => [x, y]), ...bands.map(([x, , most]) => [x, most])];
  if (!points.length) {
    picture.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "No data yet"));
    return [];
  }
  const top = high ?? Math.max(...points.map(([, y]) => y), level ?? 0, 1e-9) * 1.06;
  const bottom = zoom ? zoomed(points.map(([, y]) => y)) : 0;
  const scale = doubling ? Math.log2 : (x) => x;
  const start = scale(places ? Math.min(...places) : (from ?? (doubling ? 1 : 0)));
  const end = scale(wide ?? Math.max(...points.map(([x]) => x), 1e-9));
  const labels = direct ? lines.filter((line) => line.name && line.points.length) : [];
  const margin = { left: 46, right: labels.length ? widest(labels.map(({ name }) => name)) + 14 : 10, top: 8, bottom: places ? 38 : 22 };
  const [inner, tall] = [width - margin.left - margin.right, height - margin.top - margin.bottom];
  const along = (x) => (scale(x) - start) / (end - start || 1);
  const at = ([x, y]) => [margin.left + inner * along(x), margin.top + tall * (1 - (Math.min(y, top) - bottom) / (top - bottom))].map((n) => +n.toFixed(1));
  for (const y of ticks(top - bottom, tall / 34).map((step) => bottom + step)) {
    if (whole && y % 1) continue;
    const [, up] = at([places?.[0] ?? 1, y]);
    picture.append(svg("path", { d: `M${margin.left},${up} h${inner}`, class: "sd-rule" }));
    picture.append(svg("text", { x: margin.left - 6, y: up + 4, "text-anchor": "end" }, withUnit(y, { ...options, digits: undefined })));
  }
  const unitWidth = places ? 0 : 6.5 * unit.length + 14;
  for (const x of places ?? (doubling ? doublings(wide ?? 2 ** end) : ticks(end, Math.min(inner / 45, 10)).filter((x) => x >= start))) {
    const [across] = at([x, 0]);
    if (across < margin.left + inner + 10 - unitWidth) picture.append(svg("text", { x: across, y: height - margin.bottom + 17, "text-anchor": along(x) ? "middle" : "start" }, brief(x)));
  }
  picture.append(svg("text", { x: margin.left + inner, y: height - 5, "text-anchor": "end", class: "sd-unit" }, unit));
  if (isNumber(level)) {
    const up = at([places?.[0] ?? 1, level])[1];
    picture.append(svg("path", { d: `M${margin.left},${up} h${inner}`, class: "sd-level" }));
    if (baseline) picture.append(svg("text", { x: margin.left + inner - 4, y: up + 14, "text-anchor": "end" }, baseline));
  }
  lines.forEach((line) => drawLine(picture, line, at, whole));
  const highest = Math.max(...dots.map(({ y }) => y));
  dots.forEach(({ x, y, name }) => {
    const [across, up] = at([x, y]);
    picture.append(svg("circle", { cx: across, cy: up, r: 5.5, class: "sd-dot" }));
    picture.append(svg("text", { x: Math.min(across + 9, width - 8 * name.length - 4), y: y < highest ? up + 20 : Math.max(up - 8, 12), class: "sd-count" }, name));
  });
  labelLines(picture, labels, at, height - margin.bottom);
  return lines.flatMap((line, number) => spotsOf(line, number, at, options));
}

function drawLine(picture, { points, series, faint, dashed, marks, band = [], texts = [] }, at, whole) {
  if (!points.length) return;
  if (marks) for (const [x, low, high] of band) picture.append(svg("path", { d: `M${at([x, low])} V${at([x, high])[1]} m-4,0 h8 M${at([x, low])} m-4,0 h8`, class: "sd-whisker", "data-series": series }));
  else if (band.length > 1) picture.append(svg("path", { d: `M${band.map(([x, , most]) => at([x, most])).join(" L")} L${band.map(([x, least]) => at([x, least])).reverse().join(" L")} Z`, class: "sd-band", "data-series": series }));
  const d = points.map((point, i) => (!i ? `M${at(point)}` : whole ? `H${at(point)[0]} V${at(point)[1]}` : `L${at(point)}`)).join(" ");
  if (points.length > 1) picture.append(svg("path", { d, class: faint ? "sd-curve sd-faint" : "sd-curve", "data-points": points.length, ...seriesAttributes(series, dashed) }));
  for (const point of marks || points.length === 1 ? points : []) picture.append(svg("circle", { cx: at(point)[0], cy: at(point)[1], r: dashed ? 2 : 3.5, "data-series": series }));
  texts.forEach((text, i) => picture.append(svg("text", { x: at(points[i])[0] - 7, y: at(points[i])[1] - 6, "text-anchor": "end" }, text)));
}

// Writes the name of each line at its end; names that would overlap move apart.
function labelLines(picture, lines, at, floor) {
  const labels = lines.map((line) => ({ ...line, end: at(line.points.at(-1)) })).sort((a, b) => a.end[1] - b.end[1]);
  const right = Math.max(0, ...labels.map(({ end }) => end[0]));
  const heights = labels.map(({ end }) => end[1] + 4);
  for (let i = 1; i < heights.length; i++) heights[i] = Math.max(heights[i], heights[i - 1] + 14);
  for (let i = heights.length - 1, low = floor; i >= 0; low = heights[i--] - 14) heights[i] = Math.min(heights[i], low);
  labels.forEach(({ name, series }, i) => picture.append(svg("text", { x: right + 9, y: heights[i], class: "sd-line-name", "data-series": series }, name)));
}

function spotsOf({ name = "", points, band = [], notes = [] }, line, at, options) {
  const intervals = new Map(band.map(([x, low, high]) => [x, [low, high]]));
  return points.map(([x, y], i) => {
    const [left, up] = at([x, y]);
    const [low, high] = intervals.get(x) ?? [];
    const value = withInterval(y, low, high, { digits: 2, ...options });
    return { x: left, y: up, line, title: options.unit ? `${options.unit}: ${brief(x)}` : brief(x), rows: [[name, value, notes[i]].filter(Boolean).join(" ")] };
  });
}

// Shows the values at the pointer: of the nearest point of each line, or of the nearest row.
function showValues(box, picture, spots, options) {
  const rows = Boolean(options.groups);
  const tip = make("div", "sd-tip");
  const cross = svg("path", { class: "sd-cross" });
  const hide = () => [tip.remove(), cross.remove()];
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("pointermove", (event) => {
    const from = picture.getBoundingClientRect();
    const [x, y] = [event.clientX - from.left, event.clientY - from.top];
    const away = (spot) => (rows ? Math.abs(spot.y - y) : Math.abs(spot.x - x) + 0.01 * Math.abs(spot.y - y));
    const sorted = [...spots].sort((a, b) => away(a) - away(b));
    const found = sorted.filter((spot, i) => away(spot) < NEAR && sorted.findIndex(({ line }) => line === spot.line) === i).sort((a, b) => a.line - b.line);
    if (!found.length) return void hide();
    tip.replaceChildren(make("b", "", sorted[0].title), ...found.flatMap((spot) => spot.rows).map((text) => make("span", "", text)));
    if (!rows) cross.setAttribute("d", `M${sorted[0].x},4 V${from.height - (options.places ? 38 : 22)}`);
    picture.append(cross);
    box.append(tip);
    const offset = from.top - box.getBoundingClientRect().top;
    tip.style.top = `${offset + Math.max(0, Math.min(y + 14, from.height - tip.offsetHeight))}px`;
    tip.style.left = `${Math.max(0, x + 16 + tip.offsetWidth > box.clientWidth ? x - tip.offsetWidth - 16 : x + 16)}px`;
  });
}

/** Draws lines in the colours after that of plain decoding.
 * @param {HTMLElement} box @param {Omit<Curve, "series">[]} lines @param {Chart} options */
function lineChart(box, lines, options) {
  plot(box, { ...options, lines: lines.map((line, i) => ({ ...line, name: lines.length > 1 ? line.name : "", series: 1 + (i % (DASHES.length - 1)) })) });
}
