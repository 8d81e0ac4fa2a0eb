// The lanes: a card with the text of each, coloured by the fate of its tokens, and a bar in the race.

// A prompt that is code: its lines stay whole and its indents stand below each other.
const CODE = /^\s*(async def|def|class|import|from \S+ import|function|#include)\b.*[\w:{(]/m;

function mark(lane) {
  const node = make("span", "sd-mark", lane.index ? String(lane.index) : "0");
  node.dataset.of = lane.index;
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", lane.index ? `lane ${lane.index}` : "baseline");
  return node;
}

const lossy = (lane) => (lane.exact === false ? [make("em", "sd-lossy", "lossy")] : []);

// The model is the one that the server reports, known once it has answered.
const remoteWords = ({ server, model }) => `remote: ${model ? `${model} at ` : ""}${server}, what was drafted is unknown`;

function remote(lane) {
  if (!lane.remote) return [];
  const node = make("em", "sd-remote", remoteWords(lane.remote));
  node.title = lane.remote.endpoint;
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
  const now = make("span", "sd-state");
  now.append(state, speed);
  header.append(mark(lane), title, make("span", "sd-how", how(lane)), now);
  title.append(...lossy(lane), ...remote(lane));
  const text = make("div", "sd-text");
  text.dataset.lane = lane.index;
  text.dir = "auto";
  text.tabIndex = 0;
  text.setAttribute("role", "log");
  text.setAttribute("aria-live", "off");
  text.setAttribute("aria-label", `${lane.name}: text; arrow keys step through the decoding steps`);
  text.classList.toggle("sd-code", CODE.test(run.start.prompt));
  const note = make("p", "sd-note");
  note.hidden = true;
  const refused = make("p", "sd-unheard"); // what is struck through is not read out
  text.setAttribute("aria-describedby", (refused.id = `sd-refused-${lane.index}`));
  card.append(header, note, text, refused);
  $(".sd-lanes").append(card);
  const view = { card, state, number, unit, text, note, refused, loose: false, grown: false };
  const read = () => (view.loose = text.scrollHeight - text.scrollTop - text.clientHeight >= 30);
  text.addEventListener("scroll", read, { passive: true }); // asked here and not at every step, which would lay out the page
  return view;
}

// What the lane was asked: a text to go on with, or the last message of its chat behind a fold of those before it.
function asked(lane) {
  const said = lane.messages || [];
  if (!said.length) return [span(run.start.prompt, "prompt", -1)];
  const turns = said.map(({ role, content }) => {
    const turn = make("div", "sd-turn");
    turn.dataset.role = role;
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
  const set = Object.entries(rest).filter(([name]) => !lane.defaults?.includes(name));
  return set.map(([name, value]) => `${name} = ${value}`).join(" · ");
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
  const node = make(kind === "rejected" ? "del" : "span");
  if (kind === "rejected") node.ariaHidden = "true";
  node.dataset.kind = kind;
  if (step >= 0) node.dataset.step = step;
  node.textContent = text;
  return node;
}

function drawStep(lane, line, into) {
  const at = lane.steps.push(line) - 1;
  line.kinds.forEach((kind, i) => {
    if (kind === "corrected") for (const node of refusedDraft(line, at)) put(lane, node, into);
    const token = span(line.text[i] ?? "", kind, at);
    lane.given.push(token);
    put(lane, token, into);
  });
  lane.soFar = line.so_far;
  pill(lane, "generating", "busy");
}

// Nothing but what the lane was asked.
function emptyLane(lane) {
  const { text } = lane.view;
  text.replaceChildren(...asked(lane));
  lane.into = text;
  if (lane.messages?.length) text.append((lane.into = make("div", "sd-answer"))); // as chats show it, in a bubble
  pill(lane, "idle");
  lane.view.refused.textContent = "";
}

// The first draft refused where the path ended, struck through; how many more fell with it is said by CSS, so it is no
// text.
function refusedDraft(line, step) {
  const end = line.path.at(-1);
  const first = line.fates.findIndex((fate, i) => fate === "rejected" && line.parents[i] === end);
  if (first < 0) return [];
  const node = span(visible(line.drafted[first] ?? ""), "rejected", step);
  const more = line.fates.filter((fate) => fate === "rejected" || fate === "not reached").length - 1;
  if (more) node.dataset.more = `+${more}`;
  return [node];
}

function drawDone(lane, line) {
  lane.finish = line.finish;
  lane.summary = line.summary;
  if (lane.remote) {
    lane.remote = line.remote;
    lane.view.card.querySelector(".sd-remote").textContent = remoteWords(lane.remote);
  }
  if (line.note) laneNote(lane, line.note);
  const seconds = `${((lane.soFar.clock_ms ?? 0) / 1000).toFixed(2)} s`;
  const words = { stop: [`done in ${seconds}`, "good"], length: [`done in ${seconds}`, "good"] };
  words.cancelled = [`stopped at ${seconds}`, "fair"];
  words.error = ["failed", "bad"];
  pill(lane, ...(words[line.finish] || ["", ""]));
  const { drafted, accepted } = numbers(lane);
  if (drafted) lane.view.refused.textContent = `${drafted - accepted} of ${drafted} drafted tokens were refused.`;
}
