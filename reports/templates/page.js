const filter = document.getElementById("filter");
const boxes = all(".box");
const boxOf = new Map(boxes.map((box) => [Number(box.dataset.n), box]));
const boxAt = new Map(boxes.map((box) => [box.hash, box]));

// Filter: every word has to occur in a cell's id or be its state, written is:differs.
function applyFilter() {
  const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const element of all("[data-find]")) {
    const words = element.dataset.find.toLowerCase();
    const hit = wanted.every((word) => words.includes(word));
    element.classList.toggle("dim", !hit);
    if (element.matches(".box")) shown += hit;
  }
  document.getElementById("matches").value = wanted.length ? `${shown} of ${boxes.length}` : "";
  for (const button of all("[data-filter]")) button.setAttribute("aria-pressed", filter.value === button.dataset.filter);
}
filter.addEventListener("input", applyFilter);
for (const button of all("[data-filter]")) {
  button.addEventListener("click", () => {
    filter.value = filter.value === button.dataset.filter ? "" : button.dataset.filter;
    applyFilter();
  });
}

// Keyboard: "/" filters, arrows walk the matrix, Escape clears the filter or closes the cell.
const rows = all(".matrix tbody tr").map((row) => all("td", row).map((td) => td.querySelector(".box")));
function step(box, down, right) {
  let row = rows.findIndex((cells) => cells.includes(box));
  let column = rows[row].indexOf(box);
  while (rows[(row += down)] && (column += right) >= 0 && column < rows[row].length) {
    const next = rows[row][column];
    if (next && !next.classList.contains("dim")) return next.focus();
  }
}
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const box = document.activeElement.closest(".box");
  if (event.key === "/" && document.activeElement !== filter) {
    event.preventDefault();
    filter.focus();
    filter.select();
  } else if (event.key in MOVES && box) {
    event.preventDefault();
    step(box, ...MOVES[event.key]);
  } else if (event.key === "ArrowDown" && document.activeElement === filter) {
    event.preventDefault();
    all(".box:not(.dim)")[0]?.focus();
  } else if (event.key === "Escape") {
    if (document.activeElement === filter && filter.value) {
      filter.value = "";
      applyFilter();
    } else if (boxAt.has(location.hash)) {
      const from = boxAt.get(location.hash);
      location.hash = "";
      from.focus();
    }
  }
});

// The cell that the address names is read, drawn and marked in the matrix, and the keyboard is moved into it.
const title = document.title;
async function openCell() {
  const box = boxAt.get(location.hash);
  document.querySelector(".box[aria-current]")?.removeAttribute("aria-current");
  box?.setAttribute("aria-current", "true");
  document.title = box ? `${box.dataset.cell} · backend-parity` : title;
  const drawn = box && (await drawnCell(box));
  if (boxAt.get(location.hash) !== box) return; // another one was opened meanwhile
  document.getElementById("opened").replaceChildren(...(drawn ? [drawn] : []));
  drawn?.scrollIntoView();
  drawn?.focus({ preventScroll: true });
}
async function drawnCell(box) {
  const number = Number(box.dataset.n);
  const neighbours = [boxOf.get(number - 1) ?? null, boxOf.get(number + 1) ?? null];
  try {
    return drawCell(await readCell(number), box.hash.slice(1), ...neighbours);
  } catch (error) {
    const text = `The details of this cell cannot be drawn (${error.message}). A browser of 2023 or later can do it.`;
    return make("article.cell", { "data-cell": box.dataset.cell, tabindex: -1 }, make("p.reason", text));
  }
}
addEventListener("hashchange", openCell);
openCell();

// Groups of backends side by side are drawn when they are opened.
document.addEventListener("toggle", (event) => event.target.matches(".side[open]") && openSide(event.target), true);
loaded.then(() => all(".side[open]").forEach(openSide));

// Copy; a page opened from a file may have no clipboard, then the text is selected for the reader.
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

// Download of all quantities, of one cell or of the run.
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
