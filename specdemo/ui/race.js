// Draws a log (lines of JSON, see views.py) into view.html. Loaded after the other scripts of the race.

const NUMBERS_MS = 90; // interval between updates of the numbers
const HINT = $(".sd-step").textContent; // shown until a step is selected
const READY = $(".sd-headline").textContent; // shown until a run starts

/** @type {Run} */
let run = null; // the visible run: its start line, its end line, its lanes
let nextRun = null; // a run that has not started yet; the last one stays visible
let newest = ""; // id of the run that the server can repeat and save

// ---- the log

const readLog = reader(hideMessages, receive);

function read() {
  if (run.userRun && isOutdated(props.value)) return;
  if (!props.value) return empty();
  const [before, { end }] = [run, run];
  readLog(props.value);
  if (nextRun || !run.start.lanes.length) return;
  player.play();
  if (run !== before || run.end !== end) showPlayback();
}

// The server sends a recorded race only to visitors without a run of their own. If there is one, this answer arrived late.
function isOutdated(log) {
  return !log || JSON.parse(log.slice(0, log.indexOf("\n"))).still;
}

function receive(line) {
  const actions = { run: opened, stage: stageBegun, start: started, step: received, restart: restarted, done: received, end: ended, loading, error: failed, note: noted, idle };
  actions[line.type]?.(line);
}

function opened(line) {
  nextRun = line;
  failure = "";
  if (line.recorded && stages?.name) endStages(); // a press on Run may be followed by the recorded run of its settings
  markOutdated();
  $(".sd-alert").after($(".sd-notes")); // those of a link
  if (!line.still && !line.recorded) unfinished.keep(line.run);
}

const unfinished = unfinishedRun("race");
/** @type {any} */ (window).specdemoUnfinished = unfinished.id;

const forgetRun = () => unfinished.forget(nextRun ? nextRun.run : run.id);

// Scrolls the bars and the plot into view, once per run, if they are not visible.
function scrollToRun() {
  if (!nextRun || nextRun.still || nextRun.scrolled) return;
  nextRun.scrolled = true;
  const [bars, headline, plot] = [".sd-race", ".sd-headline", "#chart"].map((part) => $(part).getBoundingClientRect());
  if (bars.top < Math.max(headline.bottom, 0) - 1 || plot.bottom > innerHeight) scrollIntoViewport($(".sd-verdict"), "start");
}

let firstVisit = true; // no race was visible yet

// Returns whether to play a recorded race: the first one, unless the page was opened by a link or motion is reduced.
function shouldAutoplay() {
  const linked = [...new URLSearchParams(location.search).keys()].some((name) => !name.startsWith("__"));
  const first = firstVisit && run.still && gradioButton("run") && !linked && !reducedMotion() && document.visibilityState === "visible";
  firstVisit = false;
  return first || (run.recorded && !run.still && !reducedMotion());
}

function scrollIntoViewport(node, block) {
  node.scrollIntoView({ block, behavior: reducedMotion() ? "instant" : "smooth" });
}

function started(line) {
  scrollToRun();
  run = { id: nextRun.run, recorded: nextRun.recorded, still: nextRun.still, userRun: !nextRun.still, key: nextRun.key, start: line, end: null };
  nextRun = null;
  $(".sd-transport").removeAttribute("data-idle");
  if ($(".sd-notes").hidden) $(".sd-reasons").append($(".sd-notes")); // above the lanes, notes of a run would move them
  run.lanes = lanesOf(line);
  newest = run.id;
  showRun(shouldAutoplay());
}

function received(line) {
  if (stages) {
    endStages();
    showPlayback();
  }
  if (run.lanes[line.lane]) player.receive(run.lanes[line.lane], line);
}

// Clears a lane: its steps follow again, with the outcome of its draft tokens.
function restarted(line) {
  const lane = run.lanes[line.lane];
  if (!lane) return;
  player.restart(lane);
  reset(lane);
}

function ended(line) {
  forgetRun();
  endStages();
  if (nextRun) return neverStarted("Stopped before the first token.");
  if (run.end && !line.comparison.length) return; // Stop adds an end line without numbers, before or after that of the engine
  Object.assign(run, { end: line, done: false });
  if (line.finish === "cancelled") player.skip();
}

function neverStarted(text) {
  nextRun.over = true;
  setStatus(text);
  markOutdated();
  if (run.hint) run.hint = READY;
  paint();
}

watchPlace("race", (text) => {
  if (!nextRun || nextRun.over) return;
  nextRun.loading = true;
  setStatus(text);
  scrollToRun();
});

// ---- what precedes the first step, in the place of the result

const STAGES = /** @type {string[]} */ (props.stages);
let stages = null; // the stage and the share of it that is done; null: none

// Greys the visible result and shows the stages of a run that was asked for, before the server answers.
function runPressed() {
  film?.close();
  hideMessages();
  showStage("", 0);
  setStatus("Starting.");
}

function stageBegun({ name }) {
  if (STAGES.includes(name)) showStage(name, 0);
  else run.after = name; // the race, whose result stays in sight
}

function loading(line) {
  if (nextRun) nextRun.loading = true;
  showStage(stages?.name || STAGES[0], line.share);
  setStatus(`${sentence(line.text)}, ${percent(line.share)}`);
  scrollToRun();
}

function showStage(name, share) {
  stages = { name, share };
  drawStages();
}

function endStages() {
  if (!stages) return;
  stages = null;
  drawStages();
}

function drawStages() {
  const list = $(".sd-stages");
  const at = STAGES.indexOf(stages?.name);
  const part = (name, i) => {
    const done = i < at ? 1 : i === at ? stages.share : 0;
    const words = i === at ? `${sentence(name)} ${percent(done)}` : sentence(name);
    const item = withData(make("li", "", words, make("i")), { state: i < at ? "done" : i === at ? "now" : "next" });
    if (i === at) item.ariaCurrent = "step";
    item.style.setProperty("--share", String(done));
    return item;
  };
  list.hidden = !stages;
  list.replaceChildren(...(stages ? STAGES.map(part) : []));
  drawHistory();
  markOutdated();
  paint();
}

const settingsKey = () => /** @type {HTMLElement | null} */ (document.querySelector("#setup [data-key]"))?.dataset.key;
const failedSettings = { key: "" };
let failure = ""; // reason why the last run did not start

function failed(line) {
  forgetRun();
  if (line.stopped && nextRun) {
    endStages();
    return neverStarted(`${sentence(line.text)}.`);
  }
  failedSettings.key = (nextRun ?? run).key || settingsKey();
  const { instead } = line;
  if (instead) document.dispatchEvent(new CustomEvent("specdemo:failed", { detail: line.text })); // its models could not be loaded
  showAlert(line.text, ...(instead ? [clickable("sd-try", `Run ${instead[1]} instead`, () => toRace("race", instead[0]))] : []));
  scrollIntoViewport($(".sd-alert"), "nearest");
  endStages();
  if (nextRun) {
    failure = line.file ? "" : line.text;
    return neverStarted(line.file ? "File not opened." : "Run not started.");
  }
  run.end ??= { finish: "failed", comparison: [] };
  player.advance(Infinity);
}

function noted(line) {
  if (!nextRun && run.lanes[line.lane]) return laneNote(run.lanes[line.lane], line.text);
  addNote(line.text);
}

// ---- the visible run

const pace = () => {
  const { value } = $("[name=sd-pace]:checked");
  return value === "auto" ? value : Number(value);
};
const player = new Player({ pace, show, after, reset, begin, scene, sceneOver: () => film?.close() });

function show(lane, lines) {
  const text = document.createDocumentFragment();
  lane.pending?.remove();
  for (const line of lines) {
    if (line.type !== "step") drawDone(lane, line, text);
    else {
      drawStep(lane, line, text);
      addChartPoints(lane, line);
    }
  }
  lane.container.append(text);
  lane.view.hasNewText = player.playing || !run.still;
  followPlayback(lane);
}

function begin(lane, line, ms) {
  if (lane.index && lane.timing !== "requests" && isShown(pace(), ms) && displayedDrafts(line).length) showPending(lane, line, ms);
}

let film = null; // the slow motion on show; undefined after it, because it is shown once

/** Returns the slow motion of the first playback and the device time at which it begins. Not while lanes are measured: it takes CPU time. */
function scene() {
  if (film !== null || !run.end || pace() !== "auto") return null;
  const steps = run.lanes.slice(1).filter(({ timing }) => timing !== "requests").map((lane) => ({ lane, index: exampleStep(lane.lines, Math.max(1, lane.next)) }));
  const examples = steps.filter(({ index }) => index > 0).map(({ lane, index }) => ({ lane, line: lane.lines[index], at: player.due(lane, lane.lines[index - 1]) }));
  const first = examples.toSorted((a, b) => a.at - b.at)[0];
  return first ? { at: first.at, show: () => showFilm(first.lane, first.line) } : null;
}

function showFilm(lane, line) {
  const prompt = lane.messages?.length ? "" : run.start.prompt;
  film = slowMotion($(".sd-lanes"), line, prompt + joined(lane.outputNodes), () => {
    film = undefined;
    player.held = 0;
    showPlayback();
  });
  return film.ms;
}

function showPending(lane, line, ms) {
  lane.pending?.remove();
  lane.pending = pendingTokens(line, ms);
  (lane.thinking?.body ?? lane.container).append(lane.pending);
  lane.view.hasNewText = true;
}

function reset(lane) {
  lane.finishStep = null;
  Object.assign(lane, initialView());
  Object.assign(run, { done: false, panels: 0 });
  emptyLane(lane);
  paint(); // updates the numbers even if no step is shown at the new time
  if (run.selected?.lane === lane.index) closeInspector();
}

// Scrolls every text that has grown to its end, unless the visitor scrolled up. Once per picture, because it forces a layout.
let sticking = 0;
function stickToBottom() {
  if (!sticking) sticking = requestAnimationFrame(scrollDown);
}

function scrollDown() {
  sticking = 0;
  for (const { view } of run.lanes) {
    if (view.hasNewText && !view.scrolledUp) view.text.scrollTop = 1e9;
    view.hasNewText = false;
  }
}

function after(shown) {
  drawBars();
  stickToBottom();
  if (player.over) {
    player.stop();
    finish();
  }
  drawTransport();
  if (shown) paint();
}

function replay() {
  if (!player.over) return player.skip();
  hideMessages();
  run.still = false;
  showRun(true);
  player.start();
  showPlayback();
  drawTransport();
}

/** Updates the status line and the state of the lanes. */
function showPlayback() {
  drawHistory();
  for (const lane of run.done ? [] : run.lanes) {
    if (lane.next && !lane.finish) pill(lane, player.paused ? "paused" : "generating", "busy");
  }
  if (!nextRun?.loading && !stages) setStatus(playback(), run.done && !run.still ? resultSentence() : ""); // otherwise the status shows the next run
  paint();
}

function playback() {
  if (run.done) return result();
  if (player.paused) return run.lanes.some((lane) => lane.next) ? "Paused." : "Paused at the start.";
  const { schedule, lanes } = run.start;
  if (!run.end && run.after && run.lanes.every((lane) => lane.finish)) return `${sentence(run.after)}.`;
  if (!run.end) return `Running ${lanes.length} lanes, ${schedule === "sequential" ? "one after another" : "interleaved"}.`;
  const action = run.still ? "Playing a recorded run" : player.replay ? "Replaying" : "Run complete. Playing it back";
  return `${action} ${playbackSpeed()}.`;
}

const initialStream = () => ({ lines: [], received: 0, offset: null });
const initialView = () => ({
  next: 0, announced: null, steps: [], soFar: {}, finish: null, summary: null, comparison: null, // displayed state
  outputNodes: [], answerNodes: [], recentText: "", thinking: null, pending: null, finishStep: null, baselineMark: null, // text
  points: [], lastPoint: 0, noteSeries: {}, notes: {}, ribbon: { paths: {}, up: 0, down: 0, ends: [] }, // charts
});

const LONG = 200; // tokens, of about 100 steps
const hiding = $(".sd-rejected");

// Hides the rejected tokens of a long text, unless the visitor has chosen.
function hideRejected() {
  if (!("chosen" in hiding.dataset)) hiding.checked = run.start.limit > LONG;
  $(".sd-lanes").classList.toggle("sd-hide-rejected", hiding.checked);
}

/** Shows the run from its start. replayed: at its recorded speed. */
function showRun(replayed) {
  film?.close();
  player.load(run, replayed);
  document.getElementById("save-json")?.toggleAttribute("inert", Boolean(run.earlier)); // the server has the newest run
  $(".sd-lanes").replaceChildren();
  $(".sd-race").replaceChildren();
  $(".sd-next").hidden = $(".sd-estimate").hidden = $(".sd-card").hidden = true;
  $(".sd-cause").textContent = "";
  showReasons(false);
  for (const part of [".sd-race", ".sd-arena", ".sd-lanes"]) $(part).dataset.lanes = run.lanes.length;
  $(".sd-forced-key").hidden = true;
  for (const lane of run.lanes) {
    Object.assign(lane, initialView());
    lane.view = laneCard(lane);
    emptyLane(lane);
    lane.bar = raceBar(lane);
    if (lane.note) laneNote(lane, lane.note);
  }
  for (const panel of [".sd-ribbons", ".sd-drafter-charts"]) $(panel).replaceChildren();
  Object.assign(run, { selected: null, focus: Math.min(1, run.lanes.length - 1), panels: 0, painted: 0, done: false });
  badge();
  hideRejected();
  drawLaneTabs();
  inspect();
  markOutdated();
  drawTransport();
  paint();
}

function badge() {
  const node = $(".sd-badge");
  const environment = run.start.environment || {};
  const { date, commit } = environment;
  const facts = [...machine(environment), date, commit && `commit ${String(commit).slice(0, 7)}`];
  const details = (run.recorded ? facts : machine(environment)).filter(Boolean).map((word) => String(word).slice(0, 60)).join(" · ");
  node.hidden = false;
  node.classList.toggle("sd-recorded", run.recorded);
  node.textContent = run.earlier ? "Earlier run of this page" : run.recorded ? recordedOn(environment) : details;
  node.title = run.recorded ? details : "";
  const slogan = document.querySelector(".sd-slogan");
  if (slogan) slogan.textContent = run.start.same_bits ? "Same output, bit for bit" : "Same output";
}

/** Returns where and when a run was recorded, in words. */
function recordedOn({ device, date }) {
  const place = /EPYC|Xeon/.test(device) ? "a server CPU" : String(device ?? "another machine").slice(0, 40);
  const day = new Date(`${date}T00:00Z`);
  return `Recorded on ${place}${isNaN(+day) ? "" : `, ${day.toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" })}`}`;
}

function finish() {
  if (run.done) return;
  run.done = true;
  run.end.comparison.forEach((row, i) => {
    if (run.lanes[i + 1]) run.lanes[i + 1].comparison = row;
  });
  for (const mark of element.querySelectorAll(".sd-parting")) mark.remove();
  for (const lane of run.lanes.slice(1).filter(({ comparison }) => comparison?.parting)) [run.lanes[0], lane].forEach((one) => markParting(one, lane));
  keepRun(run);
  const unfinished = run.end.finish === "cancelled" ? ["stopped", "fair"] : ["failed", "bad"];
  for (const lane of run.lanes) if (!lane.finish && lane.view) pill(lane, ...unfinished);
  offerToContinue(run);
  markOutdated();
  if (run.userRun && !run.recorded) publishRun();
  $(".sd-estimate").hidden = run.earlier || !run.lanes.some((lane) => lane.predictable && numbers(lane).drafted);
  drawCard(run.end.card ?? [], run.end.found);
  $(".sd-cause").textContent = $(".sd-cause").title = run.lanes[run.end.headline?.lane]?.comparison?.cause ?? "";
  drawNext();
  showPlayback();
}

// Shows the explanation of the result, the facts about the model and the notes of the run.
function showReasons(shown) {
  $(".sd-reasons").hidden = !shown;
  $(".sd-why-toggle").setAttribute("aria-expanded", String(shown));
}

// Starts the search for what pays, with the model and the prompt of the race.
function findWhatPays() {
  tab("pays").click();
  document.getElementById("search").click();
}

const MOST_LANES = 3; // besides the baseline

// Offers at most two races that may be faster, where this page can run them.
function drawNext() {
  const drafted = run.lanes.slice(1);
  const buttons = drafted.flatMap(({ index, comparison }) => {
    const { k, speed } = comparison?.advice ?? {};
    const name = `k${index > 1 ? index : ""}`;
    return k ? [clickable("sd-try", `Try k = ${k}${drafted.length > 1 ? ` in lane ${index}` : ""}: predicted ${speed}`, () => toRace("change", { [name]: k }))] : [];
  });
  const slower = drafted.every(({ comparison }) => comparison?.word === "slower");
  const next = drafted.length + 1;
  if (slower && next <= MOST_LANES && drafted.every(({ options }) => options?.model)) {
    buttons.push(clickable("sd-try", "Race prompt lookup on this text", () => toRace("change", { lanes: next, [`method${next}`]: "ngram" })));
  }
  if (slower) buttons.push(clickable("sd-try", "Find what pays", findWhatPays));
  $(".sd-next").replaceChildren(...buttons.slice(0, 2));
  $(".sd-next").hidden = run.recorded || !buttons.length;
}

// Draws facts about the model, and a button that opens what a search for its best method has found, or else the tab with the search.
function drawCard(facts, found) {
  const search = found ? clickable("sd-find", "Race what was found →", () => toRace("open", found)) : clickable("sd-find", "What pays? Find out in 2 minutes →", findWhatPays);
  $(".sd-card").replaceChildren(factList(facts), search);
  $(".sd-card").hidden = !facts.length;
}

// Passes the run to the figures of "How it works".
function publishRun() {
  const lane = run.lanes[run.focus];
  const { name, options, comparison } = lane;
  /** @type {any} */ (window).specdemoRun = { name, k: options?.k, speedup: comparison?.speedup, lane: numbers(lane), plain: numbers(run.lanes[0]) };
  document.dispatchEvent(new CustomEvent("specdemo:run"));
}

function result() {
  if (run.still) return "Recorded run. Press Run to measure here.";
  const ends = { cancelled: "Stopped.", error: "A lane failed.", failed: "The run failed." };
  return ends[run.end.finish] ?? (run.recorded ? "Replayed." : "Finished.");
}

const resultSentence = () => (run.end.headline ? ` ${run.end.headline.sentence}` : "");

// Greys out a result of other settings, or of another run than the one that failed, and says whose it is.
function markOutdated() {
  const current = settingsKey();
  const outdated = Boolean(run.done && run.key && current && current !== run.key);
  run.failure = $(".sd-alert").hidden ? "" : failure;
  const failed = Boolean((run.failure || (stages && (run.end || nextRun))) && run.start.lanes.length);
  const whose = failed && run.still ? "Recording of another machine" : outdated ? `Result of earlier settings: ${drafters(run.lanes)}` : "Result of the run before";
  $(".sd-headline").toggleAttribute("data-outdated", outdated && !failed);
  for (const part of element.querySelectorAll(".sd-stage, .sd-headline")) part.toggleAttribute("data-recorded", Boolean(run.recorded && !run.earlier));
  for (const part of element.querySelectorAll(".sd-stage")) part.toggleAttribute("data-outdated", outdated || failed);
  $(".sd-badge").hidden = outdated || failed || !run.start.lanes.length;
  $(".sd-outdated-label").hidden = !outdated && !failed;
  $(".sd-outdated-label").textContent = whose;
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
  drawTime();
  drawHeadline();
  drawBars();
  drawSaves();
  drawPanels();
}

// ---- before the first run

function empty() {
  readLog("");
  idle({ lanes: Array(props.lanes).fill("Speculative") }); // as many as will be shown
}

function idle(line) {
  nextRun = null;
  const hint = line.obstacle ? `This machine cannot run this preset: ${line.obstacle}.` : READY;
  setStatus("", hint);
  const lane = (name, index) => ({ name, options: {}, exact: true, note: null, index, ...initialStream() });
  run = { hint, recorded: false, userRun: false, start: { environment: {}, prompt: "", lanes: [] }, end: null };
  run.lanes = ["Baseline", ...line.lanes].map(lane);
  showRun(false);
  $(".sd-transport").toggleAttribute("data-idle", Boolean(props.value)); // not while the page waits for its first log
  $(".sd-badge").hidden = true;
  if (run.lanes.length === 2) run.lanes[1].view.card.querySelector(".sd-lane-options").textContent = "drafts k tokens, which the target verifies in one pass";
}

element.addEventListener("keydown", onKey);
element.addEventListener("click", onClick);
document.addEventListener("specdemo:edit", closeInspector); // on a phone it would cover the controls
document.addEventListener("click", ({ target }) => /** @type {Element} */ (target).closest?.("#run, #continue, #repeat, #extend") && runPressed());
wireTransport();
document.addEventListener("specdemo:settings", () => {
  // until the rejected settings are changed; those before them may be described only now
  $(".sd-alert").hidden = settingsKey() !== failedSettings.key || !$(".sd-alert").textContent;
  markOutdated();
  paint();
});
for (const input of element.querySelectorAll("[name=sd-pace]")) {
  input.addEventListener("change", () => player.playing || run.userRun ? player.play() : drawTransport());
}
$(".sd-why-toggle").addEventListener("click", () => showReasons($(".sd-reasons").hidden));
hiding.addEventListener("change", () => {
  hiding.dataset.chosen = "";
  hideRejected();
});
empty();
watch("value", read);
if (props.value) read();

// Ends the skeleton (loading.css) when the parts are there that move others as they arrive.
const MOVING = ["#title h1", "#run", ".sd-examples option", ".sd-race-row"];
const arrivals = new MutationObserver(endSkeleton);

function endSkeleton() {
  if (!MOVING.every((part) => document.querySelector(part))) return;
  document.body.dataset.complete = "";
  arrivals.disconnect();
}

arrivals.observe(document.body, { childList: true, subtree: true });
endSkeleton();
