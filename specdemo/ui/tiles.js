// The numbers of a run: those at the current step during playback, the engine's summary at the end. The server computes them
// (core/tally.py).

const VERDICTS = {
  identical: ["✓ identical", "good"],
  rounding: ["≈ differs by rounding", "fair"],
  differs: ["✗ differs", "bad"],
  "same distribution": ["∼ same distribution", "good"],
  lossy: ["⚠ lossy", "fair"],
  "same text": ["✓ same text", "good"],
  "text differs": ["≠ text differs", "fair"],
  unknown: ["? unknown", ""],
};

const milliseconds = (x) => fixed(x, x < 10 ? 2 : x < 100 ? 1 : 0);
const duration = (ms) => (ms < 1000 ? `${milliseconds(ms)} ms` : `${fixed(ms / 1000, 1)} s`);
const megabytes = (x) => (!x ? "–" : x < 1e9 ? `${(x / 1e6).toFixed(1)} MB` : `${(x / 1e9).toFixed(2)} GB`);
const FORMATS = { percent, decimal: (x) => fixed(x, 2), count: (x) => fixed(x, 0), bytes: megabytes, milliseconds };
const PARTS = {
  acceptance: ({ drafted, accepted }) => drafted && `${accepted} of ${drafted}`,
  "per-pass": ({ steps }) => steps && `${steps} pass${steps === 1 ? "" : "es"}`,
  experts: (n, { notes }) => isNumber(n.experts_touched) && notes.experts_in_all && `of ${notes.experts_in_all}`,
};
const MIN_COMPARED = 8; // tokens of every lane from which they are compared: the first few steps say little
const SPEED_TONES = { faster: ["▲ ", "gain"], slower: ["▼ ", "bad"] };

const numbers = (lane) => ({ ...lane.soFar, ...lane.summary });

const comparable = (lanes) => lanes.every(({ soFar }) => soFar.tokens >= MIN_COMPARED);

// A piece of text from a server may hold several tokens. Their number is known at the end, if at all.
const countsPieces = ({ timing, summary }) => timing === "requests" && !isNumber(summary?.tokens);

// Returns whether a lane answers the baseline's prompt. In chats of older versions every lane continued its own answers.
const samePrompt = (lane, baseline) => JSON.stringify(lane.messages ?? []) === JSON.stringify(baseline.messages ?? []);

function speedup(lane) {
  if (!samePrompt(lane, run.lanes[0])) return null;
  if (lane.comparison) return lane.comparison.speedup;
  if ([lane, run.lanes[0]].some(countsPieces) || !(run.done || comparable(run.lanes))) return null;
  const [laneSpeed, baselineSpeed] = [numbers(lane).tokens_per_s, numbers(run.lanes[0]).tokens_per_s];
  return laneSpeed && baselineSpeed ? laneSpeed / baselineSpeed : null;
}

/** Returns the lane with the greatest speed-up at the current time; undefined if no speed-up is known.
 * @returns {Lane | undefined} */
function leader() {
  const known = run.lanes.slice(1).filter((lane) => isNumber(speedup(lane)));
  return known.sort((a, b) => speedup(b) - speedup(a))[0];
}

/** Returns the line of the result: the server's for a finished run (core/headline.py), before that the speed-up of the fastest lane. */
function headline() {
  if (run.failure) return { tone: "bad", text: "Not run here" };
  const result = run.done ? run.end.headline : null;
  if (result) return { tone: result.tone, text: run.still ? `Recording: ${result.caption}` : result.caption };
  const lane = leader();
  return { tone: "", text: lane ? `${lane.name} is ${speedup(lane).toFixed(2)}× as fast as plain decoding so far` : run.done ? "No result" : (run.hint ?? "No result yet") };
}

function drawNumbers() {
  const several = run.lanes.length > 2;
  for (const lane of run.lanes) laneNumbers(lane, numbers(lane));
  const drafting = run.lanes.slice(1);
  drawTile("speedup", drafting, several, speedTile);
  $(".sd-noise").replaceChildren(...noisyBadge());
  drawTile("output", drafting, several, ({ lane }) => outputTile(lane));
  for (const tile of element.querySelectorAll(".sd-tile[data-key]")) {
    const { dataset } = /** @type {any} */ (tile);
    const all = "baseline" in dataset;
    /** @type {any} */ (tile).hidden = "optional" in dataset && !run.lanes.some((lane) => isNumber(numbers(lane)[dataset.key]));
    drawTile(dataset.tile, all ? run.lanes : drafting, all || several, ({ lane, n }) => numberTile(dataset, lane, n));
  }
  drawExplanations();
}

/** @param {any} lane */
function laneNumbers(lane, n) {
  const { view } = lane;
  view.number.textContent = fixed(n.tokens_per_s, n.tokens_per_s < 100 ? 1 : 0);
  view.number.dataset.value = n.tokens_per_s ?? "";
  view.number.title = isNumber(n.tokens_per_s_low) ? `95 % interval: ${fixed(n.tokens_per_s_low, 1)} to ${fixed(n.tokens_per_s_high, 1)}` : "";
  view.unit.textContent = countsPieces(lane) ? "pieces/s" : "tok/s";
  if (lane.index) setText(view.result, laneResult(lane, n));
}

// Returns a lane's acceptance rate with the one that breaks even; with several lanes also what the headline says of one.
function laneResult(lane, n) {
  const several = run.lanes.length > 2;
  const x = several ? speedup(lane) : null;
  const accepted = isNumber(n.acceptance_rate) ? [`${percent(n.acceptance_rate)} accepted`, breakEven(lane)].filter(Boolean).join(", ") : "";
  return unbroken([isNumber(x) ? `${x.toFixed(2)}×` : "", accepted, several && lane.comparison ? outputTile(lane)[0] : ""].filter(Boolean).join(" · "));
}

function drawTile(name, lanes, several, cells) {
  const rows = $(`[data-tile=${name}] .sd-rows`);
  rows.classList.toggle("sd-multi-lane", several);
  const row = (lane) => {
    const [big, small, tone, value] = cells({ lane, n: numbers(lane) });
    const number = withData(make("b", "", big), { metric: name, ofLane: lane.index, value: value ?? "", ...(tone && { tone }) });
    return make("div", "sd-row", several && laneNumber(lane), number, make("small", "", unbroken(small)), ...(name === "speedup" ? lossy(lane) : []));
  };
  rows.replaceChildren(...lanes.map(row));
}

// Returns the source of a number that may come from a server's counters.
const sourceLabel = ({ timing }, value) => (timing !== "requests" ? "" : isNumber(value) ? "from the server's metrics" : "unknown");

// Returns the acceptance rate below which the draft of a finished lane loses on this machine.
function breakEven({ comparison }) {
  const rate = comparison?.break_even;
  return isNumber(rate) ? `break-even ${rate > 1 ? "above 100 %" : percent(rate)}` : "";
}

// Returns the cells of a tile that shows one number (core/definitions.py).
function numberTile({ tile, key, format }, lane, n) {
  const small = PARTS[tile]?.(n, lane) || sourceLabel(lane, n[key]);
  return [FORMATS[format](n[key]), [small, tile === "acceptance" && breakEven(lane)].filter(Boolean).join(", "), "", n[key]];
}

function speedTile({ lane }) {
  const x = speedup(lane);
  if (!isNumber(x)) return ["–", "", "", null];
  const { interval, word } = lane.comparison ?? {}; // known only at the end
  const [arrow, tone] = SPEED_TONES[word] ?? ["", ""];
  return [`${x.toFixed(2)}×`, [interval, word && arrow + word].filter(Boolean).join(", "), tone, x];
}

const noisyLanes = () => run.lanes.filter(({ comparison }) => comparison?.noisy);

/** Returns the reasons for noise that all of several noisy lanes have, such as that of the baseline. */
function sharedNoise() {
  const [first, ...others] = noisyLanes().map(({ comparison }) => comparison.reasons);
  return others.length ? first.filter((reason) => others.every((reasons) => reasons.includes(reason))) : [];
}

// Returns the badge of a noisy measurement: a button that repeats the run, or a label for a stored run.
function noisyBadge() {
  const lanes = noisyLanes();
  if (!lanes.length) return [];
  const badge = run.recorded ? make("span", "sd-noisy", "noisy") : clickable("sd-noisy", "noisy: pool more runs", () => gradioButton("repeat").click());
  badge.title = lanes.map(({ name, comparison }) => [...(lanes.length > 1 ? [name] : []), ...comparison.reasons].map(sentence).join(". ")).join("\n");
  return [badge];
}

function outputTile(lane) {
  const row = lane.comparison;
  if (!row) return [lane.exact === false ? "⚠ lossy" : "–", "", lane.exact === false ? "fair" : "", null];
  const known = Object.hasOwn(VERDICTS, row.verdict);
  if (row.word === "so far") return soFar(row.verdict);
  const [label, tone] = known ? VERDICTS[row.verdict] : [String(row.verdict ?? "–"), ""];
  if (row.bit_for_bit) return ["✓ bit for bit", "same output", tone, row.verdict];
  const position = isNumber(row.first_divergence) ? `from token ${row.first_divergence + 1}` : "";
  return [label, [position, row.parting, row.price].filter(Boolean).join(", "), tone, row.verdict];
}

// A stopped run has no verdict on the missing text; an existing difference is final.
function soFar(verdict) {
  const [label, tone] = VERDICTS[verdict] ?? ["–", ""];
  return tone === "good" ? [verdict, "so far", "", verdict] : [label, "", tone, verdict];
}

function drawExplanations() {
  const explained = run.lanes.slice(1).filter((lane) => lane.comparison?.why);
  const shared = sharedNoise();
  const words = (/** @type {any} */ { comparison: { why, noisy, reasons } }) => {
    const own = noisy ? reasons.filter((reason) => !shared.includes(reason)) : [];
    return unbroken([why, own.length ? `Noisy: ${own.join("; ")}.` : ""].join(" ").trim());
  };
  $(".sd-why-toggle").hidden = !explained.length && $(".sd-card").hidden;
  $(".sd-explanations").replaceChildren(
    ...explained.map((lane) => make("li", "", laneNumber(lane), make("span", "", words(lane)))),
    ...(shared.length ? [make("li", "", unbroken(`All noisy lanes: ${shared.join("; ")}.`))] : [])
  );
}
