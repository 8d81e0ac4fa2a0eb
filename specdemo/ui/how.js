// The five figures of "How it works". Each is drawn over a recorded run or over the arithmetic of maths.js, and each can be
// used by keys alone. Its value: {"lines": lines of a recorded race, "batch": points of a recorded sweep}.

const RUN = { steps: 14, plain: 14 };
const given = JSON.parse(props.value || "{}");
const figureOf = (name) => $(`[data-figure="${name}"]`);
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const on = (box, what, does) => box.querySelector(`[data-do="${what}"]`).addEventListener("click", does);
const times = (x) => `${x.toFixed(2)}×`;

/** A labelled range. */
function slider(box, { label, low, high, step, value, say = (x) => String(x) }, changed) {
  const row = make("label", "sd-slider");
  const [input, output] = [make("input"), make("output")];
  Object.assign(input, { type: "range", min: low, max: high, step, value });
  row.append(make("span", "", label), output, input);
  const tell = () => {
    output.textContent = input.ariaValueText = say(Number(input.value));
    input.style.setProperty("--at", `${(100 * (input.value - low)) / (high - low)}%`);
  };
  input.className = "sd-scrub";
  input.addEventListener("input", () => (tell(), changed(Number(input.value))));
  tell();
  box.append(row);
  return (to) => {
    input.value = to;
    tell();
  };
}

// ---- 1, plain against draft and verify

function stepsFigure() {
  const box = figureOf("steps");
  const [start, ...lines] = (given.lines || []).map((line) => JSON.parse(line));
  if (!start) return (box.hidden = true);
  const of = (lane) => lines.filter((line) => line.lane === lane).slice(0, RUN.steps + 1);
  const lanes = [of(0), of(1)];
  const pages = [...box.querySelectorAll(".sd-page")];
  const counts = [...box.querySelectorAll(".sd-scene small")];
  const most = Math.min(...lanes.map((steps) => steps.length)) - 1;
  let [at, timer, playing] = [0, 0, 0];

  const written = (lane, upTo) => lanes[lane].slice(0, upTo + 1).flatMap((line, step) => {
    const nodes = line.kinds.map((kind, i) => token(line.text[i] ?? "", kind, step === upTo && step > 0));
    const wrong = line.fates.findIndex((fate, i) => fate === "rejected" && line.parents[i] === line.path.at(-1));
    if (wrong >= 0 && line.kinds.at(-1) === "corrected") nodes.splice(-1, 0, token(visible(line.drafted[wrong] ?? ""), "rejected"));
    return nodes;
  });
  const token = (text, kind, fresh) => {
    const node = make(kind === "rejected" ? "del" : "span", fresh ? "sd-fresh" : "", text);
    node.dataset.sample = kind;
    return node;
  };
  function show(words = "") {
    pages.forEach((page, lane) => {
      const prompt = make("span", "sd-asked", start.prompt.split(" ").slice(-9).join(" "));
      page.replaceChildren(prompt, ...written(lane, at));
      const tokens = lanes[lane][at].so_far.tokens - 1;
      counts[lane].textContent = `${at} pass${at === 1 ? "" : "es"}, ${tokens} token${tokens === 1 ? "" : "s"}`;
      page.scrollTop = page.scrollHeight;
    });
    box.querySelector(".sd-caption").textContent = words || (at ? verdictWords(lanes[1][at]) : "Nothing yet. Press Next pass, or focus a button and press → and ←.");
    box.querySelector('[data-do="back"]').disabled = !at;
    box.querySelector('[data-do="next"]').disabled = at >= most;
  }
  function next() {
    if (timer) return settle();
    if (at >= most) return;
    const line = lanes[1][at + 1];
    if (still() || !tried(line).length) return settle();
    pages[1].append(ghosts(line, TOLD_MS));
    box.querySelector(".sd-caption").textContent = `${tried(line).length} guesses, then one pass over all of them …`;
    timer = window.setTimeout(settle, TOLD_MS);
  }
  function settle() {
    clearTimeout(timer);
    timer = 0;
    at = Math.min(at + 1, most);
    show();
  }
  function back() {
    clearTimeout(timer);
    timer = 0;
    at = Math.max(0, at - 1);
    show();
  }
  const button = box.querySelector('[data-do="play"]');
  function play() {
    clearInterval(playing);
    playing = playing ? 0 : window.setInterval(() => (at >= most ? play() : next()), TOLD_MS + 900);
    button.textContent = playing ? "Pause" : "Play";
    if (playing && at >= most) at = 0;
    if (playing) next();
  }
  on(box, "next", next);
  on(box, "back", back);
  on(box, "play", play);
  box.addEventListener("keydown", (event) => {
    const does = { ArrowRight: next, ArrowLeft: back }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  });
  show();
}

// ---- 2, the acceptance rule

function ruleFigure() {
  const box = figureOf("rule");
  const names = ["the", "a", "her", "one"];
  const both = { q: [0.25, 0.45, 0.2, 0.1], p: [0.5, 0.15, 0.25, 0.1] };
  const words = { q: "drafter's chance q", p: "model's chance p" };
  let counts = names.map(() => ({ kept: 0, own: 0 }));
  const bars = box.querySelector(".sd-bars");
  const views = names.map((name, i) => {
    const column = make("div", "sd-column");
    const pair = Object.keys(both).map((which) => {
      const bar = make("div", `sd-drag sd-drag-${which}`);
      bar.tabIndex = 0;
      Object.assign(bar, { role: "slider", ariaLabel: `${words[which]} of “${name}”`, ariaValueMin: "1", ariaValueMax: "97", ariaOrientation: "vertical" });
      bar.append(make("i"), make("b"));
      const set = (value) => {
        both[which] = withValue(both[which], i, value);
        clear();
      };
      bar.addEventListener("keydown", (event) => {
        const by = { ArrowUp: 0.02, ArrowRight: 0.02, ArrowDown: -0.02, ArrowLeft: -0.02, PageUp: 0.1, PageDown: -0.1 }[event.key];
        if (!by) return;
        event.preventDefault();
        set(both[which][i] + by);
      });
      const follow = (event) => {
        const { bottom, height } = bar.getBoundingClientRect();
        set((bottom - event.clientY) / height);
      };
      bar.addEventListener("pointerdown", (event) => {
        bar.setPointerCapture(event.pointerId);
        follow(event);
      });
      bar.addEventListener("pointermove", (event) => bar.hasPointerCapture(event.pointerId) && follow(event));
      return bar;
    });
    column.append(...pair, make("code", "", name));
    bars.append(column);
    return pair;
  });
  const keeps = () => sum(both.p.map((p, i) => Math.min(p, both.q[i])));

  function clear() {
    counts = names.map(() => ({ kept: 0, own: 0 }));
    show(`A guess is kept with chance ${percent(keeps())}: where q and p overlap.`);
  }
  function sample(times) {
    let last = null;
    for (let i = 0; i < times; i += 1) {
      last = speculate(both.p, both.q, Math.random);
      counts[last.token][last.kept ? "kept" : "own"] += 1;
    }
    const kept = sum(counts.map((count) => count.kept)) / sum(counts.map((count) => count.kept + count.own));
    if (times > 1) return show(`${percent(kept)} of the guesses were kept. The outlined columns are p: the tokens follow it, whatever q is.`);
    const [p, q] = [both.p[last.draft], both.q[last.draft]];
    const chance = percent(Math.min(1, p / q));
    show(`Guess “${names[last.draft]}”, kept with chance min(1, ${p.toFixed(2)} / ${q.toFixed(2)}) = ${chance}: ${last.kept ? "kept." : `refused; the model's own draw from what is left of p is “${names[last.token]}”.`}`);
  }
  function show(said) {
    views.forEach((pair, i) => Object.keys(both).forEach((which, j) => {
      const value = both[which][i];
      pair[j].querySelector("i").style.height = `${100 * value}%`;
      pair[j].querySelector("b").textContent = value.toFixed(2).replace("0.", ".");
      pair[j].ariaValueNow = String(Math.round(100 * value));
      pair[j].ariaValueText = percent(value);
    }));
    outcome();
    box.querySelector(".sd-caption").textContent = said;
  }
  function outcome() {
    const total = sum(counts.map((count) => count.kept + count.own));
    const scale = Math.max(0.55, ...both.p) * 1.1;
    box.querySelector(".sd-count-of").textContent = total ? `${total.toLocaleString("en")} tokens` : "nothing drawn yet";
    const shares = names.map((_, i) => (total ? (counts[i].kept + counts[i].own) / total : 0));
    const out = box.querySelector(".sd-outcome");
    out.ariaLabel = names.map((name, i) => `${name}: came out ${percent(shares[i])}, p is ${percent(both.p[i])}`).join("; ");
    out.replaceChildren(...names.map((name, i) => {
      const column = make("div", "sd-column");
      const well = make("div", "sd-well");
      const [own, kept, goal] = ["own", "kept", "goal"].map((cls) => make("i", `sd-${cls}`));
      kept.style.height = `${total ? (100 * counts[i].kept) / total / scale : 0}%`;
      own.style.height = `${total ? (100 * counts[i].own) / total / scale : 0}%`;
      goal.style.height = `${(100 * both.p[i]) / scale}%`;
      well.append(goal, own, kept);
      column.append(well, make("code", "", name));
      return column;
    }));
  }
  on(box, "one", () => sample(1));
  on(box, "many", () => sample(1000));
  on(box, "clear", clear);
  clear();
}

// ---- 3, the speed-up formula

const formula = { alpha: 0.75, k: 4, draft: 0.1, wide: 1.15 };

/** What a run measured of the formula's numbers; null where it cannot tell. */
function measured() {
  const last = /** @type {any} */ (window).specdemoRun;
  if (!last) return null;
  const { tokens_per_step: tokens, ms_draft, ms_verify, steps } = last.lane;
  const plain = last.plain.ms_verify / last.plain.steps;
  if (![tokens, ms_draft, ms_verify, plain, last.k, last.speedup].every((x) => isNumber(x) && x > 0)) return null;
  return { k: last.k, alpha: acceptanceOf(tokens, last.k), draft: ms_draft / steps / last.k / plain, wide: ms_verify / steps / plain, speedup: last.speedup, name: last.name };
}

function speedFigure() {
  const box = figureOf("speed");
  const sliders = box.querySelector(".sd-sliders");
  const set = {};
  const wired = { alpha: { label: "A guess is kept", low: 0.05, high: 0.98, step: 0.01, say: percent }, k: { label: "Draft length k", low: 1, high: 16, step: 1 }, draft: { label: "One guess costs", low: 0, high: 0.6, step: 0.01, say: (x) => `${percent(x)} of a pass` }, wide: { label: "The wide pass costs", low: 1, high: 3, step: 0.05, say: (x) => `${x.toFixed(2)} passes` } };
  for (const [name, how] of Object.entries(wired)) set[name] = slider(sliders, { ...how, value: formula[name] }, (x) => ((formula[name] = x), show()));
  function show() {
    const ks = Array.from({ length: 16 }, (_, i) => i + 1);
    const curve = ks.map((k) => [k, speedUp({ ...formula, k })]);
    const [bestK, best] = curve.reduce((a, b) => (b[1] > a[1] ? b : a));
    const mine = measured();
    const here = speedUp(formula);
    const dots = [{ x: formula.k, y: here, name: times(here) }];
    if (mine) dots.push({ x: mine.k, y: mine.speedup, name: `your last run ${times(mine.speedup)}` });
    const said = `${expectedTokens(formula.alpha, formula.k).toFixed(2)} tokens a pass for ${(formula.k * formula.draft + formula.wide).toFixed(2)} passes of time: ${times(here)}.`;
    const advice = best <= 1 ? "No draft length pays here." : bestK === formula.k ? "No other k is better." : `Best at k = ${bestK}: ${times(best)}.`;
    plot(box.querySelector(".sd-plot"), { lines: [{ points: curve, of: 1 }], dots, unit: "draft length k", level: 1, words: `Speed-up over the draft length. ${said}`, wide: 16 });
    box.querySelector(".sd-caption").textContent = `${said} ${advice}${mine ? "" : " Run a race, and it appears here as a dot."}`;
    box.querySelector('[data-do="mine"]').disabled = !mine;
  }
  on(box, "mine", () => {
    const mine = measured();
    for (const name of Object.keys(wired)) set[name]((formula[name] = mine[name]));
    show();
  });
  document.addEventListener("specdemo:run", show);
  show();
}

// ---- 4, families

const FAMILIES = [
  { name: "Draft model", shape: "chain", preset: "embedded-draft", reads: "the text", drafts: "a chain, one token after the other: a small model of its own" },
  { name: "Heads", shape: "heads", preset: "embedded-medusa", reads: "the model's last hidden state", drafts: "one guess per place, all at once (Medusa, Hydra, MLP speculator)" },
  { name: "Tree", shape: "tree", preset: "embedded-eagle-3", reads: "hidden states and its own guesses", drafts: "several ways on, one of which may be right (EAGLE; the shipped preset drafts its best path)" },
  { name: "Block", shape: "block", preset: "embedded-dflash", reads: "hidden states", drafts: "a whole block in one pass (DFlash)" },
  { name: "Lookup", shape: "lookup", preset: "embedded-ngram", reads: "the text so far", drafts: "what followed the same words before; no weights at all" },
];

const SHAPES = {
  chain: { dots: [[20, 40], [55, 40], [90, 40], [125, 40]], ties: [[0, 1], [1, 2], [2, 3]] },
  heads: { dots: [[20, 40], [80, 12], [80, 31], [80, 50], [80, 69]], ties: [[0, 1], [0, 2], [0, 3], [0, 4]] },
  tree: { dots: [[20, 40], [60, 22], [60, 58], [100, 12], [100, 34], [100, 58], [135, 12]], ties: [[0, 1], [0, 2], [1, 3], [1, 4], [2, 5], [3, 6]] },
  block: { dots: [[20, 40], [70, 40], [93, 40], [116, 40], [139, 40]], ties: [[0, 1]], frame: [57, 24, 95, 32] },
  lookup: { dots: [[20, 22], [43, 22], [66, 22], [89, 22], [43, 60], [66, 60], [89, 60]], ties: [[1, 4], [2, 5], [3, 6]] },
};

function shape({ dots, ties, frame }) {
  const picture = svg("svg", { viewBox: "0 0 160 80", "aria-hidden": "true" });
  for (const [a, b] of ties) picture.append(svg("path", { d: `M${dots[a]} L${dots[b]}` }));
  if (frame) picture.append(svg("rect", { x: frame[0], y: frame[1], width: frame[2], height: frame[3], rx: 8 }));
  dots.forEach(([x, y], i) => picture.append(svg("circle", { cx: x, cy: y, r: 7, class: i ? "sd-guess" : "sd-root" })));
  return picture;
}

function familiesFigure() {
  const box = figureOf("families").querySelector(".sd-families");
  for (const family of FAMILIES) {
    const card = make("article", "sd-family");
    const what = make("p");
    what.append(make("b", "", "Reads "), family.reads, make("br"), make("b", "", "Drafts "), family.drafts);
    const race = make("button", "", "Race it");
    race.type = "button";
    race.ariaLabel = `Race it: ${family.name}`;
    race.addEventListener("click", () => raceIt(family.preset));
    card.append(shape(SHAPES[family.shape]), make("h3", "", family.name), what, race);
    box.append(card);
  }
}

// The preset's own chip does it, once the controls show it; a preset without one is opened by its link.
function raceIt(preset) {
  const chip = /** @type {HTMLInputElement} */ (document.querySelector(`#presets input[value="${preset}"]`));
  if (!chip) return void (location.search = `?preset=${preset}`);
  /** @type {HTMLElement} */ (document.querySelector('[role="tab"][data-tab-id="race"]')).click();
  const go = () => document.getElementById("run").click();
  if (chip.checked) return go();
  document.addEventListener("specdemo:settings", go, { once: true });
  chip.click();
}

// ---- 5, batch

function batchFigure() {
  const box = figureOf("batch");
  const state = { ...formula, balance: 24, batch: 2 };
  const sliders = box.querySelector(".sd-sliders");
  slider(sliders, { label: "Texts at once", low: 1, high: 64, step: 1, value: 2 }, (x) => ((state.batch = x), show()));
  slider(sliders, { label: "Reading = arithmetic at", low: 4, high: 256, step: 4, value: 24, say: (x) => `${x} tokens` }, (x) => ((state.balance = x), show()));
  slider(sliders, { label: "Draft length k", low: 1, high: 12, step: 1, value: 4 }, (x) => ((state.k = x), show()));
  function show() {
    const sizes = Array.from({ length: 64 }, (_, i) => 1 + i);
    const here = batchSpeedUp(state, state.batch);
    const lines = [{ name: "by the formula", points: sizes.map((b) => [b, batchSpeedUp(state, b)]), of: 1 }];
    if (given.batch?.points.length) lines.push({ name: `measured, ${given.batch.where}`, points: given.batch.points, of: 2 });
    const end = sizes.find((b) => batchSpeedUp(state, b) < 1);
    const said = `${state.batch} text${state.batch === 1 ? "" : "s"}: the pass is over ${state.batch * (state.k + 1)} tokens and costs ${(passCost(state.batch * (state.k + 1), state.balance) / passCost(state.batch, state.balance)).toFixed(2)} plain ones: ${times(here)}.`;
    plot(box.querySelector(".sd-plot"), { lines, dots: [{ x: state.batch, y: here, name: times(here) }], unit: "texts at once", level: 1, words: `Speed-up over the batch size. ${said}`, wide: 64 });
    box.querySelector(".sd-caption").textContent = `${said} ${end ? `From about ${end} texts on it is a loss.` : "It pays at every size shown."}`;
  }
  show();
}

stepsFigure();
ruleFigure();
speedFigure();
familiesFigure();
batchFigure();
