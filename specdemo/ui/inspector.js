// The step inspector, next to the selected token: the draft tokens of one step, their probabilities and outcome. During
// playback it shows the latest step. Trees: tree.js.

/** Selects a step, and one of its output tokens if given. */
function selectStep(lane, step, movePanel = true, token = null) {
  if (!lane.steps.length) return;
  const index = Math.max(0, Math.min(step, lane.steps.length - 1));
  clearSelection();
  const tokens = lane.view.text.querySelectorAll(`[data-step="${index}"]`);
  for (const node of tokens) node.classList.add("sd-selected");
  token?.classList.add("sd-selected-token");
  const shown = token ?? tokens[0];
  const folded = shown?.closest("details");
  if (folded) folded.open = true;
  if (shown && movePanel) reveal(lane.view.text, shown);
  $(".sd-click-hint").hidden = true;
  run.selected = { lane: lane.index, step: index, token: lane.outputNodes.indexOf(token) };
  if (lane.index && lane.index !== run.focus) focusLane(lane.index);
  inspect();
  if (movePanel) placeInspector(lane, shown);
}

/** Selects an output token of a lane by its position in the text. */
function selectToken(lane, index) {
  const token = lane.outputNodes[Math.max(0, Math.min(index, lane.outputNodes.length - 1))];
  if (token) selectStep(lane, Number(token.dataset.step), true, token);
}

function clearSelection() {
  for (const node of element.querySelectorAll(".sd-selected")) node.classList.remove("sd-selected", "sd-selected-token");
}

function reveal(box, node) {
  const [outer, inner] = [box.getBoundingClientRect(), node.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - box.clientHeight / 2;
}

const INSPECTOR = { chain: 610, tree: 860, min: 380 }; // px

// Places the panel next to its lane at the height of the token if there is room, so that the text stays readable; else below
// the text. On a narrow page it is a sheet at the lower end (style.css).
function placeInspector(lane, token) {
  const [box, stage] = [$(".sd-inspector"), $(".sd-stage").getBoundingClientRect()];
  const [card, text] = [lane.view.card.getBoundingClientRect(), lane.view.text.getBoundingClientRect()];
  const tree = box.classList.contains("sd-wide");
  const room = [card.left - stage.left - 8, stage.right - card.right - 8];
  const side = room[1] >= INSPECTOR.min || room[1] >= room[0] ? 1 : 0; // beside the lanes, if possible
  const sideways = !tree && room[side] >= INSPECTOR.min;
  const wide = Math.min(tree ? INSPECTOR.tree : INSPECTOR.chain, sideways ? room[side] : stage.width);
  box.style.width = `${wide}px`;
  if (sideways) {
    const low = Math.max(6, stage.top);
    const spot = (token ?? lane.view.text).getBoundingClientRect();
    box.style.left = `${side ? card.right - stage.left + 8 : room[0] - wide}px`;
    box.style.top = `${Math.max(low, Math.min(spot.top - 70, innerHeight - box.offsetHeight - 8)) - stage.top}px`;
  } else {
    box.style.left = `${Math.max(0, Math.min(card.left - stage.left, stage.width - wide))}px`;
    box.style.top = `${text.bottom - stage.top + 6}px`;
    box.scrollIntoView({ block: "nearest", behavior: reducedMotion() ? "instant" : "smooth" });
  }
  if (getComputedStyle(box).position === "fixed" && token) scrollAboveSheet(box, token);
}

// On a phone the panel is a sheet at the lower end. Scrolls the page so that the token is visible between the bar and the sheet.
function scrollAboveSheet(sheet, token) {
  const [low, high] = [$(".sd-headline").getBoundingClientRect().bottom, sheet.getBoundingClientRect().top];
  const { top, bottom } = token.getBoundingClientRect();
  if (top < low || bottom > high - 8) window.scrollBy({ top: (top + bottom - low - high) / 2, behavior: "instant" });
}

function closeInspector() {
  if (!run.selected) return;
  const { text } = run.lanes[run.selected.lane].view;
  const inside = $(".sd-inspector").contains(document.activeElement);
  clearSelection();
  run.selected = null;
  inspect();
  if (inside) text.focus({ preventScroll: true });
}

// Shows the latest step while the inspector is open.
function followPlayback(lane) {
  if (!player.playing || run.selected?.lane !== lane.index || run.selected.step === lane.steps.length - 1) return;
  selectStep(lane, lane.steps.length - 1, false);
}

function inspect() {
  const box = $(".sd-table");
  $(".sd-inspector").hidden = !run.selected;
  if (!run.selected) {
    $(".sd-step").textContent = HINT;
    $(".sd-step-summary").textContent = "";
    return box.replaceChildren();
  }
  const lane = run.lanes[run.selected.lane];
  const line = lane.steps[run.selected.step];
  const parts = Object.entries(line.ms).map(([name, ms]) => `${name} ${milliseconds(ms)}`);
  const drafted = line.draft_outcomes.filter(Boolean).length;
  const accepted = line.draft_outcomes.filter(isAccepted).length;
  const what = !line.path.length ? "a piece as it arrived, draft tokens unknown" : run.selected.step ? (drafted ? `${accepted}/${drafted} accepted` : `nothing ${line.notes?.unverified ? "verified" : "drafted"}`) : prefill(line);
  $(".sd-step").replaceChildren(
    laneNumber(lane),
    ` Step ${run.selected.step}/${lane.steps.length - 1} · ${what} · ${duration(sum(Object.values(line.ms)))} (${parts.join(", ")})`
  );
  const summary = run.selected.step && drafted ? describeStep(line) : "";
  $(".sd-step-summary").textContent = [summary, leftOut(line), expertsTouched(line), coresTaken(line)].filter(Boolean).join(" ");
  $(".sd-inspector").classList.toggle("sd-wide", isTree(line));
  if (!isTree(line)) return box.replaceChildren(stepTable(line, selectedPosition(lane)));
  const tree = treeView(line, lane.steps[run.selected.step - 1]?.text.at(-1) ?? "");
  box.replaceChildren(tree.panel);
  if (line.top?.length) tree.panel.append(make("p", "sd-small", "Target's most likely tokens after the accepted path: "), topTokens(line.top.at(-1)));
  tree.show();
}

// Returns a sentence on draft tokens of which the drafter was not sure; empty if there were none.
const leftOut = ({ notes }) => (notes?.unverified ? `Unverified: ${fixed(notes.unverified, 0)} of which the drafter was not sure.` : "");

// Returns a sentence on the experts that a pass of a mixture of experts used; empty for other models.
function expertsTouched({ notes }) {
  if (!isNumber(notes?.experts)) return "";
  return `This pass used ${fixed(notes.experts, 1)} of ${fixed(notes.experts_in_all, 0)} experts per layer; one token uses ${fixed(notes.experts_per_token, 0)}.`;
}

// Returns a sentence on a step that waited for other programs; empty for the others.
function coresTaken({ notes }) {
  return isNumber(notes?.waited_ms) ? `Other programs took the cores, and the step waited ${milliseconds(notes.waited_ms)} ms for them.` : "";
}

const prefill = ({ notes }) => (notes.kept ? `prefill, ${notes.kept} prompt tokens reused from the KV cache` : "prefill");

// Returns the position of the selected token among the output tokens of its step; -1 if none is selected.
function selectedPosition(lane) {
  const { token, step } = run.selected;
  return token < 0 ? -1 : token - lane.outputNodes.findIndex((node) => Number(node.dataset.step) === step);
}

const COLUMNS = [["#", ""], ["token", ""], ["draft q", "probability by the drafter"], ["target p", "probability by the target"], ["outcome", ""], ["target's top 3", "most likely tokens of the target, with p"]];

// Returns the draft tokens of a chain and the target's token as a table. selected: position of an output token to mark.
function stepTable(line, selected = -1) {
  const top = line.top ?? []; // for each slot of the path; traces of earlier versions have none
  const rows = line.draft_outcomes.flatMap((outcome, i) => {
    if (!outcome) return [];
    const p = outcome === "not reached" ? null : line.target_probs[i]; // after a rejection the target's p belongs to another text
    const cells = tokenCells(i + 1, line.drafted[i], line.draft_probs[i], p, OUTCOME_LABELS[outcome], top[i]);
    return [{ cells, outcome, current: isAccepted(outcome) && i === selected }];
  });
  const last = line.output_outcomes.at(-1);
  if (last && !isAccepted(last)) {
    const p = top.at(-1)?.find(([, , isOutput]) => isOutput)?.[1];
    const entries = line.draft_outcomes[top.length - 1] ? null : top.at(-1); // else listed at the rejected token
    const cells = tokenCells("→", line.text.at(-1), null, p, TARGET_TOKEN_LABELS[last], entries);
    rows.push({ cells, outcome: last, current: selected === line.output_outcomes.length - 1 });
  }
  const columns = COLUMNS.slice(0, top.length ? undefined : -1);
  const table = tableOf(columns.map(([name]) => name), rows.map(({ cells }) => cells.slice(0, columns.length)));
  columns.forEach(([, title], i) => (table.tHead.rows[0].cells[i].title = title));
  rows.forEach(({ outcome, current }, i) => {
    const row = withData(table.tBodies[0].rows[i], { outcome: outcome.replace(" ", "-") });
    if (current) row.ariaCurrent = "true";
  });
  return table;
}

// Returns the target's most likely tokens with p, the output token in bold.
function topTokens(entries) {
  const entry = ([text, p, isOutput]) => make(isOutput ? "b" : "span", "", make("code", "", visible(text)), ` ${fixed(p, 2)}`);
  return make("span", "sd-top-tokens", ...entries.map(entry));
}

function tokenCells(name, text, q, p, label, entries) {
  const token = make("td", "", make("code", "", visible(text ?? "")));
  return [String(name), token, probability(q), probability(p), make("td", "sd-outcome", label), make("td", "", entries && topTokens(entries))];
}

function probability(value) {
  if (!isNumber(value)) return make("td", "sd-prob", "–");
  const fill = make("span");
  fill.style.width = `${100 * Math.min(1, Math.max(0, value))}%`;
  return make("td", "sd-prob", make("span", "sd-meter", fill), value.toFixed(2));
}

const selectNeighbour = (by) => run.selected && selectStep(run.lanes[run.selected.lane], run.selected.step + by);

function onKey(event) {
  const box = event.target.closest?.("[data-lane].sd-text");
  const lane = box && run.lanes[Number(box.dataset.lane)];
  if (!lane?.steps.length) return;
  const now = run.selected?.lane === lane.index ? currentToken(lane) : -1;
  const last = lane.outputNodes.length - 1;
  const to = { ArrowRight: now + 1, ArrowLeft: now < 0 ? last : now - 1, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  selectToken(lane, to);
}

// Returns the selected token, or the first of the selected step.
function currentToken(lane) {
  const { token, step } = run.selected;
  return token >= 0 ? token : lane.outputNodes.findIndex((node) => Number(node.dataset.step) === step);
}

function onClick(event) {
  const token = event.target.closest?.("[data-step]");
  const box = token?.closest("[data-lane].sd-text");
  if (!box) return;
  const lane = run.lanes[Number(box.dataset.lane)];
  selectStep(lane, Number(token.dataset.step), true, lane.outputNodes.includes(token) ? token : null);
}
