// The one way of drawing charts: Plotly, which the page brings for its own figures, in the look of bench/chart_style.py.

const CHART_MS = 200; // a chart that grows is drawn again so often
const GREY = "#7d8694";
const LINES = [ // after Okabe and Ito; the first is plain decoding's
  { color: GREY, dash: "dot" },
  { color: "#2f8fd0", dash: "solid" },
  { color: "#d97f1e", dash: "dash" },
  { color: "#17a088", dash: "dashdot" },
  { color: "#a86fc4", dash: "longdash" },
];

const axis = (more) => ({ gridcolor: "rgba(125,134,148,.22)", zeroline: false, rangemode: "tozero", fixedrange: true, ...more });

// Plotly reads a little HTML in names.
const escapeMarkup = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

/** Draws, or draws again, a figure into a box of a fixed height; `words` are what it shows to who does not see it. */
function figure(box, traces, { words, xaxis = {}, yaxis = {}, ...more }) {
  box.classList.add("sd-figure");
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", words);
  if (!window.Plotly) return void setTimeout(() => box.isConnected && figure(box, traces, { words, xaxis, yaxis, ...more }), 500);
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: GREY, family: getComputedStyle(box).fontFamily, size: 12 },
    margin: { l: 44, r: 12, t: 8, b: 36 },
    showlegend: false,
    xaxis: axis(xaxis),
    yaxis: axis(yaxis),
    ...more,
  };
  window.Plotly.react(box, traces, layout, { displayModeBar: false, responsive: true });
}

/**
 * Lines told apart by their dash. y runs from 0 to `high`, by default to the largest value; `whole` ones hold until the next.
 * @param {HTMLElement} box
 * @param {{name?: string, points: number[][]}[]} lines
 * @param {{unit: string, words: string, high?: number, whole?: boolean, percentage?: boolean}} how
 */
function lineChart(box, lines, { unit, words, high, whole = false, percentage = false }) {
  const traces = lines.map(({ name = "", points }, i) => ({
    x: points.map(([x]) => x),
    y: points.map(([, y]) => y),
    name: escapeMarkup(name),
    mode: points.length > 1 ? "lines" : "markers",
    line: { ...LINES[1 + (i % (LINES.length - 1))], width: 2, shape: whole ? "hv" : "linear" },
  }));
  const yaxis = { range: high ? [0, high] : null, tickformat: percentage ? ".0%" : "", dtick: whole ? 1 : null };
  const legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" };
  figure(box, traces, { words, xaxis: { title: { text: unit } }, yaxis, legend, showlegend: lines.length > 1 });
}
