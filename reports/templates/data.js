// Reads the packed data: a block per cell and per group, and one block that cells share (reports/page_data.py).
// The blocks come after the script, so that the page can be used before all of them have been read.
const loaded = new Promise((done) => document.addEventListener("DOMContentLoaded", done));

async function unpack(id) {
  await loaded;
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

let common = null;
function shared() {
  common ??= unpack("shared");
  return common;
}

// Converts strings to numbers that JSON does not have.
const SPECIAL = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const numeric = (value) => (value in SPECIAL ? SPECIAL[value] : value);

// Adds the ratio to a quantity; infinite for NaN, and for any error above a tolerance of 0.
function judged(q) {
  const observed = numeric(q.observed);
  const allowed = numeric(q.allowed);
  const beyond = Number.isNaN(observed) || !(allowed > 0);
  return { ...q, observed, allowed, ratio: observed === 0 ? 0 : beyond ? Infinity : observed / allowed };
}

// Unpacks the block of several cells; the last one is kept, because its cells are often read one after another.
const last = { block: -1 };
async function packedCell(number) {
  await loaded;
  const perBlock = Number(document.getElementById("block-0").dataset.cellsOf);
  const block = Math.floor(number / perBlock);
  if (last.block !== block) Object.assign(last, { block, cells: unpack(`block-${block}`) });
  return structuredClone((await last.cells)[number % perBlock]);
}

// Reads the error of a row from the digits and the powers of all.
function spelled(digits, powers, row, zero) {
  const power = typeof powers === "string" ? powers.charCodeAt(row) - zero : powers[row];
  const width = digits.length / powers.length;
  const text = digits.slice(width * row, width * (row + 1)).trim();
  return text in SPECIAL ? text : Number(`${text}e${power}`);
}

// Unpacks a cell and resolves its references to the shared block.
async function readCell(number) {
  const { strings, values, places, ...legend } = await shared();
  const { rebuilt, share } = legend.rule;
  const [grades, grade] = legend.grades;
  const cell = await packedCell(number);
  for (const key of ["stages", "charts", "maps"]) cell[key] = values[cell[key]];
  cell.together = strings[cell.together];
  cell.quantities = cell.tables.flatMap(([stage, names, steps, allowed, digits, powers]) =>
    values[names].map((number, row) => {
      const bound = values[allowed][row];
      const within = digits[row] === " " ? 0 : bound * 10 ** ((grade - digits.charCodeAt(row)) / grades);
      const error = powers ? spelled(digits, powers, row, legend.power) : within;
      const at = { stage: strings[stage], tensor: strings[number], step: values[steps][row], place: places[number] };
      const isError = !at.tensor.endsWith(rebuilt) && !at.tensor.includes(share);
      return judged({ ...at, isError, observed: error, allowed: bound });
    }),
  );
  cell.strips = cell.strips.map(([at, classes, largest, where, spread, reference]) => {
    const [stage, tensor, step, tokens, starts] = values[at];
    return { stage: strings[stage], tensor: strings[tensor], step, tokens, starts, classes, largest: numeric(largest), where, spread, reference: values[reference] };
  });
  const config = (parts) => new Map(parts.flatMap((part) => values[part].map((pair) => pair.map((i) => strings[i]))));
  for (const phase of cell.phases) {
    phase.config = config(phase.config);
    [phase.evidence, phase.batches] = [values[phase.evidence], values[phase.batches]];
    phase.pieces = new Map(Object.entries(values[phase.pieces]).map(([name, pieces]) => [strings[name], pieces]));
  }
  cell.series = series(cell.series);
  if (cell.oracle) cell.oracle = { series: series(values[cell.oracle.series]), noise: values[cell.oracle.noise].map(series), config: config(cell.oracle.config) };
  return { ...cell, number, legend };
}

// Returns the values by step for each key.
function series({ steps, values }) {
  const columns = Object.entries(values).map(([key, column]) => [
    key,
    new Map(steps.map((step, i) => [step, column[i]]).filter(([, v]) => v !== null).map(([s, v]) => [s, numeric(v)])),
  ]);
  return { steps, values: new Map(columns) };
}

// Returns the quantities of cells as parts of a file; a few thousand cells do not fit into one string.
const FIELDS = ["cell", "stage", "tensor", "step", "observed", "allowed", "ratio"];
async function exported(kind, numbers) {
  const csv = kind === "csv";
  const parts = [csv ? FIELDS.join(",") + "\r\n" : "["];
  const spelled = (v) => (Number.isFinite(v) ? Number(v.toPrecision(6)) : Number.isNaN(v) ? "nan" : v > 0 ? "inf" : "-inf");
  const quoted = (value) => (typeof value === "number" ? value : `"${value.replaceAll('"', '""')}"`);
  for (const number of numbers) {
    const { id, quantities } = await readCell(number);
    const rows = quantities.map((q) => {
      return [id, q.stage, q.tensor, q.step, spelled(q.observed), spelled(q.allowed), spelled(q.ratio)];
    });
    if (csv) parts.push(rows.map((row) => row.map(quoted).join(",") + "\r\n").join(""));
    else if (rows.length) {
      const texts = rows.map((row) => JSON.stringify(Object.fromEntries(FIELDS.map((name, i) => [name, row[i]]))));
      parts.push((parts.length > 1 ? "," : "") + texts.join(","));
    }
  }
  return csv ? parts : [...parts, "]"];
}
