// The step inspector, at the token it is about: what was drafted in one step, with which probabilities, and what became of
// it. It follows what is played. Trees: tree.js.

function pick(lane, step, place = true) {
  if (!lane.steps.length) return;
  const index = Math.max(0, Math.min(step, lane.steps.length - 1));
  for (const node of element.querySelectorAll(".sd-picked")) node.classList.remove("sd-picked");
  const tokens = lane.view.text.querySelectorAll(`[data-step="${index}"]`);
  for (const node of tokens) node.classList.add("sd-picked");
  const folded = tokens[0]?.closest("details");
  if (folded) folded.open = true;
  if (tokens[0] && place) reveal(lane.view.text, tokens[0]);
  run.picked = { lane: lane.index, step: index };
  if (lane.index && lane.index !== run.focus) look(lane.index);
  inspect();
  if (place) placeInspector(lane, tokens[0]);
}

function reveal(box, node) {
  const [outer, inner] = [box.getBoundingClientRect(), node.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - box.clientHeight / 2;
}

const INSPECTOR = { chain: 470, tree: 860, least: 380 }; // px

// Beside its lane, at the height of the token, where the lane's text can still be read and clicked; else below the text. On
// a narrow page a sheet at its lower end (style.css).
function placeInspector(lane, token) {
  const [box, stage] = [$(".sd-inspector"), $(".sd-stage").getBoundingClientRect()];
  const [card, text] = [lane.view.card.getBoundingClientRect(), lane.view.text.getBoundingClientRect()];
  const tree = box.classList.contains("sd-wide");
  const room = [card.left - stage.left - 8, stage.right - card.right - 8];
  const side = room[0] >= room[1] ? 0 : 1;
  const beside = !tree && room[side] >= INSPECTOR.least;
  const wide = Math.min(tree ? INSPECTOR.tree : INSPECTOR.chain, beside ? room[side] : stage.width);
  box.style.width = `${wide}px`;
  if (beside) {
    const low = Math.max($(".sd-transport").getBoundingClientRect().bottom + 6, stage.top);
    const spot = (token ?? lane.view.text).getBoundingClientRect();
    box.style.left = `${side ? card.right - stage.left + 8 : room[0] - wide}px`;
    box.style.top = `${Math.max(low, Math.min(spot.top - 70, innerHeight - box.offsetHeight - 8)) - stage.top}px`;
  } else {
    box.style.left = `${Math.max(0, Math.min(card.left - stage.left, stage.width - wide))}px`;
    box.style.top = `${text.bottom - stage.top + 6}px`;
    box.scrollIntoView({ block: "nearest", behavior: calm() ? "instant" : "smooth" });
  }
}

function closeInspector() {
  if (!run.picked) return;
  const { text } = run.lanes[run.picked.lane].view;
  const inside = $(".sd-inspector").contains(document.activeElement);
  for (const node of element.querySelectorAll(".sd-picked")) node.classList.remove("sd-picked");
  run.picked = null;
  inspect();
  if (inside) text.focus({ preventScroll: true });
}

// While it is open it shows the step that was drawn last.
function followPlayback(lane) {
  if (!player.playing || run.picked?.lane !== lane.index || run.picked.step === lane.steps.length - 1) return;
  pick(lane, lane.steps.length - 1, false);
}

function inspect() {
  const box = $(".sd-table");
  $(".sd-inspector").hidden = !run.picked;
  if (!run.picked) {
    $(".sd-step").textContent = HINT;
    $(".sd-words").textContent = "";
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
  $(".sd-words").textContent = lane.remote || !run.picked.step || !drafted ? "" : verdictWords(line);
  $(".sd-inspector").classList.toggle("sd-wide", isTree(line));
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

/** Another step of the lane that is inspected. */
function walkSteps(by) {
  if (run.picked) pick(run.lanes[run.picked.lane], run.picked.step + by);
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
  const token = event.target.closest?.("[data-step]");
  const box = token?.closest("[data-lane].sd-text");
  if (box) pick(run.lanes[Number(box.dataset.lane)], Number(token.dataset.step));
}
