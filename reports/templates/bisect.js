// The first wrong module of a cell, as `parity bisect` has found it: the answer, and what was found in a word and a text.
function firstModule(cell) {
  if (!cell.bisection) return null;
  const { answer, facts } = cell.bisection;
  const rows = facts.map(([word, text]) => make("tr", make("th.left", { scope: "row" }, word), make("td.left.name", text)));
  return make(
    "section.bisected",
    make("h3", "The first wrong module ", make("small", "the cell and the oracle, module by module")),
    make("p.reason", answer),
    rows.length > 0 && table("What bisecting has found", "numbers.config", [left("what"), left("found")], rows),
  );
}
