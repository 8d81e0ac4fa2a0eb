// The race: one bar per lane, which fills towards the end of the lane's own text, or of the longest text if lengths differ. All lanes
// share one clock of device time, so the faster lane fills first. A mark in the text of each speculative lane shows how far plain
// decoding was at that time.

const MIN_INSIDE = 0.5; // share of a bar from which its fill has more room for the lead than the rest
const FLAG = "M2 15V1h10l-2.5 3.5L12 8H4v7z";

const rate = (lane) => lane.soFar.tokens_per_s ?? 0; // without the prompt
const isFinished = (lane) => ["stop", "length"].includes(lane.finish);

/** Returns the number of tokens that a lane had generated at a time of its own clock. The last line of a lane has no numbers. */
const tokensAt = ({ lines }, ms) => lines.findLast((line) => line.so_far && line.at <= ms)?.so_far.tokens ?? 0;

/** Returns the number of tokens at the end of a lane's bar: those of its final text, or max new tokens if the text is incomplete. */
function barLength(lane, limit) {
  const tokens = tokensAt(lane, Infinity);
  return isFinished(lane.lines.at(-1) ?? {}) ? tokens : Math.max(tokens, limit || 0);
}

/** Returns whether a text is known to be shorter than another. The lane that ends first has then not done the same work. */
function lengthsDiffer(lanes) {
  if (lanes.some(countsPieces)) return false; // their tokens are not known
  const counts = lanes.map((lane) => tokensAt(lane, Infinity));
  return lanes.some(({ lines }, i) => isFinished(lines.at(-1) ?? {}) && counts[i] < Math.max(...counts));
}

/**
 * Returns the state of every bar. share: filled part, 0 to 1. reached: part that was filled when the first lane finished, null before that and for
 * that lane. first: whether the lane finished first and has the flag. lead: text of the lane that leads, else empty. Without equal work, a text that
 * ended early does not fill its bar, and no lane is first or leads.
 * @param {Lane[]} lanes @param {number[]} times device time of each lane, ms @param {number} [limit] max new tokens
 * @param {any} [headline] the server's result, whose winner alone has the flag; before there is one, the lane with the most tokens/s
 */
function barStates(lanes, times, limit, headline) {
  const now = commonTime(lanes, times);
  const ended = lanes.filter((lane) => isFinished(lane) && lane.soFar.clock_ms <= now);
  const lengths = lanes.map((lane) => barLength(lane, limit));
  const differ = lengthsDiffer(lanes);
  const compared = !differ && lanes.every((lane) => samePrompt(lane, lanes[0]));
  const first = compared ? ended.toSorted((a, b) => a.soFar.clock_ms - b.soFar.clock_ms)[0] : undefined;
  const leader = compared ? leadingLane(lanes, now, first) : undefined;
  return lanes.map((lane, i) => {
    const [tokens, length] = [lane.soFar.tokens ?? 0, differ ? Math.max(...lengths) : lengths[i]];
    const late = first && lane !== first;
    return {
      tokens, length,
      share: length ? tokens / length : 0,
      reached: late && length ? tokensAt(lane, first.soFar.clock_ms) / length : null,
      first: lane === first && lanes.length > 1 && (headline ? winner(headline) === i : !lanes.some((other) => rate(other) > rate(lane))),
      lead: lane === leader ? leadText(lanes, leader, now, ended) : "",
    };
  });
}

// Returns the lane that is clearly the fastest; undefined if there is none.
const winner = ({ tone, lane }) => ({ gain: lane, bad: 0 })[tone];

// Returns the time that all visible lanes have reached: that of the running lane with the lowest clock.
function commonTime(lanes, times) {
  return Math.min(Infinity, ...times.filter((_, i) => lanes[i].soFar.tokens && !isFinished(lanes[i])));
}

function leadingLane(lanes, now, first) {
  const started = lanes.filter((lane) => lane.soFar.tokens);
  if (started.length < 2) return undefined;
  return first ?? started.filter((lane) => lane.soFar.tokens >= MIN_COMPARED).toSorted((a, b) => tokensAt(b, now) - tokensAt(a, now))[0];
}

// Returns the lead over plain decoding, or over the next lane if plain decoding leads: in tokens, at the end in seconds.
function leadText(lanes, leader, now, ended) {
  const others = lanes.filter((lane) => lane !== leader && lane.soFar.tokens);
  const next = others.toSorted((a, b) => tokensAt(b, now) - tokensAt(a, now))[0];
  const other = leader.index ? lanes[0] : next;
  const tokens = tokensAt(leader, now) - tokensAt(other, now);
  const seconds = (other.soFar.clock_ms - leader.soFar.clock_ms) / 1000;
  const over = lanes.length > 2 ? ` of ${other.name}` : "";
  if (!ended.includes(leader) || !ended.includes(other)) return tokens > 1 ? `${tokens} tokens ahead${over}` : "";
  return !tokens && seconds >= 0.005 ? `${seconds.toFixed(2)} s ahead${over}` : ""; // texts of different lengths take different times
}

/** Returns the progress of a lane in words. */
function progress(lane, { tokens, length }, lanes) {
  if (countsPieces(lane)) return `${tokens} pieces`;
  if (lane.timing === "requests") return `${numbers(lane).tokens ?? 0} tokens`;
  const texts = new Set(lanes.filter(isFinished).map((other) => other.soFar.tokens));
  if (lane.finish === "stop" && texts.size > 1) return `stopped after ${tokens} tokens`;
  return length ? `${tokens} of ${length} tokens` : `${tokens} tokens`; // no length before the first run
}

function raceBar(lane) {
  const [fill, late, lead] = ["sd-fill", "sd-late", "sd-ahead"].map((cls) => make("div", cls));
  const flag = svg("svg", { viewBox: "0 0 14 16", class: "sd-flag", "aria-hidden": "true" }, svg("path", { d: FLAG }));
  const track = Object.assign(make("div", "sd-track", fill, late, lead, flag), { role: "progressbar", ariaLabel: `Output of ${lane.name}` });
  const [tokens, time] = [make("b", "", "0 tokens"), make("span", "sd-time")];
  const name = make("span", "sd-name", laneNumber(lane), Object.assign(make("span", "", lane.name), { title: fullName(lane) }), ...lossy(lane));
  $(".sd-race").append(withData(make("div", "sd-race-row", name, track, make("span", "sd-result", tokens, time)), { series: lane.index }));
  return { track, fill, late, lead, flag, tokens, time };
}

/** Draws the bars and marks at the player's clock. Cheap enough for every frame. */
function drawBars() {
  const states = barStates(run.lanes, run.lanes.map((lane) => player.timeOf(lane)), run.start.limit, run.end?.headline);
  run.lanes.forEach((lane, i) => {
    drawBar(lane, states[i]);
    if (lane.index) drawBaselineMark(lane, player.timeOf(lane));
  });
}

function drawBar(lane, state) {
  const { track, fill, late, lead, flag, tokens, time } = lane.bar;
  fill.style.transform = `scaleX(${state.share})`;
  late.hidden = state.reached === null;
  if (!late.hidden) {
    late.style.left = percentage(state.reached);
    late.style.width = percentage(Math.max(0, state.share - state.reached));
  }
  flag.style.display = state.first ? "" : "none";
  drawLead(lead, state);
  setText(tokens, progress(lane, state, run.lanes));
  setText(time, isFinished(lane) ? `${(lane.soFar.clock_ms / 1000).toFixed(2)} s` : "");
  track.ariaValueMax = String(state.length);
  track.ariaValueNow = String(state.tokens);
  track.ariaValueText = [tokens.textContent, state.lead, state.first ? "finished first" : ""].filter(Boolean).join(", ");
}

const percentage = (share) => `${100 * share}%`;

function drawLead(node, { lead, share, first }) {
  const inside = share >= MIN_INSIDE;
  setText(node, lead);
  node.classList.toggle("sd-inside", inside);
  node.classList.toggle("sd-flagged", first);
  node.style.left = inside ? "0" : percentage(share);
  node.style.right = inside ? percentage(1 - share) : "0";
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Marks the position in a lane's text that plain decoding has reached. When the lane has finished, the mark gets a label.
function drawBaselineMark(lane, now) {
  if ([lane, run.lanes[0]].some(({ timing }) => timing === "requests")) return;
  const count = tokensAt(run.lanes[0], now);
  const label = isFinished(lane) ? "baseline had reached this point" : "";
  if (lane.baselineMark?.count === count && lane.baselineMark.node.textContent === label) return;
  lane.baselineMark?.node.remove();
  lane.baselineMark = null;
  const token = lane.outputNodes[count - 1];
  if (!token || count >= lane.outputNodes.length) return;
  const node = Object.assign(make("em", "sd-baseline-mark", label), { ariaHidden: "true" });
  token.after(node);
  lane.baselineMark = { node, count };
}
