// The five figures of "How it works". They use a recorded run or the formulas of maths.js, and all work with the keyboard alone.
// Value of the component: {"lines": lines of a recorded race, "batch": points of a recorded sweep}.

const STEPS = 14; // of the recorded race
const PASS_MS = 700; // of Play, after the first pass, which is shown in slow motion
const recorded = JSON.parse(props.value || "{}");
const figureOf = (name) => $(`[data-figure="${name}"]`);
const onAction = (box, action, handler) => box.querySelector(`[data-action="${action}"]`).addEventListener("click", handler);
const times = (x) => `${x.toFixed(2)}×`;

/** A labelled range. */
function slider(box, { label, low, high, step, value, format = (x) => String(x) }, changed) {
  const input = Object.assign(make("input", "sd-scrub"), { type: "range", min: low, max: high, step, value });
  const output = make("output");
  const showValue = () => {
    output.textContent = input.ariaValueText = format(Number(input.value));
    input.style.setProperty("--at", `${(100 * (input.value - low)) / (high - low)}%`);
  };
  input.addEventListener("input", () => (showValue(), changed(Number(input.value))));
  showValue();
  box.append(make("label", "sd-slider", make("span", "", label), output, input));
  return (to) => {
    input.value = to;
    showValue();
  };
}

// ---- 1: plain decoding and speculative decoding

function stepsFigure() {
  const box = figureOf("steps");
  const [start, ...lines] = (recorded.lines || []).map((line) => JSON.parse(line));
  if (!start) return (box.hidden = true);
  const of = (lane) => lines.filter((line) => line.lane === lane).slice(0, STEPS + 1);
  const lanes = [of(0), of(1)];
  const pages = [...box.querySelectorAll(".sd-transcript")];
  const counts = [...box.querySelectorAll(".sd-demo-lane small")];
  const most = Math.min(...lanes.map((steps) => steps.length)) - 1;
  let [at, timer, playing] = [0, 0, false];

  const outputUpTo = (lane, upTo) => lanes[lane].slice(0, upTo + 1).flatMap((line, step) => {
    const nodes = line.output_outcomes.map((outcome, i) => token(line.text[i] ?? "", outcome, step === upTo && step > 0));
    const rejected = firstRejected(line);
    if (rejected >= 0 && line.output_outcomes.at(-1) === "corrected") nodes.splice(-1, 0, token(visible(line.drafted[rejected] ?? ""), "rejected"));
    return nodes;
  });
  const token = (text, outcome, fresh) => withData(make(outcome === "rejected" ? "del" : "span", fresh ? "sd-fresh" : "", text), { outcome });
  function show(caption = "") {
    pages.forEach((page, lane) => {
      const prompt = make("span", "sd-prompt", start.prompt.split(" ").slice(-9).join(" "));
      page.replaceChildren(prompt, ...outputUpTo(lane, at));
      const tokens = lanes[lane][at].so_far.tokens - 1;
      counts[lane].textContent = `${at} pass${at === 1 ? "" : "es"}, ${tokens} token${tokens === 1 ? "" : "s"}`;
      page.scrollTop = page.scrollHeight;
    });
    box.querySelector(".sd-caption").textContent = caption || (at ? describeStep(lanes[1][at]) : "Press Next pass, or focus a button and press → or ←.");
    box.querySelector('[data-action="back"]').disabled = !at;
    box.querySelector('[data-action="next"]').disabled = at >= most;
  }
  function next() {
    const line = lanes[1][at + 1];
    if (at >= most) return;
    if (!displayedDrafts(line).length) return settle();
    const film = slowMotion(box.querySelector(".sd-two"), line, pages[1].textContent, settle);
    box.querySelector(".sd-caption").textContent = `${displayedDrafts(line).length} draft tokens, then one forward pass over all of them …`;
    timer = reducedMotion() ? 0 : window.setTimeout(film.close, film.ms);
  }
  function settle() {
    clearTimeout(timer);
    at = Math.min(at + 1, most);
    show();
    if (playing) timer = window.setTimeout(() => (at < most ? settle() : play()), PASS_MS);
  }
  function back() {
    at = Math.max(0, at - 1);
    show();
  }
  const button = box.querySelector('[data-action="play"]');
  function play() {
    clearTimeout(timer);
    playing = !playing;
    button.textContent = playing ? "Pause" : "Play";
    if (playing && at >= most) at = 0;
    if (playing) next();
  }
  onAction(box, "next", next);
  onAction(box, "back", back);
  onAction(box, "play", play);
  box.addEventListener("keydown", (event) => {
    const handler = { ArrowRight: next, ArrowLeft: back }[event.key];
    if (!handler) return;
    event.preventDefault();
    handler();
  });
  show();
}

// ---- 2: the acceptance rule

function ruleFigure() {
  const box = figureOf("rule");
  const names = ["the", "a", "her", "one"];
  const distributions = { q: [0.25, 0.45, 0.2, 0.1], p: [0.5, 0.15, 0.25, 0.1] };
  const labels = { q: "draft probability q", p: "target probability p" };
  let counts = names.map(() => ({ accepted: 0, corrected: 0 }));
  const bars = box.querySelector(".sd-bars");
  const views = names.map((name, i) => {
    const pair = Object.keys(distributions).map((which) => {
      const words = { role: "slider", ariaLabel: `${labels[which]} of “${name}”`, ariaValueMin: "1", ariaValueMax: "97", ariaOrientation: "vertical" };
      const bar = Object.assign(make("div", `sd-drag sd-drag-${which}`, make("i"), make("b")), { tabIndex: 0, ...words });
      const set = (value) => {
        distributions[which] = withValue(distributions[which], i, value);
        clear();
      };
      bar.addEventListener("keydown", (event) => {
        const by = { ArrowUp: 0.02, ArrowRight: 0.02, ArrowDown: -0.02, ArrowLeft: -0.02, PageUp: 0.1, PageDown: -0.1 }[event.key];
        if (!by) return;
        event.preventDefault();
        set(distributions[which][i] + by);
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
    bars.append(make("div", "sd-column", ...pair, make("code", "", name)));
    return pair;
  });
  const acceptance = () => sum(distributions.p.map((p, i) => Math.min(p, distributions.q[i])));

  function clear() {
    counts = names.map(() => ({ accepted: 0, corrected: 0 }));
    show(`Expected acceptance rate: ${percent(acceptance())}, the overlap of q and p.`);
  }
  function sample(times) {
    let last = null;
    for (let i = 0; i < times; i += 1) {
      last = speculate(distributions.p, distributions.q, Math.random);
      counts[last.token][last.accepted ? "accepted" : "corrected"] += 1;
    }
    const accepted = sum(counts.map((count) => count.accepted)) / sum(counts.map((count) => count.accepted + count.corrected));
    if (times > 1) return show(`${percent(accepted)} of the draft tokens were accepted. The dashed outlines show p: the output follows p for any q.`);
    const [p, q] = [distributions.p[last.draft], distributions.q[last.draft]];
    const probability = percent(Math.min(1, p / q));
    show(`Draft token “${names[last.draft]}”, acceptance probability min(1, ${p.toFixed(2)} / ${q.toFixed(2)}) = ${probability}: ${last.accepted ? "accepted." : `rejected; the token resampled from the residual is “${names[last.token]}”.`}`);
  }
  function show(caption) {
    views.forEach((pair, i) => Object.keys(distributions).forEach((which, j) => {
      const value = distributions[which][i];
      pair[j].querySelector("i").style.height = `${100 * value}%`;
      pair[j].querySelector("b").textContent = value.toFixed(2).replace("0.", ".");
      pair[j].ariaValueNow = String(Math.round(100 * value));
      pair[j].ariaValueText = percent(value);
    }));
    outcome();
    box.querySelector(".sd-caption").textContent = caption;
  }
  function outcome() {
    const total = sum(counts.map((count) => count.accepted + count.corrected));
    const scale = Math.max(0.55, ...distributions.p) * 1.1;
    box.querySelector(".sd-sample-size").textContent = total ? `${total.toLocaleString("en")} tokens` : "no samples yet";
    const shares = names.map((_, i) => (total ? (counts[i].accepted + counts[i].corrected) / total : 0));
    const out = box.querySelector(".sd-sampled");
    out.ariaLabel = names.map((name, i) => `${name}: sampled ${percent(shares[i])}, p is ${percent(distributions.p[i])}`).join("; ");
    out.replaceChildren(...names.map((name, i) => {
      const part = (cls, share) => Object.assign(make("i", `sd-${cls}`), { style: `height: ${(100 * share) / scale}%` });
      const [corrected, accepted] = ["corrected", "accepted"].map((which) => part(`sampled-${which}`, counts[i][which] / (total || 1)));
      const bar = make("div", "sd-stacked-bar", part("expected", distributions.p[i]), corrected, accepted);
      return make("div", "sd-column", bar, make("code", "", name));
    }));
  }
  onAction(box, "one", () => sample(1));
  onAction(box, "many", () => sample(1000));
  onAction(box, "clear", clear);
  clear();
}

// ---- 3: the speed-up formula

const formula = { alpha: 0.75, k: 4, draft: 0.1, verify: 1.15 };

/** Returns the parameters of the formula as measured in the last run; null if they are unknown. */
function measured() {
  const last = /** @type {any} */ (window).specdemoRun;
  if (!last) return null;
  const { tokens_per_step: tokens, ms_draft, ms_verify, steps } = last.lane;
  const plain = last.plain.ms_verify / last.plain.steps;
  if (![tokens, ms_draft, ms_verify, plain, last.k, last.speedup].every((x) => isNumber(x) && x > 0)) return null;
  return { k: last.k, alpha: acceptanceOf(tokens, last.k), draft: ms_draft / steps / last.k / plain, verify: ms_verify / steps / plain, speedup: last.speedup, name: last.name };
}

function speedFigure() {
  const box = figureOf("speed");
  const sliders = box.querySelector(".sd-sliders");
  const set = {};
  const parameters = { alpha: { label: "Acceptance rate α", low: 0.05, high: 0.98, step: 0.01, format: percent }, k: { label: "Draft length k", low: 1, high: 16, step: 1 }, draft: { label: "Draft cost per token", low: 0, high: 0.6, step: 0.01, format: (x) => `${percent(x)} of a pass` }, verify: { label: "Verification cost", low: 1, high: 3, step: 0.05, format: (x) => `${x.toFixed(2)} passes` } };
  for (const [name, range] of Object.entries(parameters)) set[name] = slider(sliders, { ...range, value: formula[name] }, (x) => ((formula[name] = x), show()));
  function show() {
    const ks = Array.from({ length: 16 }, (_, i) => i + 1);
    const curve = ks.map((k) => [k, speedUp({ ...formula, k })]);
    const [bestK, best] = curve.reduce((a, b) => (b[1] > a[1] ? b : a));
    const lastRun = measured();
    const here = speedUp(formula);
    const dots = [{ x: formula.k, y: here, name: times(here) }];
    if (lastRun) dots.push({ x: lastRun.k, y: lastRun.speedup, name: `last run ${times(lastRun.speedup)}` });
    const summary = `${expectedTokens(formula.alpha, formula.k).toFixed(2)} tokens per step at the cost of ${(formula.k * formula.draft + formula.verify).toFixed(2)} plain passes: ${times(here)}.`;
    const advice = best <= 1 ? "No draft length is faster than plain decoding." : bestK === formula.k ? "This k is optimal." : `Best at k = ${bestK}: ${times(best)}.`;
    plot(box.querySelector(".sd-plot"), { lines: [{ points: curve, series: 1 }], dots, unit: "draft length k", level: 1, label: `Speed-up by draft length. ${summary}`, wide: 16 });
    box.querySelector(".sd-caption").textContent = `${summary} ${advice}${lastRun ? "" : " Your next race will appear here as a dot."}`;
    box.querySelector('[data-action="use-last-run"]').disabled = !lastRun;
  }
  onAction(box, "use-last-run", () => {
    const lastRun = measured();
    for (const name of Object.keys(parameters)) set[name]((formula[name] = lastRun[name]));
    show();
  });
  document.addEventListener("specdemo:run", show);
  show();
}

// ---- 4: families of drafters

function familiesFigure() {
  for (const race of figureOf("families").querySelectorAll("[data-preset]")) race.addEventListener("click", () => toRace("race", race.dataset.preset));
}

// ---- 5: batch size

function batchFigure() {
  const box = figureOf("batch");
  const state = { ...formula, ridge: 24, batch: 2 };
  const sliders = box.querySelector(".sd-sliders");
  slider(sliders, { label: "Batch size", low: 1, high: 64, step: 1, value: 2 }, (x) => ((state.batch = x), show()));
  slider(sliders, { label: "Compute-bound above (roofline ridge)", low: 4, high: 256, step: 4, value: 24, format: (x) => `${x} tokens` }, (x) => ((state.ridge = x), show()));
  slider(sliders, { label: "Draft length k", low: 1, high: 12, step: 1, value: 4 }, (x) => ((state.k = x), show()));
  function show() {
    const sizes = Array.from({ length: 64 }, (_, i) => 1 + i);
    const here = batchSpeedUp(state, state.batch);
    const lines = [{ name: "formula", points: sizes.map((b) => [b, batchSpeedUp(state, b)]), series: 1 }];
    if (recorded.batch?.points.length) lines.push({ name: `measured, ${recorded.batch.where}`, points: recorded.batch.points, series: 2 });
    const end = sizes.find((b) => batchSpeedUp(state, b) < 1);
    const summary = `Batch size ${state.batch}: verification reads ${state.batch * (state.k + 1)} tokens and costs ${(passCost(state.batch * (state.k + 1), state.ridge) / passCost(state.batch, state.ridge)).toFixed(2)} plain passes: ${times(here)}.`;
    plot(box.querySelector(".sd-plot"), { lines, dots: [{ x: state.batch, y: here, name: times(here) }], unit: "batch size", level: 1, label: `Speed-up by batch size. ${summary}`, wide: 64 });
    box.querySelector(".sd-caption").textContent = `${summary} ${end ? `Slower than plain decoding from batch size ${end}.` : "Faster than plain decoding at every size shown."}`;
  }
  show();
}

stepsFigure();
ruleFigure();
speedFigure();
familiesFigure();
batchFigure();
