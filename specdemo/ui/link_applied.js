() => {
  window.specdemoLinked = true;
  document.dispatchEvent(new Event("specdemo:linked"));
}
