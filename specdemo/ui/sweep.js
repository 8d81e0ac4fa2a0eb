// Draws the text of a sweep (lines of JSON, see sweep.py) into the skeleton of sweep.html, or of a page like it; kit.js
// stands before it. The curves are Python's; the result on show stays, faint, until the next one comes.

const SHARES = ["plain", "speculative"];

let came = false; // this text's result

const readLog = reader(clear, (line) => actions[line.type]?.(line));
const actions = { start: started, loading, result: shown, stopping, stopped, error: failed, note: noted };

function clear() {
  came = false;
  $(".sd-alert").hidden = true;
  $(".sd-notes").hidden = true;
  $(".sd-notes").replaceChildren();
}

function started(line) {
  busy(true);
  $(".sd-loading").removeAttribute("value"); // nobody knows yet how far
  say(`Starting ${line.name}.`);
}

function loading(line) {
  $(".sd-loading").value = line.share;
  say(`${percent(line.share)} done: ${line.text}.`);
}

function stopping() {
  say("Stopping after the step in hand.");
}

function stopped() {
  busy(false);
  say(came ? "Stopped. The numbers are those of the finished repeats." : "Stopped before a repeat was finished.");
}

function failed(line) {
  $(".sd-alert").hidden = false;
  $(".sd-alert").textContent = sentence(line.text);
  busy(false);
  say("Nothing was measured.");
}

function noted(line) {
  $(".sd-notes").hidden = false;
  $(".sd-notes").append(make("li", "", sentence(line.text)));
}

function shown(line) {
  came = true;
  busy(false);
  $(".sd-badge").hidden = !line.recorded;
  $(".sd-badge").textContent = ["recorded", ...line.where].join(" · ");
  $(".sd-numbers").hidden = false;
  $(".sd-conditions").textContent = line.conditions;
  $(".sd-table").replaceChildren(table(line));
  $(".sd-remarks").hidden = !line.remarks.length;
  $(".sd-remarks").replaceChildren(...line.remarks.map((text) => make("li", "", text)));
  say(`${line.recorded ? "Opened" : "Finished"}: ${line.verdict}`);
}

function busy(on) {
  $(".sd-sweep").toggleAttribute("data-busy", on);
  $(".sd-loading").hidden = !on;
}

function say(text) {
  $(".sd-status").textContent = text;
}

function table({ rows }) {
  const names = [...new Set(rows.flatMap(Object.keys))];
  const drawn = make("table");
  const head = make("tr");
  for (const name of names) head.append(heading(name, "col"));
  drawn.append(make("thead"), make("tbody"));
  drawn.tHead.append(head);
  for (const row of rows) {
    const line = make("tr");
    names.forEach((name, i) => line.append(i ? cell(name, row[name]) : heading(visible(String(row[name] ?? "–")), "row")));
    drawn.tBodies[0].append(line);
  }
  return drawn;
}

function heading(text, scope) {
  const drawn = make("th", "", text);
  drawn.scope = scope;
  return drawn;
}

function cell(name, value) {
  if (!isNumber(value?.value)) return make("td", "", words(name, value));
  const drawn = make("td", "", fixed(value.value, value.value < 10 ? 2 : 1));
  if (value.interval) drawn.append(" ", make("small", "sd-small", `[${value.interval}]`));
  drawn.dataset.value = value.value;
  return drawn;
}

function words(name, value) {
  if (name === "accepted" && isNumber(value)) return percent(value);
  if (SHARES.includes(name) && isNumber(value)) return `${fixed(100 * value, 1)} %`;
  if (isNumber(value)) return Number.isInteger(value) ? String(value) : fixed(value, 2);
  return value == null ? "–" : String(value);
}

// A chart that was drawn while another tab was open has the wrong width.
new ResizeObserver(() => {
  const plot = element.querySelector(".js-plotly-plot");
  if (window.Plotly && plot?.clientWidth) window.Plotly.Plots.resize(plot);
}).observe($(".sd-sweep"));
const read = () => readLog(props.value || "");
watch("value", read);
read(); // what a link was refused came before this tab was drawn
