// One line with the lanes of the comparison, and the button that opens their controls. The value (controls.py, `setup`) includes
// a key of all settings; race.js compares it with that of the visible result. Run is off while there is an obstacle. Gradio sets
// `disabled` itself at the start and the end of a run, so this uses `inert`.

const edit = $(".sd-edit");

edit.addEventListener("click", () => {
  const open = document.getElementById("drawer").classList.toggle("open");
  edit.setAttribute("aria-expanded", String(open));
  edit.querySelector("b").textContent = open ? "Close" : "Edit";
});

const read = () => {
  if (!props.value) return;
  const { lanes, target, key, obstacle } = JSON.parse(props.value);
  const parts = lanes.map((description, i) => {
    const part = make("span");
    part.append(make("i", "", lanes.length > 1 ? `Lane ${i + 1} ` : ""), description);
    return part;
  });
  const model = make("span");
  model.append(make("i", "", "Target "), target);
  $(".sd-setup-summary").replaceChildren(model, ...parts);
  element.dataset.key = key;
  const run = document.getElementById("run");
  if (run) {
    run.inert = Boolean(obstacle);
    run.ariaDisabled = String(Boolean(obstacle));
    run.title = obstacle ? `This machine cannot run this preset: ${obstacle}.` : "";
  }
  document.dispatchEvent(new CustomEvent("specdemo:settings"));
};
watch("value", read);
read();
