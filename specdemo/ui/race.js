// Draws a log (lines of JSON, see views.py) into the skeleton of view.html; the other scripts of the race stand before it.

const QUEUE_LEFT_MS = 1000; // after the queue the first line of the run comes within this time, unless Stop was pressed
const NUMBERS_MS = 90; // numbers that change are written again so often
const HINT = $(".sd-step").textContent; // until a step is picked

/** @type {Run} */
let run = null; // the run on show: its start line, its end line, its lanes
let coming = null; // a run that has not started yet; the last one stays on show

// ---- the log

const readLog = reader(clear, receive);

function read() {
  if (run.own && late(props.value)) return;
  if (!props.value) return idle();
  const [before, { end }] = [run, run];
  readLog(props.value);
  if (coming || !run.start.lanes.length) return;
  player.play();
  if (run !== before || run.end !== end) showPlayback();
}

// A recorded race is offered only to a visitor who has no run on show, so this answer was overtaken by a later one.
function late(log) {
  return !log || JSON.parse(log.slice(0, log.indexOf("\n"))).still;
}

function clear() {
  $(".sd-alert").hidden = true;
  $(".sd-notes").hidden = true;
  $(".sd-notes").replaceChildren();
}

function receive(line) {
  const actions = { run: opened, start: started, step: kept, done: kept, end: ended, loading, error: failed, note: noted, idle: waiting };
  actions[line.type]?.(line);
}

function opened(line) {
  coming = line;
}

// A run that begins out of sight is scrolled into view, once: its status and most of its lanes.
function come() {
  if (!coming || coming.still || coming.seen) return;
  coming.seen = true;
  const [bar, lanes] = [$(".sd-bar"), $(".sd-lanes").getBoundingClientRect()];
  const seen = Math.min(lanes.bottom, innerHeight) - Math.max(lanes.top, 0);
  const above = bar.getBoundingClientRect().top < $(".sd-transport").getBoundingClientRect().bottom;
  if (above || seen < Math.min(lanes.height, innerHeight) / 2) glide(bar, "start");
}

let unseen = true; // no race has been on show yet

// The first recorded race is played, once, unless a link asked for something or nothing is to move.
function plays() {
  const linked = [...new URLSearchParams(location.search).keys()].some((name) => !name.startsWith("__"));
  const first = unseen && run.still && gradio("run") && !linked && !calm() && document.visibilityState === "visible";
  unseen = false;
  return first || (run.recorded && !run.still && !calm());
}

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function glide(node, block) {
  node.scrollIntoView({ block, behavior: calm() ? "instant" : "smooth" });
}

function started(line) {
  come();
  run = { recorded: coming.recorded, still: coming.still, own: !coming.still, key: coming.key, start: line, end: null };
  coming = null;
  run.lanes = line.lanes.map((lane, index) => ({ ...lane, index, ...UNHEARD(), over: false }));
  stage(plays());
}

function kept(line) {
  const lane = run.lanes[line.lane];
  if (lane) player.receive(lane, line);
}

function ended(line) {
  $(".sd-loading").hidden = true;
  if (coming) return say("Stopped before the first token.");
  if (run.end && !line.comparison.length) return; // Stop adds an end without numbers, before or after the engine's own
  Object.assign(run, { end: line, done: false });
  if (line.finish === "cancelled") player.skip();
}

function loading(line) {
  const bar = $(".sd-loading");
  if (coming) coming.loading = true;
  bar.hidden = line.share >= 1;
  bar.value = line.share;
  say(line.share >= 1 ? "Warming up, off the clock." : `${sentence(line.text)}, ${percent(line.share)}`);
  come();
}

const settings = () => /** @type {HTMLElement | null} */ (document.querySelector("#setup [data-key]"))?.dataset.key;
const refused = { key: "" };

function failed(line) {
  const alert = $(".sd-alert");
  refused.key = settings();
  alert.hidden = false;
  alert.textContent = sentence(line.text);
  glide(alert, "nearest");
  $(".sd-loading").hidden = true;
  if (coming) return say("Nothing was run.");
  run.end ??= { finish: "failed", comparison: [] };
  player.advance(Infinity);
}

function noted(line) {
  if (!coming && run.lanes[line.lane]) return laneNote(run.lanes[line.lane], line.text);
  $(".sd-notes").hidden = false;
  $(".sd-notes").append(make("li", "", sentence(line.text)));
}

// ---- the run on show

const pace = () => {
  const { value } = $("[name=sd-pace]:checked");
  return value === "auto" ? value : Number(value);
};
const player = new Player({ pace, show, after, reset, begin });

function show(lane, lines) {
  const text = document.createDocumentFragment();
  lane.haunted?.remove();
  for (const line of lines) {
    if (line.type !== "step") drawDone(lane, line);
    else {
      drawStep(lane, line, text);
      follow(lane, line);
    }
  }
  lane.into.append(text);
  lane.view.grown = player.playing || !run.still;
  followPlayback(lane);
}

// A step that takes a while to see is shown as it happens.
function begin(lane, line, ms) {
  if (ms >= SHOWN_MS && lane.index && !lane.remote && !calm() && tried(line).length) haunt(lane, line, ms);
}

function haunt(lane, line, ms) {
  lane.haunted?.remove();
  lane.haunted = ghosts(line, ms);
  (lane.thought?.body ?? lane.into).append(lane.haunted);
  lane.view.grown = true;
}

function reset(lane) {
  lane.acting = null;
  Object.assign(lane, UNSHOWN());
  Object.assign(run, { done: false, panels: 0 });
  emptyLane(lane);
  paint(); // the numbers too, even if nothing is shown at the new time
  if (run.picked?.lane === lane.index) closeInspector();
}

// A text that has grown shows its end, unless its reader has scrolled up.
function keepUp() {
  for (const { view } of run.lanes) {
    if (view.grown && !view.loose) view.text.scrollTop = 1e9;
    view.grown = false;
  }
}

function after(shown) {
  drawBars();
  keepUp();
  if (player.over) {
    player.stop();
    finish();
  }
  drawTransport();
  if (shown) paint();
}

function replay() {
  if (!player.over) return player.skip();
  clear();
  run.still = false;
  stage(true);
  player.start();
  showPlayback();
  drawTransport();
}

/** Writes into the status and the lanes what the display does now. */
function showPlayback() {
  for (const lane of run.done ? [] : run.lanes) {
    if (lane.next && !lane.finish) pill(lane, player.paused ? "paused" : "generating", "busy");
  }
  if (!coming?.loading) say(playback()); // else the status is that of the next run
  paint();
}

function playback() {
  if (run.done) return result();
  if (player.paused) return run.lanes.some((lane) => lane.next) ? "Paused." : "Paused at the start.";
  const { schedule, lanes } = run.start;
  if (!run.end) return `Running ${lanes.length} lanes, ${schedule === "sequential" ? "one after the other" : "taking turns"}.`;
  const words = run.still ? "A recorded race," : player.replay ? "Replaying," : "Measured; shown";
  return `${words} ${slowed() || "at the run's own speed"}.`;
}

const UNHEARD = () => ({ lines: [], received: 0, offset: null });
const UNSHOWN = () => ({
  next: 0, begun: null, steps: [], soFar: {}, finish: null, summary: null, comparison: null, // what is on show
  given: [], answer: [], tail: "", thought: null, haunted: null, acting: null, here: null, // its text
  points: [], lastPoint: 0, told: {}, notes: {}, // its charts
});

/** Shows the run from its start; `replayed` at its own speed. */
function stage(replayed) {
  player.load(run, replayed);
  $(".sd-loading").hidden = true;
  $(".sd-lanes").replaceChildren();
  $(".sd-race").replaceChildren();
  $(".sd-why").hidden = $(".sd-ask").hidden = true;
  $(".sd-lanes").dataset.lanes = run.lanes.length;
  for (const lane of run.lanes) {
    Object.assign(lane, UNSHOWN());
    lane.view = laneCard(lane);
    emptyLane(lane);
    lane.bar = raceBar(lane);
    if (lane.note) laneNote(lane, lane.note);
  }
  timeAxis();
  for (const panel of [".sd-histogram", ".sd-told-lanes"]) $(panel).replaceChildren();
  Object.assign(run, { picked: null, focus: Math.min(1, run.lanes.length - 1), panels: 0, painted: 0, done: false });
  badge();
  tabs();
  inspect();
  age();
  drawTransport();
  paint();
}

function badge() {
  const node = $(".sd-badge");
  const { device, date, dtype, threads, commit, clock } = run.start.environment || {};
  node.hidden = false;
  node.classList.toggle("sd-recorded", run.recorded);
  const where = [device, threads ? `${threads} thread${threads > 1 ? "s" : ""}` : null, dtype, clock];
  const when = [date || "date unknown", commit ? `commit ${String(commit).slice(0, 7)}` : null];
  const words = run.recorded ? ["Recorded run", ...where, ...when] : where;
  node.textContent = words.filter(Boolean).map((word) => String(word).slice(0, 60)).join(" · ");
}

function finish() {
  if (run.done) return;
  run.done = true;
  run.end.comparison.forEach((row, i) => {
    if (run.lanes[i + 1]) run.lanes[i + 1].comparison = row;
  });
  const cut = run.end.finish === "cancelled" ? ["stopped", "fair"] : ["failed", "bad"];
  for (const lane of run.lanes) if (!lane.finish && lane.view) pill(lane, ...cut);
  age();
  if (run.own && !run.recorded) tell();
  $(".sd-ask").hidden = !run.lanes.some((lane) => lane.exact && !lane.remote && numbers(lane).drafted);
  showPlayback();
}

// The figures of "How it works" show the visitor's own run too.
function tell() {
  const lane = run.lanes[run.focus];
  const { name, options, comparison } = lane;
  /** @type {any} */ (window).specdemoRun = { name, k: options?.k, speedup: comparison?.speedup, lane: numbers(lane), plain: numbers(run.lanes[0]) };
  document.dispatchEvent(new CustomEvent("specdemo:run"));
}

function result() {
  if (run.still) return "Recorded earlier. Press Run for your own.";
  const ends = { cancelled: "Stopped.", error: "A lane failed.", failed: "The run failed." };
  const end = ends[run.end.finish] ?? (run.recorded ? "Replayed." : "Finished.");
  return [end, run.end.headline?.sentence].filter(Boolean).join(" ");
}

// A result of other settings than those above is dimmed, and says whose it is.
function age() {
  const asked = settings();
  const stale = Boolean(run.done && run.key && asked && asked !== run.key);
  $(".sd-stage").toggleAttribute("data-stale", stale);
  $(".sd-badge").hidden = stale || !run.start.lanes.length;
  $(".sd-stale").hidden = !stale;
  const lanes = run.lanes.slice(1).map((lane) => [lane.name, how(lane)].filter(Boolean).join(", "));
  $(".sd-stale").textContent = `Result of: ${lanes.join("; ")}`;
}

// Gradio writes "queue: 2/3 | 1.2/8.0s" into a place of its own; here it is said in words, where nothing moves.
function queued() {
  const place = document.getElementById("queue");
  const waits = () => $(".sd-status").textContent.startsWith("Waiting");
  let before = "";
  new MutationObserver(() => {
    const [, at, seconds] = /queue: (\d+)\/\d+(?:[^/]*\/([\d.]+)s)?/i.exec(place.textContent) || [];
    if (at) {
      if (!waits()) before = $(".sd-status").textContent;
      const others = at === "1" ? "you are next" : `${Number(at) - 1} before you`;
      say(`Waiting for the engine: ${others}${seconds ? `, about ${Math.ceil(Number(seconds))} s` : ""}.`);
    } else if (waits()) setTimeout(() => !coming && waits() && say(before), QUEUE_LEFT_MS);
  }).observe(place, { childList: true, characterData: true, subtree: true });
}

function say(text) {
  if ($(".sd-status").textContent !== text) $(".sd-status").textContent = text;
}

let painting = 0;
function paint() {
  if (!painting) painting = requestAnimationFrame(repaint);
}

function repaint() {
  painting = 0;
  if (player.playing && performance.now() - run.painted < NUMBERS_MS) return;
  run.painted = performance.now();
  drawNumbers();
  drawRatio();
  drawBars();
  drawPanels();
}

// ---- before the first run

function idle() {
  readLog("");
  waiting({ lanes: ["Speculative"] });
}

function waiting(line) {
  coming = null;
  say(line.obstacle ? `This machine cannot run this preset: ${line.obstacle}.` : "Ready. Press Run to race plain against speculative decoding.");
  const lane = (name, index) => ({ name, options: {}, exact: true, note: null, index, ...UNHEARD() });
  run = { recorded: false, own: false, start: { environment: {}, prompt: "", lanes: [] }, end: null };
  run.lanes = ["Baseline", ...line.lanes].map(lane);
  stage(false);
  $(".sd-badge").hidden = true;
  if (run.lanes.length === 2) run.lanes[1].view.card.querySelector(".sd-how").textContent = "drafts k tokens, keeps what the target agrees with";
}

element.addEventListener("keydown", onKey);
element.addEventListener("click", onClick);
wireTransport();
$(".sd-ask").addEventListener("click", () => gradio("ask").click());
document.addEventListener("specdemo:settings", () => {
  age();
  if (settings() !== refused.key) $(".sd-alert").hidden = true; // what was refused is no longer asked for
});
if (document.getElementById("queue")) queued();
for (const input of element.querySelectorAll("[name=sd-pace]")) {
  input.addEventListener("change", () => player.playing || run.own ? player.play() : drawTransport());
}
$(".sd-rejected").addEventListener("change", (event) => {
  $(".sd-lanes").classList.toggle("sd-hide-rejected", !event.target.checked);
});
idle();
watch("value", read);
if (props.value) read();
