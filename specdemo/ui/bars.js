// The race on one time axis: a bar a lane, as long as the lane's own device time. The finish line stands where the first
// lane came in; in a drafting lane's text a mark stands where plain decoding was by then.

function raceBar(lane) {
  const row = make("div", "sd-run");
  row.dataset.of = lane.index;
  const [track, fill, late, flag, ahead] = ["sd-track", "sd-fill", "sd-late", "sd-flag", "sd-ahead"].map((cls) => make("div", cls));
  track.append(fill, late, flag, ahead);
  const result = make("span", "sd-result");
  const tokens = make("b", "", "0 tok");
  const time = make("span", "sd-time", "");
  result.append(tokens, " ", time);
  const name = make("span", "sd-name");
  name.append(mark(lane), make("span", "", lane.name), ...lossy(lane));
  row.append(name, track, result);
  $(".sd-race").append(row);
  return { track, fill, late, flag, ahead, tokens, time };
}

function timeAxis() {
  const row = make("div", "sd-run sd-axis");
  row.ariaHidden = "true";
  row.append(make("span"), make("div", "sd-ticks"), make("span"));
  $(".sd-race").append(row);
}

const arrived = (lane) => ["stop", "length"].includes(lane.finish);

/** Bars, finish line and marks as of the player's clock; cheap enough for every frame. */
function drawBars() {
  const span = player.span || 1;
  const home = run.lanes.filter(arrived).map((lane) => lane.soFar.clock_ms);
  const first = home.length ? Math.min(...home) : null;
  for (const lane of run.lanes) {
    const { fill, late, flag, ahead, time } = lane.bar;
    const now = player.timeOf(lane);
    fill.style.transform = `scaleX(${Math.min(1, now / span)})`;
    time.textContent = now ? `${(now / 1000).toFixed(2)} s` : "";
    flag.hidden = first === null;
    const behind = first === null ? 0 : Math.max(0, now - first);
    late.hidden = !behind;
    if (first !== null) flag.style.left = late.style.left = `${(100 * first) / span}%`;
    late.style.width = `${(100 * behind) / span}%`;
    const lead = arrived(lane) && lane.soFar.clock_ms === first ? span - first : 0;
    ahead.hidden = lead / span < 0.14 || run.lanes.length < 2;
    if (!ahead.hidden) {
      ahead.textContent = run.done ? `${(lead / 1000).toFixed(2)} s earlier` : "finished";
      ahead.style.left = flag.style.left;
    }
    if (lane.index) markPlain(lane, now);
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

/** How many tokens plain decoding had given at a time of its own clock. */
function plainTokens(ms) {
  const lines = run.lanes[0].lines;
  let [low, high] = [0, lines.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lines[middle].at <= ms) low = middle + 1;
    else high = middle;
  }
  return low ? (lines.slice(0, low).findLast((line) => line.so_far)?.so_far.tokens ?? 0) : 0;
}

// The place in a lane's text that plain decoding has come to; once the lane has finished it stays, with its words.
function markPlain(lane, now) {
  if (lane.remote || run.lanes[0].remote) return;
  const count = plainTokens(now);
  const words = arrived(lane) ? "plain decoding was here" : "";
  if (lane.here?.count === count && lane.here.node.textContent === words) return;
  lane.here?.node.remove();
  lane.here = null;
  const token = lane.given[count - 1];
  if (!token || count >= lane.given.length) return;
  const node = make("em", "sd-here", words);
  node.ariaHidden = "true";
  token.after(node);
  lane.here = { node, count };
}
