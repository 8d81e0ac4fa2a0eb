// The lanes of the comparison in one line, and the button that opens their controls. Its value (controls.py, `setup`) also has
// the key of the settings, by which the view tells whether the result on show is theirs.

const edit = $(".sd-edit");

edit.addEventListener("click", () => {
  const open = document.getElementById("drawer").classList.toggle("open");
  edit.setAttribute("aria-expanded", String(open));
  edit.querySelector("b").textContent = open ? "Close" : "Edit";
});

const read = () => {
  if (!props.value) return;
  const { lanes, target, key } = JSON.parse(props.value);
  const parts = lanes.map((words, i) => {
    const part = make("span");
    part.append(make("i", "", lanes.length > 1 ? `Lane ${i + 1} ` : ""), words);
    return part;
  });
  const model = make("span");
  model.append(make("i", "", "Target "), target);
  $(".sd-setup-words").replaceChildren(model, ...parts);
  element.dataset.key = key;
  document.dispatchEvent(new CustomEvent("specdemo:settings"));
};
watch("value", read);
read();
