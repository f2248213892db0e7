// Handles keys: "/" filters, Enter opens the first hit, arrows move between shown cells, Escape clears the filter or closes the cell. Left and right
// continue in the next row, up and down go to the nearest cell of the next line, so that every shown cell can be reached.
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function step(box, down, right) {
  const shown = all(".box:not(.away)", box.closest("table"));
  if (right) return shown[shown.indexOf(box) + right]?.focus();
  const at = box.getBoundingClientRect();
  const beyond = shown.flatMap((one) => {
    const { top, left } = one.getBoundingClientRect();
    const distance = down * (top - at.top);
    return distance > 1 ? [[distance, Math.abs(left - at.left), one]] : [];
  });
  beyond.sort((a, b) => a[0] - b[0] || a[1] - b[1])[0]?.[2].focus();
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
  } else if (["ArrowDown", "Enter"].includes(event.key) && document.activeElement === filter) {
    event.preventDefault();
    const first = boxes.find((one) => !one.classList.contains("away"));
    if (event.key === "Enter") first?.click();
    else first?.focus();
  } else if (event.key === "Escape") {
    if (document.activeElement === filter && filter.value) setFilter("");
    else if (boxAt.has(readAddress().cell)) {
      const from = boxAt.get(readAddress().cell);
      location.hash = "";
      from.focus();
    }
  }
});
