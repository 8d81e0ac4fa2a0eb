// Draws the log of a training run (lines of JSON, see lab.py) into lab.html. Loaded after helpers.js and chart.js.

const NAMES = ["1st token", "2nd", "3rd"];
const LOSSES = { loss: "training", held_out_loss: "held-out" };

let training = null;

const readLog = reader(() => showAlert(""), (line) => actions[line.type]?.(line));
const actions = { run: opened, tick, done, stopped, error: failed, note: ({ text }) => setStatus(sentence(text)) };

function opened(line) {
  training = { recipe: line.recipe, recorded: line.recorded, points: {}, last: {}, head: null };
  $(".sd-badge").hidden = !line.recorded;
  $(".sd-badge").textContent = ["recorded", ...(line.where || [])].join(" · ");
  $(".sd-loading").hidden = line.recorded;
  $(".sd-loading").removeAttribute("value"); // indeterminate
  $(".sd-facts").textContent = "";
  $(".sd-lab-charts").hidden = true;
  setStatus(`Training ${line.recipe || ""}.`);
}

watchPlace("training", (text) => !$(".sd-loading").hidden && setStatus(text));

function tick(line) {
  if (!training.points.loss) setStatus(`Training ${training.recipe}.`);
  training.last = { ...training.last, ...line };
  for (const [name, value] of Object.entries(line)) {
    if (!(name in LOSSES) && !/^agree_\d+$/.test(name)) continue;
    (training.points[name] ??= []).push([line.seconds, value]);
  }
  facts();
}

function done(line) {
  training.head = line;
  ended(training.recorded ? "Training of the shipped head. Press Train to train your own." : `Done. Saved to ${line.folder}.`);
}

function stopped() {
  ended(training.head ? `Stopped. The partly trained head is saved to ${training.head.folder}.` : "Stopped.");
}

function failed(line) {
  showAlert(line.text);
  ended("Training not started.");
}

function ended(status) {
  $(".sd-loading").hidden = true;
  setStatus(status);
}

function facts() {
  const { seconds, of_seconds, step, tokens } = training.last;
  $(".sd-loading").value = of_seconds ? seconds / of_seconds : 0;
  const parts = [`${fixed(seconds, 0)} of ${fixed(of_seconds, 0)} s`, `${step} steps`, `${Number(tokens).toLocaleString("en")} tokens`];
  $(".sd-facts").textContent = parts.join(" · ");
}

function idle() {
  training = null;
  $(".sd-badge").hidden = $(".sd-lab-charts").hidden = true;
  $(".sd-facts").textContent = "";
  setStatus("Ready. Press Train to start.");
}

function draw() {
  if (!training) return;
  const named = (names) => names.filter(([name]) => training.points[name]).map(([name, title]) => ({ name: title, points: training.points[name] }));
  const depths = Object.keys(training.points).filter((name) => name.startsWith("agree_"));
  const agree = named(depths.map((name, i) => [name, NAMES[i] || `${i + 1}th`]));
  const losses = named(Object.entries(LOSSES));
  $(".sd-lab-charts").hidden = !losses.length && !agree.length;
  chart($(".sd-agree"), agree, { high: 1, percentage: true, format: percent });
  chart($(".sd-loss"), losses, { zoom: true });
}

function chart(box, lines, { format = (y) => fixed(y, 3), ...scale }) {
  if (!lines.length) return box.replaceChildren(make("p", "sd-small", "Not measured yet."));
  const latest = lines.map((line) => ({ ...line, name: `${line.name} ${format(line.points.at(-1)[1])}` }));
  if (!box.querySelector(".sd-lab-chart")) box.replaceChildren(make("div", "sd-lab-chart"));
  lineChart(box.firstChild, latest, { unit: "s", label: latest.map((line) => line.name).join(", "), ...scale });
}

new ResizeObserver(draw).observe($(".sd-lab-charts"));
watch("value", () => {
  readLog(props.value || "");
  if (!props.value) idle();
  draw();
});
