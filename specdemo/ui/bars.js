// The race on one time axis: one bar per lane, as long as the lane's own device time. The finish line is where the first lane
// finished. A mark in the text of each speculative lane shows how far plain decoding was at that time.

function raceBar(lane) {
  const row = make("div", "sd-race-row");
  row.dataset.series = lane.index;
  const [track, fill, lag, finishLine, leadTime] = ["sd-track", "sd-fill", "sd-lag", "sd-finish-line", "sd-lead-time"].map((cls) => make("div", cls));
  track.append(fill, lag, finishLine, leadTime);
  const result = make("span", "sd-result");
  const tokens = make("b", "", "0 tok");
  const time = make("span", "sd-time", "");
  result.append(tokens, " ", time);
  const name = make("span", "sd-name");
  name.append(laneNumber(lane), make("span", "", lane.name), ...lossy(lane));
  row.append(name, track, result);
  $(".sd-race").append(row);
  return { track, fill, lag, finishLine, leadTime, tokens, time };
}

function timeAxis() {
  const row = make("div", "sd-race-row sd-axis");
  row.ariaHidden = "true";
  row.append(make("span"), make("div", "sd-ticks"), make("span"));
  $(".sd-race").append(row);
}

const isFinished = (lane) => ["stop", "length"].includes(lane.finish);

/** Draws bars, finish line and marks at the player's clock. Cheap enough for every frame. */
function drawBars() {
  const span = player.span || 1;
  const finishTimes = run.lanes.filter(isFinished).map((lane) => lane.soFar.clock_ms);
  const first = finishTimes.length ? Math.min(...finishTimes) : null;
  for (const lane of run.lanes) {
    const { fill, lag, finishLine, leadTime, time } = lane.bar;
    const now = player.timeOf(lane);
    fill.style.transform = `scaleX(${Math.min(1, now / span)})`;
    time.textContent = now ? `${(now / 1000).toFixed(2)} s` : "";
    finishLine.hidden = first === null;
    const lagMs = first === null ? 0 : Math.max(0, now - first);
    lag.hidden = !lagMs;
    if (first !== null) finishLine.style.left = lag.style.left = `${(100 * first) / span}%`;
    lag.style.width = `${(100 * lagMs) / span}%`;
    const lead = isFinished(lane) && lane.soFar.clock_ms === first ? span - first : 0;
    leadTime.hidden = lead / span < 0.14 || run.lanes.length < 2;
    if (!leadTime.hidden) {
      leadTime.textContent = run.done ? `${(lead / 1000).toFixed(2)} s ahead` : "finished";
      leadTime.style.left = finishLine.style.left;
    }
    if (lane.index) drawBaselineMark(lane, now);
  }
  drawTicks(span);
}

function drawTicks(span) {
  const box = $(".sd-ticks");
  if (box.dataset.span === String(Math.round(span))) return;
  box.dataset.span = String(Math.round(span));
  const seconds = span / 1000;
  box.replaceChildren(
    ...(seconds < 0.002 ? [] : ticks(seconds, 6)).filter((x) => x <= seconds * 0.97).map((x, i) => {
      const tick = make("span", "", i ? brief(x) : "0 s");
      tick.style.left = `${(100 * x) / seconds}%`;
      return tick;
    })
  );
}

/** Returns the number of tokens that plain decoding had generated at a time of its own clock. */
function baselineTokens(ms) {
  const lines = run.lanes[0].lines;
  let [low, high] = [0, lines.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lines[middle].at <= ms) low = middle + 1;
    else high = middle;
  }
  return low ? (lines.slice(0, low).findLast((line) => line.so_far)?.so_far.tokens ?? 0) : 0;
}

// Marks the position in a lane's text that plain decoding has reached. When the lane has finished, the mark gets a label.
function drawBaselineMark(lane, now) {
  if (lane.remote || run.lanes[0].remote) return;
  const count = baselineTokens(now);
  const label = isFinished(lane) ? "baseline had reached this point" : "";
  if (lane.baselineMark?.count === count && lane.baselineMark.node.textContent === label) return;
  lane.baselineMark?.node.remove();
  lane.baselineMark = null;
  const token = lane.outputNodes[count - 1];
  if (!token || count >= lane.outputNodes.length) return;
  const node = make("em", "sd-baseline-mark", label);
  node.ariaHidden = "true";
  token.after(node);
  lane.baselineMark = { node, count };
}
