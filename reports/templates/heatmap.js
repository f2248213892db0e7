// Heat maps: worst observed / allowed of all steps, by layer and kind of parameter (reports/heatmap.py has the places).
const WIDE = 8; // up to so many columns there is room for the ratio in each square

function shade(value, shades) {
  if (value === 0) return "h0";
  const index = shades.findIndex((top) => value <= top);
  return `h${1 + (index < 0 ? shades.length : index)}`;
}

// The quantities of a stage that are parameters.
const parametersOf = (cell, stage) => cell.quantities.filter((q) => q.stage === stage && q.place);

// The squares of one stage.
function heatMap(cell, stage) {
  const found = parametersOf(cell, stage);
  const rows = new Map(); // by kind, then by column
  for (const q of found) {
    const [column, kind] = q.place;
    if (!rows.has(kind)) rows.set(kind, new Map());
    const row = rows.get(kind);
    if (!(row.get(column)?.ratio > q.ratio)) row.set(column, q);
  }
  const depth = (column) => (column === "in" ? -1 : column === "out" ? Infinity : Number(column));
  const columns = [...new Set(found.map((q) => q.place[0]))].sort((a, b) => (depth(a) < depth(b) ? -1 : 1));
  const { kinds, shades } = cell.legend;
  const rank = (kind) => (kinds.includes(kind) ? kinds.indexOf(kind) : kinds.length);
  const wide = columns.length <= WIDE;
  const head = columns.map((c) => make("th", wide || !(Number(c) % 4) ? c : ""));
  const square = (q) => {
    if (!q) return make("td");
    const text = wide ? ratio(q.ratio) : q.ratio > 1 ? "×" : "";
    const tip = `${tensorAtStep(q)}\nerror ${number(q.observed)}, allowed ${number(q.allowed)}`;
    return make(`td.${shade(q.ratio, shades)}`, { "data-tip": tip }, text);
  };
  const body = [...rows.keys()]
    .sort((a, b) => rank(a) - rank(b))
    .map((kind) => make("tr", make("th", kind), columns.map((column) => square(rows.get(kind).get(column)))));
  const drawn = make(wide ? "table.heat" : "table.heat.fine", make("tr", make("th"), head), body);
  return make("div.scroll", { tabindex: 0, role: "region", "aria-label": stage }, drawn);
}
