// Curves of one cell or of several together: a value over the oracle's, and its error on a log axis with the tolerance
// band. Two loss curves that lie on each other prove little, so the error is always drawn beside them. Nothing is
// smoothed. An error of exactly 0 has no place on a log axis; it is drawn at the floor, hollow, and said so.
const WIDTH = 300, HEIGHT = 176, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 24;
const SHAPES = ["b0", "b1", "b2", "b3"]; // of backends; a fifth is drawn as the first
const LINES = 12; // of a read-out
const HOVERS = 60; // read-outs per chart

// The parts of a report that have curves; the one that every objective has comes first and has no name.
const panels = (cells) => [...new Set(["", ...cells.flatMap((cell) => cell.charts.map(([, , , , panel]) => panel))])];

// [title, remark, drawing] of all that can be drawn of these cells in a panel, in one chart together.
function charts(cells, panel) {
  const own = cells.flatMap((cell) => cell.charts.filter((chart) => chart[4] === panel));
  const known = new Map(own.map((chart) => [chart.join("\n"), chart]));
  const drawn = [...known.values()].flatMap(([title, stage, key, tensor]) => [
    [title, "per step", valueChart(cells, title, key)],
    [
      `${title}: error`,
      tensor === key ? "relative, log axis" : "against its own tokens, log axis",
      errorChart(cells, title, errorPoints(cells, stage, tensor)),
    ],
  ]);
  return drawn.filter(([, , chart]) => chart);
}

// The judged quantities that an error chart draws: of each cell, by step.
const errorPoints = (cells, stage, tensor) =>
  cells.map((c) => c.quantities.filter((q) => q.stage === stage && q.tensor === tensor).sort((a, b) => a.step - b.step));

function axes(first, last, low, high) {
  const inset = 10, width = WIDTH - LEFT - RIGHT - 2 * inset;
  return {
    first, last, low, high,
    x: (step) => LEFT + inset + (last > first ? (width * (step - first)) / (last - first) : width / 2),
    y: (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (value - low)) / (high - low),
  };
}

// A cell's values of a key per step, the oracle's as a broad pale line under them.
function valueChart(cells, title, key) {
  const ours = cells.map((cell) => cell.series.values.get(key) ?? new Map());
  const theirs = cells.map((cell) => cell.oracle?.series.values.get(key)).find((found) => found) ?? new Map();
  const values = [...ours, theirs].flatMap((one) => [...one.values()]).filter(Number.isFinite);
  if (!values.length) return null;
  const steps = [...new Set([...ours, theirs].flatMap((one) => [...one.keys()]))].sort((a, b) => a - b);
  const low = Math.min(...values), high = Math.max(...values);
  const margin = 0.08 * (high - low) || 0.05 * Math.abs(high) || 1;
  const axis = axes(steps[0], steps.at(-1), low - margin, high + margin);
  const path = (one) => [...one].filter(([, v]) => Number.isFinite(v)).map(([s, v]) => [axis.x(s), axis.y(v)]);
  const body = [frame(axis, rounds(axis.low, axis.high).map((v) => [axis.y(v), String(v)])), line(path(theirs), "oracle")];
  if (cells.length === 1) body.push(legs(axis, cells[0]));
  ours.forEach((one, i) => {
    const kind = kinds(cells)[i];
    body.push(line(path(one), kind));
    for (const [step, value] of one) {
      body.push(Number.isFinite(value) ? mark(kind, axis.x(step), axis.y(value)) : cross(axis.x(step)));
    }
  });
  const exact = (value) => (value === undefined ? "not recorded" : String(Number(value.toPrecision(9))));
  const tips = steps.map((step) => {
    const lines = cells.map((cell, i) => `${who(cell, cells)}: ${exact(ours[i].get(step))}`);
    return [step, [...some(lines), `oracle: ${exact(theirs.get(step))}`]];
  });
  return drawing([...body, hovers(axis, tips)], `${title} per step of ${what(cells)}, over the oracle's`);
}

// The judged error of one number per step on a log axis, with what is allowed as a band.
function errorChart(cells, title, points) {
  const every = points.flat().sort((a, b) => a.step - b.step);
  const positive = every.flatMap((q) => [q.observed, q.allowed]).filter((v) => v > 0 && v < Infinity);
  if (!positive.length) return null;
  const zeros = every.some((q) => q.observed === 0);
  const low = Math.floor(Math.log10(Math.min(...positive)));
  const high = Math.max(Math.ceil(Math.log10(Math.max(...positive))), low + 1);
  const axis = axes(every[0].step, every.at(-1).step, low - 0.7 * zeros, high + 0.15);
  const stride = Math.ceil((high - low) / 6);
  const ticks = [];
  for (let e = low; e <= high; e += stride) ticks.push([axis.y(e), power(e)]);
  if (zeros) ticks.push([axis.y(axis.low), "0"]);
  const body = [band(axis, every), frame(axis, ticks)];
  if (cells.length === 1) body.push(legs(axis, cells[0]));
  const drawable = (q) => q.observed > 0 && q.observed < Infinity;
  const tips = new Map();
  points.forEach((found, i) => {
    const kind = kinds(cells)[i];
    for (const run of split(found, drawable)) {
      body.push(line(run.map((q) => [axis.x(q.step), axis.y(Math.log10(q.observed))]), kind));
    }
    for (const q of found) {
      const x = axis.x(q.step);
      if (drawable(q)) body.push(mark(q.ratio > 1 ? `${kind} over` : kind, x, axis.y(Math.log10(q.observed))));
      else if (q.observed === 0) body.push(make("path.zero", { d: zero(x, axis.y(axis.low) - 8) }));
      else body.push(cross(x));
      const equal = q.observed === 0 ? " (exactly equal)" : "";
      const alone = `error ${number(q.observed)}${equal}\nallowed ${number(q.allowed)}\nratio ${ratio(q.ratio)}`;
      const among = `${who(cells[i], cells)}: ${number(q.observed)}, ${ratio(q.ratio)} of allowed`;
      if (!tips.has(q.step)) tips.set(q.step, []);
      tips.get(q.step).push([q.ratio, cells.length === 1 ? alone : among]);
    }
  });
  const texts = [...tips].map(([step, found]) => [step, some(found.sort((a, b) => b[0] - a[0]).map(([, text]) => text))]);
  const label = `relative error of the ${title} per step of ${what(cells)} on a log axis, with the tolerance`;
  return drawing([...body, hovers(axis, texts)], label);
}

// How each cell is drawn: "ours" alone; among others by its backend, in colour and in shape.
function kinds(cells) {
  if (cells.length === 1) return ["ours"];
  const backends = [...new Set(cells.map((cell) => cell.backend))];
  return cells.map((cell) => SHAPES[backends.indexOf(cell.backend) % SHAPES.length]);
}

const who = (cell, cells) => (cells.length === 1 ? cell.backend : `${cell.backend} ${cell.layout}`);
const what = (cells) => (cells.length === 1 ? cells[0].id : `${cells.length} cells`);
const some = (lines) => (lines.length > LINES ? [...lines.slice(0, LINES), `and ${lines.length - LINES} more`] : lines);

// Runs of what can be drawn: no line across a step that has no place on the axis.
function split(points, drawable) {
  const runs = [[]];
  for (const q of points) {
    if (drawable(q)) runs.at(-1).push(q);
    else runs.push([]);
  }
  return runs;
}

// A dot whose shape, too, says which backend it is of.
function mark(kind, x, y) {
  const shapes = { b1: "m-2.7 -2.7h5.4v5.4h-5.4z", b2: "m0 -3.7l3.7 3.7l-3.7 3.7l-3.7 -3.7z", b3: "m0 -3.4l3.5 6h-7z" };
  const shape = shapes[kind.split(" ")[0]];
  const classes = `mark ${kind}`;
  if (shape) return make("path", { class: classes, d: `M${x.toFixed(1)} ${y.toFixed(1)}${shape}` });
  return make("circle", { class: classes, cx: x.toFixed(1), cy: y.toFixed(1), r: 2.8 });
}

const zero = (x, y) => `M${(x - 4).toFixed(1)} ${y.toFixed(1)}h8l-4 7z`;
// A value that is not a finite number, at the top edge.
const cross = (x) => make("path.nan", { d: `M${(x - 4).toFixed(1)} ${TOP + 2}l8 8m0 -8l-8 8` });
// A legend of marks with their words, each kept together; a mark that is drawn as in the charts.
const legendOf = (items, name = "marks") => make(`span.legend.${name}`, items.map((item) => [make("span", item), " "]));
const oracleLegend = (allowed) => [[make("i.k-oracle"), "oracle"], [make("i.k-band"), allowed]];
const key = (drawn) => make("svg.chart.key", { viewBox: "0 0 12 10", "aria-hidden": "true" }, drawn);

function frame(axis, ticks) {
  const right = WIDTH - RIGHT, floor = HEIGHT - BOTTOM;
  const parts = ticks.flatMap(([y, text]) => [
    make("path.grid", { d: `M${LEFT} ${y.toFixed(1)}H${right}` }),
    make("text", { x: LEFT - 6, y: (y + 3.5).toFixed(1), "text-anchor": "end" }, text),
  ]);
  parts.push(make("path.axis", { d: `M${LEFT} ${TOP}V${floor}H${right}` }));
  const stride = Math.ceil((axis.last - axis.first + 1) / 8);
  for (let step = axis.first; step <= axis.last; step += stride) {
    const text = step === axis.first ? `${axis.unit ?? "step"} ${step}` : String(step);
    parts.push(make("text", { x: axis.x(step).toFixed(1), y: floor + 15, "text-anchor": "middle" }, text));
  }
  return parts;
}

// Where a leg takes over from the one before it.
function legs(axis, cell) {
  const starts = cell.legs.slice(1).map((leg) => axis.x(leg.first - 0.5).toFixed(1));
  return starts.map((x) => make("path.leg", { d: `M${x} ${TOP}V${HEIGHT - BOTTOM}` }));
}

// What is allowed: a shaded area below a line that steps half-way between two optimizer steps.
function band(axis, points) {
  const allowed = new Map();
  for (const q of points) if (q.allowed > 0) allowed.set(q.step, Math.max(q.allowed, allowed.get(q.step) ?? 0));
  const edges = [...allowed];
  if (!edges.length) return [];
  const height = (value) => axis.y(Math.log10(value)).toFixed(1);
  let top = `M${LEFT} ${height(edges[0][1])}`;
  edges.slice(1).forEach(([step, value], i) => (top += `H${axis.x((edges[i][0] + step) / 2).toFixed(1)}V${height(value)}`));
  top += `H${WIDTH - RIGHT}`;
  return [make("path.band", { d: `${top}V${HEIGHT - BOTTOM}H${LEFT}Z` }), make("path.limit", { d: top })];
}

function line(points, kind) {
  if (points.length < 2) return [];
  return make(`polyline.${kind}`, { points: points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ") });
}

// One transparent column per step that shows a cursor line and a read-out.
function hovers(axis, tips) {
  const chosen = tips.filter((_, i) => i % Math.ceil(tips.length / HOVERS) === 0);
  const width = (WIDTH - LEFT - RIGHT) / Math.max(chosen.length, 1);
  return chosen.map(([step, lines]) => {
    const x = axis.x(step);
    const size = { x: (x - width / 2).toFixed(1), y: TOP, width: width.toFixed(1), height: HEIGHT - TOP - BOTTOM };
    const cursor = make("path", { d: `M${x.toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}` });
    return make("g.hover", { "data-step": step, "data-tip": [`step ${step}`, ...lines].join("\n") }, make("rect", size), cursor);
  });
}

const drawing = (body, label) =>
  make("svg.chart", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, body);
const figure = ([title, remark, drawn]) =>
  make("figure", make("figcaption", title, " ", make("small", remark)), drawn);

function power(exponent) {
  const sign = exponent < 0 ? "\u2212" : "";
  return ["10", make("tspan", { dy: -4, "font-size": 8 }, `${sign}${Math.abs(exponent)}`)];
}

// Three to six round numbers between low and high.
function rounds(low, high) {
  const rough = (high - low) / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((size) => size >= rough * (1 - 1e-12));
  const found = [];
  for (let i = Math.ceil(low / stride); i <= Math.floor(high / stride); i++) found.push(Number((i * stride).toPrecision(9)));
  return found;
}
