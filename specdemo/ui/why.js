// Draws one diagnosis (JSON, see why.py) into why.html. Loaded after helpers.js. All text comes from a visitor's output.

function list(selector, lines, empty) {
  $(selector).replaceChildren(...(lines.length ? lines : [empty]).map((line) => make("li", "", line)));
}

function show(diagnosis) {
  $(".sd-alert").hidden = !diagnosis.error;
  $(".sd-diagnosis").hidden = Boolean(diagnosis.error);
  if (diagnosis.error) return void ($(".sd-alert").textContent = sentence(diagnosis.error));
  $(".sd-diagnosed").textContent = diagnosis.sentence;
  $(".sd-diagnosed").dataset.tone = diagnosis.tone;
  list(".sd-changes", diagnosis.changes, "Unknown.");
  list(".sd-causes", diagnosis.causes.map(([title, gain, evidence]) => `${title} (${gain}): ${evidence}`), "None found.");
  $(".sd-table").replaceChildren(numbers(diagnosis.numbers));
  const missing = diagnosis.missing.length ? [`Unknown, and would make this more certain: ${diagnosis.missing.join(", ")}.`] : [];
  $(".sd-lacks").textContent = [...diagnosis.notes, ...missing].join(" ");
}

function numbers(rows) {
  const table = make("table");
  const body = table.createTBody();
  for (const [name, value, remark] of rows) {
    const head = make("th", "", name);
    head.scope = "row";
    body.insertRow().append(head, make("td", "", value), make("td", "", remark));
  }
  return table;
}

const read = () => props.value && show(JSON.parse(props.value));
watch("value", read);
read();
