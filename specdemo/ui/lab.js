// Draws the text of a training (lines of JSON, see lab.py) into the skeleton of lab.html; kit.js stands before it.

const NAMES = ["1st token", "2nd", "3rd"];
const LOSSES = { loss: "in training", held_out_loss: "held out" };

let training = null;

const readLog = reader(clear, (line) => actions[line.type]?.(line));
const actions = { run: opened, tick, done, stopped, error: failed, note: (line) => say(sentence(line.text)) };

function clear() {
  $(".sd-alert").hidden = true;
}

function opened(line) {
  training = { recipe: line.recipe, recorded: line.recorded, points: {}, last: {}, head: null };
  $(".sd-badge").hidden = !line.recorded;
  $(".sd-badge").textContent = ["recorded", ...(line.where || [])].join(" · ");
  $(".sd-loading").hidden = line.recorded;
  $(".sd-loading").removeAttribute("value"); // busy, nobody knows how long
  $(".sd-facts").textContent = "";
  $(".sd-lab-charts").hidden = true;
  say(`Training ${line.recipe || ""}.`);
}

function tick(line) {
  if (!training.points.loss) say(`Training ${training.recipe}.`);
  training.last = { ...training.last, ...line };
  for (const [name, value] of Object.entries(line)) {
    if (!(name in LOSSES) && !/^agree_\d+$/.test(name)) continue;
    (training.points[name] ??= []).push([line.seconds, value]);
  }
  facts();
}

function done(line) {
  training.head = line;
  if (training.recorded) return ended("How the shipped head learned. Press Train for your own.");
  ended(`Done. The head is in ${line.folder}.`);
}

function stopped() {
  ended(training.head ? `Stopped. The head as far as it was trained is in ${training.head.folder}.` : "Stopped.");
}

function failed(line) {
  $(".sd-alert").hidden = false;
  $(".sd-alert").textContent = sentence(line.text);
  ended("Nothing was trained.");
}

function ended(words) {
  $(".sd-loading").hidden = true;
  say(words);
}

function say(text) {
  $(".sd-status").textContent = text;
}

function facts() {
  const { seconds, of_seconds, step, tokens } = training.last;
  $(".sd-loading").value = of_seconds ? seconds / of_seconds : 0;
  const words = [`${fixed(seconds, 0)} of ${fixed(of_seconds, 0)} s`, `${step} steps`, `${Number(tokens).toLocaleString("en")} tokens`];
  $(".sd-facts").textContent = words.join(" · ");
}

function idle() {
  training = null;
  $(".sd-badge").hidden = $(".sd-lab-charts").hidden = true;
  $(".sd-facts").textContent = "";
  say("Ready. Press Train to begin.");
}

function draw() {
  if (!training) return;
  const named = (names) => names.filter(([name]) => training.points[name]).map(([name, title]) => ({ name: title, points: training.points[name] }));
  const depths = Object.keys(training.points).filter((name) => name.startsWith("agree_"));
  const agree = named(depths.map((name, i) => [name, NAMES[i] || `${i + 1}th`]));
  const losses = named(Object.entries(LOSSES));
  $(".sd-lab-charts").hidden = !losses.length && !agree.length;
  chart($(".sd-agree"), agree, { high: 1, percentage: true, say: percent });
  chart($(".sd-loss"), losses, {});
}

function chart(box, lines, { say = (y) => fixed(y, 3), ...scale }) {
  if (!lines.length) return box.replaceChildren(make("p", "sd-small", "Not measured yet."));
  const latest = lines.map((line) => ({ ...line, name: `${line.name} ${say(line.points.at(-1)[1])}` }));
  if (!box.querySelector(".sd-lab-chart")) box.replaceChildren(make("div", "sd-lab-chart"));
  lineChart(box.firstChild, latest, { unit: "s", words: latest.map((line) => line.name).join(", "), ...scale });
}

new ResizeObserver(draw).observe($(".sd-lab-charts"));
watch("value", () => {
  readLog(props.value || "");
  if (!props.value) idle();
  draw();
});
