// Splits a matrix that is wider than the paper for printing; each part repeats the layouts.
const PAPER = 1240; // px: A4 and Letter across, at the size in which the matrix is printed

addEventListener("beforeprint", () => {
  const around = cellTable.parentElement;
  const shown = columnsOf(cellTable).map((cells) => !cells[0].hidden);
  const widths = columnsOf(cellTable).map((cells) => cells[0].offsetWidth);
  const room = PAPER - cellTable.querySelector("th.key").offsetWidth;
  const pages = [];
  let used = Infinity;
  shown.forEach((isShown, column) => {
    if (!isShown) return;
    if (used + widths[column] > room) {
      pages.push(shown.map(() => false));
      used = 0;
    }
    pages.at(-1)[column] = true;
    used += widths[column];
  });
  if (pages.length < 2) return;
  around.classList.add("parted");
  for (const page of pages.reverse()) {
    const part = cellTable.cloneNode(true);
    part.removeAttribute("id");
    part.classList.add("part");
    showColumns(part, page);
    around.after(part);
  }
});
addEventListener("afterprint", () => {
  cellTable.parentElement.classList.remove("parted");
  for (const part of all(".matrix.part")) part.remove();
});
