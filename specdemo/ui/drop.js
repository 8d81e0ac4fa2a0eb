() => {
  // A text file that is dropped on a text field becomes its text; a browser would leave the page for the file.
  const fieldOf = ({ dataTransfer, target }) => dataTransfer?.types.includes("Files") && target.closest("textarea:enabled");
  document.addEventListener("dragover", (event) => fieldOf(event) && event.preventDefault());
  document.addEventListener("drop", async (event) => {
    const field = fieldOf(event);
    if (!field) return;
    event.preventDefault();
    field.value = (await Promise.all([...event.dataTransfer.files].map((file) => file.text()))).join("\n");
    for (const type of ["input", "change", "blur"]) field.dispatchEvent(new Event(type, { bubbles: true }));
  });
}
