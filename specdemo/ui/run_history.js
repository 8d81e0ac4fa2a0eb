// The runs of this page, in one line below the playback bar. They are in the memory of the browser only. A press replays one; under the
// pointer, or with the focus, its tokens/s lie over the plot.

const MOST_RUNS = 8; // older ones are dropped
/** @type {any[]} */
const pastRuns = []; // the newest is the last
let laidOver = null; // the run whose curves lie over the plot

/** Returns the lanes of a start line, with the lines that were received before. */
const lanesOf = ({ lanes }, streams = []) => lanes.map((lane, index) => ({ ...lane, index, ...initialStream(), over: false, ...streams[index] }));

/** Returns the speed-ups of a run in words, the greatest first; empty if none is known. @returns {string[]} */
function speedsOf({ comparison }) {
  const rows = comparison.filter(({ speedup }) => isNumber(speedup)).toSorted((a, b) => b.speedup - a.speedup);
  return rows.map(({ lane, speedup }) => `${speedup.toFixed(2)}× ${lane}`);
}

/** Keeps a finished run of this page, once.
 * @param {any} finished */
function keepRun(finished) {
  const { id, key, recorded, start, end, lanes } = finished;
  if (recorded || pastRuns.some((one) => one.id === id) || !speedsOf(end).length) return;
  const streams = lanes.map(({ lines, received, offset, over }) => ({ lines, received, offset, over }));
  pastRuns.push({ id, key, start, end, streams, curves: curvesOf(lanes) });
  pastRuns.splice(0, pastRuns.length - MOST_RUNS);
}

function openRun({ id, key, start, end, streams }) {
  const earlier = id !== newest;
  hideMessages();
  run = { id, key: earlier ? "" : key, recorded: earlier, earlier, still: false, userRun: true, start, end, lanes: lanesOf(start, streams) };
  laidOver = null;
  showRun(true);
  player.start();
  showPlayback();
  drawTransport();
}

function layOver(one) {
  laidOver = one;
  Object.assign(run, { panels: 0 });
  paint();
}

// Draws the line; off while a run is in progress.
function drawHistory() {
  const box = $(".sd-history");
  box.inert = Boolean(stages) || !run.end;
  const shown = [...pastRuns.map(({ id }) => id), run.id].join();
  if (box.dataset.shown === shown) return; // a button that is replaced loses the focus
  box.dataset.shown = shown;
  const button = (one) => {
    const [best, ...others] = speedsOf(one.end);
    const node = clickable("sd-past", best, () => openRun(one));
    node.title = `Replay: ${[one.start.title, best, ...others].filter(Boolean).join(", ")}`;
    if (one.id === run.id) node.ariaCurrent = "true";
    for (const event of ["pointerenter", "focus"]) node.addEventListener(event, () => one.id !== run.id && layOver(one));
    for (const event of ["pointerleave", "blur"]) node.addEventListener(event, () => laidOver && layOver(null));
    return node;
  };
  box.replaceChildren(...(pastRuns.length ? [make("span", "", "Runs"), ...pastRuns.toReversed().map(button)] : []));
}
