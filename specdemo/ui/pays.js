// Draws the result of a search for what pays (bench/tune.py) into pays.html: stages, a bar per drafter, and what to do with the best one.
// Rows of all kinds of work together have a state; the others are runs of a candidate on one kind. Loaded before sweep.js.

const ALL_WORK = "mixed";
const MOST_BARS = 8; // outside of the fold
let stages = /** @type {[string, number][]} */ ([]);
let stageBegan = 0; // time of the page at which the current stage began
let stageClock = 0; // timer of the seconds of the current stage

/** Returns the stages with their seconds and whether they are over; the last that has begun may be at work.
 * @param {[string, number][]} known @param {boolean} busy @param {number} extra seconds since they were sent */
function stageParts(known, busy, extra) {
  const last = Math.max(busy ? 0 : -1, known.findLastIndex(([, seconds]) => seconds > 0));
  return known.map(([name, seconds], i) => {
    const now = busy && i === last;
    return { name, seconds: Math.round(now ? seconds + extra : seconds), state: now ? "now" : i <= last ? "over" : "ahead" };
  });
}

function showStages(busy) {
  const list = $(".sd-stages");
  if (!list) return;
  const parts = stageParts(stages, busy, (performance.now() - stageBegan) / 1000);
  list.hidden = !parts.length;
  const words = ({ name, seconds, state }) => withData(make("li", "", sentence(name), state !== "ahead" && ` ${seconds} s`), { state });
  list.replaceChildren(...parts.map(words));
  clearInterval(stageClock);
  if (busy && parts.length) stageClock = window.setInterval(() => showStages(busy), 1000);
}

/** Returns the rows of the bars, the top of their scale, and the rows without a speed-up. */
function barRows(rows) {
  const all = rows.filter((row) => row.category === ALL_WORK && "state" in row);
  const measured = all.filter((row) => isNumber(row["speed-up"]?.value));
  const top = Math.max(1.2, ...measured.map((row) => 1.05 * Math.max(row["speed-up"].value, Math.min(row["speed-up"].high ?? 0, 2 * row["speed-up"].value))));
  return { measured, top, idle: all.filter((row) => !measured.includes(row)) };
}

function methodRow(row, top, partial) {
  const { value, low, high, interval } = row["speed-up"];
  const share = (x) => `${Math.min(100, (100 * x) / top)}%`;
  const fill = make("div", "sd-gain");
  fill.style.width = share(value);
  const whisker = isNumber(low) && isNumber(high) && high > low && make("i", "sd-range");
  if (whisker) Object.assign(whisker.style, { left: share(low), width: `calc(${share(high)} - ${share(low)})` });
  const track = Object.assign(make("div", "sd-track", fill, whisker), { role: "img", ariaLabel: `${fixed(value, 2)}×${interval ? `, ${interval}` : ""}` });
  track.style.setProperty("--one", share(1));
  const plain = !row.place;
  const race = row.race && !partial && clickable("sd-try", "Race it", () => openRace(row.race, true));
  if (race) race.ariaLabel = `Race it: ${row.lane}`;
  const number = make("span", "sd-value", make("b", "", `${fixed(value, 2)}×`), interval && !plain && make("small", "sd-small", ` ${interval}`));
  const kind = plain ? "plain" : row.state.startsWith("left out") ? "out" : value < 1 ? "slower" : "faster";
  const name = make("span", "sd-method-name", sentence(row.lane), row.state && make("small", "sd-small", row.state));
  return withData(Object.assign(make("div", "sd-method", name, track, number, race || make("span")), { role: "listitem" }), { kind });
}

// Draws bars: the first ones, the others in a fold.
function showBars(measured, top, partial) {
  const draw = (row) => methodRow(row, top, partial);
  const plain = measured.filter((row) => !row.place);
  const drafters = measured.filter((row) => row.place);
  const many = drafters.length > MOST_BARS + 1;
  const shown = many ? drafters.slice(0, MOST_BARS) : drafters;
  const rest = drafters.slice(shown.length);
  $(".sd-method-rows").replaceChildren(...[...shown, ...plain].map(draw));
  $(".sd-more-methods").hidden = !rest.length;
  $(".sd-more-methods summary").textContent = `${rest.length} slower ones`;
  $(".sd-more-methods div").replaceChildren(...rest.map(draw));
}

function openRace(query, run) {
  toRace("open", query);
  if (run) document.getElementById("run")?.click(); // waits for the settings
}

function copyButton(title, command) {
  const button = clickable("sd-try", `Copy for ${title}`, async () => {
    await navigator.clipboard?.writeText(command);
    button.textContent = "Copied";
  });
  button.title = command;
  return button;
}

/** Draws what `tune` found; does nothing in other views. */
function showFound(line) {
  if (!$(".sd-methods")) return;
  stages = Object.entries(line.stages ?? {});
  stageBegan = performance.now();
  showStages(line.partial);
  const { measured, top, idle } = barRows(line.rows);
  $(".sd-methods").hidden = !measured.length && !idle.length && line.partial;
  $(".sd-finding").textContent = line.partial ? "" : sentence(line.verdict);
  const best = measured.find((row) => row.race);
  const known = Object.entries(line.commands ?? {});
  const use = best && known.length && clickable("sd-try sd-use", "Use this", () => openRace(best.race, false));
  $(".sd-methods .sd-next").replaceChildren(...[use, ...known.map(([title, command]) => copyButton(title, command))].filter(Boolean));
  $(".sd-methods .sd-next").hidden = line.partial || !known.length;
  showBars(measured, top, line.partial);
  $(".sd-idle").hidden = !idle.length;
  $(".sd-idle").replaceChildren(...idle.map((row) => make("li", "", make("b", "", row.lane), `: ${row.state}`)));
  $(".sd-details").hidden = line.partial;
  showHeat(line.rows.filter((row) => row.race && row.category !== ALL_WORK));
}

/** Shows rows that can be raced as a heat map: kinds of work by method, if there are several kinds. The rows of a kind are sorted, the fastest first. */
function showHeat(raced) {
  const methodOf = (row) => row.lane.replace(/, (k=\d+.*|adaptive)$/, "");
  const methods = [...new Set(raced.map(methodOf))];
  const kinds = [...new Set(raced.map((row) => row.category))];
  $(".sd-heat").hidden = kinds.length < 2;
  const fastest = (kind, name) => raced.find((row) => row.category === kind && methodOf(row) === name);
  $(".sd-heat .sd-table").replaceChildren(tableOf(["", ...methods], kinds.map((kind) => [kind, ...methods.map((name) => heat(fastest(kind, name)))])));
}

function heat(row) {
  if (!row) return make("td", "", "–");
  const speed = row["speed-up"].value;
  const button = withData(clickable("", `${fixed(speed, 2)}×${row.k ? ` at k = ${row.k}` : ""}`, () => openRace(row.race, false)), { slower: speed < 1 });
  button.ariaLabel = `Open as a race: ${row.category}, ${row.lane}, ${fixed(speed, 2)}×`;
  button.style.setProperty("--heat", `${Math.min(40, 60 * Math.abs(Math.log2(speed)))}%`);
  return make("td", "", button);
}
