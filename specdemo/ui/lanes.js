// Draws a log (lines of JSON, see views.py) into the skeleton of view.html; kit.js and tree.js stand before it. Lines are
// kept as they come and drawn when the display's clock reaches their device time, so the pace of the display, and a
// replay, never touch the engine.

const WINDOW = 16; // tokens the throughput is taken over
const CHART_MS = 200;
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
const FATES = { accepted: "✓ accepted", rejected: "✗ rejected", "not reached": "· not reached" };
const OWN = { corrected: "↺ corrected by target", bonus: "★ bonus of target", target: "target's own token", unknown: "? unknown: its server does not tell" };
// What cannot be seen of a lane on a server, unless its summary brings the server's own counters.
const UNSEEN = {
  acceptance_rate: null, tokens_per_step: null, drafted: null, accepted: null, steps: null,
  accept_histogram: [], accept_by_position: [], ms_draft: null, ms_verify: null, ms_other: null,
};

const total = (ms) => Object.values(ms).reduce((a, b) => a + b, 0);
const milliseconds = (x) => fixed(x, x < 10 ? 2 : x < 100 ? 1 : 0);
const megabytes = (x) => (!x ? "–" : x < 1e9 ? `${(x / 1e6).toFixed(1)} MB` : `${(x / 1e9).toFixed(2)} GB`);

const HINT = $(".sd-step").textContent; // until a step is picked

let run = null; // the run on show: its start line, its end line, its lanes
let coming = null; // a run that has not started yet; the last one stays on show
const player = { replay: false, clock: 0, last: 0, frame: 0 };

// ---- the log

const readLog = reader(clear, receive);

function read() {
  if (run.own && late(props.value)) return;
  if (!props.value) return idle();
  readLog(props.value);
  if (!coming && run.start.lanes.length) play();
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

function glide(node, block) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  node.scrollIntoView({ block, behavior: calm ? "instant" : "smooth" });
}

function started(line) {
  come();
  run = { recorded: coming.recorded, still: coming.still, own: !coming.still, start: line, end: null };
  coming = null;
  Object.assign(player, { replay: run.recorded && !run.still, clock: 0, last: 0 });
  run.lanes = line.lanes.map((lane, index) => ({ ...lane, index, lines: [], received: 0, offset: null, over: false }));
  stage();
  if (!run.recorded) say(`Running ${line.lanes.length} lanes, ${line.schedule}.`);
}

function kept(line) {
  const lane = run.lanes[line.lane];
  if (!lane) return;
  lane.offset ??= run.start.schedule === "sequential" ? sum(run.lanes.map((l) => l.received)) : 0;
  if (line.type === "step") lane.received += total(line.ms);
  else lane.over = true;
  line.at = lane.received;
  lane.lines.push(line);
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
  advance(Infinity);
  say("The run failed.");
}

function noted(line) {
  if (!coming && run.lanes[line.lane]) return laneNote(run.lanes[line.lane], line.text);
  $(".sd-notes").hidden = false;
  $(".sd-notes").append(make("li", "", sentence(line.text)));
}

// ---- the display's clock

const pace = () => Number(element.querySelector("[name=sd-pace]:checked").value);
const atOnce = () => !player.replay && pace() === 1;
const due = (lane, line) => line.at + (player.replay ? 0 : lane.offset);
const drawnAll = () => run.lanes.every((lane) => lane.next >= lane.lines.length);

function play() {
  if (run.recorded && !player.last && matchMedia("(prefers-reduced-motion: reduce)").matches) {
    player.replay = false;
  }
  if (atOnce() || (run.recorded && !player.replay)) return advance(Infinity);
  if (!player.frame) {
    player.last = performance.now();
    player.frame = requestAnimationFrame(tick);
  }
}

function tick(now) {
  player.frame = 0;
  const passed = Math.max(0, now - player.last);
  player.last = now;
  player.clock = Math.min(player.clock + passed * pace(), horizon());
  advance(atOnce() ? Infinity : player.clock);
  if (!(run.end && drawnAll())) player.frame = requestAnimationFrame(tick);
}

// How far the engine is known to have come: the display waits there and does not jump ahead afterwards.
function horizon() {
  const open = run.lanes.filter((lane) => !lane.over).map((lane) => lane.received + (player.replay ? 0 : lane.offset || 0));
  if (run.end || !open.length) return Infinity;
  return run.start.schedule === "sequential" ? Math.max(...open) : Math.min(...open);
}

function advance(clock) {
  let drawn = 0;
  for (const lane of run.lanes) {
    const bottom = pinned(lane);
    const text = document.createDocumentFragment();
    while (lane.next < lane.lines.length && due(lane, lane.lines[lane.next]) <= clock) {
      const line = lane.lines[lane.next++];
      player.clock = Math.max(player.clock, due(lane, line)); // what is drawn at once is behind the clock too
      if (line.type === "step") drawStep(lane, line, text);
      else drawDone(lane, line);
      drawn += 1;
    }
    lane.view.text.append(text);
    if (bottom && !run.still) lane.view.text.scrollTop = lane.view.text.scrollHeight;
  }
  if (drawn) paint();
  if (run.end && drawnAll()) finish();
  replayButton();
}

function replay() {
  if (!run.end) return;
  if (player.frame) {
    cancelAnimationFrame(player.frame);
    player.frame = 0;
    advance(Infinity);
    return;
  }
  clear();
  stage();
  run.still = false;
  player.replay = true;
  player.clock = 0;
  player.last = performance.now();
  say("Replaying at the run's own speed" + (pace() === 1 ? "." : `, slowed ${1 / pace()} times.`));
  player.frame = requestAnimationFrame(tick);
  replayButton();
}

function replayButton() {
  $(".sd-replay").disabled = !run.end;
  $(".sd-replay").textContent = player.frame && run.end ? "Skip" : "Replay";
}

// ---- lanes

function stage() {
  cancelAnimationFrame(player.frame);
  player.frame = 0;
  $(".sd-loading").hidden = true;
  $(".sd-lanes").replaceChildren();
  $(".sd-race").replaceChildren();
  $(".sd-why").hidden = true;
  $(".sd-lanes").dataset.lanes = run.lanes.length;
  delete $(".sd-lanes").dataset.idle;
  for (const lane of run.lanes) {
    Object.assign(lane, { next: 0, clock: 0, decode: 0, tokens: 0, steps: [], finish: null, summary: null, comparison: null });
    Object.assign(lane, { drafted: 0, accepted: 0, kept: [], reached: [], hits: [], split: { draft: 0, verify: 0, other: 0 } });
    Object.assign(lane, { answer: [], tail: "", thought: null });
    Object.assign(lane, { past: [[0, 0]], points: [[], []], charted: 0, lastPoint: 0, ttft: null, told: {}, notes: {}, trainMs: 0 });
    lane.view = laneCard(lane);
    lane.bar = raceBar(lane);
    if (lane.note) laneNote(lane, lane.note);
  }
  run.picked = null;
  run.focus = Math.min(1, run.lanes.length - 1);
  run.chart = null;
  run.done = false;
  $(".sd-inspector").classList.remove("sd-wide");
  badge();
  tabs();
  inspect();
  paint();
}

function badge() {
  const node = $(".sd-badge");
  const { device, date, dtype, threads, commit } = run.start.environment || {};
  node.hidden = false;
  node.classList.toggle("sd-recorded", run.recorded);
  const where = [device, threads ? `${threads} thread${threads > 1 ? "s" : ""}` : null, dtype];
  const when = [date || "date unknown", commit ? `commit ${String(commit).slice(0, 7)}` : null];
  const words = run.recorded ? ["Recorded run", ...where, ...when] : where;
  node.textContent = words.filter(Boolean).map((word) => String(word).slice(0, 60)).join(" · ");
}

function mark(lane) {
  const node = make("span", "sd-mark", lane.index ? String(lane.index) : "0");
  node.dataset.of = lane.index;
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", lane.index ? `lane ${lane.index}` : "baseline");
  return node;
}

const lossy = (lane) => (lane.exact === false ? [make("em", "sd-lossy", "lossy")] : []);

function remote(lane) {
  if (!lane.remote) return [];
  const node = make("em", "sd-remote", `remote: ${lane.remote.server}, what was drafted is unknown`);
  node.title = [lane.remote.model, lane.remote.endpoint].filter(Boolean).join(" at ");
  return [node];
}

function laneCard(lane) {
  const card = make("article", "sd-lane");
  card.dataset.of = lane.index;
  const header = make("header");
  const title = make("h3", "", lane.name);
  const state = make("span", "sd-pill", "idle");
  const speed = make("span", "sd-speed");
  const number = make("b", "", "–");
  number.dataset.metric = "tokens_per_s";
  number.dataset.ofLane = lane.index;
  const unit = make("span", "", "tok/s");
  speed.append(number, " ", unit);
  header.append(mark(lane), title, make("span", "sd-how", how(lane)), state, speed);
  title.append(...lossy(lane), ...remote(lane));
  const text = make("div", "sd-text");
  text.dataset.lane = lane.index;
  text.tabIndex = 0;
  text.setAttribute("role", "log");
  text.setAttribute("aria-live", "off");
  text.setAttribute("aria-label", `${lane.name}: text; arrow keys step through the decoding steps`);
  text.append(...asked(lane));
  const note = make("p", "sd-note");
  note.hidden = true;
  card.append(header, note, text);
  $(".sd-lanes").append(card);
  return { card, state, number, unit, text, note };
}

// What the lane was asked: a text to go on with, or the last message of its chat behind a fold of those before it.
function asked(lane) {
  const said = lane.messages || [];
  if (!said.length) return [span(run.start.prompt, "prompt", -1)];
  const turns = said.map(({ role, content }) => {
    const turn = make("div", "sd-turn");
    turn.append(make("b", "sd-role", role), span(content, "prompt", -1));
    return turn;
  });
  const last = turns.pop();
  if (!turns.length) return [last];
  const before = fold(turns);
  before.head.textContent = `Before this: ${said.slice(0, -1).map(({ role }) => role).join(", ")}`;
  return [before.box, last];
}

// Closed until someone opens it; stands where the first of its nodes stood.
function fold(nodes) {
  const [box, head, body] = [make("details", "sd-fold"), make("summary"), make("div", "sd-folded")];
  if (nodes[0].parentNode) nodes[0].before(box);
  box.append(head, body);
  body.append(...nodes);
  return { box, head, body };
}

// Puts a token where it belongs: what a model thinks, from <think> to </think>, is folded. Some templates write <think>
// themselves, so a </think> without one folds all that came before it.
function put(lane, node, into) {
  (lane.thought?.body ?? into).append(node);
  if (node.dataset.kind === "rejected") return lane.thought ? 0 : lane.answer.push(node);
  lane.tail += node.textContent;
  if (lane.thought) lane.thought.tokens += 1;
  else lane.answer.push(node);
  if (!lane.thought && lane.tail.includes("<think>")) {
    let tag = lane.answer.length - 1;
    while (tag > 0 && !joined(lane.answer.slice(tag)).includes("<think>")) tag -= 1;
    think(lane, lane.answer.splice(tag));
  } else if (lane.tail.includes("</think>")) {
    if (!lane.thought) think(lane, lane.answer.splice(0));
    lane.thought.head.textContent = `Thought · ${lane.thought.tokens} tokens`;
    Object.assign(lane, { thought: null, tail: "" });
  } else if (lane.thought) {
    lane.thought.head.textContent = `Thinking … ${lane.thought.tokens} tokens`;
  }
  lane.tail = lane.tail.slice(-20);
}

const emitted = (nodes) => nodes.filter((node) => node.dataset.kind !== "rejected");
const joined = (nodes) => emitted(nodes).map((node) => node.textContent).join("");

function think(lane, nodes) {
  lane.thought = { ...fold(nodes), tokens: emitted(nodes).length };
  lane.thought.head.textContent = "Thinking …";
  lane.tail = "";
}

function how(lane) {
  if (lane.remote) return "";
  if (!lane.index) return "one token per target pass";
  const { model, ...rest } = lane.options || {};
  return Object.entries(rest).map(([name, value]) => `${name} = ${value}`).join(" · ");
}

function laneNote(lane, text) {
  lane.view.note.hidden = false;
  lane.view.note.textContent = sentence(text);
}

function pill(lane, text, tone = "") {
  lane.view.state.textContent = text;
  lane.view.state.dataset.tone = tone;
}

function span(text, kind, step) {
  const node = make("span");
  node.dataset.kind = kind;
  if (step >= 0) node.dataset.step = step;
  node.textContent = text;
  return node;
}

const pinned = ({ view: { text } }) => text.scrollHeight - text.scrollTop - text.clientHeight < 30;

function drawStep(lane, line, into) {
  const at = lane.steps.push(line) - 1;
  line.kinds.forEach((kind, i) => {
    if (kind === "corrected") for (const node of refused(line, at)) put(lane, node, into);
    put(lane, span(line.text[i] ?? "", kind, at), into);
  });
  count(lane, line);
  if (isTree(line)) $(".sd-inspector").classList.add("sd-wide");
  pill(lane, "generating", "busy");
}

// The first draft refused where the path ended, struck through; how many more fell with it is said by CSS, so it is no
// text.
function refused(line, step) {
  const end = line.path.at(-1);
  const first = line.fates.findIndex((fate, i) => fate === "rejected" && line.parents[i] === end);
  if (first < 0) return [];
  const node = span(visible(line.drafted[first] ?? ""), "rejected", step);
  const more = line.fates.filter((fate) => fate === "rejected" || fate === "not reached").length - 1;
  if (more) node.dataset.more = `+${more}`;
  return [node];
}

function count(lane, line) {
  const ms = total(line.ms);
  lane.clock += ms;
  lane.tokens += line.kinds.length;
  if (line.index > 0) {
    lane.decode += ms;
    const keep = line.fates.filter((fate) => fate === "accepted").length;
    const deep = depth(line);
    lane.drafted += line.fates.filter(Boolean).length;
    lane.accepted += keep;
    lane.kept[keep] = (lane.kept[keep] || 0) + 1;
    for (let i = 0; i < deep; i++) {
      lane.reached[i] = (lane.reached[i] || 0) + 1;
      lane.hits[i] = (lane.hits[i] || 0) + (keep > i ? 1 : 0);
    }
    lane.split.draft += (line.ms.draft || 0) + (line.ms.observe || 0);
    lane.split.verify += line.ms.verify || 0;
    lane.split.other += (line.ms.accept || 0) + (line.ms.commit || 0);
    tell(lane, line);
  } else {
    lane.ttft = ms;
  }
  measure(lane);
}

function depth(line) {
  const levels = [0];
  let deepest = 0;
  line.parents.forEach((parent, i) => {
    levels.push(levels[parent] + 1);
    if (line.fates[i]) deepest = Math.max(deepest, levels[i + 1]);
  });
  return deepest;
}

function measure(lane) {
  lane.past.push([lane.clock, lane.tokens]);
  while (lane.past.length > 2 && lane.tokens - lane.past[1][1] >= WINDOW) lane.past.shift();
  const [then, had] = lane.past[0];
  const spacing = Math.max(1, (run.start.limit || 200) / 200);
  if (lane.tokens < 4 || lane.tokens - lane.lastPoint < spacing) return;
  lane.lastPoint = lane.tokens;
  lane.points[0].push(lane.clock / 1000);
  lane.points[1].push((1000 * (lane.tokens - had)) / (lane.clock - then));
}

function drawDone(lane, line) {
  lane.finish = line.finish;
  lane.summary = line.summary;
  if (lane.remote) lane.remote = line.remote;
  if (line.note) laneNote(lane, line.note);
  const seconds = `${(lane.clock / 1000).toFixed(2)} s`;
  const words = { stop: [`done in ${seconds}`, "good"], length: [`done in ${seconds}`, "good"] };
  words.cancelled = [`stopped at ${seconds}`, "fair"];
  words.error = ["failed", "bad"];
  pill(lane, ...(words[line.finish] || ["", ""]));
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
  const words = rows.map((lane) => `${named(lane)}: ${factor(lane.comparison.speedup)}, ${lane.comparison.verdict}.`);
  if (run.still) return "Recorded earlier. Press Run for your own.";
  return [ends[run.end.finish] || (run.recorded ? "Replayed." : "Finished."), ...words].join(" ");
}

const same = (x) => Math.abs(x - 1) <= 0.005;
const factor = (x) => (same(x) ? "the same speed" : x < 1 ? `slower, ${x.toFixed(2)} times the baseline's speed` : `${x.toFixed(2)} times as fast`);

function say(text) {
  if ($(".sd-status").textContent !== text) $(".sd-status").textContent = text;
}

// ---- numbers: live ones while it runs, the engine's own summary afterwards

function numbers(lane) {
  const s = lane.summary || {};
  const rate = lane.decode ? (1000 * (lane.tokens - 1)) / lane.decode : null;
  const live = {
    tokens_per_s: rate,
    acceptance_rate: lane.drafted ? lane.accepted / lane.drafted : null,
    tokens_per_step: lane.steps.length > 1 ? (lane.tokens - 1) / (lane.steps.length - 1) : null,
    ttft_ms: lane.ttft,
    itl_ms_p50: null,
    drafted: lane.drafted,
    accepted: lane.accepted,
    steps: Math.max(0, lane.steps.length - 1),
    accept_histogram: Array.from(lane.kept, (n) => n || 0),
    accept_by_position: lane.reached.map((n, i) => lane.hits[i] / n),
    peak_memory_bytes: null,
    ms_draft: lane.split.draft,
    ms_verify: lane.split.verify,
    ms_other: lane.split.other,
  };
  return { ...live, ...(lane.remote ? UNSEEN : {}), ...s };
}

// A piece that a server sends may be several tokens; how many there were is known at the end, if at all.
const inPieces = (lane) => lane.remote && !isNumber(lane.summary?.tokens);

function speedup(lane) {
  if (lane.comparison) return lane.comparison.speedup;
  if ([lane, run.lanes[0]].some(inPieces)) return null;
  const [ours, theirs] = [numbers(lane).tokens_per_s, numbers(run.lanes[0]).tokens_per_s];
  return ours && theirs ? ours / theirs : null;
}

let painting = 0;
function paint() {
  if (!painting) painting = requestAnimationFrame(repaint);
}

function repaint() {
  painting = 0;
  const several = run.lanes.length > 2;
  for (const lane of run.lanes) {
    const n = numbers(lane);
    lane.view.number.textContent = fixed(n.tokens_per_s, n.tokens_per_s < 100 ? 1 : 0);
    lane.view.number.dataset.value = n.tokens_per_s ?? "";
    lane.view.unit.textContent = inPieces(lane) ? "pieces/s" : "tok/s";
    const share = run.start.limit ? Math.min(1, lane.tokens / run.start.limit) : 0;
    lane.bar.fill.style.transform = `scaleX(${lane.finish === "stop" ? 1 : share})`;
    lane.bar.tokens.textContent = inPieces(lane) ? `${lane.tokens} pieces` : `${n.tokens ?? (lane.tokens || "–")} tok`;
    lane.bar.time.textContent = lane.clock ? `${(lane.clock / 1000).toFixed(2)} s` : "";
  }
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
  histogram();
  times();
  told();
  chart();
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
      row.append(number, make("small", "", small), ...(name === "speedup" ? lossy(lane) : []));
      return row;
    })
  );
}

// What stands under a number that a server's counters may or may not give.
const byServer = (lane, value) => (lane.remote && isNumber(value) ? "by its server's metrics" : lane.remote ? "unknown" : "");

function speedTile({ lane }) {
  const x = speedup(lane);
  if (!isNumber(x)) return ["–", "", "", null];
  const [words, tone] = same(x) ? ["same speed", ""] : x < 1 ? ["▼ slower", "bad"] : ["▲ faster", "gain"];
  return [`${x.toFixed(2)}×`, words, tone, x];
}

function outputTile(lane) {
  const row = lane.comparison;
  if (!row) return [lane.exact === false ? "⚠ lossy" : "–", "", lane.exact === false ? "fair" : "", null];
  const known = Object.hasOwn(VERDICTS, row.verdict);
  const [words, tone] = known ? VERDICTS[row.verdict] : [String(row.verdict ?? "–"), ""];
  const place = isNumber(row.first_divergence) ? `from token ${row.first_divergence + 1}` : "";
  const gap = isNumber(row.divergence_margin) ? `gap of the two best ${row.divergence_margin}` : "";
  return [words, [place, gap].filter(Boolean).join(", "), tone, row.verdict];
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
      item.append(mark(lane), make("span", "", lane.comparison.why));
      return item;
    })
  );
}

function raceBar(lane) {
  const row = make("div", "sd-run");
  row.dataset.of = lane.index;
  const track = make("div", "sd-track");
  const fill = make("div", "sd-fill");
  track.append(fill);
  const result = make("span", "sd-result");
  const tokens = make("b", "", "0 tok");
  const time = make("span", "sd-time", "");
  result.append(tokens, " ", time);
  const name = make("span", "sd-name");
  name.append(mark(lane), make("span", "", lane.name), ...lossy(lane));
  row.append(name, track, result);
  $(".sd-race").append(row);
  return { fill, tokens, time };
}

// ---- charts

function chart() {
  const plot = element.querySelector(".js-plotly-plot");
  if (!window.Plotly || !plot?.data) return setTimeout(paint, 500); // the plotting library comes after the page
  const now = performance.now();
  const first = run.chart === null;
  if (!first && !run.done && now - run.chart < CHART_MS) return;
  run.chart = now;
  const of = run.lanes.map((lane) => lane.index).filter((i) => i < plot.data.length);
  if (first || run.done) {
    const all = plot.data.map((_, i) => i);
    const lanes = all.map((i) => run.lanes[i]);
    window.Plotly.restyle(plot, {
      x: lanes.map((lane) => [...(lane?.points[0] || [])]),
      y: lanes.map((lane) => [...(lane?.points[1] || [])]),
      name: lanes.map((lane) => (lane ? escapeMarkup(lane.name) : "")),
      visible: lanes.map(Boolean),
    }, all);
  } else {
    const fresh = of.filter((i) => run.lanes[i].charted < run.lanes[i].points[0].length);
    if (!fresh.length) return;
    const rest = (axis) => fresh.map((i) => run.lanes[i].points[axis].slice(run.lanes[i].charted));
    window.Plotly.extendTraces(plot, { x: rest(0), y: rest(1) }, fresh);
  }
  for (const i of of) run.lanes[i].charted = run.lanes[i].points[0].length;
}

// Plotly reads a little HTML in names.
const escapeMarkup = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function histogram() {
  const lane = run.lanes[run.focus];
  const n = numbers(lane);
  const bars = n.accept_histogram || [];
  const rates = n.accept_by_position || [];
  const box = $(".sd-histogram");
  if (lane.remote) {
    const kept = rates.length ? [`Its server kept at position: ${rates.map((r, i) => `${i + 1}: ${percent(r)}`).join("  ")}. ${lane.remote.source}.`] : [];
    box.replaceChildren(...["How many drafts each pass kept is unknown.", ...kept].map((words) => make("p", "sd-small", words)));
    return;
  }
  if (!lane.index || !bars.length || !n.drafted) {
    box.replaceChildren(make("p", "sd-small", lane.index ? `Nothing was drafted${run.done ? "" : " yet"}.` : "The baseline drafts nothing."));
    return;
  }
  const [width, height, base] = [340, 158, 132];
  const step = (width - 16) / bars.length;
  const top = Math.max(...bars, 1);
  const x = (i) => 8 + step * (i + 0.5);
  const words = bars.map((count, i) => `${count} passes kept ${i}`).join(", ");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words, "data-of": lane.index });
  bars.forEach((count, i) => {
    const tall = (96 * count) / top;
    const w = Math.min(44, step - 6);
    picture.append(svg("rect", { x: x(i) - w / 2, y: base - tall, width: w, height: Math.max(tall, 1), rx: 3, class: "sd-b" }));
    picture.append(svg("text", { x: x(i), y: height - 10, class: "sd-x" }, i));
  });
  const y = (rate) => base - 96 * rate;
  const points = rates.map((rate, i) => [x(i + 1), isNumber(rate) ? rate : 0]);
  picture.append(svg("polyline", { points: points.map(([px, r]) => `${px},${y(r)}`).join(" "), class: "sd-line" }));
  for (const [px, rate] of points) {
    const dot = svg("circle", { cx: px, cy: y(rate), r: 3.5, class: "sd-dot" });
    dot.append(svg("title", {}, percent(rate)));
    picture.append(dot);
  }
  bars.forEach((count, i) => {
    picture.append(svg("text", { x: x(i), y: base - (96 * count) / top - 7, class: "sd-n" }, count));
  });
  const rate = make("p", "sd-small sd-rates", `kept at position: ${rates.map((r, i) => `${i + 1}: ${percent(r)}`).join("  ")}`);
  box.replaceChildren(picture, rate);
}

function tabs() {
  const several = run.lanes.length > 2;
  $(".sd-tabs").hidden = !several;
  $(".sd-tabs").replaceChildren(
    ...run.lanes.slice(1).map((lane) => {
      const button = make("button", "sd-tab");
      button.type = "button";
      button.setAttribute("aria-pressed", lane.index === run.focus);
      button.append(mark(lane));
      button.title = lane.name;
      button.addEventListener("click", () => look(lane.index));
      return button;
    })
  );
}

function look(index) {
  run.focus = index;
  tabs();
  paint();
}

function times() {
  const split = run.lanes.map((lane) => numbers(lane)).map((n) => [n.ms_draft, n.ms_verify, n.ms_other]);
  const longest = Math.max(...split.map((parts) => sum(parts)), 1e-9);
  $(".sd-times").replaceChildren(
    ...run.lanes.map((lane, i) => {
      const row = make("div", "sd-split");
      const track = make("div", "sd-track");
      const names = ["draft", "verify", "other"];
      split[i].forEach((ms, j) => {
        const part = make("div", `sd-part sd-${names[j]}`);
        part.style.width = `${(100 * ms) / longest}%`;
        part.title = `${names[j]} ${milliseconds(ms)} ms`;
        track.append(part);
      });
      track.setAttribute("role", "img");
      track.setAttribute("aria-label", names.map((name, j) => `${name} ${milliseconds(split[i][j])} ms`).join(", "));
      const learning = lane.trainMs ? `, ${milliseconds(lane.trainMs)} ms of it training` : "";
      const share = sum(split[i]) ? `${percent(split[i][0] / sum(split[i]))} draft${learning}` : "";
      row.append(mark(lane), track, make("span", "sd-ms", lane.remote ? "unknown" : sum(split[i]) ? `${(sum(split[i]) / 1000).toFixed(2)} s` : "–"));
      if (lane.index && !lane.remote) row.append(make("small", "", share));
      return row;
    })
  );
}

// ---- what a drafter says of itself in the notes of its steps

const TOLD = {
  k: { title: "Draft length k", whole: true, say: (y) => fixed(y, 0) },
  accepted: { title: "Acceptance while it learns", high: 1, say: percent },
  route: { title: "Route", whole: true, say: (y) => fixed(y, 0) },
};

function tell(lane, { notes }) {
  for (const name of Object.keys(TOLD)) {
    if (isNumber(notes[name])) (lane.told[name] ??= []).push([lane.steps.length - 1, notes[name]]);
  }
  lane.notes = notes;
  lane.trainMs += notes.train_ms || 0;
}

function told() {
  const telling = run.lanes.filter((lane) => Object.keys(lane.told).length);
  $(".sd-told").hidden = !telling.length;
  const told = telling.flatMap((lane) => Object.entries(lane.told).map(([name, points]) => toldOf(lane, name, points)));
  $(".sd-told-lanes").replaceChildren(...told.map(({ figure }) => figure));
  for (const { figure, draw } of told) figure.append(draw(figure)); // a chart is as wide as its place
}

function toldOf(lane, name, points) {
  const { title, ...scale } = TOLD[name];
  const figure = make("figure");
  figure.dataset.of = lane.index;
  const caption = make("figcaption");
  const now = `now ${scale.say(points.at(-1)[1])}`;
  caption.append(mark(lane), make("b", "", title), make("span", "sd-small", [now, ...remarks(lane, name)].join(" · ")));
  const words = `${lane.name}: ${title} over ${points.at(-1)[0]} target passes, ${now}`;
  figure.append(caption);
  return { figure, draw: (box) => lineChart(box, [{ points }], { unit: "target passes", words, ...scale }) };
}

function remarks(lane, name) {
  const { alpha, predicted, updates, train_loss } = lane.notes;
  if (name === "k" && isNumber(alpha)) return [`estimated acceptance ${percent(alpha)}`, `predicted ${fixed(predicted, 2)}×`];
  if (name === "route") {
    const { model, drafter, drafts = "" } = lane.options;
    return [[model ?? drafter ?? "", ...String(drafts).split(",")].map(String)[lane.notes.route]?.trim()].filter(Boolean);
  }
  if (name !== "accepted") return [];
  const loss = isNumber(train_loss) ? [`training loss ${fixed(train_loss, 3)}`] : [];
  return [`${updates} updates`, `${milliseconds(lane.trainMs)} ms of training`, ...loss];
}

// ---- step inspector

function pick(lane, step) {
  if (!lane.steps.length) return;
  const index = Math.max(0, Math.min(step, lane.steps.length - 1));
  for (const node of element.querySelectorAll(".sd-picked")) node.classList.remove("sd-picked");
  const spans = lane.view.text.querySelectorAll(`[data-step="${index}"]`);
  for (const node of spans) node.classList.add("sd-picked");
  const folded = spans[0]?.closest("details");
  if (folded) folded.open = true;
  if (spans[0]) reveal(lane.view.text, spans[0]);
  run.picked = { lane: lane.index, step: index };
  if (lane.index) look(lane.index);
  inspect();
}

function reveal(box, node) {
  const [outer, inner] = [box.getBoundingClientRect(), node.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - box.clientHeight / 2;
}

function inspect() {
  const box = $(".sd-table");
  if (!run.picked) {
    $(".sd-step").textContent = HINT;
    return box.replaceChildren();
  }
  const lane = run.lanes[run.picked.lane];
  const line = lane.steps[run.picked.step];
  const parts = Object.entries(line.ms).map(([name, ms]) => `${name} ${milliseconds(ms)}`);
  const drafted = line.fates.filter(Boolean).length;
  const kept = line.fates.filter((fate) => fate === "accepted").length;
  const what = lane.remote ? "a piece as it arrived, what was drafted is unknown" : run.picked.step ? (drafted ? `${kept} of ${drafted} drafts kept` : "nothing drafted") : prefill(line);
  $(".sd-step").replaceChildren(
    mark(lane),
    ` Step ${run.picked.step} of ${lane.steps.length - 1} · ${what} · ${milliseconds(total(line.ms))} ms (${parts.join(", ")})`
  );
  if (!isTree(line)) return box.replaceChildren(stepTable(line));
  const tree = treeView(line, lane.steps[run.picked.step - 1]?.text.at(-1) ?? "");
  box.replaceChildren(tree.whole);
  tree.show();
}

function prefill({ notes }) {
  return notes.kept ? `prefill, ${notes.kept} prompt tokens kept from the turn before` : "prefill";
}

function stepTable(line) {
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const [name, title] of [["#", ""], ["token", ""], ["draft q", "the drafter's probability"], ["target p", "the target's probability"], ["verdict", ""]]) {
    const cell = make("th", "", name);
    cell.scope = "col";
    cell.title = title;
    head.append(cell);
  }
  const body = table.createTBody();
  line.fates.forEach((fate, i) => {
    if (fate) tokenRow(body, i + 1, line.drafted[i], line.q[i], line.p[i], fate.replace(" ", "-"), FATES[fate]);
  });
  const own = line.kinds.at(-1);
  if (own && own !== "accepted") tokenRow(body, "→", line.text.at(-1), null, null, own, OWN[own]);
  return table;
}

function tokenRow(body, name, text, q, p, kind, verdict) {
  const row = body.insertRow();
  row.dataset.fate = kind;
  row.append(make("td", "", String(name)));
  const token = make("td");
  token.append(make("code", "", visible(text ?? "")));
  row.append(token, probability(q), probability(p), make("td", "sd-verdict", verdict));
}

function probability(value) {
  const cell = make("td", "sd-prob");
  if (!isNumber(value)) {
    cell.textContent = "–";
    return cell;
  }
  const meter = make("span", "sd-meter");
  const fill = make("span");
  fill.style.width = `${100 * Math.min(1, Math.max(0, value))}%`;
  meter.append(fill);
  cell.append(meter, value.toFixed(2));
  return cell;
}

function onKey(event) {
  const box = event.target.closest?.("[data-lane].sd-text");
  const lane = box && run.lanes[Number(box.dataset.lane)];
  if (!lane?.steps.length) return;
  const now = run.picked?.lane === lane.index ? run.picked.step : -1;
  const to = { ArrowRight: now + 1, ArrowLeft: now < 0 ? lane.steps.length - 1 : now - 1, Home: 0, End: lane.steps.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  pick(lane, to);
}

function onClick(event) {
  const token = event.target.closest?.("span[data-step]");
  const box = token?.closest("[data-lane].sd-text");
  if (box) pick(run.lanes[Number(box.dataset.lane)], Number(token.dataset.step));
}

function idle() {
  readLog("");
  waiting({ lanes: ["Speculative"] });
}

function waiting(line) {
  coming = null;
  say("Ready. Press Run to race plain against speculative decoding.");
  const lane = (name, index) => ({ name, options: {}, exact: true, note: null, index, lines: [], received: 0 });
  run = { recorded: false, own: false, start: { environment: {}, prompt: "", lanes: [] }, end: null };
  run.lanes = ["Baseline", ...line.lanes].map(lane);
  stage();
  $(".sd-lanes").dataset.idle = "";
  $(".sd-badge").hidden = true;
  replayButton();
  if (run.lanes.length === 2) run.lanes[1].view.card.querySelector(".sd-how").textContent = "drafts k tokens, keeps what the target agrees with";
}

element.addEventListener("keydown", onKey);
element.addEventListener("click", onClick);
$(".sd-replay").addEventListener("click", replay);
for (const input of element.querySelectorAll("[name=sd-pace]")) {
  input.addEventListener("change", () => (run.end || run.lanes.some((lane) => lane.lines.length)) && play());
}
$(".sd-rejected").addEventListener("change", (event) => {
  $(".sd-lanes").classList.toggle("sd-hide-rejected", !event.target.checked);
});
idle();
watch("value", read);
if (props.value) read();
