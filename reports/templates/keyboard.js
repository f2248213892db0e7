// Handles keys: "/" filters, arrows move between shown cells, Escape clears the filter or closes the cell. Left and right
// continue in the next row, up and down go to the nearest cell, so that every shown cell can be reached.
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function step(box, down, right) {
  const shown = (cell) => cell.querySelector(".box:not(.away)");
  const rows = all("tbody tr:not([hidden])", box.closest("table"))
    .map((row) => all("td", row).map(shown))
    .filter((row) => row.some((cell) => cell));
  if (right) {
    const every = rows.flat().filter((cell) => cell);
    return every[every.indexOf(box) + right]?.focus();
  }
  const row = rows.findIndex((cells) => cells.includes(box));
  const column = rows[row].indexOf(box);
  const near = (rows[row + down] ?? []).map((cell, at) => [Math.abs(at - column), cell]).filter(([, cell]) => cell);
  near.sort(([a], [b]) => a - b)[0]?.[1].focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const box = document.activeElement.closest(".box");
  if (event.key === "/" && !document.activeElement.matches("input")) {
    event.preventDefault();
    filter.focus();
    filter.select();
  } else if (event.key in MOVES && box) {
    event.preventDefault();
    step(box, ...MOVES[event.key]);
  } else if (event.key === "ArrowDown" && document.activeElement === filter) {
    event.preventDefault();
    boxes.find((one) => !one.classList.contains("away"))?.focus();
  } else if (event.key === "Escape") {
    if (document.activeElement === filter && filter.value) setFilter("");
    else if (boxAt.has(readAddress().cell)) {
      const from = boxAt.get(readAddress().cell);
      location.hash = "";
      from.focus();
    }
  }
});
