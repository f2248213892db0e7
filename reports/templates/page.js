// Reads and draws the cell that the address names, marks it in the matrix, and moves the focus to it.
const boxAt = new Map(boxes.map((box) => [box.hash, box]));
const title = document.title;
async function openCell() {
  const { cell, filter: asked } = readAddress();
  if (asked && asked !== filter.value.trim()) setFilter(asked);
  else keepFilter();
  if (cell && !cell.startsWith("#cell-")) { // another part of the page; the open cell stays
    const finding = cell.startsWith("#finding-") && document.getElementById(cell.slice(1));
    if (finding) finding.open = true;
    return;
  }
  const box = boxAt.get(cell);
  document.querySelector(".box[aria-current]")?.removeAttribute("aria-current");
  box?.setAttribute("aria-current", "true");
  document.title = box ? `${box.dataset.cell} · backend-parity` : title;
  const drawn = box && (await drawnCell(box));
  if (readAddress().cell !== cell) return; // another one was opened meanwhile
  const missing = !box && cell && make("p.note", { role: "status" }, `This report has no cell ${cell.slice(6)}.`);
  document.getElementById("opened").replaceChildren(...[drawn, missing].filter((part) => part));
  if (missing) document.getElementById("opened").scrollIntoView({ block: "center" });
  drawn?.scrollIntoView();
  drawn?.focus({ preventScroll: true });
}
async function drawnCell(box) {
  const number = Number(box.dataset.n);
  const neighbours = [boxOf.get(number - 1) ?? null, boxOf.get(number + 1) ?? null];
  try {
    return drawCell(await readCell(number), box.hash.slice(1), ...neighbours);
  } catch (error) {
    const text = `The details of this cell cannot be drawn (${error.message}). Use a browser of 2023 or later.`;
    return make("article.cell", { "data-cell": box.dataset.cell, tabindex: -1 }, make("p.reason", text));
  }
}
addEventListener("hashchange", openCell);
openCell();

// Draws groups of backends when they are opened.
document.addEventListener("toggle", (event) => event.target.matches(".side[open]") && openSide(event.target), true);
loaded.then(() => all(".side[open]").forEach(openSide));

// Copies text; a page opened from a file may have no clipboard, then the text is selected instead.
async function copy(button) {
  const code = button.parentElement.querySelector("code");
  let done = "Copied";
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    getSelection().selectAllChildren(code);
    done = document.execCommand("copy") ? "Copied" : "Selected";
  }
  button.textContent = done;
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// Downloads all quantities, of one cell or of the run.
async function download(button) {
  const { download: kind, only } = button.dataset;
  button.disabled = true;
  const numbers = only ? [Number(only)] : [...boxOf.keys()].sort((a, b) => a - b);
  const type = kind === "csv" ? "text/csv" : "application/json";
  const link = make("a", { href: URL.createObjectURL(new Blob(await exported(kind, numbers), { type })) });
  link.download = `${only ? boxOf.get(numbers[0]).dataset.cell.replaceAll("/", "_") : "quantities"}.${kind}`;
  link.click();
  button.disabled = false;
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy], [data-download]");
  if (button) (button.matches("[data-copy]") ? copy : download)(button);
});
