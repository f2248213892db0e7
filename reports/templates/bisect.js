// Draws the result of bisecting a cell: the first wrong module, and a table of findings.
function firstModule(cell) {
  if (!cell.bisection) return cell.state === "differs" ? notBisected(cell) : null;
  const { answer, facts } = cell.bisection;
  const rows = facts.map(([word, text]) => make("tr", make("th.left", { scope: "row" }, word), make("td.left.name", text)));
  return make(
    "section.bisected",
    make("h3", "The first wrong module ", make("small", "the cell and the reference, module by module")),
    make("p.reason", answer),
    rows.length > 0 && table("Findings of the bisection", "numbers.config", [left("finding"), left("value")], rows),
  );
}

// Says why a cell was not bisected, and what would tell its first wrong module.
function notBisected(cell) {
  const link = (id) => make("a", { href: boxes.find((box) => box.dataset.cell === id)?.hash ?? null }, make("code", id));
  const missing = "This cell was not bisected: a run bisects at most 8 cells. The first command below does.";
  const found = cell.alike
    ? ["A run bisects one cell of each scenario, model and backend. ", link(cell.alike[0]), `, which begins alike: ${cell.alike[1]}`]
    : cell.untraced || missing;
  return make("section.bisected", make("h3", "The first wrong module"), make("p.note", found));
}
