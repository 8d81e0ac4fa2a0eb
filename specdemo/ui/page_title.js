// Title of the browser tab: a run in progress, or the result of the Race tab, and the name of the other tabs.

const APP = document.title;
const stops = "#stop, #sweep-stop, #stop-training, #losslessness-stop";

/** Returns the title from the name of the tab, whether something runs, and the speed-up of the visible race, such as "1.80×". */
function pageTitle(tab, running, speedup) {
  const factor = tab === "Race" ? parseFloat(speedup) : NaN;
  const result = factor > 0 ? `${factor.toFixed(1)}× as fast` : "";
  return [running ? "Running…" : result, tab === "Race" ? "" : tab, APP].filter(Boolean).join(" - ");
}

const updateTitle = () => {
  const tab = document.querySelector('[role=tab][aria-selected="true"]')?.textContent.trim() ?? "";
  const running = [...document.querySelectorAll(stops)].some((stop) => !stop.disabled);
  const title = pageTitle(tab, running, document.querySelector(".sd-headline b")?.textContent ?? "");
  if (title !== document.title) document.title = title;
};
setInterval(updateTitle, 500);
