// Draws the log of a sweep or a test (lines of JSON, see sweep.py) into result.html or pays.html. Loaded after helpers.js, chart.js and
// pays.js. The last result disappears when a run starts.

const SHARE_COLUMNS = ["plain", "speculative"];
const COLUMN_LABELS = { time: "time (s)", running: "running requests", place: "position", accepted: "acceptance rate", "tokens/pass": "mean accepted length" };

let begun = 0; // time of the first progress
let run = ""; // id of this log
const unfinished = unfinishedRun(props.name);

const readLog = reader(hideMessages, (line) => actions[line.type]?.(line));
const actions = { run: (line) => (run = line.run), start: started, loading, result: shown, stopped, error: failed, note: ({ text }) => addNote(text), stopping: () => setStatus("Stopping after the current step.") };

function started(line) {
  unfinished.keep(run);
  setBusy(true);
  begun = 0;
  hideResult();
  $(".sd-loading").removeAttribute("value"); // indeterminate
  setStatus(`Starting ${line.name}.`);
}

watchPlace(props.name, (text) => $(".sd-sweep").hasAttribute("data-busy") && setStatus(text));

function hideResult() {
  for (const part of [".sd-badge", ".sd-result-chart", ".sd-numbers", ".sd-stages", ".sd-methods", ".sd-details"]) if ($(part)) $(part).hidden = true;
}

function loading(line) {
  $(".sd-loading").value = line.share;
  begun ||= performance.now();
  const left = timeLeft(performance.now() - begun, line.share);
  const timed = / left$/.test(line.text);
  const done = line.share && !timed ? `${percent(line.share)} done: ${line.text}.` : `${sentence(line.text)}.`;
  setStatus([done, !timed && left && `${sentence(left)}.`].filter(Boolean).join(" "));
}

function stopped() {
  ended($(".sd-numbers").hidden ? "Stopped before anything was measured." : "Stopped. Below is what was measured.");
}

function failed(line) {
  showAlert(line.text);
  ended(line.file ? "File not opened." : begun ? "The measurement failed." : "Run not started.");
}

function ended(status) {
  unfinished.forget(run);
  setBusy(false);
  setStatus(status);
}

function shown(line) {
  if (!line.partial) unfinished.forget(run);
  setBusy(line.partial);
  $(".sd-badge").hidden = !line.recorded;
  $(".sd-badge").textContent = ["recorded", ...line.where].join(" · ");
  $(".sd-result-chart").hidden = !line.chart;
  if (line.chart) {
    $(".sd-chart-title").textContent = line.chart.title;
    plot($(".sd-chart"), line.chart);
  }
  showFound(line);
  const numbers = line.rows.filter((row) => !("state" in row));
  $(".sd-numbers").hidden = !numbers.length && !line.remarks.length;
  $(".sd-numbers .sd-h").textContent = numbers.length ? "Table" : "So far";
  $(".sd-conditions").textContent = line.conditions;
  $(".sd-numbers .sd-table").replaceChildren(table(numbers));
  hintAtScrolling();
  $(".sd-remarks").hidden = !line.remarks.length;
  $(".sd-remarks").replaceChildren(...line.remarks.map((text) => make("li", "", ...coded(text))));
  const end = line.state ?? (line.recorded ? `Recorded result${line.target && ` of ${line.target}`}` : "Done");
  if (!line.partial) setStatus($(".sd-finding") ? `${end}.` : `${end}. ${sentence(line.verdict)}`);
}

function hintAtScrolling() {
  const box = $(".sd-numbers .sd-table");
  const more = [box.scrollWidth > box.clientWidth + 1 && "columns", box.scrollHeight > box.clientHeight + 1 && "rows"].filter(Boolean);
  $(".sd-more").hidden = !more.length;
  $(".sd-more").textContent = `Scroll the table for more ${more.join(" and ")}.`;
}

function setBusy(on) {
  showStages(on);
  $(".sd-sweep").toggleAttribute("data-busy", on);
  $(".sd-loading").hidden = !on;
}

function table(rows) {
  const names = [...new Set(rows.flatMap(Object.keys))].filter((name) => name !== "race");
  const labels = names.map((name) => COLUMN_LABELS[name] ?? name.replace(/^kept at/, "accepted at"));
  return tableOf(labels, rows.map((row) => names.map((name, i) => (i ? cell(name, row[name]) : visible(String(row[name] ?? "–"))))));
}

function cell(name, value) {
  if (!isNumber(value?.value)) return format(name, value);
  const interval = value.interval && make("small", "sd-small", `[${value.interval}]`);
  return withData(make("td", "", fixed(value.value, value.value < 10 ? 2 : 1), interval && " ", interval), { value: value.value });
}

function format(name, value) {
  if (name === "accepted" && isNumber(value)) return percent(value);
  if (SHARE_COLUMNS.includes(name) && isNumber(value)) return `${fixed(100 * value, 1)} %`;
  if (isNumber(value)) return Number.isInteger(value) ? String(value) : fixed(value, 2);
  return value == null ? "–" : String(value);
}

new ResizeObserver(hintAtScrolling).observe($(".sd-sweep"));
const read = () => readLog(props.value || "");
watch("value", read);
read(); // the errors of a link arrive before this tab is drawn
if (unfinished.id()) document.getElementById(`${props.name}-rejoin`)?.click();
