// Draws curves of one or several cells: a value over the oracle's, and its error with the tolerance band. Loss curves that
// coincide prove little, so the error is always drawn next to them. Nothing is smoothed. An error of exactly 0 is not on
// a log axis; it is drawn at the bottom, hollow, with a note.

// Returns the panels with curves; the panel that every objective has comes first and has no name.
const panels = (cells) => [...new Set(["", ...cells.flatMap((cell) => cell.charts.map(([, , , , panel]) => panel))])];

// Returns [title, remark, drawing] of each chart of a panel, with all cells in one chart; zoom.js has the views.
function charts(cells, panel, view) {
  const own = cells.flatMap((cell) => cell.charts.filter((chart) => chart[4] === panel));
  const known = new Map(own.map((chart) => [chart.join("\n"), chart]));
  const drawn = [...known.values()].flatMap(([title, stage, key, tensor]) => {
    const points = errorPoints(cells, stage, tensor).map((found) => found.filter((q) => within(view, q.step)));
    const isSigned = view.errors === "signed" && tensor === key;
    const against = tensor === key ? "relative" : `against its own tokens${cells.length === 1 ? "; dashed: against the reference" : ""}`;
    return [
      [title, "per step", valueChart(cells, title, key, view)],
      isSigned
        ? [`${title}: difference`, "relative, signed", signedChart(cells, title, key, points)]
        : [`${title}: error`, `${against}, ${view.errors === "log" ? "log" : "linear"} axis`, errorChart(cells, title, points, view, key, tensor === key)],
    ];
  });
  return drawn.filter(([, , chart]) => chart);
}

// Returns the judged quantities of an error chart, by cell and step.
const errorPoints = (cells, stage, tensor) =>
  cells.map((c) => c.quantities.filter((q) => q.stage === stage && q.tensor === tensor).sort((a, b) => a.step - b.step));

// Draws the values of a key per step over the oracle's, which are a broad pale line.
function valueChart(cells, title, key, view) {
  const ofView = (found) => new Map([...(found ?? [])].filter(([step]) => within(view, step)));
  const ours = cells.map((cell) => ofView(cell.series.values.get(key)));
  const theirs = ofView(cells.map((cell) => cell.oracle?.series.values.get(key)).find((found) => found));
  const isLog = view.values === "log";
  const height = (value) => (isLog ? (value > 0 ? Math.log10(value) : NaN) : value);
  const values = [...ours, theirs].flatMap((one) => [...one.values()]).map(height).filter(Number.isFinite);
  if (!values.length) return null;
  const steps = [...new Set([...ours, theirs].flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  const low = Math.min(...values), high = Math.max(...values);
  const margin = 0.08 * (high - low) || 0.05 * Math.abs(high) || 1;
  const axis = axes(steps[0], steps.at(-1), low - margin, high + margin);
  const path = (one) => [...one].filter(([, v]) => Number.isFinite(height(v))).map(([s, v]) => [axis.x(s), axis.y(height(v))]);
  const ticks = isLog ? logTicks(axis) : rounds(axis.low, axis.high).map((v) => [axis.y(v), label(v)]);
  const body = [frame(axis, ticks), line(path(theirs), "oracle")];
  if (cells.length === 1) body.push(phases(axis, cells[0]));
  ours.forEach((one, i) => {
    const kind = kinds(cells)[i];
    body.push(line(path(one), kind));
    for (const [step, value] of one) {
      const x = beside(axis, step, i, cells);
      body.push(Number.isFinite(height(value)) ? mark(kind, x, axis.y(height(value))) : cross(x));
    }
  });
  const exact = (value) => (value === undefined ? "not recorded" : String(Number(value.toPrecision(9))));
  const tips = steps.map((step) => {
    const lines = cells.map((cell, i) => `${who(cell, cells)}: ${exact(ours[i].get(step))}`);
    return [step, [...some(lines), `reference: ${exact(theirs.get(step))}`]];
  });
  return drawing([...body, hovers(axis, tips)], `${title} per step of ${what(cells)}, over the reference`);
}

// Shifts the marks of several members a little, because equal ones would hide each other.
function beside(axis, step, i, cells) {
  return axis.x(step) + (i - (cells.length - 1) / 2) * Math.min(3, 14 / cells.length);
}

function logTicks(axis) {
  const powers = [];
  for (let e = Math.ceil(axis.low); e <= axis.high; e++) powers.push([axis.y(e), power(e)]);
  if (powers.length > 1) return powers.filter((_, i) => i % Math.ceil(powers.length / 6) === 0);
  return rounds(10 ** axis.low, 10 ** axis.high).map((v) => [axis.y(Math.log10(v)), label(v)]);
}

// Draws the judged error of the number ``key`` per step, with the tolerance as a band, and its noise. A number that is held
// against the cell's own tokens also has its error against the reference, which is not judged.
function errorChart(cells, title, points, view, key, isDirect) {
  const isLog = view.errors === "log";
  const every = points.flat().sort((a, b) => a.step - b.step);
  const floor = isDirect ? noiseFloor(cells, key, every) : [];
  const apart = isDirect || cells.length > 1 ? new Map() : new Map(every.map((q) => [q.step, differenceAt(cells[0], key, q.step)]).filter(([, v]) => v < Infinity));
  const positive = [...every.flatMap((q) => [q.observed, q.allowed]), ...floor.map(([, v]) => v), ...apart.values()].filter((v) => v > 0 && v < Infinity);
  if (!positive.length) return null;
  const zeros = every.some((q) => q.observed === 0);
  const least = isLog ? Math.floor(Math.log10(Math.min(...positive))) : 0;
  const most = isLog ? Math.max(Math.ceil(Math.log10(Math.max(...positive))), least + 1) : 1.08 * Math.max(...positive);
  const axis = axes(every[0].step, every.at(-1).step, isLog ? least - 0.7 * zeros : 0, isLog ? most + 0.15 : most);
  const height = (value) => axis.y(isLog ? Math.log10(value) : value);
  const ticks = isLog ? [] : rounds(0, most).map((v) => [axis.y(v), label(v)]);
  if (isLog) for (let e = least; e <= most; e += Math.ceil((most - least) / 6)) ticks.push([axis.y(e), power(e)]);
  if (isLog && zeros) ticks.push([axis.y(axis.low), "0"]);
  const body = [band(axis, every, height), frame(axis, ticks)];
  const noise = floor.filter(([, v]) => v > 0 || !isLog).map(([step, v]) => `${axis.x(step).toFixed(1)} ${height(v).toFixed(1)}`);
  if (noise.length) body.push(make("path.noise", { d: noise.length > 1 ? `M${noise.join("L")}` : `M${LEFT} ${noise[0].split(" ")[1]}H${WIDTH - RIGHT}` }));
  if (cells.length === 1) body.push(phases(axis, cells[0]));
  body.push(line([...apart].filter(([, v]) => v > 0 || !isLog).map(([step, v]) => [axis.x(step), height(v)]), "apart"));
  const drawable = (q) => (q.observed > 0 || (!isLog && q.observed === 0)) && q.observed < Infinity;
  const tips = new Map();
  points.forEach((found, i) => {
    const kind = kinds(cells)[i];
    for (const run of split(found, drawable)) {
      body.push(line(run.map((q) => [axis.x(q.step), height(q.observed)]), kind));
    }
    for (const q of found) {
      const x = beside(axis, q.step, i, cells);
      if (drawable(q)) body.push(mark(q.ratio > 1 ? `${kind} over` : kind, x, height(q.observed)));
      else if (q.observed === 0) body.push(make("path", { class: `zero ${kind}`, d: zero(x, axis.y(axis.low) - 8) }));
      else body.push(cross(x));
      const equal = q.observed === 0 ? " (exactly equal)" : "";
      const second = apart.has(q.step) ? `\nagainst the reference ${number(apart.get(q.step))}, which is not judged` : "";
      const alone = `error ${number(q.observed)}${equal}\nallowed ${number(q.allowed)}\nmargin ${margin(q.ratio)}${second}`;
      const among = `${who(cells[i], cells)}: ${number(q.observed)}, margin ${margin(q.ratio)}`;
      if (!tips.has(q.step)) tips.set(q.step, []);
      tips.get(q.step).push([q.ratio, cells.length === 1 ? alone : among]);
    }
  });
  const floors = new Map(floor);
  const texts = [...tips].map(([step, found]) => {
    const lines = some(found.sort((a, b) => b[0] - a[0]).map(([, text]) => text));
    return [step, floors.has(step) ? [...lines, `noise ${number(floors.get(step))}`] : lines];
  });
  const words = `relative error of the ${title} per step of ${what(cells)} on a ${isLog ? "log" : "linear"} axis, with the tolerance`;
  return drawing([...body, hovers(axis, texts)], words);
}

// Returns the relative difference of a number to the reference's at a step; NaN if one of them is not recorded.
function differenceAt(cell, key, step) {
  const [own, theirs] = [cell.series, cell.oracle?.series].map((series) => series?.values.get(key)?.get(step) ?? NaN);
  return Math.abs((own - theirs) / (theirs || 1));
}

// Draws the relative difference with its sign, and the tolerance on both sides.
function signedChart(cells, title, key, points) {
  const differences = cells.map((cell) => {
    const theirs = cell.oracle?.series.values.get(key) ?? new Map();
    const found = [...(cell.series.values.get(key) ?? [])].filter(([step]) => theirs.has(step));
    return new Map(found.map(([step, value]) => [step, (value - theirs.get(step)) / (Math.abs(theirs.get(step)) || 1)]));
  });
  const judgedOnes = points.map((found, i) => found.map((q) => ({ ...q, signed: differences[i].get(q.step) })).filter((q) => q.signed !== undefined));
  const every = judgedOnes.flat().sort((a, b) => a.step - b.step);
  const sizes = every.flatMap((q) => [Math.abs(q.signed), q.allowed]).filter((v) => v > 0 && v < Infinity);
  if (!sizes.length) return null;
  const most = 1.1 * Math.max(...sizes);
  const axis = axes(every[0].step, every.at(-1).step, -most, most);
  const edge = (sign) => every.map((q) => `${axis.x(q.step).toFixed(1)} ${axis.y(sign * q.allowed).toFixed(1)}`);
  const area = every.length > 1 && every[0].step < every.at(-1).step && make("path.band", { d: `M${edge(1).join("L")}L${edge(-1).reverse().join("L")}Z` });
  const body = [area || [], frame(axis, rounds(-most, most).map((v) => [axis.y(v), label(v)])), make("path.axis", { d: `M${LEFT} ${axis.y(0).toFixed(1)}H${WIDTH - RIGHT}` })];
  const tips = new Map();
  judgedOnes.forEach((found, i) => {
    const kind = kinds(cells)[i];
    const at = (q) => [beside(axis, q.step, i, cells), axis.y(q.signed)];
    for (const run of split(found, (q) => Number.isFinite(q.signed))) body.push(line(run.map((q) => [axis.x(q.step), axis.y(q.signed)]), kind));
    for (const q of found) {
      body.push(Number.isFinite(q.signed) ? mark(q.ratio > 1 ? `${kind} over` : kind, ...at(q)) : cross(at(q)[0]));
      const line = `${who(cells[i], cells)}: ${q.signed > 0 ? "+" : ""}${number(q.signed)}, allowed \u00b1${number(q.allowed)}`;
      tips.set(q.step, [...(tips.get(q.step) ?? []), line]);
    }
  });
  const texts = [...tips].map(([step, lines]) => [step, some(lines)]);
  return drawing([...body, hovers(axis, texts)], `signed relative difference of the ${title} per step of ${what(cells)}`);
}

// Returns the effect of rounding alone: the error of a single process in the cell's precision, by step; in the exact tier
// half a unit in the last place of float64.
const UNIT = 2 ** -53;
function noiseFloor(cells, key, every) {
  const steps = [...new Set(every.map((q) => q.step))];
  const cell = cells.find((one) => one.oracle?.series.values.has(key));
  if (!cell) return [];
  if (cell.precision === "exact") return steps.map((step) => [step, UNIT]);
  const theirs = cell.oracle.series.values.get(key);
  const runs = cell.oracle.noise.map((one) => one.values.get(key)).filter((one) => one);
  const errors = (step) => runs.filter((one) => one.has(step)).map((one) => Math.abs((one.get(step) - theirs.get(step)) / (theirs.get(step) || 1)));
  return steps.map((step) => [step, Math.max(...errors(step))]).filter(([, v]) => Number.isFinite(v));
}

