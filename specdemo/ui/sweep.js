// Draws the log of a sweep or a test (lines of JSON, see sweep.py) into result.html. Loaded after helpers.js and
// chart.js. The last result disappears when a run starts.

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
  $(".sd-badge").hidden = $(".sd-result-chart").hidden = $(".sd-heat").hidden = $(".sd-numbers").hidden = true;
}

function loading(line) {
  $(".sd-loading").value = line.share;
  begun ||= performance.now();
  const left = timeLeft(performance.now() - begun, line.share);
  const done = line.share ? `${percent(line.share)} done: ${line.text}.` : `${sentence(line.text)}.`;
  setStatus([done, left && !/ left$/.test(line.text) && `${sentence(left)}.`].filter(Boolean).join(" "));
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
  showHeat(line);
  $(".sd-numbers").hidden = false;
  $(".sd-numbers .sd-h").textContent = line.rows.length ? "Table" : "So far";
  $(".sd-conditions").textContent = line.conditions;
  $(".sd-numbers .sd-table").replaceChildren(table(line));
  hintAtScrolling();
  $(".sd-remarks").hidden = !line.remarks.length;
  $(".sd-remarks").replaceChildren(...line.remarks.map((text) => make("li", "", ...coded(text))));
  if (!line.partial) setStatus(`${line.state ?? (line.recorded ? "Recorded result" : "Done")}. ${sentence(line.verdict)}`);
}

/** Shows rows that can be raced as a heat map: kinds of work by method. The rows of a kind are sorted, the fastest first. */
function showHeat({ rows }) {
  const raced = rows.filter((row) => row.race);
  $(".sd-heat").hidden = !raced.length;
  const methodOf = (row) => row.lane.replace(/, k=\d+$/, "");
  const methods = [...new Set(raced.map(methodOf))];
  const kinds = [...new Set(raced.map((row) => row.category))];
  const fastest = (kind, name) => raced.find((row) => row.category === kind && methodOf(row) === name);
  $(".sd-heat .sd-table").replaceChildren(tableOf(["", ...methods], kinds.map((kind) => [kind, ...methods.map((name) => heat(fastest(kind, name)))])));
}

function heat(row) {
  if (!row) return make("td", "", "–");
  const speed = row["speed-up"].value;
  const button = withData(clickable("", `${fixed(speed, 2)}×${row.k ? ` at k = ${row.k}` : ""}`, () => toRace("open", row.race)), { slower: speed < 1 });
  button.ariaLabel = `Open as a race: ${row.category}, ${row.lane}, ${fixed(speed, 2)}×`;
  button.style.setProperty("--heat", `${Math.min(40, 60 * Math.abs(Math.log2(speed)))}%`);
  return make("td", "", button);
}

function hintAtScrolling() {
  const box = $(".sd-numbers .sd-table");
  const more = [box.scrollWidth > box.clientWidth + 1 && "columns", box.scrollHeight > box.clientHeight + 1 && "rows"].filter(Boolean);
  $(".sd-more").hidden = !more.length;
  $(".sd-more").textContent = `Scroll the table for more ${more.join(" and ")}.`;
}

function setBusy(on) {
  $(".sd-sweep").toggleAttribute("data-busy", on);
  $(".sd-loading").hidden = !on;
}

function table({ rows }) {
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
