() => {
  // Gradio gives a set of radio buttons no name; that of the presets takes its label.
  const set = document.querySelector("#presets fieldset");
  set?.setAttribute("aria-label", set.querySelector("[data-testid=block-info]").textContent.trim());
}
