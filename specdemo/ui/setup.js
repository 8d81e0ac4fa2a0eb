// The row with the setup: the menu of examples, a chip for each choice, which opens its control, and the button that opens all controls. Its value
// (setup.py, `row_data`) includes a key of all settings; race.js compares it with that of the visible result. Run is off while
// there is an obstacle. Gradio sets `disabled` itself at the start and the end of a run, so this uses `inert`.

const [edit, menu] = [$(".sd-edit"), $(".sd-examples")];
let current = null; // the data of the settings
let runInstead = ""; // the preset to run as soon as it is shown
let shown = settingsOf(location.search); // the settings of the address

function read() {
  if (!props.value) return;
  const before = current;
  current = JSON.parse(props.value);
  showSelection();
  showChips();
  showPrompt();
  element.dataset.key = current.key;
  showObstacle();
  if (before?.query && current.query && current.query !== before.query && window.specdemoLinked !== false) setQuery(current.query, "replaceState");
  current.query ??= before?.query; // half-typed settings have none
  document.dispatchEvent(new CustomEvent("specdemo:settings"));
  if (runInstead !== current.preset || current.custom) return;
  runInstead = "";
  document.getElementById("run").click();
}

function showChips() {
  const chip = ([id, words]) => Object.assign(clickable("sd-chip", words, () => openControl(id)), { title: document.querySelector(`#${id} [data-testid=block-info]`)?.textContent.trim() ?? "" });
  const lane = ([id]) => id.split("-")[1] ?? "";
  $(".sd-chips").replaceChildren(...current.chips.map((one) => withData(chip(one), { series: lane(one) })));
  const last = Math.max(...current.chips.map(lane).map(Number));
  $(".sd-add").hidden = last >= props.lanes;
  if (!added || added > last) return;
  added = 0;
  openControl(`method-${last}`);
}

let added = 0; // the lane that was added, until its controls are shown

function openControl(id) {
  showDrawer(true);
  const control = document.getElementById(id);
  if (!control.checkVisibility()) document.getElementById("advanced-toggle").click();
  control.querySelector("input").focus();
}

function addLane() {
  added = Math.max(...current.chips.map(([id]) => Number(id.split("-")[1] ?? 0))) + 1;
  document.getElementById("add-lane").click();
}

// Marks a prompt that is code, and says how many lines are hidden until the box has the focus.
function showPrompt() {
  const box = document.getElementById("prompt");
  const text = box?.querySelector("textarea");
  if (!text) return;
  const lines = text.value.split("\n").length;
  box.classList.toggle("sd-code", CODE.test(text.value));
  box.dataset.more = lines > 1 ? `+${lines - 1} lines` : "";
  if (document.activeElement !== text) text.scrollTop = 0;
}

// Selects the example. Another preset, and changed settings, have an entry of their own, so that choosing the example restores it.
function showSelection() {
  menu.querySelector(".sd-custom")?.remove();
  menu.value = current.preset;
  if (!current.custom && menu.value) return;
  const option = new Option(current.custom ? `${current.title}, changed` : current.title, "", true, true);
  option.className = "sd-custom";
  option.hidden = true;
  menu.prepend(option);
}

// Moves the preset below the others, with the reason why its models could not be loaded.
function offerLast(reason) {
  const option = [...menu.options].find(({ value }) => value === current.preset);
  if (current.custom || !option) return;
  if (!menu.querySelector("optgroup")) menu.append(Object.assign(document.createElement("optgroup"), { label: "Failed here" }));
  option.textContent = `${current.title}: ${reason.length > 90 ? `${reason.slice(0, 90)}…` : reason}`;
  menu.querySelector("optgroup").append(option);
}

function showObstacle() {
  const { obstacle, instead, told } = current;
  const run = document.getElementById("run");
  $(".sd-obstacle").hidden = !obstacle || (told && edit.ariaExpanded === "true");
  $(".sd-obstacle span").textContent = obstacle;
  $(".sd-instead").hidden = !instead;
  if (instead) $(".sd-instead").textContent = `Run instead: ${instead[1]}`;
  if (!run) return;
  run.inert = Boolean(obstacle);
  run.ariaDisabled = String(Boolean(obstacle));
  run.title = obstacle;
}

// ---- the address

/** Writes settings to the address. A frame may forbid it. */
function setQuery(settings, method) {
  shown = settings;
  history[method](null, "", location.pathname + searchOf(settings, location.search) + location.hash);
}

/** Asks the server for the controls of other settings. */
function openSettings(settings) {
  window.specdemoLinked = false; // Run waits for them
  trigger("submit", { query: settings });
}

function openLink(query) {
  setQuery(query, "pushState");
  openSettings(query);
}

function choose(id) {
  openLink(`preset=${id}`);
}

function race(id) {
  if (current.preset === id && !current.custom) return document.getElementById("run").click();
  choose((runInstead = id));
}

// Races the present settings with changes, by the names of links.
function raceChanged(changes) {
  const query = new URLSearchParams(current.query);
  for (const [name, value] of Object.entries(changes)) query.set(name, value);
  openLink(`${query}`);
  document.getElementById("run").click(); // waits for the settings
}

const tabOf = (hash) => tab(PLACES[hash.slice(1)]?.[0] ?? hash.slice(1)) ?? (hash ? tab("reference") : document.querySelector("[role=tab]"));

function openPlace() {
  const { hash } = location;
  const part = PLACES[hash.slice(1)]?.[1];
  const show = () => {
    const node = document.getElementById(part);
    if (node?.checkVisibility()) node.scrollIntoView();
    else if (location.hash === hash) requestAnimationFrame(show); // Gradio draws a tab after it is opened
  };
  tabOf(hash)?.click();
  if (part) show();
}

function onTab({ target }) {
  const chosen = target.closest?.("[role=tab]");
  if (!chosen || chosen === tabOf(location.hash)) return;
  const hash = chosen === tabOf("") ? "" : `#${chosen.dataset.tabId}`;
  const method = navigator.userActivation?.hasBeenActive === false ? "replaceState" : "pushState"; // a link opens its own tab
  history[method](null, "", location.pathname + location.search + hash);
}

// Gradio gives the page a base address without the settings, so the browser would load the page again.
function onFragment(event) {
  const link = event.target.closest?.('a[href^="#"]');
  if (!link) return;
  event.preventDefault();
  location.hash = link.getAttribute("href");
}

function onBack() {
  openPlace();
  const settings = settingsOf(location.search);
  if (settings !== shown) openSettings((shown = settings));
}

function showDrawer(opened) {
  document.getElementById("drawer").classList.toggle("open", opened);
  edit.setAttribute("aria-expanded", String(opened));
  edit.textContent = opened ? "Close" : "Settings";
  showObstacle();
  if (opened) document.dispatchEvent(new CustomEvent("specdemo:edit"));
}

edit.addEventListener("click", () => showDrawer(edit.ariaExpanded !== "true"));
$(".sd-add").addEventListener("click", addLane);
document.addEventListener("focusout", (/** @type {any} */ { target }) => target.closest?.("#prompt") && showPrompt());
menu.addEventListener("change", () => menu.value && choose(menu.value));
$(".sd-instead").addEventListener("click", () => race(current.instead[0]));
document.addEventListener("specdemo:failed", (/** @type {CustomEvent} */ { detail }) => offerLast(detail));
document.addEventListener("specdemo:race", (/** @type {CustomEvent} */ { detail }) => race(detail));
document.addEventListener("specdemo:change", (/** @type {CustomEvent} */ { detail }) => raceChanged(detail));
document.addEventListener("specdemo:open", (/** @type {CustomEvent} */ { detail }) => openLink(detail));
document.addEventListener("click", onTab);
document.addEventListener("click", onFragment);
addEventListener("popstate", onBack);
menu.append(...props.examples.map(([title, id]) => new Option(title, id)));
watch("value", read);
read();
openPlace();
