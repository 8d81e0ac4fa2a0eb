// The bar that stays: play, pause, step, skip, pace, the scrubber over device time, the live ratio; and the keys.

const button = (name) => /** @type {HTMLButtonElement} */ ($(`.sd-${name}`));
const gradio = (id) => /** @type {HTMLButtonElement | null} */ (document.getElementById(id));

const ICONS = { play: "M4 2.5l9 5.5-9 5.5z", pause: "M3.5 2.5h3v11h-3zM9.5 2.5h3v11h-3z" };

/** What the bar shows of the player, every frame. */
function drawTransport() {
  const something = run.lanes.some((lane) => lane.lines.length);
  const whole = Boolean(run.end);
  button("pause").disabled = button("back").disabled = button("forward").disabled = !something;
  button("pause").querySelector("path").setAttribute("d", player.playing ? ICONS.pause : ICONS.play);
  button("pause").ariaLabel = player.playing ? "Pause" : "Play";
  button("replay").disabled = !whole && !player.playing && !player.paused;
  button("replay").textContent = something && !player.over && (player.playing || player.paused || !whole) ? "Skip" : "Replay";
  const scrub = $(".sd-scrub");
  const [span, now] = [player.span, Math.max(0, ...run.lanes.map((lane) => player.timeOf(lane)))];
  scrub.disabled = !something;
  scrub.value = span ? Math.round((1000 * now) / span) : 0;
  scrub.style.setProperty("--at", `${scrub.value / 10}%`);
  scrub.ariaValueText = `${(now / 1000).toFixed(2)} of ${(span / 1000).toFixed(2)} seconds`;
  $(".sd-now").textContent = `${(now / 1000).toFixed(2)} s`;
}

/** The headline. */
function drawRatio() {
  const [number, words] = [$(".sd-ratio b"), $(".sd-ratio span")];
  const { number: value, tone, caption } = headline();
  number.textContent = value;
  number.dataset.tone = tone;
  words.textContent = words.title = caption;
}

/** "slowed 10 times", or nothing at the engine's own speed. */
function slowed() {
  const times = 1 / player.speed;
  return times < 1.05 ? "" : `slowed ${times < 9.5 ? +times.toFixed(1) : Math.round(times)} times`;
}

function togglePlay() {
  if (player.playing) player.pause();
  else if (player.over) return replay();
  else player.start();
  showPlayback();
  drawTransport();
}

// A step back, or a step on: its draft, its pass and its verdict are shown one after the other.
function stepBy(by) {
  const lane = run.lanes[run.picked?.lane || run.focus || 0];
  const time = lane && player.stepTime(lane, by);
  if (time === null || time === undefined) return;
  const line = lane.lines[lane.next];
  const shows = by > 0 && line?.type === "step" && tried(line).length && !calm();
  const arrive = () => {
    player.seek(time);
    showPlayback();
    pick(lane, lane.steps.length - 1);
  };
  if (lane.acting) return lane.acting();
  if (!shows) return arrive();
  player.pause();
  showPlayback();
  haunt(lane, line, TOLD_MS);
  keepUp();
  const timer = setTimeout(() => lane.acting?.(), TOLD_MS);
  lane.acting = () => {
    clearTimeout(timer);
    lane.acting = null;
    arrive();
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
  const shown = ["run", "sweep-run", "train"].map(gradio).find((node) => node?.checkVisibility());
  if (shown && !shown.disabled) shown.click();
}

function leave() {
  if (run.picked) return closeInspector();
  const stop = ["stop", "sweep-stop", "stop-training"].map(gradio).find((node) => node?.checkVisibility() && !node.disabled);
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
  if (event.key === "Escape" && !event.defaultPrevented) return leave();
  const typing = event.target.closest("input:not([type=radio], [type=range], [type=checkbox]), textarea, select");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !element.contains(event.target) || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
}

// A button that is switched off loses the focus: Run hands it to Stop, and gets it back. Gradio mounts both after this runs.
function keepFocus() {
  let had = false;
  element.addEventListener("click", ({ target }) => {
    if (/** @type {Element} */ (target).closest("#run")) had = true;
  });
  new MutationObserver(() => {
    const [start, stop] = [gradio("run"), gradio("stop")];
    const lost = [document.body, null, stop, start].includes(/** @type {any} */ (document.activeElement));
    if (!had || !lost) return;
    if (!stop.disabled) stop.focus({ preventScroll: true });
    else if (!start.disabled) {
      start.focus({ preventScroll: true });
      had = false;
    }
  }).observe(element, { attributes: true, attributeFilter: ["disabled"], subtree: true });
}

function wireTransport() {
  button("pause").addEventListener("click", togglePlay);
  button("back").addEventListener("click", () => stepBy(-1));
  button("forward").addEventListener("click", () => stepBy(1));
  button("replay").addEventListener("click", replay);
  button("earlier").addEventListener("click", () => walkSteps(-1));
  button("later").addEventListener("click", () => walkSteps(1));
  button("close").addEventListener("click", closeInspector);
  $(".sd-scrub").addEventListener("input", scrubbed);
  document.addEventListener("keydown", onAnyKey);
  keepFocus();
}
