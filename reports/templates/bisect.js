// Draws the result of bisecting a cell: the first wrong module, and a table of findings.
function firstModule(cell) {
  if (!cell.bisection) return null;
  const { answer, facts } = cell.bisection;
  const rows = facts.map(([word, text]) => make("tr", make("th.left", { scope: "row" }, word), make("td.left.name", text)));
  return make(
    "section.bisected",
    make("h3", "The first wrong module ", make("small", "the cell and the reference, module by module")),
    make("p.reason", answer),
    rows.length > 0 && table("Findings of the bisection", "numbers.config", [left("finding"), left("value")], rows),
  );
}
