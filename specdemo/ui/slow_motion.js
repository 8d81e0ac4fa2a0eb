// One step in slow motion, over the lanes: the drafter writes draft tokens as cards, one pass of the target covers all of them, they are
// checked from left to right, and the first rejected one turns into the target's token. CSS draws it from the times of `moments`; reduced
// motion gets four stills of it. Any key or press ends it.

const EXAMPLE_WITHIN = 8; // steps of a lane among which the example is chosen
const MODIFIERS = ["Shift", "Control", "Alt", "Meta", "CapsLock"];

/** Returns the index of the step that shows the mechanism best among the first ones from `start` on: one that accepts a draft token and
 * rejects the next, else one that rejects, else the first that drafts; -1 if none does.
 * @param {Line[]} lines @param {number} start */
function exampleStep(lines, start = 1) {
  const rank = (line) => (line.output_outcomes.at(-1) !== "corrected" ? 1 : line.output_outcomes.length > 1 ? 3 : 2);
  const ranks = lines.slice(start, start + EXAMPLE_WITHIN).map((line) => (line.draft_outcomes?.some(Boolean) ? rank(line) : 0));
  const best = ranks.findIndex((one) => one && one === Math.max(...ranks));
  return best < 0 ? -1 : start + best;
}

/** Returns when each draft token appears, the pass, each check, the target's token and the end begin, ms; `stills`: four moments to look at.
 * @param {number} drafted @param {number} checked */
function moments(drafted, checked) {
  const [write, check] = [Math.min(260, 1100 / drafted), Math.min(380, 1500 / checked)];
  const appear = Array.from({ length: drafted }, (_, i) => 350 + write * i);
  const pass = appear.at(-1) + 450;
  const checks = Array.from({ length: checked }, (_, i) => pass + 1000 + check * i);
  const target = (checks.at(-1) ?? pass + 700) + 500;
  return { appear, pass, checks, target, end: target + 1200, stills: [appear.at(-1) + 110, pass + 450, target - 50, target + 900] };
}

/** @param {Line} line @param {string} before text before the step */
function slowScene(line, before) {
  const drafts = displayedDrafts(line);
  const checked = drafts.filter(({ outcome }) => outcome !== "not reached").length;
  const times = moments(drafts.length, checked);
  const last = line.output_outcomes.at(-1);
  const cards = make("div", "sd-cards");
  const word = (text = "") => visible(text.trim() || text);
  const card = (text, outcome, appear, check = appear) => {
    const node = withData(make("samp", "sd-card-token", make("span", "", word(text))), { outcome: outcome.replace(" ", "-") });
    cards.append(withTimes(node, { appear, check }));
    return node;
  };
  drafts.forEach(({ text, outcome }, i) => {
    const node = card(text, outcome, times.appear[i], times.checks[i] ?? times.target);
    if (outcome === "rejected" && last === "corrected") node.append(make("b", "", word(line.text.at(-1))));
  });
  if (last === "bonus") card(line.text.at(-1), "bonus", times.target);
  cards.append(make("i", "sd-model"));
  return { scene: withTimes(make("div", "sd-scene", make("samp", "sd-scene-text", before), cards), { pass: times.pass, target: times.target }), times };
}

/**
 * Shows a step over a container. Returns its duration, ms, and the function that ends it, after which `ended` is called.
 * @param {HTMLElement} container @param {Line} line @param {string} before @param {() => void} ended
 */
function slowMotion(container, line, before, ended) {
  const text = before.replace(/\s+/g, " ");
  const { scene, times } = slowScene(line, text.length > 60 ? text.slice(-60).replace(/^\S*\s/, "… ") : text);
  const box = Object.assign(make("figure", "sd-slow", scene, make("button", "sd-skip", "Skip")), { ariaLabel: `Slow motion of one step. ${describeStep(line)}` });
  if (reducedMotion()) {
    box.classList.add("sd-stills");
    scene.replaceWith(...times.stills.map((now) => withTimes(scene.cloneNode(true), { now })));
  }
  for (const picture of box.querySelectorAll(".sd-scene")) picture.ariaHidden = "true";
  const listening = new AbortController();
  const close = () => {
    if (listening.signal.aborted) return;
    listening.abort();
    box.remove();
    ended();
  };
  for (const name of ["keydown", "pointerdown", "click"]) {
    document.addEventListener(name, (/** @type {any} */ event) => {
      if (MODIFIERS.includes(event.key)) return;
      if (event.key === "Escape") event.preventDefault(); // it does not stop a run, too
      close();
    }, { capture: true, signal: listening.signal });
  }
  container.append(box);
  return { ms: times.end, close };
}
