() => {
  window.specdemoLinked = true;
  document.dispatchEvent(new Event("specdemo:linked"));
  if (window.specdemoUnfinished?.() && !window.specdemoRejoined) document.getElementById("race-rejoin").click();
  window.specdemoRejoined = true; // once per page
}
