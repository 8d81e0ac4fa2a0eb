() => {
  // Gradio names an empty plot that is no picture. It gives radio buttons neither a name, by which a set of them is one stop of the Tab key, nor the set a label; and
  // every tab is a stop of its own, where arrow keys should go from one to the next.
  const tidy = () => {
    for (const set of document.querySelectorAll("fieldset:has(input[type=radio]:not([name]))")) {
      set.ariaLabel ??= set.querySelector("[data-testid=block-info]")?.textContent.trim();
      const name = `radio-${set.closest("[id]").id}`;
      for (const input of set.querySelectorAll("input[type=radio]")) input.name = name;
    }
    for (const box of document.querySelectorAll(".empty[aria-label]:not([role])")) box.role = "img";
    for (const tab of document.querySelectorAll("[role=tab]")) tab.tabIndex = tab.ariaSelected === "true" ? 0 : -1;
  };
  const list = document.querySelector("[role=tablist]");
  list.addEventListener("keydown", ({ key }) => {
    const tabs = [...list.querySelectorAll("[role=tab]")];
    const by = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (!by) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + by + tabs.length) % tabs.length];
    next.click();
    next.focus();
  });
  new MutationObserver(tidy).observe(list, { attributes: true, attributeFilter: ["aria-selected"], subtree: true });
  new MutationObserver(tidy).observe(document.querySelector(".gradio-container"), { childList: true, subtree: true });
  tidy();
}
