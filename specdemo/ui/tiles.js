// The numbers of a run: those of the step that is on show while it runs, the engine's own summary afterwards. The server adds
// them up (core/tally.py); nothing is counted here.

const VERDICTS = {
  identical: ["✓ identical", "good"],
  rounding: ["≈ rounding", "fair"],
  differs: ["✗ differs", "bad"],
  "same distribution": ["∼ same distribution", "good"],
  lossy: ["⚠ lossy", "fair"],
  "same text": ["✓ same text", "good"],
  "text differs": ["≠ text differs", "fair"],
  unknown: ["? unknown", ""],
};

const milliseconds = (x) => fixed(x, x < 10 ? 2 : x < 100 ? 1 : 0);
const megabytes = (x) => (!x ? "–" : x < 1e9 ? `${(x / 1e6).toFixed(1)} MB` : `${(x / 1e9).toFixed(2)} GB`);
const TONES = { faster: ["▲ ", "gain"], slower: ["▼ ", "bad"] };

const numbers = (lane) => ({ ...lane.soFar, ...lane.summary });

// A piece that a server sends may be several tokens; how many there were is known at the end, if at all.
const inPieces = (lane) => lane.remote && !isNumber(lane.summary?.tokens);

function speedup(lane) {
  if (lane.comparison) return lane.comparison.speedup;
  if ([lane, run.lanes[0]].some(inPieces)) return null;
  const [ours, theirs] = [numbers(lane).tokens_per_s, numbers(run.lanes[0]).tokens_per_s];
  return ours && theirs ? ours / theirs : null;
}

/** The lane with the greatest speed-up at the playhead; undefined while no speed-up is known.
 * @returns {Lane | undefined} */
function leader() {
  const known = run.lanes.slice(1).filter((lane) => isNumber(speedup(lane)));
  return known.sort((a, b) => speedup(b) - speedup(a))[0];
}

/** The result that stays in view: of a finished run as the server states it (core/headline.py), before that the leader's speed-up. */
function headline() {
  const result = run.done ? run.end.headline : null;
  const lane = result ? run.lanes[result.lane] : leader();
  if (!lane) return { number: "–", tone: "", caption: "speed-up" };
  const { tone, caption } = result ?? { tone: "", caption: `${lane.name}, so far` };
  return { number: `${speedup(lane).toFixed(2)}×`, tone, caption };
}

function drawNumbers() {
  const several = run.lanes.length > 2;
  for (const lane of run.lanes) laneNumbers(lane, numbers(lane));
  const drafting = run.lanes.slice(1);
  tile("speedup", drafting, several, (lane) => speedTile(lane));
  tile("acceptance", drafting, several, ({ lane, n }) => {
    return [percent(n.acceptance_rate), isNumber(n.drafted) ? n.drafted && `${n.accepted} of ${n.drafted}` : byServer(lane, n.acceptance_rate), "", n.acceptance_rate];
  });
  tile("per-pass", drafting, several, ({ lane, n }) => {
    return [fixed(n.tokens_per_step, 2), isNumber(n.steps) ? n.steps && `${n.steps} pass${n.steps === 1 ? "" : "es"}` : byServer(lane, n.tokens_per_step), "", n.tokens_per_step];
  });
  tile("output", drafting, several, ({ lane }) => outputTile(lane));
  tile("memory", run.lanes, true, ({ n }) => [megabytes(n.peak_memory_bytes), "", "", n.peak_memory_bytes]);
  latency();
  why();
}

/** @param {any} lane */
function laneNumbers({ view, bar, remote, soFar, summary }, n) {
  const pieces = inPieces({ remote, summary });
  const said = soFar.tokens || 0;
  view.number.textContent = fixed(n.tokens_per_s, n.tokens_per_s < 100 ? 1 : 0);
  view.number.dataset.value = n.tokens_per_s ?? "";
  view.number.title = isNumber(n.tokens_per_s_low) ? `95 % interval: ${fixed(n.tokens_per_s_low, 1)} to ${fixed(n.tokens_per_s_high, 1)}` : "";
  view.unit.textContent = pieces ? "pieces/s" : "tok/s";
  bar.tokens.textContent = pieces ? `${said} pieces` : `${n.tokens ?? 0} tok`;
}

function tile(name, lanes, several, cells) {
  const rows = $(`[data-tile=${name}] .sd-rows`);
  rows.classList.toggle("sd-several", several);
  rows.replaceChildren(
    ...lanes.map((lane) => {
      const [big, small, tone, value] = cells({ lane, n: numbers(lane) });
      const row = make("div", "sd-row");
      if (several) row.append(mark(lane));
      const number = make("b", "", big);
      number.dataset.metric = name;
      number.dataset.ofLane = lane.index;
      number.dataset.value = value ?? "";
      if (tone) number.dataset.tone = tone;
      row.append(number, make("small", "", small), ...(name === "speedup" ? [...lossy(lane), ...noisy(lane)] : []));
      return row;
    })
  );
}

// What stands under a number that a server's counters may or may not give.
const byServer = (lane, value) => (lane.remote && isNumber(value) ? "by its server's metrics" : lane.remote ? "unknown" : "");

function speedTile({ lane }) {
  const x = speedup(lane);
  if (!isNumber(x)) return ["–", "", "", null];
  const { interval, word } = lane.comparison ?? {}; // known at the end
  const [arrow, tone] = TONES[word] ?? ["", ""];
  return [`${x.toFixed(2)}×`, [interval, word && arrow + word].filter(Boolean).join(", "), tone, x];
}

// Why a speed-up should be measured again, and what does so; a stored run can only say it.
function noisy(lane) {
  if (!lane.comparison?.noisy) return [];
  const badge = make(run.recorded ? "span" : "button", "sd-noisy", run.recorded ? "noisy machine" : "noisy machine: repeat");
  badge.title = lane.comparison.reasons.map(sentence).join(". ");
  if (!run.recorded) badge.addEventListener("click", () => document.getElementById("repeat").click());
  return [badge];
}

function outputTile(lane) {
  const row = lane.comparison;
  if (!row) return [lane.exact === false ? "⚠ lossy" : "–", "", lane.exact === false ? "fair" : "", null];
  const known = Object.hasOwn(VERDICTS, row.verdict);
  if (row.word === "so far") return soFar(row.verdict);
  const [words, tone] = known ? VERDICTS[row.verdict] : [String(row.verdict ?? "–"), ""];
  const place = isNumber(row.first_divergence) ? `from token ${row.first_divergence + 1}` : "";
  const gap = isNumber(row.divergence_margin) ? `gap of the two best ${row.divergence_margin}` : "";
  return [words, [place, gap].filter(Boolean).join(", "), tone, row.verdict];
}

// A run that was stopped says nothing of the text that is missing; what differs already is final.
function soFar(verdict) {
  const [words, tone] = VERDICTS[verdict] ?? ["–", ""];
  return tone === "good" ? [verdict, "so far", "", verdict] : [words, "", tone, verdict];
}

function latency() {
  const grid = make("div", "sd-grid");
  const gap = make("small", "", "gap, ms");
  gap.title = "a step's time is shared evenly among the tokens it emits";
  grid.append(make("span"), make("small", "", "first, ms"), gap);
  for (const lane of run.lanes) {
    const n = numbers(lane);
    const cells = [["ttft_ms", n.ttft_ms], ["itl_ms_p50", n.itl_ms_p50]].map(([metric, value]) => {
      const cell = make("b", "", milliseconds(value));
      cell.dataset.metric = metric;
      cell.dataset.ofLane = lane.index;
      cell.dataset.value = value ?? "";
      return cell;
    });
    grid.append(mark(lane), ...cells);
  }
  $("[data-tile=latency] .sd-rows").replaceChildren(grid);
}

function why() {
  const list = $(".sd-why");
  const told = run.lanes.slice(1).filter((lane) => lane.comparison?.why);
  list.hidden = !told.length;
  list.replaceChildren(
    ...told.map((lane) => {
      const item = make("li");
      const { why, noisy, reasons } = lane.comparison;
      item.append(mark(lane), make("span", "", [why, noisy ? `Noisy: ${reasons.join("; ")}.` : ""].join(" ").trim()));
      return item;
    })
  );
}
