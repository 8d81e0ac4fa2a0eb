() => {
  // FOLD: toggle or remove
  const open = document.getElementById("share-panel").classList.FOLD("open");
  document.getElementById("share").setAttribute("aria-expanded", String(open === true));
}
