// Draws one prediction (JSON, see whatif.py) into whatif.html. Loaded after helpers.js and chart.js.

const times = (x) => `${fixed(x, 2)}×`;
const speedTone = { faster: ["▲ faster", "gain"], slower: ["▼ slower", "bad"] };
const duration = (ms) => (ms < 1 ? `${fixed(1000 * ms, 0)} µs` : `${fixed(ms, ms < 10 ? 2 : 1)} ms`);
const rounded = (x) => Number(x.toPrecision(3)).toLocaleString("en");
const line = (points) => ({ series: 1, points: points.map(([x, [value]]) => [x, value]), band: points.filter(([, [, low]]) => isNumber(low)).map(([x, [, low, high]]) => [x, low, high]) });

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

function drawTiles({ plain, best, recorded, word, interval, memory_gb, room_gb }, row) {
  const [arrow, tone] = speedTone[word] ?? ["no clear difference", ""];
  fill("speedup", times(row.speedup[0]), [interval, arrow].filter(Boolean).join(", "), "", tone);
  fill("rate", rounded(row.tokens_per_s[0]), "of the whole batch", `plain decoding: ${rounded(plain.tokens_per_s)}`);
  fill("per-pass", fixed(row.tokens, 2));
  fill("best", best ? `k = ${best}` : "off", best ? " " : "plain decoding is faster", best && recorded && best > recorded ? `extrapolated beyond k = ${recorded}` : "on this machine at this load");
  fill("memory", `${rounded(memory_gb)} GB`, `of ${rounded(room_gb)}${memory_gb > room_gb ? ": too large" : ""}`, "", memory_gb > room_gb ? "bad" : "");
}

function drawOverK({ rows, at, measured }, row) {
  const points = rows.map(({ k, speedup }) => [k, speedup]);
  const dots = [{ x: at.k, y: row.speedup[0], name: times(row.speedup[0]) }];
  if (measured) dots.push({ x: measured.k, y: measured.speedup, name: `${measured.source} ${times(measured.speedup)}` });
  const label = `Speed-up by draft length${measured ? `, ${dots[1].name} with k = ${measured.k}` : ""}: ${rows.map(({ k, speedup }) => `${k}: ${times(speedup[0])}`).join(", ")}`;
  plot($(".sd-over-k"), { lines: [line(points)], dots, unit: "draft length k", suffix: "×", level: 1, label, wide: 16 });
}

function drawOverBatch({ loads, at }) {
  const points = loads.map(({ batch, speedup }) => [batch, speedup]);
  const here = loads.find(({ batch }) => batch === at.batch);
  const dots = here ? [{ x: here.batch, y: here.speedup[0], name: `${times(here.speedup[0])} ${here.k ? `k = ${here.k}` : "off"}` }] : [];
  const batches = loads.map(({ batch, k, speedup, fits }) => `${batch}: ${times(speedup[0])} ${k ? `with k = ${k}` : "at best"}${fits ? "" : ", too large for its memory"}`);
  plot($(".sd-over-batch"), { lines: [line(points)], dots, unit: "batch size", suffix: "×", level: 1, label: `Speed-up by batch size: ${batches.join("; ")}`, doubling: true });
}

function drawSteps({ plain }, row) {
  const all = [["Plain, per token", plain.parts, 1], [`k = ${row.k}, per token`, row.ms, row.tokens]];
  const each = all.map(([, ms, tokens]) => sum(Object.values(ms)) / tokens);
  $(".sd-times").replaceChildren(
    ...all.map(([name, ms, tokens], i) => {
      const box = make("div", "sd-split");
      const parts = Object.entries(ms).map(([part, length]) => [part, length / tokens, duration(length / tokens)]);
      box.append(make("span", "sd-row-label", name), splitTrack(parts, Math.max(...each)), make("span", "sd-ms", duration(each[i])));
      return box;
    })
  );
}

function numbers({ rows }) {
  const names = ["k", "speed-up", "95 % interval", "tokens/s", "mean accepted length", "draft", "verification", "bottleneck"];
  const cells = ({ k, speedup: [value, low, high], tokens_per_s, tokens, ms, limit }) => {
    const interval = isNumber(low) ? `${fixed(low, 2)} to ${fixed(high, 2)}` : "–";
    return [String(k), times(value), interval, rounded(tokens_per_s[0]), fixed(tokens, 2), duration(ms.draft), duration(ms.verify), limit];
  };
  return tableOf(names, rows.map(cells));
}

drawValue(show);
