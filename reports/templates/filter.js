// Filters cells: they have to match all words, and no word with a minus in front. A word that is part of a cell's name,
// or a state such as is:fail, is searched in names; any other in reasons and in the stages and tensors that differ.
// Other cells are hidden, with rows that are then empty. The address keeps the filter.
const filter = document.getElementById("filter");
const wordOf = Object.fromEntries(all(".count").map((button) => [button.classList[1], button.dataset.filter])); // is:pass
const boxes = all("#cells .box");
const boxOf = new Map(boxes.map((box) => [Number(box.dataset.n), box]));
const nameOf = new Map(boxes.map((box) => [Number(box.dataset.n), `${box.dataset.cell} is:${box.dataset.state} ${wordOf[box.dataset.state]}`.toLowerCase()]));
const reasonOf = new Map(boxes.map((box) => [Number(box.dataset.n), box.dataset.tip.toLowerCase()]));
const allNames = [...nameOf.values()];

// Draws a tile for each cell beside the name of its backend, so that the first screen shows all of them.
for (const row of all(".backends li")) {
  const own = boxes.filter((box) => box.closest("td").dataset.backend === row.dataset.backend);
  const tile = (box) => {
    const made = make(`a.tile.${box.dataset.state}`, { href: box.hash, "data-n": box.dataset.n, "data-m": box.dataset.m ?? null, "data-tip": box.dataset.tip, tabindex: -1, "aria-label": box.getAttribute("aria-label") });
    if (!box.matches(".conforms")) made.textContent = box.querySelector(".symbol").textContent;
    return made;
  };
  row.append(make(`span.tiles${own.length > 60 ? ".fine" : ""}`, own.map(tile)));
}

function hits(text) {
  const tests = text.toLowerCase().split(/\s+/).filter((word) => word.replace("-", "")).map((word) => {
    const negated = word.startsWith("-");
    const wanted = negated ? word.slice(1) : word;
    const place = allNames.some((name) => name.includes(wanted)) ? nameOf : reasonOf;
    return (number) => place.get(number).includes(wanted) !== negated;
  });
  return new Set([...nameOf.keys()].filter((number) => tests.every((test) => test(number))));
}

function applyFilter() {
  const found = hits(filter.value);
  for (const box of all(".box, .tile")) box.classList.toggle("away", !found.has(Number(box.dataset.n)));
  for (const element of all("[data-cells]")) {
    const numbers = element.dataset.cells.split(" ").filter(Boolean);
    element.hidden = numbers.length > 0 && !numbers.some((number) => found.has(Number(number)));
  }
  const first = document.querySelector(".attention");
  if (first) first.hidden = all("[data-cells]", first).every((element) => element.hidden);
  for (const body of all("#cells tbody")) {
    const rows = all("tr", body);
    for (const row of rows) row.hidden = !row.querySelector(".box:not(.away)");
    body.hidden = rows.every((row) => row.hidden);
  }
  document.getElementById("matches").value = filter.value.trim() ? `${found.size} of ${boxes.length}` : "";
  for (const button of all("[data-filter]")) button.setAttribute("aria-pressed", filter.value === button.dataset.filter);
}

// The address has the open cell and the filter: #cell-NAME?filter=WORDS.
function readAddress() {
  const [cell, query = ""] = location.hash.split("?");
  return { cell: cell === "#" ? "" : cell, filter: new URLSearchParams(query).get("filter") ?? "" };
}
function keepFilter() {
  const { cell } = readAddress();
  const kept = filter.value.trim();
  history.replaceState(null, "", `${cell || "#"}${kept ? `?filter=${encodeURIComponent(kept)}` : ""}`);
}
function setFilter(text) {
  filter.value = text;
  applyFilter();
  keepFilter();
}
filter.addEventListener("input", () => setFilter(filter.value));
for (const button of all("[data-filter]")) {
  button.addEventListener("click", () => setFilter(filter.value === button.dataset.filter ? "" : button.dataset.filter));
}
if (readAddress().filter) setFilter(readAddress().filter);

unpack("found").then(({ cells, strings }) => {
  for (const [number, texts] of Object.entries(cells)) {
    const words = texts.map((text) => strings[text]).join("\n");
    reasonOf.set(Number(number), `${reasonOf.get(Number(number))}\n${words.toLowerCase()}`);
  }
  if (filter.value) applyFilter();
});
