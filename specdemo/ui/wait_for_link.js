() => {
  // Delays Run until the settings of a link are applied, which takes seconds on a server that has just started.
  if (window.specdemoLinked ?? !new URLSearchParams(location.search).size) return [];
  document.querySelector("#view .sd-status").textContent = "Reading the link.";
  return new Promise((resolve) => document.addEventListener("specdemo:linked", () => resolve([]), { once: true }));
}
