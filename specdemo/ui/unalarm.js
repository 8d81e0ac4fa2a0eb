() => {
  // What was refused was asked for under the preset before.
  document.querySelector("#view .sd-alert").hidden = true;
}
