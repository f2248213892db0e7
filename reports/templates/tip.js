// Shows tooltips; a step is marked in all charts of its cell.
const tip = document.getElementById("tip");
let terms = {}; // the meaning of each part of a layout
if (document.querySelector("[data-cell]")) unpack("terms").then((found) => (terms = found));

// Returns the tooltip of a cell: its name, what it is, and the meaning of each part of its layout.
function tipOfCell({ n, tip }) {
  const { cell } = boxOf.get(Number(n)).dataset;
  const known = [...new Set(cell.split("/")[3]?.split(/\.|-to-/))].filter((part) => terms[part]);
  return [cell, tip, ...known.map((part) => `${part}: ${terms[part]}`)].join("\n");
}
function show(element, x, y) {
  tip.textContent = "n" in element.dataset ? tipOfCell(element.dataset) : element.dataset.tip;
  tip.hidden = false;
  const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
  const top = y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
  for (const other of all(".hover.on")) other.classList.remove("on");
  if (element.dataset.step) {
    for (const other of all(`.hover[data-step="${element.dataset.step}"]`, element.closest(".cell, .side"))) {
      other.classList.add("on");
    }
  }
}
function hide() {
  tip.hidden = true;
  for (const other of all(".hover.on")) other.classList.remove("on");
}
// On touch screens, a tap shows the tooltip, and a tap elsewhere hides it.
document.addEventListener("click", (event) => {
  if (event.pointerType !== "touch") return;
  const element = event.target.closest("[data-tip]:not(a)");
  if (element) show(element, event.clientX, event.clientY);
  else hide();
});
document.addEventListener("pointermove", (event) => {
  if (event.pointerType === "touch") return;
  const element = event.target.closest("[data-tip]");
  if (element) show(element, event.clientX, event.clientY);
  else hide();
});
document.addEventListener("focusin", (event) => {
  const box = event.target.closest(".box");
  if (box && box.matches(":focus-visible")) {
    const at = box.getBoundingClientRect();
    show(box, at.left, at.bottom - 12);
  } else hide();
});
addEventListener("scroll", hide, { passive: true });
