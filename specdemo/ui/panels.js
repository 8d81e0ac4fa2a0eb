// The panels below the lanes: throughput, drafts kept per step, where the time went, what drafters say of themselves.

const WINDOW_TOKENS = 4; // before so many there is no rate of the moment

function drawPanels() {
  if (!player.over && !player.paused && performance.now() - run.panels < CHART_MS) return;
  run.panels = performance.now();
  chart();
  histogram();
  times();
  told();
}

// What a step adds to the charts.
function follow(lane, line) {
  const { tokens, clock_ms, recent } = line.so_far;
  for (const name of Object.keys(TOLD)) {
    if (isNumber(line.notes[name])) (lane.told[name] ??= []).push([lane.steps.length - 1, line.notes[name]]);
  }
  lane.notes = line.notes;
  const spacing = Math.max(1, (run.start.limit || 200) / 200);
  if (tokens < WINDOW_TOKENS || tokens - lane.lastPoint < spacing) return;
  lane.lastPoint = tokens;
  lane.points.push([clock_ms / 1000, recent]);
}

function chart() {
  const lines = run.lanes.map((lane) => ({ name: lane.name, points: lane.points, of: lane.index }));
  const words = `Throughput of ${run.lanes.map((lane) => lane.name).join(", ")} over device time`;
  plot($("#chart"), { lines, unit: "seconds of device time", words, wide: player.span / 1000 || 1 });
}

function histogram() {
  const lane = run.lanes[run.focus];
  const n = numbers(lane);
  const rates = n.accept_by_position || [];
  const words = rates.map((rate, i) => `${i + 1}: ${percent(rate)}`).join("  ");
  const box = $(".sd-histogram");
  if (lane.remote) {
    const kept = rates.length ? [`Its server kept at position: ${words}. ${lane.remote.source}.`] : [];
    return paragraphs(box, ["How many drafts each pass kept is unknown.", ...kept]);
  }
  if (!lane.index) return paragraphs(box, ["The baseline drafts nothing."]);
  if (!n.drafted) return paragraphs(box, [`Nothing was drafted${run.done ? "" : " yet"}.`]);
  if (!$(".sd-kept")) box.replaceChildren(make("div", "sd-kept"), make("p", "sd-small sd-rates"));
  $(".sd-rates").textContent = `kept at position: ${words}`;
  const told = n.accept_histogram.map((count, kept) => `${count} passes kept ${kept}`).join(", ");
  plot($(".sd-kept"), { bars: n.accept_histogram, words: told, of: lane.index });
}

function paragraphs(box, texts) {
  box.replaceChildren(...texts.map((text) => make("p", "sd-small", text)));
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
  Object.assign(run, { focus: index, panels: 0 });
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
      const learning = lane.soFar.ms_train ? `, ${milliseconds(lane.soFar.ms_train)} ms of it training` : "";
      const share = sum(split[i]) ? `${percent(split[i][0] / sum(split[i]))} draft${learning}` : "";
      row.append(mark(lane), track, make("span", "sd-ms", lane.remote ? "unknown" : sum(split[i]) ? `${(sum(split[i]) / 1000).toFixed(2)} s` : "–"));
      const waited = numbers(lane).waited_share;
      const told = [lane.index && !lane.remote && share, isNumber(waited) && `waited for the processor ${percent(waited)}`];
      row.append(make("small", "", told.filter(Boolean).join(", ")));
      return row;
    })
  );
}

// ---- what a drafter says of itself in the notes of its steps

const TOLD = {
  k: { title: "Draft length k", whole: true, say: (y) => fixed(y, 0) },
  accepted: { title: "Acceptance while it learns", high: 1, percentage: true, say: percent },
  route: { title: "Route", whole: true, say: (y) => fixed(y, 0) },
};

function told() {
  const telling = run.lanes.filter((lane) => Object.keys(lane.told).length);
  $(".sd-told").hidden = !telling.length;
  for (const lane of telling) for (const [name, points] of Object.entries(lane.told)) toldOf(lane, name, points);
}

function toldOf(lane, name, points) {
  const { title, say, ...scale } = TOLD[name];
  const now = `now ${say(points.at(-1)[1])}`;
  const id = `${lane.index} ${name}`;
  const box = $(`[data-told="${id}"]`) ?? $(".sd-told-lanes").appendChild(toldFigure(lane, title, id));
  box.querySelector("small").textContent = [now, ...remarks(lane, name)].join(" · ");
  const words = `${lane.name}: ${title} over ${points.at(-1)[0]} target passes, ${now}`;
  lineChart(box.querySelector("div"), [{ points }], { unit: "target passes", words, ...scale });
}

function toldFigure(lane, title, id) {
  const [box, caption] = [make("figure"), make("figcaption")];
  box.dataset.told = id;
  caption.append(mark(lane), make("b", "", title), make("small", "sd-small"));
  box.append(caption, make("div"));
  return box;
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
  return [`${updates} updates`, `${milliseconds(lane.soFar.ms_train)} ms of training`, ...loss];
}
