() => {
  // Run waits for what a link asks for; on a server that has just started, reading it takes seconds.
  if (window.specdemoLinked ?? !new URLSearchParams(location.search).size) return [];
  document.querySelector("#view .sd-status").textContent = "Reading the link.";
  return new Promise((go) => document.addEventListener("specdemo:linked", () => go([]), { once: true }));
}
