// The page's address: the settings of the race as its query, the tab as its fragment. Gradio's own parameters stay.

/**
 * Places that a fragment names, other than the tabs: the tab, and the element that is scrolled into view. All but two were tabs of
 * earlier versions. Any other fragment is a section of the reference.
 * @type {Record<string, [string, string]>}
 */
const PLACES = {
  tune: ["pays", "tune-controls"],
  sweep: ["pays", "sweep-about"],
  "what-if": ["machines", "whatif-about"],
  why: ["machines", "why-card-toggle"],
  lab: ["training", "lab-about"],
  losslessness: ["how", "losslessness-about"],
};

/** Returns the part of a query that holds settings: "preset=embedded-ngram&k=7". */
const settingsOf = (search) => parameters(search).filter((part) => !isDisplay(part)).join("&");

/** Returns the query for settings, with the display parameters of the current one. */
const searchOf = (settings, search) => {
  const parts = [settings, ...parameters(search).filter(isDisplay)].filter(Boolean);
  return parts.length ? `?${parts.join("&")}` : "";
};

const parameters = (search) => search.replace(/^\?/, "").split("&").filter(Boolean);
const isDisplay = (part) => /^(__|view=)/.test(part);
