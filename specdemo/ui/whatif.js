// Draws one prediction (JSON, see whatif.py) into whatif.html. Loaded after helpers.js and chart.js.

const times = (x) => `${fixed(x, 2)}×`;
const interval = ({ low, high }) => (isNumber(low) ? `${fixed(low, 2)} to ${fixed(high, 2)}` : "–");
const duration = (ms) => (ms < 1 ? `${fixed(1000 * ms, 0)} µs` : `${fixed(ms, ms < 10 ? 2 : 1)} ms`);
const rounded = (x) => Number(x.toPrecision(3)).toLocaleString("en");
const line = (points) => ({ series: 1, points: points.map(([x, { value }]) => [x, value]), band: points.filter(([, { low }]) => isNumber(low)).map(([x, { low, high }]) => [x, low, high]) });

function fill(name, big, small = "", below = "", tone = "") {
  const tile = $(`[data-tile="${name}"]`);
  const number = tile.querySelector("b");
  number.textContent = big;
  number.dataset.tone = tone;
  if (small) tile.querySelector("small").textContent = small;
  if (below) tile.querySelector("p").textContent = below;
}

function show(prediction) {
  showAlert(prediction.error ?? "");
  $(".sd-prediction").toggleAttribute("data-outdated", Boolean(prediction.error));
  if (prediction.error) return;
  $(".sd-prediction").hidden = false;
  const row = prediction.rows.find(({ k }) => k === prediction.at.k);
  drawTiles(prediction, row);
  $(".sd-bottleneck").textContent = prediction.sentence;
  drawOverK(prediction, row);
  drawOverBatch(prediction);
  drawSteps(prediction, row);
  $(".sd-table").replaceChildren(numbers(prediction));
  $(".sd-facts").textContent = [prediction.where, prediction.from, ...prediction.notes].join(" · ");
}

function drawTiles({ plain_tokens_per_s, best_k, recorded_k, memory_gb, room_gb }, row) {
  const { value, low, high } = row.speedup;
  const [word, tone] = low > 1 ? ["▲ faster", "gain"] : high < 1 ? ["▼ slower", "bad"] : ["no clear difference", ""];
  fill("speedup", times(value), `${interval(row.speedup)}, ${word}`, "", tone);
  fill("rate", rounded(row.tokens_per_s.value), "of the whole batch", `plain decoding: ${rounded(plain_tokens_per_s.value)}`);
  fill("per-pass", fixed(row.tokens.value, 2));
  fill("best", best_k ? `k = ${best_k}` : "off", best_k ? " " : "plain decoding is faster", best_k && recorded_k && best_k > recorded_k ? `extrapolated beyond k = ${recorded_k}` : "on this machine at this load");
  fill("memory", `${rounded(memory_gb)} GB`, `of ${rounded(room_gb)}${memory_gb > room_gb ? ": too large" : ""}`, "", memory_gb > room_gb ? "bad" : "");
}

function drawOverK({ rows, at, known }, row) {
  const points = rows.map(({ k, speedup }) => [k, speedup]);
  const dots = [{ x: at.k, y: row.speedup.value, name: times(row.speedup.value) }];
  if (known) dots.push({ x: known.k, y: known.speedup, name: `${known.source} ${times(known.speedup)}` });
  const label = `Speed-up by draft length${known ? `, ${dots[1].name} with k = ${known.k}` : ""}: ${rows.map(({ k, speedup }) => `${k}: ${times(speedup.value)}`).join(", ")}`;
  plot($(".sd-over-k"), { lines: [line(points)], dots, unit: "draft length k", suffix: "×", level: 1, label, wide: 16 });
}

function drawOverBatch({ loads, at }) {
  const points = loads.map(({ batch, speedup }) => [batch, speedup]);
  const here = loads.find(({ batch }) => batch === at.batch);
  const dots = here ? [{ x: here.batch, y: here.speedup.value, name: `${times(here.speedup.value)} ${here.k ? `k = ${here.k}` : "off"}` }] : [];
  const batches = loads.map(({ batch, k, speedup, fits }) => `${batch}: ${times(speedup.value)} ${k ? `with k = ${k}` : "at best"}${fits ? "" : ", too large for its memory"}`);
  plot($(".sd-over-batch"), { lines: [line(points)], dots, unit: "batch size", suffix: "×", level: 1, label: `Speed-up by batch size: ${batches.join("; ")}`, doubling: true });
}

const partsOf = ({ draft_ms, verify_ms, other_ms }) => [["draft", draft_ms], ["verify", verify_ms], ["other", other_ms]];

function drawSteps({ plain_ms }, row) {
  const verify_ms = row.verify_ms / row.v; // of a plain step
  const plain = { draft_ms: 0, verify_ms, other_ms: plain_ms - verify_ms };
  const all = [["Plain, per token", partsOf(plain), 1], [`k = ${row.k}, per token`, partsOf(row), row.tokens.value]];
  const each = all.map(([, parts, tokens]) => sum(parts.map(([, ms]) => ms)) / tokens);
  $(".sd-times").replaceChildren(
    ...all.map(([name, parts, tokens], i) => {
      const box = make("div", "sd-split");
      const track = parts.map(([part, ms]) => [part, ms / tokens, duration(ms / tokens)]);
      box.append(make("span", "sd-row-label", name), splitTrack(track, Math.max(...each)), make("span", "sd-ms", duration(each[i])));
      return box;
    })
  );
}

function numbers({ rows }) {
  const names = ["k", "speed-up", "95 % interval", "tokens/s", "mean accepted length", "draft", "verification", "bottleneck"];
  const cells = ({ k, speedup, tokens_per_s, tokens, draft_ms, verify_ms, limit }) =>
    [String(k), times(speedup.value), interval(speedup), rounded(tokens_per_s.value), fixed(tokens.value, 2), duration(draft_ms), duration(verify_ms), limit];
  return tableOf(names, rows.map(cells));
}

drawValue(show);
