(file) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([file.text], { type: "text/plain;charset=utf-8" }));
  link.download = file.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  return [];
}
