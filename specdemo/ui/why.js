// Draws one diagnosis (JSON, see why.py) into why.html. Loaded after helpers.js. All text comes from a visitor's output.

function list(selector, lines, empty) {
  $(selector).replaceChildren(...(lines.length ? lines : [empty]).map((line) => make("li", "", ...coded(line))));
}

function show(diagnosis) {
  showAlert(diagnosis.error ?? "");
  $(".sd-diagnosis").hidden = Boolean(diagnosis.error);
  if (diagnosis.error) return;
  $(".sd-diagnosed").textContent = diagnosis.sentence;
  $(".sd-diagnosed").dataset.tone = diagnosis.tone;
  list(".sd-changes", diagnosis.changes, "Unknown.");
  list(".sd-causes", diagnosis.causes.map(([title, gain, evidence]) => `${title} (${gain}): ${evidence}`), "None found.");
  $(".sd-table").replaceChildren(tableOf([], diagnosis.numbers));
  const missing = diagnosis.missing.length ? [`Unknown, and would make this more certain: ${diagnosis.missing.join(", ")}.`] : [];
  $(".sd-lacks").textContent = [...diagnosis.notes, ...missing].join(" ");
}

drawValue(show);
