() => {
  // Gradio gives every radio button a name of its own, where those of a set are one stop of the Tab key, and the set no
  // label; every tab is a stop, where arrow keys should go from one to the next; an empty plot is named but is no picture;
  // a list of choices is a stop, from which the focus falls when the list closes, and opens again when the Tab key leaves it.
  const tidy = () => {
    for (const set of document.querySelectorAll("fieldset.block")) {
      set.ariaLabel ??= set.querySelector("[data-testid=block-info]")?.textContent.trim();
      const name = `of-${set.closest("[id]:not([id=''])").id}`;
      for (const input of set.querySelectorAll(`input[type=radio]:not([name="${name}"])`)) input.name = name;
    }
    for (const box of document.querySelectorAll(".empty[aria-label]:not([role])")) box.role = "img";
    for (const list of document.querySelectorAll("ul[role=listbox]:not([tabindex])")) list.tabIndex = -1;
    for (const tab of document.querySelectorAll("[role=tab]")) tab.tabIndex = tab.ariaSelected === "true" ? 0 : -1;
  };
  document.addEventListener("focusout", ({ target }) => {
    setTimeout(() => {
      if (target.ariaExpanded === "true" && document.activeElement !== target) target.dispatchEvent(new FocusEvent("blur"));
    }, 50);
  });
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
  new MutationObserver(tidy).observe(document.body, { childList: true, subtree: true });
  tidy();
}
