// The page's address: the settings of the race as its query, the tab as its fragment. Gradio's own parameters stay.

/** Returns the part of a query that holds settings: "preset=embedded-ngram&k=7". */
const settingsOf = (search) => parameters(search).filter((part) => !isDisplay(part)).join("&");

/** Returns the query for settings, with the display parameters of the current one. */
const searchOf = (settings, search) => {
  const parts = [settings, ...parameters(search).filter(isDisplay)].filter(Boolean);
  return parts.length ? `?${parts.join("&")}` : "";
};

const parameters = (search) => search.replace(/^\?/, "").split("&").filter(Boolean);
const isDisplay = (part) => /^(__|view=)/.test(part);
