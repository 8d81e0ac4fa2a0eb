// SVG charts of the race, the lab and the figures. Lines differ in dash pattern and in colour. Sweeps use Plotly figures made
// in Python.

const CHART_MS = 200; // interval between updates of a growing chart
const DASHES = ["2 3", "", "8 4", "8 3 2 3", "14 4"]; // the first is plain decoding
const charts = new WeakMap(); // the chart of a box, to redraw it at another width
const widths = new ResizeObserver((boxes) => boxes.forEach(({ target }) => redraw(/** @type {HTMLElement} */ (target))));
const MARGIN = { left: 46, right: 10, top: 8, bottom: 22 };

/** Returns about `count` round numbers from 0 to `high`. */
function ticks(high, count) {
  const rough = high / count || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * size).find((fine) => fine >= rough * 0.99);
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, i) => i * step);
}

/** Returns 1, 2, 4, ... up to `high`. */
const doublings = (high) => Array.from({ length: Math.floor(Math.log2(high) + 1e-9) + 1 }, (_, i) => 2 ** i);

const brief = (x) => (x >= 10000 ? `${+(x / 1000).toFixed(1)}k` : String(+x.toPrecision(3)));

/**
 * Draws a chart into a box of fixed height, or redraws it.
 * @param {HTMLElement} box
 * @param {object} options
 * @param {string} options.label description for screen readers
 * @param {{name?: string, points: number[][], series: number, faint?: boolean, band?: number[][]}[]} [options.lines] series:
 *   selects colour and dash; band: interval as x, low, high
 * @param {number[]} [options.bars] heights of the bars at 0, 1, 2, ...
 * @param {{x: number, y: number, name: string}[]} [options.dots]
 * @param {string} [options.unit] unit of x
 * @param {number} [options.high] top of the y axis; default: the largest value
 * @param {number} [options.wide] end of the x axis
 * @param {boolean} [options.doubling] logarithmic x axis from 1
 * @param {boolean} [options.whole] draw steps instead of slopes
 * @param {boolean} [options.percentage]
 * @param {number} [options.level] y of a horizontal line, such as "no gain"
 * @param {number} [options.series] colour of the bars
 */
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
  const named = (options.lines || []).filter((line) => line.name);
  const picture = svg("svg", { "aria-hidden": "true", width });
  box.replaceChildren(...(named.length ? [legend(named)] : []), picture);
  const height = Math.max(90, box.clientHeight - (named.length ? /** @type {HTMLElement} */ (box.firstChild).offsetHeight : 0));
  picture.setAttribute("height", String(height));
  const size = { width, height };
  if (options.bars) barChart(picture, size, options.bars, options.series ?? 1);
  else curves(picture, size, options);
}

function legend(lines) {
  const list = make("p", "sd-chart-legend");
  for (const { name, series } of lines) {
    const sample = svg("svg", { width: 26, height: 10, "aria-hidden": "true" });
    sample.append(svg("path", { d: "M1,5 H25", "data-series": series, "stroke-dasharray": DASHES[series % DASHES.length] }));
    const item = make("span");
    item.append(sample, make("span", "legendtext", name));
    list.append(item);
  }
  return list;
}

function barChart(picture, { width, height }, bars, series) {
  const [each, most] = [width / bars.length, Math.max(...bars, 1)];
  const room = height - 42;
  bars.forEach((count, i) => {
    const tall = (room * count) / most;
    const thick = Math.min(0.62 * each, 46);
    const middle = (i + 0.5) * each;
    picture.append(
      svg("rect", { x: middle - thick / 2, y: 20 + room - tall, width: thick, height: Math.max(tall, 1), rx: 2, "data-series": series }),
      svg("text", { x: middle, y: 14 + room - tall, "text-anchor": "middle", class: "sd-count" }, String(count)),
      svg("text", { x: middle, y: height - 6, "text-anchor": "middle" }, String(i))
    );
  });
}

function curves(picture, { width, height }, { lines = [], dots = [], unit = "", high, wide, whole, percentage, level, doubling }) {
  const bands = lines.flatMap((line) => line.band ?? []);
  const points = [...lines.flatMap((line) => line.points), ...dots.map(({ x, y }) => [x, y]), ...bands.map(([x, , most]) => [x, most])];
  if (!points.length) return void picture.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "No data yet"));
  const top = high ?? Math.max(...points.map(([, y]) => y), level ?? 0, 1e-9) * 1.06;
  const end = wide ?? Math.max(...points.map(([x]) => x), 1e-9);
  const [inner, tall] = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
  const along = (x) => (doubling ? Math.log2(x) / Math.log2(end) : x / end);
  const at = ([x, y]) => [MARGIN.left + inner * along(x), MARGIN.top + tall * (1 - Math.min(y, top) / top)].map((n) => +n.toFixed(1));
  for (const y of ticks(top, tall / 34)) {
    if (whole && y % 1) continue;
    const [, up] = at([0, y]);
    picture.append(svg("path", { d: `M${MARGIN.left},${up} h${inner}`, class: "sd-rule" }));
    picture.append(svg("text", { x: MARGIN.left - 6, y: up + 4, "text-anchor": "end" }, percentage ? percent(y) : brief(y)));
  }
  const unitWidth = 7 * unit.length + 16;
  for (const x of doubling ? doublings(end) : ticks(end, inner / 80)) {
    const [across] = at([x, 0]);
    if (across < width - unitWidth) picture.append(svg("text", { x: across, y: height - 5, "text-anchor": along(x) ? "middle" : "start" }, brief(x)));
  }
  picture.append(svg("text", { x: width - MARGIN.right, y: height - 5, "text-anchor": "end", class: "sd-unit" }, unit));
  if (isNumber(level)) picture.append(svg("path", { d: `M${MARGIN.left},${at([0, level])[1]} h${inner}`, class: "sd-level" }));
  for (const { points, series, faint, band } of lines) {
    if (!points.length) continue;
    if (band?.length > 1) picture.append(svg("path", { d: `M${band.map(([x, , most]) => at([x, most])).join(" L")} L${band.map(([x, least]) => at([x, least])).reverse().join(" L")} Z`, class: "sd-band", "data-series": series }));
    const d = points.map((point, i) => (!i ? `M${at(point)}` : whole ? `H${at(point)[0]} V${at(point)[1]}` : `L${at(point)}`)).join(" ");
    if (points.length > 1) picture.append(svg("path", { d, class: faint ? "sd-curve sd-faint" : "sd-curve", "data-series": series, "data-points": points.length, "stroke-dasharray": DASHES[series % DASHES.length] }));
    else picture.append(svg("circle", { cx: at(points[0])[0], cy: at(points[0])[1], r: 3, "data-series": series }));
  }
  dots.forEach(({ x, y, name }, i) => {
    const [across, up] = at([x, y]);
    picture.append(svg("circle", { cx: across, cy: up, r: 5.5, class: "sd-dot" }));
    picture.append(svg("text", { x: Math.min(across + 9, width - 8 * name.length - 4), y: i ? up + 20 : Math.max(up - 8, 12), class: "sd-count" }, name));
  });
}

/**
 * Draws lines with a y axis from 0, in the colours after that of plain decoding.
 * @param {HTMLElement} box
 * @param {{name?: string, points: number[][]}[]} lines
 * @param {{unit: string, label: string, high?: number, whole?: boolean, percentage?: boolean}} options
 */
function lineChart(box, lines, options) {
  plot(box, { ...options, lines: lines.map((line, i) => ({ ...line, name: lines.length > 1 ? line.name : "", series: 1 + (i % (DASHES.length - 1)) })) });
}
