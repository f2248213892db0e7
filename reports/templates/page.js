"use strict";
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const filter = document.getElementById("filter");

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
  const total = all(".box").length;
  document.getElementById("matches").value = wanted.length ? `${shown} of ${total}` : "";
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
    } else if (opened()) {
      const from = all(".box").find((link) => link.hash === location.hash);
      location.hash = "";
      from?.focus();
    }
  }
});

// An opened cell is the target of the address; mark it in the matrix and move the keyboard into it.
const opened = () => document.querySelector(".cell:target");
const title = document.title;
function mark() {
  for (const link of all(".box")) link.toggleAttribute("aria-current", link.hash === location.hash);
  const cell = opened();
  document.title = cell ? `${cell.dataset.cell} · backend-parity` : title;
  cell?.focus({ preventScroll: true });
}
window.addEventListener("hashchange", mark);
mark();

// Read-outs; a step is marked in all charts of its cell.
const tip = document.getElementById("tip");
function show(element, x, y) {
  tip.textContent = element.dataset.tip;
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
document.addEventListener("pointermove", (event) => {
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

// Copy; a page opened from a file may have no clipboard, then the text is selected for the reader.
for (const button of all("[data-copy]")) {
  button.addEventListener("click", async () => {
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
  });
}

// Download: the quantities lie in the page as gzipped JSON.
async function quantities() {
  const packed = Uint8Array.from(atob(document.getElementById("quantities").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
const quoted = (value) => (value === null ? "" : typeof value === "number" ? value : `"${value.replaceAll('"', '""')}"`);
for (const button of all("[data-download]")) {
  button.addEventListener("click", async () => {
    const kind = button.dataset.download;
    const { columns, data } = await quantities();
    const chosen = data.filter((row) => !button.dataset.only || row[0] === button.dataset.only);
    const text =
      kind === "csv"
        ? [columns, ...chosen].map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n"
        : JSON.stringify(chosen.map((row) => Object.fromEntries(columns.map((name, i) => [name, row[i]]))));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: kind === "csv" ? "text/csv" : "application/json" }));
    link.download = `${(button.dataset.only || "quantities").replaceAll("/", "_")}.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
}
