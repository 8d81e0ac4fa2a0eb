// The ribbon: one strip per lane on the clock of the throughput chart, with a cell per step as wide as its time. A cell rises
// by the tokens that the step wrote, and falls by the draft tokens that were discarded.

/** Returns the device time of the first token of any lane, ms, with which the charts over time begin: before it there is only the prefill.
 * @param {Lane[]} lanes */
const chartStart = (lanes) => Math.min(...lanes.flatMap(({ lines }) => lines.slice(0, 1)).filter(({ so_far }) => so_far).map(({ at }) => at), player.span);

const CELL_PARTS = ["accepted", "corrected", "bonus", "target", "unknown", "rejected"];

/** Counts the tokens of a step by the part of the cell that they fill. @returns {Record<string, number>} */
function cellCounts({ output_outcomes, draft_outcomes }) {
  const written = output_outcomes.map((outcome) => (outcome === "forced" ? "accepted" : outcome));
  const discarded = draft_outcomes.filter((outcome) => outcome === "rejected" || outcome === "not reached");
  return Object.fromEntries(CELL_PARTS.map((part) => [part, part === "rejected" ? discarded.length : written.filter((outcome) => outcome === part).length]));
}

/** Returns the path of every part of a cell, one unit per token. begin, end: device time, ms. @returns {[string, string][]} */
function cellPaths(counts, begin, end) {
  const width = fixed((end - begin) * 0.86, 2); // a gap between steps
  let top = 0;
  return CELL_PARTS.filter((part) => counts[part]).map((part) => {
    const [from, height] = part === "rejected" ? [0, counts[part]] : [top, -counts[part]];
    if (part !== "rejected") top += height;
    return [part, `M${fixed(begin, 2)} ${from}v${height}h${width}v${-height}z`];
  });
}

// Adds a step to the strip of its lane.
function addCell({ ribbon }, line) {
  const counts = cellCounts(line);
  const end = line.so_far.clock_ms;
  for (const [part, path] of cellPaths(counts, ribbon.ends.at(-1) ?? 0, end)) ribbon.paths[part] = (ribbon.paths[part] ?? "") + path;
  ribbon.up = Math.max(ribbon.up, line.output_outcomes.length);
  ribbon.down = Math.max(ribbon.down, counts.rejected);
  ribbon.ends.push(end);
}

function drawRibbons() {
  const box = $(".sd-ribbons");
  if (!box.childElementCount) box.append(...run.lanes.flatMap((lane) => [laneNumber(lane), strip(lane)]));
  const [up, down] = [Math.max(1, ...run.lanes.map(({ ribbon }) => ribbon.up)), Math.max(...run.lanes.map(({ ribbon }) => ribbon.down))];
  const begin = chartStart(run.lanes);
  for (const { index, name, ribbon } of run.lanes) {
    const drawing = box.children[2 * index + 1];
    drawing.setAttribute("viewBox", `${begin} ${-up} ${Math.max(player.span - begin, 1)} ${up + down}`);
    drawing.setAttribute("aria-label", `${name}: ${ribbon.ends.length} steps, at most ${ribbon.up} tokens in one`);
    for (const path of drawing.children) path.setAttribute("d", ribbon.paths[path.dataset.part] ?? "");
  }
}

// Returns an empty strip. A press selects the step at that time.
function strip(lane) {
  const paths = CELL_PARTS.map((part) => withData(svg("path", {}), { part }));
  const drawing = svg("svg", { preserveAspectRatio: "none", role: "img" }, ...paths);
  drawing.addEventListener("click", (event) => {
    const { left, width } = drawing.getBoundingClientRect();
    const begin = chartStart(run.lanes);
    const step = lane.ribbon.ends.findIndex((end) => end >= begin + ((event.clientX - left) / width) * (player.span - begin));
    if (step >= 0) selectStep(lane, step);
  });
  return drawing;
}
