// The playback bar: play, pause, step, skip, speed, the slider over device time, the headline; and the keyboard shortcuts.

const button = (name) => /** @type {HTMLButtonElement} */ ($(`.sd-${name}`));
const gradioButton = (id) => /** @type {HTMLButtonElement | null} */ (document.getElementById(id));

const ICONS = { play: "M4 2.5l9 5.5-9 5.5z", pause: "M3.5 2.5h3v11h-3zM9.5 2.5h3v11h-3z" };

const slide = $(".sd-slide");
const playhead = () => Math.max(0, ...run.lanes.map((lane) => player.timeOf(lane))); // device time, ms

/** Updates the bar from the player, every frame. What is drawn moves by a transform: a new value of the slider would be a layout. */
function drawTransport() {
  const hasSteps = run.lanes.some((lane) => lane.lines.length);
  const hasEnd = Boolean(run.end);
  button("pause").disabled = button("back").disabled = button("forward").disabled = $(".sd-scrub").disabled = !hasSteps;
  const label = player.playing ? "Pause" : "Play";
  if (button("pause").ariaLabel !== label) button("pause").querySelector("path").setAttribute("d", player.playing ? ICONS.pause : ICONS.play);
  button("pause").ariaLabel = label;
  button("replay").disabled = !hasEnd && !player.playing && !player.paused;
  setText(button("replay"), hasSteps && !player.over && (player.playing || player.paused || !hasEnd) ? "Skip" : "Replay");
  slide.style.setProperty("--at", fixed(Math.min(1, playhead() / (player.span || 1)), 4));
}

/** Writes the time of the playhead, as often as other numbers. */
function drawTime() {
  const [span, now] = [player.span, playhead()];
  $(".sd-scrub").value = span ? Math.round((1000 * now) / span) : 0;
  $(".sd-scrub").ariaValueText = `${fixed(now / 1000, 2)} of ${fixed(span / 1000, 2)} seconds`;
  setText($(".sd-now"), `${fixed(now / 1000, 2)} s`);
}

/** Draws the line of the result with its speed-up in bold. A phone has no room for the interval. */
function drawHeadline() {
  const { tone, text } = headline();
  const line = $(".sd-headline");
  if (line.textContent === text && line.dataset.tone === tone) return;
  const [, before, value, rest, interval, after] = /^(.*?)(\d+\.\d\d×)([^(]*)( \([\d.]+ to [\d.]+\))?(.*)$/s.exec(text) ?? ["", text];
  line.dataset.tone = tone;
  line.replaceChildren(before, ...(value ? [make("b", "", value), rest, make("span", "sd-interval", interval), after] : []));
}

/** Returns the playback speed in words: "at 1/10 speed". */
function playbackSpeed() {
  const factor = 1 / player.speed;
  return factor < 1.05 ? "in real time" : `at 1/${factor < 9.5 ? +factor.toFixed(1) : Math.round(factor)} speed`;
}

function togglePlay() {
  if (player.playing) player.pause();
  else if (player.over) return replay();
  else player.start();
  showPlayback();
  drawTransport();
}

// Moves one step back or forward. A step forward is animated: draft, target pass, outcome.
function stepBy(by) {
  const lane = run.lanes[run.selected?.lane || run.focus || 0];
  const time = lane && player.stepTime(lane, by);
  if (time === null || time === undefined) return;
  const line = lane.lines[lane.next];
  const animated = by > 0 && line?.type === "step" && displayedDrafts(line).length;
  const goToStep = () => {
    player.seek(time);
    showPlayback();
    selectStep(lane, lane.steps.length - 1);
  };
  if (lane.finishStep) return lane.finishStep();
  if (!animated) return goToStep();
  player.pause();
  showPlayback();
  showPending(lane, line, SLOW_STEP_MS);
  stickToBottom();
  const timer = setTimeout(() => lane.finishStep?.(), SLOW_STEP_MS);
  lane.finishStep = () => {
    clearTimeout(timer);
    lane.finishStep = null;
    goToStep();
  };
  drawTransport();
}

function scrubbed() {
  player.seek((Number($(".sd-scrub").value) / 1000) * player.span);
  showPlayback();
  drawTransport();
}

// ---- keys

function runAgain() {
  const visibleButton = ["run", "sweep-run", "train"].map(gradioButton).find((node) => node?.checkVisibility());
  if (visibleButton && !visibleButton.disabled) visibleButton.click();
}

function onEscape() {
  if (run.selected) return closeInspector();
  const stop = ["stop", "sweep-stop", "stop-training"].map(gradioButton).find((node) => node?.checkVisibility() && !node.disabled);
  if (stop) stop.click();
  else if (player.playing) player.skip();
}

const KEYS = { p: togglePlay, ",": () => stepBy(-1), ".": () => stepBy(1) };

function onAnyKey(event) {
  if (!element.isConnected) return document.removeEventListener("keydown", onAnyKey);
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    return runAgain();
  }
  if (event.key === "Escape" && !event.defaultPrevented) return onEscape();
  const typing = event.target.closest("input:not([type=radio], [type=range], [type=checkbox]), textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !element.contains(event.target) || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
}

// A disabled button loses the focus. Moves it from Run to Stop and back. Gradio mounts both buttons on its own time.
function moveFocus() {
  let runPressed = false;
  document.addEventListener("click", ({ target }) => {
    if (/** @type {Element} */ (target).closest("#run")) runPressed = true;
  });
  new MutationObserver(() => {
    const [start, stop] = [gradioButton("run"), gradioButton("stop")];
    const lost = [document.body, null, stop, start].includes(/** @type {any} */ (document.activeElement));
    if (!runPressed || !lost) return;
    if (!stop.disabled) stop.focus({ preventScroll: true });
    else if (!start.disabled) {
      start.focus({ preventScroll: true });
      runPressed = false;
    }
  }).observe(document.body, { attributes: true, attributeFilter: ["disabled"], subtree: true });
}

function wireTransport() {
  const buttons = {
    pause: togglePlay, back: () => stepBy(-1), forward: () => stepBy(1), replay, close: closeInspector,
    "previous-step": () => selectNeighbour(-1), "next-step": () => selectNeighbour(1),
    "save-image": saveImage, "save-loop": saveLoop, estimate: () => gradioButton("estimate").click(),
  };
  for (const [name, pressed] of Object.entries(buttons)) button(name).addEventListener("click", pressed);
  $(".sd-scrub").addEventListener("input", scrubbed);
  document.addEventListener("keydown", onAnyKey);
  moveFocus();
}
