// The panels beside and below the lanes: throughput, ribbon, accepted tokens per step, time per phase, and statistics reported by drafters.

const MIN_TOKENS = 4; // tokens before the first point of the throughput chart

function drawPanels() {
  if (!player.over && !player.paused && performance.now() - run.panels < CHART_MS) return;
  run.panels = performance.now();
  drawThroughput();
  drawRibbons();
  drawHistogram();
  drawTimes();
  drawCosts();
  drawNoteCharts();
}

// Adds a step to the charts.
function addChartPoints(lane, line) {
  addCell(lane, line);
  const { tokens, clock_ms, recent } = line.so_far;
  for (const name of Object.keys(NOTE_CHARTS)) {
    if (isNumber(line.notes[name])) (lane.noteSeries[name] ??= []).push([lane.steps.length - 1, line.notes[name]]);
  }
  lane.notes = line.notes;
  const spacing = Math.max(1, (run.start.limit || 200) / 200);
  if (!isNumber(recent) || tokens < MIN_TOKENS || tokens - lane.lastPoint < spacing) return;
  lane.lastPoint = tokens;
  lane.points.push([clock_ms / 1000, recent]);
}

/** Returns the tokens/s of every lane over the seconds after the first token. */
function curvesOf(lanes) {
  const begin = chartStart(lanes) / 1000;
  return lanes.map(({ points, index }) => ({ points: points.map(([x, y]) => [x - begin, y]), series: index }));
}

function drawThroughput() {
  const laid = (laidOver?.curves ?? []).map((curve) => ({ ...curve, faint: true, dashed: true }));
  const lines = [...laid, ...curvesOf(run.lanes).map((curve) => ({ ...curve, name: String(curve.series) }))];
  const label = `Throughput of ${run.lanes.map((lane) => lane.name).join(", ")} over device time after the first token`;
  const end = (player.span - chartStart(run.lanes)) / 1000;
  plot($("#chart"), { lines, unit: "s after first token", label, wide: Math.max(end, ...laid.map(({ points }) => points.at(-1)?.[0] ?? 0)) || 1, direct: true });
}

// Draws the histogram of accepted tokens and the acceptance rate by position, or the reason why there is none. A server may report only rates.
function drawHistogram() {
  const lane = run.lanes[run.focus];
  const n = numbers(lane);
  const remote = lane.timing === "requests";
  const drafted = lane.index && (remote || n.drafted);
  const [counts, rates] = [n.accept_histogram, n.accept_by_position].map((list) => (drafted && list) || []);
  const unknown = remote && !counts.length && "The accepted tokens per step are unknown.";
  $(".sd-undrafted").textContent = unknown || (!lane.index ? "The baseline has no drafter." : drafted ? "" : `Nothing was drafted${run.done ? "" : " yet"}.`);
  drawBarsOf(".sd-histogram", { bars: counts, label: counts.map((count, accepted) => `${count} steps accepted ${accepted}`).join(", "), unit: "accepted draft tokens", series: lane.index });
  const list = rates.map((rate, i) => `position ${i + 1}: ${percent(rate)}`).join(", ");
  drawBarsOf(".sd-rates", { bars: rates, label: `Acceptance rate, ${list}`, unit: "position in the draft", first: 1, high: 1, percentage: true, series: lane.index });
  $(".sd-source").textContent = remote && !stepsKnown(lane) ? `${lane.remote.source}.` : "";
}

function drawBarsOf(figure, options) {
  $(figure).hidden = !options.bars.length;
  if (options.bars.length) plot($(`${figure} div`), options);
}

function drawLaneTabs() {
  const tabs = run.lanes.slice(1).map((lane) => {
    const title = { title: lane.name, ariaPressed: String(lane.index === run.focus) };
    return Object.assign(clickable("sd-tab", laneNumber(lane), () => focusLane(lane.index)), title);
  });
  $(".sd-tabs").hidden = tabs.length < 2;
  $(".sd-tabs").replaceChildren(...tabs);
}

function focusLane(index) {
  Object.assign(run, { focus: index, panels: 0 });
  drawLaneTabs();
  paint();
}

function drawTimes() {
  const split = run.lanes.map((lane) => numbers(lane)).map((n) => [n.ms_draft, n.ms_verify, n.ms_other]);
  const longest = Math.max(...split.map((parts) => sum(parts)), 1e-9);
  const row = (lane, i) => {
    const total = sum(split[i]);
    const parts = ["draft", "verify", "other"].map((name, j) => [name, split[i][j], `${milliseconds(split[i][j])} ms`]);
    const training = lane.soFar.ms_train ? ` including ${milliseconds(lane.soFar.ms_train)} ms of training` : "";
    const share = lane.index && lane.timing !== "requests" && total ? `${percent(split[i][0] / total)} draft${training}` : "";
    const waitedShare = numbers(lane).waited_share;
    const details = [share, waitedShare >= 0.005 && `CPU contention ${percent(waitedShare)}`].filter(Boolean).join(", ");
    const time = make("span", "sd-ms", lane.timing === "requests" ? "unknown" : total ? `${(total / 1000).toFixed(2)} s` : "–");
    return make("div", "sd-split", laneNumber(lane), splitTrack(parts, longest), time, make("small", "", details));
  };
  $(".sd-times").replaceChildren(...run.lanes.map(row));
}

/** Returns the tokens that a step yields if drafts are cut to each length, by the tokens of its pass. histogram: of the steps that accepted n.
 * @param {number[]} histogram */
function tokensPerStep(histogram) {
  const steps = sum(histogram);
  let tokens = 0;
  return histogram.map((_, n) => [n + 1, (tokens += sum(histogram.slice(n)) / steps)]);
}

function drawCosts() {
  const lanes = run.lanes.filter((lane) => lane.index && numbers(lane).drafted && numbers(lane).accept_histogram?.length);
  const yields = lanes.map((lane) => ({ name: String(lane.index), series: lane.index, points: tokensPerStep(numbers(lane).accept_histogram) }));
  const widest = Math.max(2, ...yields.map(({ points }) => points.length));
  const passes = (run.end?.passes ?? run.start.passes ?? []).filter(([n]) => n <= 1.5 * widest);
  const dots = lanes.filter((lane) => lane.index === run.focus && isNumber(speedup(lane))).map((lane) => {
    const n = numbers(lane);
    return { x: 1 + n.drafted / n.steps, y: n.tokens_per_step / speedup(lane), name: `cost ${fixed(n.tokens_per_step / speedup(lane), 2)}` };
  });
  const label = yields.map(({ name, points }) => `lane ${name} yields ${fixed(points.at(-1)[1], 2)} tokens per step`).join(", ");
  const lines = [{ name: "0", points: lanes.length ? passes : [], series: 0 }, ...yields];
  plot($(".sd-costs"), { lines, dots, unit: "tokens in a pass", label: label || "Tokens per step and cost of a pass", from: 1, direct: true });
}

// ---- statistics that drafters add to their steps (`notes`)

const NOTE_CHARTS = {
  k: { title: "Draft length k", whole: true, format: (y) => fixed(y, 0) },
  accepted: { title: "Acceptance rate during training", high: 1, percentage: true, format: percent },
  route: { title: "Selected drafter", whole: true, format: (y) => fixed(y, 0) },
};

function drawNoteCharts() {
  const lanesWithNotes = run.lanes.filter((lane) => Object.keys(lane.noteSeries).length);
  $(".sd-drafter-notes").hidden = !lanesWithNotes.length;
  for (const lane of lanesWithNotes) for (const [name, points] of Object.entries(lane.noteSeries)) drawNoteChart(lane, name, points);
}

function drawNoteChart(lane, name, points) {
  const { title, format, ...scale } = NOTE_CHARTS[name];
  const now = `now ${format(points.at(-1)[1])}`;
  const id = `${lane.index} ${name}`;
  const box = $(`[data-note="${id}"]`) ?? $(".sd-drafter-charts").appendChild(noteFigure(lane, title, id));
  box.querySelector("small").textContent = [now, ...noteDetails(lane, name)].join(" · ");
  const label = `${lane.name}: ${title} over ${points.at(-1)[0]} steps, ${now}`;
  plot(box.querySelector("div"), { lines: [{ points, series: lane.index }], unit: "steps", label, ...scale });
}

function noteFigure(lane, title, id) {
  const caption = make("figcaption", "", laneNumber(lane), make("b", "", title), make("small", "sd-small"));
  return withData(make("figure", "", caption, make("div")), { note: id });
}

function noteDetails(lane, name) {
  const { alpha, predicted, updates, train_loss } = lane.notes;
  if (name === "k" && isNumber(alpha)) return [`estimated acceptance ${percent(alpha)}`, `predicted ${fixed(predicted, 2)}×`];
  if (name === "route") {
    const { model, drafter, drafts = "" } = lane.options;
    return [[model ?? drafter ?? "", ...String(drafts).split(",")].map(String)[lane.notes.route]?.trim()].filter(Boolean);
  }
  if (name !== "accepted") return [];
  const loss = isNumber(train_loss) ? [`training loss ${fixed(train_loss, 3)}`] : [];
  return [`${updates} updates`, `${milliseconds(lane.soFar.ms_train)} ms of training`, ...loss];
}
