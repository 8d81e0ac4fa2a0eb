// Draws one prediction (JSON, see whatif.py) into the skeleton of whatif.html; kit.js and chart.js stand before it.

const times = (x) => `${fixed(x, 2)}×`;
const speedTone = { faster: ["▲ faster", "gain"], slower: ["▼ slower", "bad"] };
const duration = (ms) => (ms < 1 ? `${fixed(1000 * ms, 0)} µs` : `${fixed(ms, ms < 10 ? 2 : 1)} ms`);
const many = (x) => Number(x.toPrecision(3)).toLocaleString("en");
const line = (points) => ({ of: 1, points: points.map(([x, [value]]) => [x, value]), band: points.filter(([, [, low]]) => isNumber(low)).map(([x, [, low, high]]) => [x, low, high]) });

function fill(name, big, small = "", below = "", tone = "") {
  const tile = $(`[data-tile="${name}"]`);
  const number = tile.querySelector("b");
  number.textContent = big;
  number.dataset.tone = tone;
  if (small) tile.querySelector("small").textContent = small;
  if (below) tile.querySelector("p").textContent = below;
}

function show(told) {
  $(".sd-alert").hidden = !told.error;
  $(".sd-foretold").toggleAttribute("data-old", Boolean(told.error));
  if (told.error) return void ($(".sd-alert").textContent = sentence(told.error));
  $(".sd-foretold").hidden = false;
  const row = told.rows.find(({ k }) => k === told.at.k);
  tiles(told, row);
  $(".sd-limits").textContent = told.sentence;
  overK(told, row);
  overBatch(told);
  steps(told, row);
  $(".sd-table").replaceChildren(numbers(told));
  $(".sd-facts").textContent = [told.where, told.from, ...told.notes].join(" · ");
}

function tiles({ plain, best, recorded, word, interval, memory_gb, room_gb }, row) {
  const [arrow, tone] = speedTone[word] ?? ["no clear difference", ""];
  fill("speedup", times(row.speedup[0]), [interval, arrow].filter(Boolean).join(", "), "", tone);
  fill("rate", many(row.tokens_per_s[0]), "of all texts together", `plain decoding: ${many(plain.tokens_per_s)}`);
  fill("per-pass", fixed(row.tokens, 2));
  fill("best", best ? `k = ${best}` : "off", best ? " " : "plain decoding is faster", best && recorded && best > recorded ? `extrapolated beyond k = ${recorded}` : best ? "for this machine and load" : "at this machine and load");
  fill("memory", `${many(memory_gb)} GB`, `of ${many(room_gb)}${memory_gb > room_gb ? ": too much" : ""}`, "", memory_gb > room_gb ? "bad" : "");
}

function overK({ rows, at, measured }, row) {
  const points = rows.map(({ k, speedup }) => [k, speedup]);
  const dots = [{ x: at.k, y: row.speedup[0], name: times(row.speedup[0]) }];
  if (measured) dots.push({ x: measured.k, y: measured.speedup, name: `the run itself ${times(measured.speedup)}` });
  const words = `Speed-up over the draft length${measured ? `, ${dots[1].name} with k = ${measured.k}` : ""}: ${rows.map(({ k, speedup }) => `${k}: ${times(speedup[0])}`).join(", ")}`;
  plot($(".sd-over-k"), { lines: [line(points)], dots, unit: "draft length k", level: 1, words, wide: 16 });
}

function overBatch({ loads, at }) {
  const points = loads.map(({ batch, speedup }) => [batch, speedup]);
  const here = loads.find(({ batch }) => batch === at.batch);
  const dots = here ? [{ x: here.batch, y: here.speedup[0], name: `${times(here.speedup[0])} ${here.k ? `k = ${here.k}` : "off"}` }] : [];
  const told = loads.map(({ batch, k, speedup, fits }) => `${batch}: ${times(speedup[0])} ${k ? `with k = ${k}` : "at best"}${fits ? "" : ", too large for its memory"}`);
  plot($(".sd-over-batch"), { lines: [line(points)], dots, unit: "texts at once", level: 1, words: `Speed-up over the batch size: ${told.join("; ")}`, doubling: true });
}

function steps({ plain }, row) {
  const all = [["Plain, a token", plain.parts, 1], [`k = ${row.k}, a token`, row.ms, row.tokens]];
  const each = all.map(([, ms, tokens]) => sum(Object.values(ms)) / tokens);
  $(".sd-times").replaceChildren(
    ...all.map(([name, ms, tokens], i) => {
      const box = make("div", "sd-split");
      const track = make("div", "sd-track");
      for (const [part, length] of Object.entries(ms)) {
        const piece = make("div", `sd-part sd-${part}`);
        piece.style.width = `${(100 * length) / tokens / Math.max(...each)}%`;
        track.append(piece);
      }
      track.setAttribute("role", "img");
      track.setAttribute("aria-label", Object.entries(ms).map(([part, length]) => `${part} ${duration(length / tokens)}`).join(", "));
      box.append(make("span", "sd-whose", name), track, make("span", "sd-ms", duration(each[i])));
      return box;
    })
  );
}

function numbers({ rows }) {
  const drawn = make("table");
  const head = drawn.createTHead().insertRow();
  for (const name of ["k", "speed-up", "95 % interval", "tokens/s", "tokens / pass", "draft", "target pass", "limited by"]) {
    const cell = make("th", "", name);
    cell.scope = "col";
    head.append(cell);
  }
  const body = drawn.createTBody();
  for (const { k, speedup, tokens_per_s, tokens, ms, limit } of rows) {
    const [value, low, high] = speedup;
    const cells = [times(value), isNumber(low) ? `${fixed(low, 2)} to ${fixed(high, 2)}` : "–", many(tokens_per_s[0]), fixed(tokens, 2), duration(ms.draft), duration(ms.verify), limit];
    const name = make("th", "", String(k));
    name.scope = "row";
    body.insertRow().append(name, ...cells.map((text) => make("td", "", text)));
  }
  return drawn;
}

const read = () => props.value && show(JSON.parse(props.value));
watch("value", read);
read();
