// The step inspector: what was drafted in one step, with which probabilities, and what became of it. Trees: tree.js.

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
    ` Step ${run.picked.step} of ${lane.steps.length - 1} · ${what} · ${milliseconds(sum(Object.values(line.ms)))} ms (${parts.join(", ")})`
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
