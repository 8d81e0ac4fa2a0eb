(link) => {
  if (!/^(\?|https:)/.test(link)) return link; // why there is none
  // The address bar and the clipboard; the text box shows the link in any case, since a frame may forbid both.
  const query = link.slice(link.indexOf("?"));
  const url = link.startsWith("?") ? location.origin + location.pathname + link : link;
  const own = location.search.slice(1).split("&").filter((part) => part.startsWith("__")); // Gradio's, as the theme
  history.replaceState(null, "", location.pathname + [query, ...own].join("&"));
  if (window.parent !== window) window.parent.postMessage({ queryString: query.slice(1) }, "https://huggingface.co");
  navigator.clipboard?.writeText(url).catch(() => {});
  return url;
}
