() => {
  // Fixes the accessibility of Gradio's components. Radio buttons of a group get a common name and the group a label, so that
  // the Tab key stops once. Tabs are reached by arrow keys. An empty plot gets the role of an image. An open list of choices is
  // not a stop of the Tab key, and closes when the focus leaves it. Texts from right to left are aligned so. Targets get the heading of
  // their group, which the first of it shows and every one has as description.
  const GROUPS = [[" — not here: ", "Needs more"], [" — download", "Fits this machine"], ["", "On this machine"]];
  const group = (choices) => {
    choices.forEach((choice, i) => {
      choice.ariaDescription = GROUPS.find(([mark]) => choice.ariaLabel.includes(mark))[1];
      choice.toggleAttribute("data-first", choice.ariaDescription !== choices[i - 1]?.ariaDescription);
    });
  };
  const tabs = () => [...document.querySelectorAll("[role=tab]")].filter((tab) => tab.checkVisibility());
  const fix = () => {
    for (const set of document.querySelectorAll("fieldset.block")) {
      set.ariaLabel ??= set.querySelector("[data-testid=block-info]")?.textContent.trim();
      const name = `of-${set.closest("[id]:not([id=''])").id}`;
      for (const input of set.querySelectorAll(`input[type=radio]:not([name="${name}"])`)) input.name = name;
    }
    for (const box of document.querySelectorAll(".empty[aria-label]:not([role])")) box.role = "img";
    for (const list of document.querySelectorAll("ul[role=listbox]:not([tabindex])")) list.tabIndex = -1;
    for (const text of document.querySelectorAll("textarea:not([dir=auto])")) text.dir = "auto";
    group([...document.querySelectorAll("#target [role=option]")]);
    const stop = tabs().find(({ ariaSelected }) => ariaSelected === "true") ?? tabs()[0]; // a link in the footer selects no visible one
    for (const tab of document.querySelectorAll("[role=tab]")) tab.tabIndex = tab === stop ? 0 : -1;
  };
  document.addEventListener("focusout", ({ target }) => {
    setTimeout(() => {
      if (target.ariaExpanded === "true" && document.activeElement !== target) target.dispatchEvent(new FocusEvent("blur"));
    }, 50);
  });
  // a press on a heading chooses nothing
  document.addEventListener("mousedown", (event) => {
    if (event.target.hasAttribute("data-first") && event.offsetY < parseFloat(getComputedStyle(event.target, "::before").height)) {
      event.preventDefault();
      event.stopPropagation();
    }
  }, true);
  const list = document.querySelector("[role=tablist]");
  list.addEventListener("keydown", ({ key }) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (!by) return;
    const next = tabs().at((tabs().indexOf(document.activeElement) + by) % tabs().length);
    next.click();
    next.focus();
  });
  new MutationObserver(fix).observe(list, { attributes: true, attributeFilter: ["aria-selected"], subtree: true });
  // not what views draw, maybe at every frame: they care for themselves
  const others = (changes) => changes.some(({ target }) => !target.closest(".sd")) && fix();
  new MutationObserver(others).observe(document.body, { childList: true, subtree: true });
  fix();
}
