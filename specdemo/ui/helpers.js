// Helpers of all views: DOM nodes, number formats, the log reader. Model text enters the page only through textContent.

const SVG = "http://www.w3.org/2000/svg";
const CODE = /^\s*(async def|def|class|import|from \S+ import|function|#include)\b.*[\w:{(]/m; // a prompt that keeps its lines and indentation
const GLYPHS = { "\n": "⏎", "\r": "␍", "\t": "⇥" };

/** @returns {any} an element of the view */
const $ = (selector) => element.querySelector(selector);
const filled = (node, children) => {
  node.append(...children.filter(Boolean));
  return node;
};
/** Returns an HTML element with texts and nodes in it; empty ones are left out. */
const make = (tag, cls = "", ...children) => filled(Object.assign(document.createElement(tag), cls && { className: cls }), children);
const svg = (tag, attributes, ...children) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return filled(node, children);
};
const withData = (node, data) => {
  Object.assign(node.dataset, data);
  return node;
};
// Sets times in ms, which animations of the style sheet use.
const withTimes = (node, times) => {
  for (const [name, ms] of Object.entries(times)) node.style.setProperty(`--${name}`, `${ms}ms`);
  return node;
};
const clickable = (cls, words, pressed) => {
  const node = Object.assign(make("button", cls, words), { type: "button" });
  node.addEventListener("click", pressed);
  return node;
};
// Returns a table. The first cell of a row is its heading. Cells are texts or <td> elements.
const tableOf = (names, rows) => {
  const heading = (text, scope) => Object.assign(make("th", "", text), { scope });
  const cell = (content) => (typeof content === "string" ? make("td", "", content) : content);
  const head = names.length && make("thead", "", make("tr", "", ...names.map((name) => heading(name, "col"))));
  return make("table", "", head, make("tbody", "", ...rows.map(([first, ...cells]) => make("tr", "", heading(first, "row"), ...cells.map(cell)))));
};
// Returns a bar of several parts as an image. parts: name and length of each, and its length in words.
const splitTrack = (parts, longest) => {
  const words = parts.map(([name, , length]) => `${name} ${length}`);
  const track = Object.assign(make("div", "sd-track"), { role: "img", ariaLabel: words.join(", ") });
  parts.forEach(([name, length], i) => (track.appendChild(Object.assign(make("div", `sd-part sd-${name}`), { title: words[i] })).style.width = `${(100 * length) / longest}%`));
  return track;
};
/** Sets the status. `more` is read by screen readers only. */
const setStatus = (text, more = "") => {
  const status = $(".sd-status");
  if (status.textContent !== text + more) status.replaceChildren(text, more && make("span", "sd-visually-hidden", more));
};
const tab = (id) => /** @type {HTMLElement | null} */ (document.querySelector(`[role=tab][data-tab-id="${CSS.escape(id)}"]`));
// Opens the Race tab and sends setup.js an event.
const toRace = (event, detail) => {
  tab("race").click();
  document.dispatchEvent(new CustomEvent(`specdemo:${event}`, { detail }));
};
// Draws the value of a component, JSON, now and whenever it changes.
const drawValue = (show) => {
  const read = () => props.value && show(JSON.parse(props.value));
  watch("value", read);
  read();
};
// Returns a sentence as nodes: the parts between backticks are code.
const coded = (text) => sentence(text).split(/`(.+?)`/).map((part, i) => (i % 2 ? make("code", "", part) : part));
// Shows an error as a sentence, with buttons behind it; hides the last one without a text.
const showAlert = (text, ...buttons) => {
  $(".sd-alert").hidden = !text;
  $(".sd-alert").replaceChildren(...coded(text), ...buttons);
};
const hideMessages = () => {
  showAlert("");
  $(".sd-notes").hidden = true;
  $(".sd-notes").replaceChildren();
};
const addNote = (text) => {
  $(".sd-notes").hidden = false;
  $(".sd-notes").append(make("li", "", ...coded(text)));
};
const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const isNumber = (x) => typeof x === "number" && isFinite(x);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const fixed = (x, digits) => (isNumber(x) ? x.toFixed(digits) : "–");
const percent = (x) => (isNumber(x) ? `${(100 * x).toFixed(0)} %` : "–");
// Keeps each number and its percent sign in one line.
const unbroken = (text) => text.replaceAll(" %", "\u00a0%");
// Returns the remaining time of work in words; empty while too little is done to tell.
const timeLeft = (ms, share) => {
  const seconds = ((ms / share) * (1 - share)) / 1000;
  if (!(share > 0.02) || share >= 1 || ms < 2000) return "";
  return seconds < 90 ? `about ${Math.ceil(seconds)} s left` : `about ${Math.round(seconds / 60)} min left`;
};
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const visible = (text) => (text === "" ? "∅" : text.replace(/[\n\r\t]/g, (c) => GLYPHS[c]).replace(/^ | $/g, "·"));

// Keeps the id of a tab's run in progress, which the page rejoins after a reload or a lost connection. A frame may forbid to store it.
function unfinishedRun(name) {
  const key = `specdemo.${name}`;
  const storage = (() => {
    try {
      return sessionStorage;
    } catch {
      return null;
    }
  })();
  return {
    id: () => storage?.getItem(key) ?? "",
    keep: (run) => storage?.setItem(key, run),
    forget: (run) => storage?.getItem(key) === run && storage.removeItem(key),
  };
}

// Calls `show` with the place of the visitor's run in the queue, which Gradio writes into a hidden component.
function watchPlace(name, show) {
  const box = document.getElementById(`${name}-place`);
  if (!box) return requestAnimationFrame(() => watchPlace(name, show));
  const read = () => {
    const [, at, size, waited, total] = /queue: (\d+)\/(\d+)(?:\D+([\d.]+)\/([\d.]+)s)?/.exec(box.textContent) ?? [];
    const rest = Math.ceil(Number(total) - Number(waited));
    if (at) show(`Waiting: place ${at} of ${size} in line${rest > 0 ? `, about ${rest} s until it is done` : ""}.`);
  };
  return new MutationObserver(read).observe(box, { childList: true, characterData: true, subtree: true });
}

// Returns a function that takes an append-only log and passes its new lines to `receive`. A different first line means a new log:
// `opened` is called first. A shorter log arrived late and is ignored.
function reader(opened, receive) {
  let seen = { head: "", length: 0 };
  return (log) => {
    const head = log.slice(0, log.indexOf("\n"));
    if (head !== seen.head) {
      seen = { head, length: 0 };
      opened();
    } else if (log.length < seen.length) return;
    const end = log.lastIndexOf("\n") + 1;
    const lines = log.slice(seen.length, end).split("\n");
    seen.length = Math.max(end, seen.length);
    for (const line of lines) if (line) receive(JSON.parse(line));
  };
}
