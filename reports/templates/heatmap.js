// Draws heat maps: the smallest margin or the largest error of all steps, by layer and kind of parameter (see reports/page_data.py), with
// the boundaries of pipeline stages, and the number of tensor-parallel pieces of sharded parameters.
const WIDE = 8; // up to so many columns there is room for the margin in each square

// Returns the colour classes of a quantity: by margin within the tolerance, by relative error outside of it.
function shade(q, { shades, beyond }) {
  if (q.ratio === 0) return "h0";
  const among = (tops, value) => tops.filter((top) => value > top).length;
  return q.ratio <= 1 ? `h${1 + among(shades, q.ratio)}` : `h${5 + (q.observed >= 0 ? among(beyond, q.observed) : beyond.length)}.out`;
}

// Returns the quantities of a stage that are parameters; none if all are compared with rebuilt numbers, within tolerance.
function parametersOf(cell, stage) {
  const found = cell.quantities.filter((q) => q.stage === stage && q.place);
  return found.some(isUrgent) ? found : [];
}

// Draws the squares of one stage.
function heatMap(cell, stage) {
  const found = parametersOf(cell, stage);
  const rows = new Map(); // by kind, then by column
  for (const q of found) {
    const [column, kind] = q.place;
    if (!rows.has(kind)) rows.set(kind, new Map());
    const row = rows.get(kind);
    if (!row.has(column) || byUrgency(row.get(column), q) > 0) row.set(column, q);
  }
  const depth = (column) => (column === "in" ? -1 : column === "out" ? Infinity : Number(column));
  const columns = [...new Set(found.map((q) => q.place[0]))].sort((a, b) => (depth(a) < depth(b) ? -1 : 1));
  const { kinds } = cell.legend;
  const rank = (kind) => (kinds.includes(kind) ? kinds.indexOf(kind) : kinds.length);
  const wide = columns.length <= WIDE;
  const starts = stageStarts(cell, found, columns);
  const seam = (column) => (starts.has(column) ? ".seam" : "");
  const head = columns.map((c) => make(`th${seam(c)}`, wide || !(Number(c) % 4) ? c : ""));
  const square = (q, column) => {
    if (!q) return make(`td${seam(column)}`);
    const text = wide ? inSquare(q) : q.ratio > 1 ? "×" : "";
    const tip = `${tensorAtStep(q)}\n${off(q)}${placed(cell, q.tensor)}`;
    return make(`td.${shade(q, cell.legend)}${seam(column)}`, { "data-tip": tip }, text);
  };
  const body = [...rows.keys()]
    .sort((a, b) => rank(a) - rank(b))
    .map((kind) => {
      const cut = Math.max(...[...rows.get(kind).values()].map((q) => tensorPieces(cell, q.tensor)));
      const name = make("th", kind, cut > 1 && make("small", ` \u00f7${cut}`));
      return make("tr", name, columns.map((column) => square(rows.get(kind).get(column), column)));
    });
  const drawn = make(wide ? "table.heat" : "table.heat.fine", make("tr", make("th"), head), body);
  return make("div.scroll", { tabindex: 0, role: "region", "aria-label": stage }, drawn);
}

// Returns the ranks that hold each piece of a parameter, by name and region, in the first phase.
const piecesOf = (cell, tensor) => cell.phases[0]?.pieces.get(tensor.replace(/ \(.*$/, "")) ?? {};
const ranksOf = (pieces) => [...new Set(Object.values(pieces).flat())].sort((a, b) => a - b);

// Returns over how many tensor-parallel ranks a parameter is sharded; backends name its pieces tp0, tp1, ...
function tensorPieces(cell, tensor) {
  const parts = Object.keys(piecesOf(cell, tensor)).map((region) => /tp ?(\d+)/.exec(region)?.[1]);
  return new Set(parts.filter((part) => part !== undefined)).size || 1;
}

// Returns the columns at which a pipeline stage starts: no rank holds parameters of this column and of the previous one.
function stageStarts(cell, found, columns) {
  const holders = (column) => new Set(found.filter((q) => q.place[0] === column).flatMap((q) => ranksOf(piecesOf(cell, q.tensor))));
  const sets = columns.map(holders);
  return new Set(columns.filter((_, i) => i && sets[i].size && sets[i - 1].size && ![...sets[i]].some((rank) => sets[i - 1].has(rank))));
}

function placed(cell, tensor) {
  const pieces = piecesOf(cell, tensor);
  const ranks = ranksOf(pieces);
  if (!ranks.length) return "";
  const count = Object.keys(pieces).length;
  const cut = tensorPieces(cell, tensor);
  const over = cut > 1 ? `, cut over ${cut} tensor-parallel ranks` : "";
  return `\n${count > 1 ? `in ${count} pieces` : "whole"} on ranks ${ranks.join(", ")}${over}`;
}
