// The result as an image and as a loop of six seconds, drawn on a canvas in the browser with the names of the models, the kind of work, the
// machine and the date. Nothing leaves the page.

const FRAME = { width: 1280, height: 720, margin: 44 };
const LOOP = { scale: 0.75, frameMs: 100, raceMs: 4000, holdMs: 2000, quality: 0.6 };
const COLOURED = { accepted: "accepted", forced: "forced", rejected: "rejected", corrected: "correction", bonus: "bonus" }; // kinds of tokens

/** Returns a lane as it was at a time of its clock, ms. */
function laneAt(lane, clock) {
  const shown = lane.lines.filter(({ at }) => at <= clock);
  const soFar = shown.findLast((line) => line.so_far)?.so_far ?? {};
  const ended = shown.length === lane.lines.length;
  return { ...lane, soFar, next: shown.length, finish: shown.at(-1)?.finish ?? null, summary: ended ? lane.summary : null };
}

/** Returns the line of the result at a time: the server's at the end, before that the speed-up of the fastest lane so far. */
function resultAt(source, lanes) {
  const complete = source.end && lanes.every((lane) => lane.next >= lane.lines.length);
  if (complete && source.end.headline) return source.end.headline;
  const ratio = (lane) => lane.soFar.tokens_per_s / lanes[0].soFar.tokens_per_s;
  const best = lanes.slice(1).filter((lane) => isNumber(ratio(lane)) && (complete || comparable(lanes))).toSorted((a, b) => ratio(b) - ratio(a))[0];
  return { tone: "", caption: best ? `${best.name} is ${ratio(best).toFixed(2)}× as fast as plain decoding so far` : "" };
}

/** Breaks pieces of text into lines. Returns lines of pieces with their position and width.
 * @param {{ text: string, kind: string }[]} pieces @param {number} width @param {(text: string) => number} measure */
function breakLines(pieces, width, measure) {
  const lines = [[]];
  let x = 0;
  for (const { text, kind } of pieces) {
    text.split("\n").forEach((words, i) => {
      if (i) [x] = [0, lines.push([])];
      const full = x && x + measure(words) > width;
      if (full) [x] = [0, lines.push([])];
      const part = full ? words.trimStart() : words;
      if (!part) return;
      lines.at(-1).push({ text: part, kind, x, width: measure(part) });
      x += measure(part);
    });
  }
  return lines;
}

/** Returns the text of a lane at a time as pieces: prompt, output tokens, and the draft of the current step if it lasts long enough. */
function piecesAt(source, lane, clock, displayMs) {
  const prompt = lane.messages?.length && !begunAnswer(lane) ? `${source.start.prompt.trimEnd()}\n\n` : source.start.prompt; // an answer is a paragraph of its own
  const pieces = (prompt.match(/\s*\S+|\s+/g) ?? []).map((text) => ({ text, kind: "prompt" }));
  for (const line of lane.lines.slice(0, lane.next)) (line.text ?? []).forEach((text, i) => pieces.push({ text, kind: line.output_outcomes[i] }));
  const [before, step] = [lane.lines[lane.next - 1], lane.lines[lane.next]];
  if (!before || step?.type !== "step" || lane.timing === "requests" || displayMs(before.at, step.at) < MIN_STEP_MS) return pieces;
  const decided = (clock - before.at) / (step.at - before.at) >= 0.65;
  return [...pieces, ...displayedDrafts(step).map(({ text, outcome }) => ({ text: text.replace(/\n/g, "⏎"), kind: decided ? outcome : "pending" }))];
}

/** Returns the kinds of tokens that need a legend: those of the texts, and rejected ones if drafts are drawn, too.
 * @param {any} source @param {boolean} drafts */
function legendKinds({ lanes }, drafts) {
  const lines = lanes.flatMap((lane) => lane.lines);
  const shown = new Set(lines.flatMap((line) => [...(line.output_outcomes ?? []), ...(drafts ? (line.draft_outcomes ?? []) : [])]));
  return Object.keys(COLOURED).filter((kind) => shown.has(kind));
}

/** Returns the numbers of a lane in words: its progress and tokens/s; at its end also its time, speed-up and whether that is noisy. */
function laneNumbersAt(lane, state, lanes) {
  const { speedup, interval, noisy } = (lane.summary && lane.comparison) || {};
  const { tokens_per_s } = numbers(lane);
  return [
    progress(lane, state, lanes),
    isFinished(lane) && `${(lane.soFar.clock_ms / 1000).toFixed(2)} s`,
    isNumber(tokens_per_s) && `${fixed(tokens_per_s, tokens_per_s < 100 ? 1 : 0)} ${countsPieces(lane) ? "pieces/s" : "tok/s"}`,
    isNumber(speedup) && interval && `${speedup.toFixed(2)}× (${interval})`,
    noisy && "noisy",
  ].filter(Boolean).join("   ");
}

// ---- drawing

function palette() {
  const style = getComputedStyle($(".sd-stage"));
  const read = (name) => style.getPropertyValue(name).trim() || "#888";
  const dark = Boolean(element.closest(".dark"));
  const series = [0, 1, 2, 3].map((i) => read(`--sd-${i}`));
  return { read, series, ink: read("--body-text-color"), soft: read("--sd-soft"), paper: read("--body-background-fill"), track: read("--sd-track"), inside: dark ? "#0b1220" : "#fff" };
}

const font = (size, weight = 400, family = "system-ui, sans-serif") => `${weight} ${size}px ${family}`;
const MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

const AT_ONCE = () => 0; // display time of a step of a still image

/** Draws a run at a time on a canvas of FRAME's size.
 * @param {any} context @param {any} source @param {number} clock @param {(from?: number, to?: number) => number} [displayMs] */
function drawFrame(context, source, clock, displayMs = AT_ONCE) {
  const colours = palette();
  const lanes = source.lanes.map((lane) => laneAt(lane, clock));
  const states = barStates(lanes, lanes.map((lane) => Math.min(clock, lane.received)), source.start.limit, source.end?.headline);
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, FRAME.width, FRAME.height);
  context.textBaseline = "middle";
  const room = drawLegend(context, legendKinds(source, displayMs !== AT_ONCE), colours);
  write(context, subject(source), FRAME.margin, 38, { font: font(20, 650), colour: colours.soft }, { width: room });
  drawCaption(context, resultAt(source, lanes), colours);
  lanes.forEach((lane, i) => drawTrack(context, lane, states[i], lanes, 142 + 66 * i, colours));
  const top = 142 + 66 * lanes.length + 14;
  const width = (FRAME.width - 2 * FRAME.margin - 28 * (lanes.length - 1)) / lanes.length;
  lanes.forEach((lane, i) => drawText(context, piecesAt(source, lane, clock, displayMs), { x: FRAME.margin + i * (width + 28), y: top, width, height: FRAME.height - 74 - top }, colours));
  drawFooter(context, source, colours);
}

function write(context, text, x, y, style, { align = "left", width = undefined } = {}) {
  [context.font, context.fillStyle, context.textAlign] = [style.font, style.colour, /** @type {CanvasTextAlign} */ (align)];
  context.fillText(text, x, y, width);
}

function drawCaption(context, { caption, tone }, colours) {
  const [, before, value, after] = /^(.*?)(\d+\.\d\d×)(.*)$/s.exec(caption) ?? ["", caption, "", ""];
  const parts = [[before, font(25, 600), colours.ink], [value, font(44, 750), tone === "gain" ? colours.read("--sd-good") : tone === "bad" ? colours.read("--sd-bad") : colours.ink], [after, font(25, 600), colours.ink]];
  const widths = parts.map(([text, style]) => {
    context.font = style;
    return context.measureText(text).width;
  });
  const room = FRAME.width - 2 * FRAME.margin;
  const scale = Math.min(1, room / Math.max(1, sum(widths)));
  context.save();
  context.translate(FRAME.margin, 80);
  context.scale(scale, scale);
  parts.forEach(([text, style, colour], i) => write(context, text, sum(widths.slice(0, i)), 0, { font: style, colour }));
  context.restore();
}

function drawTrack(context, lane, state, lanes, y, colours) {
  const [left, width] = [FRAME.margin, FRAME.width - 2 * FRAME.margin];
  const colour = colours.series[lane.index % 4];
  write(context, lane.name, left, y, { font: font(19, 600), colour: colours.ink }, { width: width - 580 });
  write(context, laneNumbersAt(lane, state, lanes), left + width, y, { font: font(18), colour: colours.soft }, { align: "right" });
  context.fillStyle = colours.track;
  context.fillRect(left, y + 15, width, 30);
  context.fillStyle = colour;
  context.fillRect(left, y + 15, width * state.share, 30);
  if (state.reached !== null) {
    context.globalAlpha = 0.55; // generated after the first lane had finished
    context.fillStyle = colours.track;
    context.fillRect(left + width * state.reached, y + 15, width * Math.max(0, state.share - state.reached), 30);
    context.globalAlpha = 1;
  }
  const inside = state.share >= MIN_INSIDE;
  const end = left + width * state.share + (inside ? -12 : 12);
  if (state.first) drawFlag(context, end - 14, y + 22, colours.inside);
  write(context, state.lead, end - (state.first ? 26 : 0), y + 31, { font: font(18, 650), colour: inside ? colours.inside : colours.ink }, { align: inside ? "right" : "left" });
}

/** Draws the legend at the right end of the first line, and returns the width that is left of it. */
function drawLegend(context, kinds, colours) {
  let x = FRAME.width - FRAME.margin;
  for (const kind of kinds.toReversed()) {
    context.font = font(15.5, 400, MONO);
    const { width } = context.measureText(COLOURED[kind]);
    x -= width;
    drawPiece(context, { text: COLOURED[kind], kind, width }, x, 38, colours);
    x -= 16;
  }
  return x - FRAME.margin;
}

function drawFlag(context, x, y, colour) {
  context.save();
  context.translate(x, y);
  context.fillStyle = colour;
  context.fill(new Path2D(FLAG));
  context.restore();
}

function drawText(context, pieces, { x, y, width, height }, colours) {
  const lineHeight = 25;
  context.font = font(15.5, 400, MONO);
  const lines = breakLines(pieces, width, (text) => context.measureText(text).width).slice(-Math.floor(height / lineHeight));
  context.save();
  context.beginPath();
  context.rect(x - 2, y, width + 4, height);
  context.clip();
  lines.forEach((line, row) => line.forEach((piece) => drawPiece(context, piece, x + piece.x, y + row * lineHeight + 12, colours)));
  context.restore();
}

function drawPiece(context, { text, kind, width }, x, y, colours) {
  if (kind in COLOURED) {
    context.fillStyle = colours.read(`--sd-${kind}-bg`);
    context.fillRect(x, y - 10, width, 21);
    context.fillStyle = colours.read(`--sd-${kind}`);
    context.fillRect(x, kind === "rejected" ? y : y + 9, width, 1.5);
  }
  if (kind === "pending") {
    Object.assign(context, { strokeStyle: colours.soft, lineWidth: 1 });
    context.strokeRect(x + 0.5, y - 10, width - 1, 20);
  }
  const faint = kind === "prompt" || kind === "pending" || kind === "not reached";
  write(context, text, x, y, { font: font(15.5, 400, MONO), colour: faint ? colours.soft : kind === "rejected" ? colours.read("--sd-rejected") : colours.ink });
}

/** Returns the name of the model, and the kind of work if it is known. */
const subject = ({ start }) => [start.title || "unknown model", start.work].filter(Boolean).join("  ·  ");

/** Returns the drafters, the machine and the date of a run. */
function provenance({ start, lanes }) {
  const environment = start.environment ?? {};
  return [drafters(lanes), machine(environment).join(", "), String(environment.date || "date unknown").slice(0, 10)].filter(Boolean);
}

function drawFooter(context, source, colours) {
  const [width, y] = [FRAME.width - 2 * FRAME.margin, FRAME.height - 38];
  context.fillStyle = colours.track;
  context.fillRect(FRAME.margin, y - 22, width, 1.5);
  write(context, provenance(source).join("  ·  "), FRAME.margin, y, { font: font(16), colour: colours.soft }, { width: width - 120 });
  write(context, "specdemo", FRAME.margin + width, y, { font: font(17, 650), colour: colours.ink }, { align: "right" });
}

// ---- files

function canvasOf(scale) {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: FRAME.width * scale, height: FRAME.height * scale });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { canvas, context };
}

function download(blob, name) {
  const link = make("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

const fileName = (source, ending) => `specdemo-${source.start.preset ?? "race"}.${ending}`;

function saveImage() {
  const source = run;
  const { canvas, context } = canvasOf(2);
  drawFrame(context, source, Infinity);
  canvas.toBlob((blob) => download(blob, fileName(source, "png")), "image/png");
}

const numberBytes = (number, count) => Uint8Array.from({ length: count }, (_, i) => Math.floor(number / 256 ** i) % 256);

/** Joins parts of a file: byte arrays, and texts of one byte per letter.
 * @param {(Uint8Array | string)[]} parts */
function joinBytes(parts) {
  const arrays = parts.map((part) => (typeof part === "string" ? Uint8Array.from(part, (letter) => letter.charCodeAt(0)) : part));
  const joined = new Uint8Array(sum(arrays.map(({ length }) => length)));
  arrays.reduce((at, part) => (joined.set(part, at), at + part.length), 0);
  return joined;
}

const chunk = (name, ...parts) => {
  const content = joinBytes(parts);
  return joinBytes([name, numberBytes(content.length, 4), content, new Uint8Array(content.length % 2)]);
};

/** Returns the chunks of a still WebP that hold its picture.
 * @param {Uint8Array} file */
function pictureChunks(file) {
  const parts = [];
  for (let at = 12; at + 8 <= file.length;) {
    const size = new DataView(file.buffer, file.byteOffset + at + 4).getUint32(0, true);
    const next = at + 8 + size + (size % 2);
    if (["VP8 ", "VP8L", "ALPH"].includes(String.fromCharCode(...file.slice(at, at + 4)))) parts.push(file.slice(at, next));
    at = next;
  }
  return parts;
}

/** Returns still WebP images of one size as an animated WebP that repeats (https://developers.google.com/speed/webp/docs/riff_container).
 * @param {{ image: Uint8Array, ms: number }[]} frames @param {number} width @param {number} height */
function animatedWebP(frames, width, height) {
  const size = joinBytes([numberBytes(width - 1, 3), numberBytes(height - 1, 3)]);
  const pictures = frames.map(({ image, ms }) => chunk("ANMF", numberBytes(0, 6), size, numberBytes(ms, 3), numberBytes(2, 1), ...pictureChunks(image))); // 2: not blended
  const header = chunk("VP8X", numberBytes(2, 4), size); // 2: animated
  return chunk("RIFF", "WEBP", header, chunk("ANIM", numberBytes(0, 6)), ...pictures); // 0: repeats forever
}

async function saveLoop() {
  const [source, control] = [run, button("save-loop")];
  const { canvas, context } = canvasOf(LOOP.scale);
  const timing = new Player({ pace: () => 1, show() {}, after() {} });
  timing.load({ ...source, lanes: source.lanes.map((lane) => ({ ...lane, next: 0 })) }, true);
  const [begin, count] = [timing.firstToken(), LOOP.raceMs / LOOP.frameMs];
  const speed = (timing.span - begin) / LOOP.raceMs;
  const frames = [];
  control.disabled = true;
  for (let i = 0; i <= count; i += 1) {
    drawFrame(context, source, i < count ? begin + i * LOOP.frameMs * speed : Infinity, (from, to) => (to - from) / speed);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/webp", LOOP.quality));
    frames.push({ image: new Uint8Array(await blob.arrayBuffer()), ms: i < count ? LOOP.frameMs : LOOP.holdMs });
    setText(control, `Drawing, ${percent(i / count)}`);
  }
  download(new Blob([animatedWebP(frames, canvas.width, canvas.height)], { type: "image/webp" }), fileName(source, "webp"));
  setText(control, "Save loop");
  control.disabled = false;
}

let drawsWebP = null; // whether the browser can write WebP images; one that cannot saves only the still image

/** Shows the buttons for a finished run. */
function drawSaves() {
  if (run.done) drawsWebP ??= document.createElement("canvas").toDataURL("image/webp").startsWith("data:image/webp");
  button("save-image").hidden = !run.done;
  button("save-loop").hidden = !run.done || !drawsWebP;
}
