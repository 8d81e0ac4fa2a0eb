() => {
  window.specdemoLinked = true;
  document.dispatchEvent(new Event("specdemo:linked"));
  if (sessionStorage.getItem("specdemo.run") && !window.specdemoRejoined) document.getElementById("rejoin").click();
  window.specdemoRejoined = true; // once per page
}
