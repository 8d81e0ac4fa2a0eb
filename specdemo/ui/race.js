// Draws a log (lines of JSON, see views.py) into the skeleton of view.html; the other scripts of the race stand before it.

const HINT = $(".sd-step").textContent; // until a step is picked

/** @type {Run} */
let run = null; // the run on show: its start line, its end line, its lanes
let coming = null; // a run that has not started yet; the last one stays on show

// ---- the log

const readLog = reader(clear, receive);

function read() {
  if (run.own && late(props.value)) return;
  if (!props.value) return idle();
  readLog(props.value);
  if (!coming && run.start.lanes.length) player.play();
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

// A run that begins out of sight comes into it, once.
function come() {
  if (!coming || coming.still || coming.seen) return;
  coming.seen = true;
  const { top, bottom, height } = $(".sd-lanes").getBoundingClientRect();
  const seen = Math.min(bottom, innerHeight) - Math.max(top, 0);
  if (seen < Math.min(height, innerHeight) / 2) glide($(".sd-bar"), "start");
}

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function glide(node, block) {
  node.scrollIntoView({ block, behavior: calm() ? "instant" : "smooth" });
}

function started(line) {
  come();
  run = { recorded: coming.recorded, still: coming.still, own: !coming.still, start: line, end: null };
  coming = null;
  run.lanes = line.lanes.map((lane, index) => ({ ...lane, index, ...UNHEARD(), over: false }));
  stage(run.recorded && !run.still && !calm());
  if (!run.recorded) say(`Running ${line.lanes.length} lanes, ${line.schedule}.`);
}

function kept(line) {
  const lane = run.lanes[line.lane];
  if (lane) player.receive(lane, line);
}

function ended(line) {
  $(".sd-loading").hidden = true;
  if (coming) return say("Stopped before the first token.");
  run.end = line;
}

function loading(line) {
  const bar = $(".sd-loading");
  if (coming) coming.loading = true;
  bar.hidden = line.share >= 1;
  bar.value = line.share;
  say(line.share >= 1 ? "Warming up, off the clock." : `${sentence(line.text)}, ${percent(line.share)}`);
  come();
}

function failed(line) {
  const alert = $(".sd-alert");
  alert.hidden = false;
  alert.textContent = sentence(line.text);
  glide(alert, "nearest");
  $(".sd-loading").hidden = true;
  if (coming) return say("Nothing was run.");
  run.end ??= { finish: "error", comparison: [] };
  player.advance(Infinity);
  say("The run failed.");
}

function noted(line) {
  if (!coming && run.lanes[line.lane]) return laneNote(run.lanes[line.lane], line.text);
  $(".sd-notes").hidden = false;
  $(".sd-notes").append(make("li", "", sentence(line.text)));
}

// ---- the run on show

const pace = () => Number($("[name=sd-pace]:checked").value);
const player = new Player({ pace, show, after });

function show(lane, lines) {
  const bottom = pinned(lane);
  const text = document.createDocumentFragment();
  for (const line of lines) {
    if (line.type !== "step") drawDone(lane, line);
    else {
      drawStep(lane, line, text);
      follow(lane, line);
      if (isTree(line)) $(".sd-inspector").classList.add("sd-wide");
    }
  }
  lane.view.text.append(text);
  if (bottom && !run.still) lane.view.text.scrollTop = lane.view.text.scrollHeight;
}

function after(shown) {
  if (shown) paint();
  if (player.over) finish();
  replayButton();
}

function replay() {
  if (!run.end) return;
  if (player.playing) return player.skip();
  clear();
  run.still = false;
  stage(true);
  say("Replaying at the run's own speed" + (pace() === 1 ? "." : `, slowed ${1 / pace()} times.`));
  player.start();
  replayButton();
}

function replayButton() {
  $(".sd-replay").disabled = !run.end;
  $(".sd-replay").textContent = player.playing && run.end ? "Skip" : "Replay";
}

const UNHEARD = () => ({ lines: [], received: 0, offset: null });
const UNSHOWN = () => ({
  next: 0, steps: [], soFar: {}, finish: null, summary: null, comparison: null, // what is on show
  answer: [], tail: "", thought: null, // its text
  points: [[], []], lastPoint: 0, told: {}, notes: {}, // its charts
});

/** Shows the run from its start; `replayed` at its own speed. */
function stage(replayed) {
  player.load(run, replayed);
  $(".sd-loading").hidden = true;
  $(".sd-lanes").replaceChildren();
  $(".sd-race").replaceChildren();
  $(".sd-why").hidden = true;
  $(".sd-lanes").dataset.lanes = run.lanes.length;
  delete $(".sd-lanes").dataset.idle;
  for (const lane of run.lanes) {
    Object.assign(lane, UNSHOWN());
    lane.view = laneCard(lane);
    lane.bar = raceBar(lane);
    if (lane.note) laneNote(lane, lane.note);
  }
  for (const panel of [".sd-histogram", ".sd-told-lanes"]) $(panel).replaceChildren();
  Object.assign(run, { picked: null, focus: Math.min(1, run.lanes.length - 1), panels: 0, done: false });
  $(".sd-inspector").classList.remove("sd-wide");
  badge();
  tabs();
  inspect();
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
  const cut = run.end.finish === "error" ? ["failed", "bad"] : ["stopped", "fair"];
  for (const lane of run.lanes) if (!lane.finish && lane.view) pill(lane, ...cut);
  paint();
  if (!coming?.loading) say(verdictOfAll()); // else the status is that of the next run
}

function verdictOfAll() {
  const ends = { cancelled: "Stopped.", error: "A lane failed." };
  const rows = run.lanes.slice(1).filter((lane) => lane.comparison && isNumber(lane.comparison.speedup));
  const named = (lane) => (run.lanes.length > 2 ? `Lane ${lane.index}` : lane.name);
  const words = rows.map((lane) => `${named(lane)}: ${factor(lane.comparison)}, ${lane.comparison.verdict}.`);
  if (run.still) return "Recorded earlier. Press Run for your own.";
  return [ends[run.end.finish] || (run.recorded ? "Replayed." : "Finished."), ...words].join(" ");
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
  drawNumbers();
  drawPanels();
}

// ---- before the first run

function idle() {
  readLog("");
  waiting({ lanes: ["Speculative"] });
}

function waiting(line) {
  coming = null;
  say("Ready. Press Run to race plain against speculative decoding.");
  const lane = (name, index) => ({ name, options: {}, exact: true, note: null, index, ...UNHEARD() });
  run = { recorded: false, own: false, start: { environment: {}, prompt: "", lanes: [] }, end: null };
  run.lanes = ["Baseline", ...line.lanes].map(lane);
  stage(false);
  $(".sd-lanes").dataset.idle = "";
  $(".sd-badge").hidden = true;
  replayButton();
  if (run.lanes.length === 2) run.lanes[1].view.card.querySelector(".sd-how").textContent = "drafts k tokens, keeps what the target agrees with";
}

element.addEventListener("keydown", onKey);
element.addEventListener("click", onClick);
$(".sd-replay").addEventListener("click", replay);
for (const input of element.querySelectorAll("[name=sd-pace]")) {
  input.addEventListener("change", () => (run.end || run.lanes.some((lane) => lane.lines.length)) && player.play());
}
$(".sd-rejected").addEventListener("change", (event) => {
  $(".sd-lanes").classList.toggle("sd-hide-rejected", !event.target.checked);
});
idle();
watch("value", read);
if (props.value) read();
