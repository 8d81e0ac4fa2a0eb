(link) => {
  if (!/^(\?|https:)/.test(link)) return link; // an error message
  // Writes the link to the address bar and the clipboard. A frame may forbid both; the text box always shows the link.
  const query = link.slice(link.indexOf("?"));
  const url = link.startsWith("?") ? location.origin + location.pathname + link : link;
  const own = location.search.slice(1).split("&").filter((part) => part.startsWith("__")); // Gradio's own parameters, such as the theme
  history.replaceState(null, "", location.pathname + [query, ...own].join("&"));
  if (window.parent !== window) window.parent.postMessage({ queryString: query.slice(1) }, "https://huggingface.co");
  navigator.clipboard?.writeText(url).catch(() => {});
  return url;
}
