// The lanes: a card with the text of each, coloured by the outcome of its tokens.

function laneNumber({ index }) {
  const words = { role: "img", ariaLabel: index ? `lane ${index}` : "baseline" };
  return withData(Object.assign(make("span", "sd-lane-number", String(index)), words), { series: index });
}

const lossy = (lane) => (lane.exact === false ? [make("em", "sd-lossy", "lossy")] : []);

// The server reports its model with its first answer.
const remoteLabel = ({ server, model }, known = false) => `remote: ${model ? `${model} at ` : ""}${server}${known ? "" : ", draft tokens unknown"}`;

// Returns the full names of the lane's method and model: of the baseline, the target. A server's model is what it is meant to run.
const fullName = ({ details = [], options }) => details.filter(([name]) => name === "Method" || name === "Model").map(([, text]) => text).join(", ") || (options?.model ?? "");

// Returns whether the server reported which tokens were drafted.
const stepsKnown = (lane) => lane.steps.every((line) => line.path.length);

const remote = (lane) => (lane.remote ? [Object.assign(make("em", "sd-remote", remoteLabel(lane.remote)), { title: lane.remote.endpoint })] : []);

function laneCard(lane) {
  const state = make("span", "sd-pill", "idle");
  const result = make("span", "", lane.index ? "" : laneOptions(lane));
  const [number, unit] = [withData(make("b", "", "–"), { metric: "tokens_per_s", ofLane: lane.index }), make("span", "", "tok/s")];
  const header = make(
    "header", "", laneNumber(lane), Object.assign(make("h3", "", lane.name, ...lossy(lane), ...remote(lane)), { title: [fullName(lane), laneOptions(lane)].filter(Boolean).join(", ") }),
    lane.index && Object.assign(make("span", "sd-lane-options", laneOptions(lane)), { title: laneOptions(lane) }),
    make("span", "sd-speed", number, " ", unit), make("span", "sd-lane-result", result, state)
  );
  const text = withData(make("div", CODE.test(run.start.prompt) ? "sd-text sd-code" : "sd-text"), { lane: lane.index });
  Object.assign(text, { dir: "auto", tabIndex: 0, role: "log", ariaLive: "off", ariaLabel: `${lane.name}: output; use the arrow keys to move between tokens` });
  const note = Object.assign(make("p", "sd-note"), { hidden: true });
  const rejectedNote = make("p", "sd-visually-hidden"); // screen readers skip rejected tokens
  text.setAttribute("aria-describedby", (rejectedNote.id = `sd-rejected-${lane.index}`));
  const card = withData(make("article", "sd-lane", header, note, text, rejectedNote, laneDetails(lane)), { series: lane.index });
  $(".sd-lanes").append(card);
  const view = { card, state, number, unit, result, text, note, rejectedNote, scrolledUp: false, hasNewText: false };
  const updateScrolledUp = () => (view.scrolledUp = text.scrollHeight - text.scrollTop - text.clientHeight >= 30);
  // not read at every step, because that would force a layout of the page
  text.addEventListener("scroll", updateScrolledUp, { passive: true });
  return view;
}

// Returns the beginning of a chat's answer that a lane continues.
const begunAnswer = ({ messages = [] }) => (messages.at(-1)?.role === "assistant" ? messages.at(-1).content : "");

// Returns the prompt: a text to continue, or the last message of a chat after the earlier messages, which are folded.
function promptNodes(lane) {
  const messages = (lane.messages || []).slice(0, begunAnswer(lane) ? -1 : undefined);
  if (!messages.length) return [make("span", "sd-prompt", run.start.prompt)];
  const turns = messages.map(({ role, content }) => withData(make("div", "sd-turn", make("b", "sd-role", role), make("span", "sd-prompt", content)), { role }));
  const last = turns.pop();
  if (!turns.length) return [last];
  const history = fold(turns);
  history.head.textContent = `${turns.length} earlier message${turns.length > 1 ? "s" : ""}`;
  return [history.box, last];
}

// Returns a closed list of facts: pairs of a name and a text.
function laneDetails(lane) {
  const details = fold([factList(lane.details ?? [])]);
  details.head.textContent = "Details";
  details.box.hidden = lane.details?.length === 0;
  details.box.style.visibility = lane.details ? "" : "hidden"; // a lane that has not run keeps their place
  return details.box;
}

const factList = (facts) => make("dl", "sd-passes", ...facts.flatMap(([name, text]) => [make("dt", "", name), make("dd", "", text)]));

// Moves nodes into a closed <details> element in place of the first of them.
function fold(nodes) {
  const [head, body] = [make("summary"), make("div", "sd-folded")];
  const box = make("details", "sd-fold", head, body);
  if (nodes[0].parentNode) nodes[0].before(box);
  body.append(...nodes);
  return { box, head, body };
}

// Appends a token, inside a fold between <think> and </think>. Some templates write <think> themselves, so a </think> without
// it folds everything before it.
function placeToken(lane, node, container) {
  (lane.thinking?.body ?? container).append(node);
  if (node.dataset.outcome === "rejected") return lane.thinking ? 0 : lane.answerNodes.push(node);
  lane.recentText += node.textContent;
  if (lane.thinking) lane.thinking.tokens += 1;
  else lane.answerNodes.push(node);
  if (!lane.thinking && lane.recentText.includes("<think>")) {
    let tag = lane.answerNodes.length - 1;
    while (tag > 0 && !joined(lane.answerNodes.slice(tag)).includes("<think>")) tag -= 1;
    startThinking(lane, lane.answerNodes.splice(tag));
  } else if (lane.recentText.includes("</think>")) {
    if (!lane.thinking) startThinking(lane, lane.answerNodes.splice(0));
    lane.thinking.head.textContent = `Thought · ${lane.thinking.tokens} tokens`;
    Object.assign(lane, { thinking: null, recentText: "" });
  } else if (lane.thinking) {
    lane.thinking.head.textContent = `Thinking … ${lane.thinking.tokens} tokens`;
  }
  lane.recentText = lane.recentText.slice(-20);
}

const emitted = (nodes) => nodes.filter((node) => node.dataset.outcome !== "rejected");
const joined = (nodes) => emitted(nodes).map((node) => node.textContent).join("");

function startThinking(lane, nodes) {
  lane.thinking = { ...fold(nodes), tokens: emitted(nodes).length };
  lane.thinking.head.textContent = "Thinking …";
  lane.recentText = "";
}

function laneOptions(lane) {
  if (lane.timing === "requests") return "";
  if (!lane.index) return "one token per forward pass";
  const { model, ...rest } = lane.options || {};
  const set = Object.entries(rest).filter(([name]) => name === "k" || !lane.defaults?.includes(name));
  const brief = (value) => (value.length > 40 ? `${value.length.toLocaleString("en")} characters` : value); // a text
  return set.map(([name, value]) => `${name} = ${brief(value)}`).join(" · ");
}

const drafters = (lanes) => lanes.slice(1).map((lane) => [lane.name, laneOptions(lane)].filter(Boolean).join(", ")).join("; ");
const machine = ({ device, threads, dtype, clock }) => [device, threads && `${threads} thread${threads > 1 ? "s" : ""}`, dtype, clock].filter(Boolean);

function laneNote(lane, text) {
  lane.view.note.hidden = false;
  lane.view.note.replaceChildren(...coded(text));
}

function pill(lane, text, tone = "") {
  setText(lane.view.state, text);
  lane.view.state.dataset.tone = tone;
}

function span(text, outcome, step) {
  const node = withData(make(outcome === "rejected" ? "del" : "span"), { outcome, step });
  if (outcome === "rejected") node.ariaHidden = "true";
  else if (!text.trim()) node.dataset.blank = "";
  node.textContent = text;
  return node;
}

function drawStep(lane, line, container) {
  const at = lane.steps.push(line) - 1;
  line.output_outcomes.forEach((outcome, i) => {
    const [rejected] = outcome === "corrected" ? rejectedDraft(line, at) : [];
    if (rejected) placeToken(lane, rejected, container);
    if (outcome === "forced") $(".sd-forced-key").hidden = false;
    const token = span(line.text[i] ?? "", outcome, at);
    if (rejected) token.dataset.instead = ""; // `del + span` in a style sheet would make every recalculation as slow as the text is long
    lane.outputNodes.push(token);
    placeToken(lane, token, container);
  });
  lane.soFar = line.so_far;
  pill(lane, "generating", "busy");
}

// Shows only the prompt.
function emptyLane(lane) {
  const { text } = lane.view;
  text.replaceChildren(...promptNodes(lane));
  lane.container = text;
  if (lane.messages?.length) text.append((lane.container = make("div", "sd-answer", begunAnswer(lane) && make("span", "sd-prompt", begunAnswer(lane))))); // a speech bubble
  const reads = run.start.lanes.length && run.start.schedule !== "sequential" && !run.end;
  pill(lane, ...(reads ? ["reading", "busy"] : ["idle"]));
  lane.view.rejectedNote.textContent = "";
}

const SPECIAL = /^(<\|[^<>]*\|>|<\/?s>|<(eos|bos|pad|unk|end_of_turn|start_of_turn)>)$/; // names of special tokens

// Returns the first rejected draft token at the end of the path. CSS shows the number of further discarded tokens, so that it
// is not part of the text.
function rejectedDraft(line, step) {
  const first = firstRejected(line);
  if (first < 0) return [];
  const text = line.drafted[first] ?? "";
  if (SPECIAL.test(text)) return []; // a rejected end of the text is no word of it
  const node = span(text.includes("\n") && !text.trim() ? "⏎" : visible(text), "rejected", step); // without the indentation of the next line
  const more = line.draft_outcomes.filter((outcome) => outcome === "rejected" || outcome === "not reached").length - 1;
  if (more) node.dataset.more = `+${more}`;
  return [node];
}

/** Marks the token of a text at which it parts from the baseline's, or the baseline's from it, with the two candidates.
 * @param {any} one @param {any} lane */
function markParting({ outputNodes, view, container }, { index, comparison }) {
  const token = outputNodes[comparison.first_divergence];
  const mark = make("em", "sd-parting", `texts part${run.lanes.length > 2 ? ` (lane ${index})` : ""}: ${comparison.parting}`);
  if (token) token.before(mark);
  else container.append(mark);
  reveal(view.text, mark);
}

// Offers to continue the texts where they were cut. All lanes go on with that of plain decoding, so it must have been cut, too.
function offerToContinue(/** @type {Run} */ { recorded, lanes }) {
  const inChat = lanes[0].messages?.length && lanes.some(({ timing }) => timing === "requests"); // servers cannot
  if (recorded || inChat || lanes[0].finish !== "length") return;
  for (const { view } of lanes) {
    const proceed = clickable("sd-try", "Continue", () => gradioButton("extend").click());
    proceed.title = "All lanes continue the text of plain decoding";
    view.text.querySelector(".sd-cut")?.after(proceed);
    view.hasNewText = true;
  }
  stickToBottom();
}

function drawDone(lane, line, container) {
  lane.finish = line.finish;
  lane.summary = line.summary;
  if (lane.remote) {
    lane.remote = line.remote;
    lane.view.card.querySelector(".sd-remote").textContent = remoteLabel(lane.remote, stepsKnown(lane));
  }
  if (line.note) laneNote(lane, line.note);
  if (line.finish === "length") container.append(make("em", "sd-cut", `Cut at ${run.start.limit ?? line.summary.tokens} tokens`));
  const done = ["done", "good"]; // the bar has the time
  pill(lane, ...({ stop: done, length: done, cancelled: ["stopped", "fair"], error: ["failed", "bad"] }[line.finish] ?? [""]));
  const { drafted, accepted } = numbers(lane);
  if (drafted) lane.view.rejectedNote.textContent = `${drafted - accepted} of ${drafted} draft tokens were rejected or not reached.`;
}
