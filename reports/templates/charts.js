// Drawing of charts: axes, lines, marks, bands and read-outs.
const WIDTH = 300, HEIGHT = 176, LEFT = 50, RIGHT = 8, TOP = 8, BOTTOM = 24;
const SHAPES = ["b0", "b1", "b2", "b3"]; // of backends; a fifth is drawn as the first
const LINES = 12; // of a read-out
const HOVERS = 60; // read-outs per chart

function axes(first, last, low, high) {
  const inset = 10, width = WIDTH - LEFT - RIGHT - 2 * inset;
  return {
    first, last, low, high,
    x: (step) => LEFT + inset + (last > first ? (width * (step - first)) / (last - first) : width / 2),
    y: (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (value - low)) / (high - low),
  };
}

// Returns how each cell is drawn: a single cell as "ours", several by backend, in colour and shape.
function kinds(cells) {
  if (cells.length === 1) return ["ours"];
  const backends = [...new Set(cells.map((cell) => cell.backend))];
  return cells.map((cell) => SHAPES[backends.indexOf(cell.backend) % SHAPES.length]);
}

const who = (cell, cells) => (cells.length === 1 ? cell.backend : `${cell.backend} ${cell.layout}`);
const what = (cells) => (cells.length === 1 ? cells[0].id : `${cells.length} cells`);
const some = (lines) => (lines.length > LINES ? [...lines.slice(0, LINES), `and ${lines.length - LINES} more`] : lines);

// Splits points at steps that cannot be drawn on the axis, so that no line crosses them.
function split(points, drawable) {
  const runs = [[]];
  for (const q of points) {
    if (drawable(q)) runs.at(-1).push(q);
    else runs.push([]);
  }
  return runs;
}

// Draws a dot whose shape also shows its backend.
function mark(kind, x, y) {
  const shapes = { b1: "m-2.7 -2.7h5.4v5.4h-5.4z", b2: "m0 -3.7l3.7 3.7l-3.7 3.7l-3.7 -3.7z", b3: "m0 -3.4l3.5 6h-7z" };
  const shape = shapes[kind.split(" ")[0]];
  const classes = `mark ${kind}`;
  if (shape) return make("path", { class: classes, d: `M${x.toFixed(1)} ${y.toFixed(1)}${shape}` });
  return make("circle", { class: classes, cx: x.toFixed(1), cy: y.toFixed(1), r: 2.8 });
}

const zero = (x, y) => `M${(x - 4).toFixed(1)} ${y.toFixed(1)}h8l-4 7z`;
// Draws a value that is not finite, at the top edge.
const cross = (x) => make("path.nan", { d: `M${(x - 4).toFixed(1)} ${TOP + 2}l8 8m0 -8l-8 8` });
// Draws a legend; a mark and its words stay on one line.
const legendOf = (items, name = "marks") => make(`span.legend.${name}`, items.map((item) => [make("span", item), " "]));
function oracleLegend(allowed, cells) {
  const noise = cells[0].precision === "exact" ? "half a unit in the last place of float64" : `noise: a single process in ${cells[0].precision}`;
  const isKnown = cells[0].precision === "exact" || cells[0].oracle?.noise.length > 0;
  return [[make("i.k-oracle"), "reference"], [make("i.k-band"), allowed], ...(isKnown ? [[make("i.k-noise"), noise]] : [])];
}
const key = (drawn) => make("svg.chart.key", { viewBox: "0 0 12 10", "aria-hidden": "true" }, drawn);

function frame(axis, ticks, numbered = true) {
  const right = WIDTH - RIGHT, floor = HEIGHT - BOTTOM;
  const parts = ticks.flatMap(([y, text]) => [
    make("path.grid", { d: `M${LEFT} ${y.toFixed(1)}H${right}` }),
    make("text", { x: LEFT - 6, y: (y + 3.5).toFixed(1), "text-anchor": "end" }, text),
  ]);
  parts.push(make("path.axis", { d: `M${LEFT} ${TOP}V${floor}H${right}` }));
  const steps = axis.last > axis.first ? rounds(axis.first, axis.last, 8).filter(Number.isInteger) : [axis.first];
  for (const [i, step] of numbered ? steps.entries() : []) {
    const text = i ? String(step) : `${axis.unit ?? "step"} ${step}`;
    parts.push(make("text", { x: axis.x(step).toFixed(1), y: floor + 15, "text-anchor": "middle" }, text));
  }
  return parts;
}

// Draws a line at the first step of each phase after the first one.
function phases(axis, cell) {
  const starts = cell.phases.slice(1).map((phase) => axis.x(phase.first - 0.5).toFixed(1));
  return starts.map((x) => make("path.phase", { d: `M${x} ${TOP}V${HEIGHT - BOTTOM}` }));
}

// Draws the tolerance: a shaded area below a line that steps half-way between two optimizer steps.
function band(axis, points, height) {
  const allowed = new Map();
  for (const q of points) if (q.allowed > 0) allowed.set(q.step, Math.max(q.allowed, allowed.get(q.step) ?? 0));
  const edges = [...allowed];
  if (!edges.length) return [];
  const y = (value) => height(value).toFixed(1);
  let top = `M${LEFT} ${y(edges[0][1])}`;
  edges.slice(1).forEach(([step, value], i) => (top += `H${axis.x((edges[i][0] + step) / 2).toFixed(1)}V${y(value)}`));
  top += `H${WIDTH - RIGHT}`;
  return [make("path.band", { d: `${top}V${HEIGHT - BOTTOM}H${LEFT}Z` }), make("path.limit", { d: top })];
}

function line(points, kind) {
  if (points.length < 2) return [];
  return make(`polyline.${kind}`, { points: points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ") });
}

// Draws one transparent column per step that shows a cursor line and a tooltip.
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

const minus = (text) => text.replace("-", "\u2212");
const power = (exponent, before = "") => [`${before}10`, make("tspan", { dy: -4, "font-size": 8 }, minus(String(exponent)))];

// Formats a round number at an axis: 0.25, or 2.5 times a power of ten.
function label(value) {
  const [mantissa, exponent] = value.toExponential().split("e").map(Number);
  return value === 0 || Math.abs(exponent) < 4 ? minus(String(value)) : power(exponent, `${minus(String(mantissa))}\u00d7`);
}

// Returns three to six round numbers between low and high, or about as many as given.
function rounds(low, high, parts = 4) {
  const rough = (high - low) / parts;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((size) => size >= rough * (1 - 1e-12));
  const found = [];
  for (let i = Math.ceil(low / stride); i <= Math.floor(high / stride); i++) found.push(Number((i * stride).toPrecision(9)));
  return found;
}
