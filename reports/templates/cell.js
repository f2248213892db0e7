// Draws the section of one cell: the first difference, then stages in causal order, curves, heat maps, tables.
const WORST = 15;

function drawCell(cell, anchor, previous, next) {
  const state = cell.legend.states[cell.state];
  return make(
    `article.cell.${cell.state}`,
    { id: anchor, "data-cell": cell.id, tabindex: -1, "aria-label": cell.id },
    make(
      "header",
      chip(state, cell.state),
      make("h2", make("a", { href: `#${anchor}`, title: "link to this cell" }, parts(cell.id))),
      make("nav", { "aria-label": "Other cells" }, neighbour(previous, "← previous"), neighbour(next, "next →"), closing()),
    ),
    overview(cell, state),
    cell.first && firstDifference(cell),
    cell.quantities.length ? stages(cell) : null,
    firstModule(cell),
    nextSteps(cell),
    Object.keys(cell.logs).length || cell.state === "infrastructure" ? logs(cell) : null,
    panels([cell]).map((panel) => curves(cell, panel)),
    distributions(cell),
    batch(cell),
    maps(cell),
    cell.quantities.length ? worst(cell) : null,
    evidence(cell),
    denominators(cell),
    cell.series.steps.length ? perStep(cell) : null,
    cell.phases.length ? configuration(cell) : null,
  );
}

const chip = (state, id, words = state.name) =>
  make(`span.chip.${id}`, make("span", { "aria-hidden": "true" }, state.symbol), ` ${words}`);
const closing = () => make("a.close", { href: "#", title: "close (Esc)" }, "close ✕");
const neighbour = (box, text) => box && make("a", { href: box.hash, title: box.dataset.cell }, text);
const parts = (id) => id.split("/").flatMap((part, i) => (i ? [make("i", "/"), make("wbr"), part] : [part]));
const advice = ([tensor, hint]) => make("p.advice", make("b", "Likely cause"), " ", make("code", tensor), ": ", linked(hint));
const folded = (open, title, ...body) =>
  make("section", make("details", { open }, make("summary", make("h3", title)), body));

// Whether a section says what differs first, so that the summary need not.
const isDiagnosed = (cell) => cell.state === "differs" && cell.first;

function overview(cell, state) {
  const outside = cell.quantities.filter((q) => q.ratio > 1).length;
  const facts = [plural(cell.ranks, "rank"), `${cell.seconds.toFixed(1)} s`];
  if (cell.phases.length > 1) facts.push(plural(cell.phases.length, "phase"));
  facts.push(...costs(cell));
  if (cell.quantities.length) facts.push(`${cell.quantities.length} quantities compared`, `${outside} outside tolerance`);
  const [sentence, ...more] = (cell.reason || state.meaning).split("\n");
  return make(
    "div.summary",
    !isDiagnosed(cell) && make("p.reason", linked(sentence)),
    more.length > 0 && make("pre.more", { tabindex: 0 }, linked(more.join("\n").replace(/^\n+/, ""))),
    cell.problem && make("p.reason", `The record of this cell is damaged: ${cell.problem}`),
    make("p.meta", facts.map((fact) => make("span", fact))),
    cell.conventions.map(([name, words, shown]) =>
      make("p.note", "Declared convention ", make("b", name), `: ${words}; ${shown ? "it shows" : "it does not show"} in this cell.`),
    ),
  );
}

// Draws the commands that lead on from a diagnosis.
function nextSteps(cell) {
  if (!cell.reproduce) return null;
  const differs = cell.state === "differs", precision = cell.precision;
  const steps = [[differs ? `After a change, judge ${cell.together ? "only " : ""}this cell again:` : "Run this cell again:", cell.reproduce]];
  const bisect = cell.reproduce.replace(/^parity run/, "parity bisect").replace(/ --out \S+/, "").replace("--cells ", "");
  if (differs && cell.together) steps.unshift(["After a change, judge all cells with this first difference again:", cell.together]);
  if (differs && !cell.untraced && bisect.startsWith("parity bisect")) {
    steps.unshift([cell.bisection ? "Find the first wrong module again:" : "Find the first wrong module:", bisect]);
  }
  if (differs && precision !== "exact") {
    const twin = cell.reproduce.replaceAll(`/${precision}`, "/exact");
    steps.push([`See whether it differs without rounding; if not, look at code that only ${precision} runs:`, twin]);
  }
  const drawn = steps.map(([words, command]) => [
    make("p.note", words),
    make("div.command", make("code", command), make("button", { type: "button", "data-copy": true }, "Copy")),
  ]);
  return make("section.next", make("h3", "What to run next"), drawn);
}

function firstDifference(cell) {
  const { stage, step, findings, more, of, hints, shared, passing, later } = cell.first;
  const wrong = findings.length + more;
  const heads = ["tensor", "step", "observed", "allowed", "margin", "largest, absolute", left("where")];
  const found = findings.map(([tensor, observed, allowed, ...rest]) => [tensor, judged({ observed, allowed }), ...rest]);
  const rows = found.map(([tensor, q, largest, where]) => {
    const numbers = [step, number(q.observed), number(q.allowed), make("td", judgedMargin(q)), number(numeric(largest))];
    return [make("td.name", tensor), ...numbers, make("td.left", where)];
  });
  return make(
    "section.first",
    make("h3", `First difference: ${stage}, ${when(step)} `, make("small", `in ${wrong} of ${plural(of, "number")}`)),
    make("p.said", make("code", found[0][0]), ` is ${off(found[0][1])}`),
    table("Findings of the first stage", "numbers", heads, rows),
    more > 0 && make("p.note", `${more} more of this stage at this step are in the CSV.`),
    hints.map(advice),
    shared && make("p.advice", shared),
    passing && make("p.note", `No likely cause is known. ${passing}`),
    isDiagnosed(cell) && cell.reason && make("p.note", linked(cell.reason)),
    later.length > 0 && make("p.note", `Also outside tolerance, perhaps as a consequence: ${later.join(", ")}.`),
  );
}

function logs(cell) {
  const open = !cell.quantities.length && !cell.reason.includes("\n"); // a reason of several lines contains the logs
  const texts = Object.entries(cell.logs).map(([rank, text]) =>
    make(
      "details",
      { open },
      make("summary", rank, " ", make("a", { href: cell.files[rank] }, "whole file")),
      make("pre", { tabindex: 0 }, text || "(empty)"),
    ),
  );
  return make(
    "section.logs",
    make("h3", "Last lines of each rank"),
    texts.length ? texts : make("p.note", "No rank wrote a log."),
  );
}

// Draws a square for each stage and step. Read down each column, then to the right: the first red square is the cause.
function stages(cell) {
  const worst = new Map(); // by stage, and by stage and step
  for (const q of [...cell.quantities].sort(byUrgency)) {
    for (const at of [q.stage, `${q.stage} ${q.step}`]) if (!worst.has(at)) worst.set(at, q);
  }
  const steps = [...new Set(cell.quantities.map((q) => q.step))].sort((a, b) => a - b);
  const wide = steps.length <= 2 * WIDE;
  const square = (stage, step) => {
    const q = worst.get(`${stage} ${step}`);
    if (!q) return make("td.square");
    const isFirst = stage === cell.first?.stage && step === cell.first.step;
    const classes = `${shade(q, cell.legend)}${isFirst ? ".begins" : ""}`;
    return make(`td.square.${classes}`, { "data-tip": `${tensorAtStep(q)}\n${off(q)}` }, wide ? inSquare(q) : q.ratio > 1 ? "×" : "");
  };
  const names = [...new Set([...cell.stages, ...cell.quantities.map((q) => q.stage)])];
  const rows = names.map((stage) => {
    const q = worst.get(stage);
    const name = make("th", { scope: "row", "data-tip": meaningOf(stage) }, stage, stage === cell.first?.stage && [" ", make("em", "first")]);
    if (!q) return make("tr.absent", name, make("td.left", { colspan: steps.length + 4 }, "not compared"));
    return make(
      "tr",
      { class: [q.ratio > 1 && "over", stage === cell.first?.stage && "origin"].filter(Boolean).join(" ") },
      [name, steps.map((step) => square(stage, step)), make("td.least", judgedMargin(q))],
      [make("td.wide", number(q.observed)), make("td.wide", number(q.allowed)), make("td.name.left.wide", tensorAtStep(q))],
    );
  });
  const heads = [make("th", "stage"), ...steps.map((step) => make("th.square", step < 0 ? "loaded" : wide ? `step ${step}` : step % 4 ? "" : step))];
  heads.push(make("th.least", "margin"), make("th.wide", "observed"), make("th.wide", "allowed"), make("th.left.wide", "worst at"));
  const drawn = make("table.stages", make("thead", make("tr", heads)), make("tbody", rows));
  return make(
    "section",
    make("h3", "Stages, in causal order ", make("small", "margin in digits, or the error in percent")),
    make("p.shades", shadeLegend(cell)),
    make("div.scroll", { tabindex: 0, role: "region", "aria-label": "Stages" }, drawn),
    make("p.note", provenance(cell)),
  );
}

// Draws the curves of one panel; panels that only some objectives have are folded.
function curves(cell, panel) {
  const drawn = adjustable([cell], panel);
  if (!drawn) return null;
  const own = cell.charts.filter((chart) => chart[4] === panel);
  const errors = own.flatMap(([, stage, , tensor]) => errorPoints([cell], stage, tensor).flat());
  const legend = [[make("i.k-ours"), cell.backend], ...oracleLegend("allowed", [cell])];
  if (errors.some((q) => q.observed === 0)) {
    legend.push([key(make("path.zero", { d: "M2 1h8l-4 7z" })), "exactly equal: error 0, drawn at the bottom"]);
  }
  if (errors.some((q) => q.ratio > 1)) legend.push([make("i.k-over"), "outside tolerance"]);
  if (cell.phases.length > 1) legend.push([make("i.k-phase"), "the next phase begins"]);
  if (panel) return folded(cell.state !== "conforms", panel, make("p", legendOf(legend)), drawn);
  return make("section", make("h3", "Curves ", legendOf(legend)), drawn);
}

function maps(cell) {
  const compared = cell.maps.filter((stage) => parametersOf(cell, stage).length);
  if (!compared.length) return null;
  const equal = compared.filter((stage) => parametersOf(cell, stage).every((q) => q.ratio === 0));
  const drawn = compared.filter((stage) => !equal.includes(stage));
  const elsewhere = equal.map((stage) => cell.quantities.find((q) => q.stage === stage && q.ratio > 1)).filter((q) => q);
  const clean = equal.filter((stage) => !elsewhere.some((q) => q.stage === stage));
  const remark = "margin in digits, or the largest error of all steps in percent, by layer and kind of parameter";
  return make(
    "section",
    make("h3", "Where in the network ", make("small", remark)),
    make("p.shades", shadeLegend(cell), boundaries(cell)),
    make("div.maps", drawn.map((stage) => make("figure", make("figcaption", stage), heatMap(cell, stage)))),
    clean.length > 0 && make("p.note", `Exactly equal in every parameter: ${clean.join(", ")}.`),
    elsewhere.map((q) => make("p.note", `In ${q.stage} no parameter differs, but ${tensorAtStep(q)}: ${off(q)}.`)),
  );
}

function boundaries(cell) {
  const legend = [];
  const parameters = cell.quantities.filter((q) => q.place);
  if (/pp\d/.test(cell.layout)) legend.push([make("i.k-seam"), "the next pipeline stage"]);
  const cut = Math.max(1, ...parameters.map((q) => tensorPieces(cell, q.tensor)));
  if (cut > 1) legend.push([make("b", `\u00f7${cut}`), ` cut over ${cut} tensor-parallel ranks`]);
  return legend.length ? legendOf(legend) : null;
}

// Explains the colours; errors outside the tolerance are only explained in a cell that has some.
function shadeLegend({ legend: { shades, beyond }, quantities }) {
  const steps = shades.map((top, i) => [make(`i.h${i + 1}`), `≥ ${margin(top)}`, top === 1 && make("b", "tolerance")]);
  const errors = [...beyond.map((top) => `≤ ${share(top)}`), "more"].map((text, i) => [make(`i.h${i + 5}`), text]);
  return legendOf([[make("i.h0"), "="], ...steps, ...(quantities.some((q) => q.ratio > 1) ? errors : [])], "heatkey");
}

function worst(cell) {
  const found = [...cell.quantities].sort(byUrgency).slice(0, WORST);
  const rows = found.map((q) => [
    ...[make("td.left", q.stage), make("td.name", q.tensor), q.step, number(q.observed), number(q.allowed)],
    make("td", judgedMargin(q)),
  ]);
  const button = (kind) =>
    make("button", { type: "button", "data-download": kind, "data-only": cell.number }, kind.toUpperCase());
  return folded(
    cell.state !== "conforms",
    `Worst ${found.length} of ${cell.quantities.length} quantities`,
    table("Worst quantities", "numbers", ["stage", left("tensor"), "step", "observed", "allowed", "margin"], rows),
    make("p.note.screen", "All of them: ", button("csv"), " ", button("json")),
  );
}

// Draws a row for each number and step, because a row for each step would be too wide.
function perStep(cell) {
  const shown = (one, step) => (one?.has(step) ? String(Number(one.get(step).toPrecision(15))) : "");
  const rows = [...cell.series.values].flatMap(([name, ours]) =>
    cell.series.steps.map((step) => [make("td.left", name), step, shown(ours, step), shown(cell.oracle?.series.values.get(name), step)]),
  );
  return folded(false, "Values per step", table("Values per step", "numbers", [left("number"), "step", cell.backend, "reference"], rows));
}
