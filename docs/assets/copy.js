// A button on each block of code that copies it.
document.querySelectorAll('[role="main"] pre').forEach((block) => {
  const place = document.createElement("div");
  const button = document.createElement("button");
  place.className = "with-copy";
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const code = block.querySelector("code") || block;
    await navigator.clipboard.writeText(code.innerText.trimEnd() + "\n");
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  block.replaceWith(place);
  place.append(block, button);
});
