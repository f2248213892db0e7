// Draws per-token errors: a line for each observable with a number per token and each step, in the colours of the heat
// maps; conformance/judge/ defines the error of a token.
const SPECIALS = { n: ["NaN", "N"], i: ["infinite", "∞"] }; // words and symbol

function batch(cell) {
  if (!cell.strips.length) return null;
  const lines = new Map(); // of each observable, by step
  for (const strip of cell.strips) {
    const name = `${strip.stage}\n${strip.tensor}`;
    lines.set(name, [...(lines.get(name) ?? []), strip]);
  }
  const stages = [...lines.values()].map(([{ stage }]) => stage);
  const named = ({ stage, tensor }) => (stages.indexOf(stage) === stages.lastIndexOf(stage) ? stage : `${stage}: ${tensor}`);
  const isEqual = (found) => found.every(({ classes }) => /^0*$/.test(classes));
  const equal = [...lines.values()].filter(isEqual).map(([strip]) => named(strip));
  const drawn = [...lines.values()].filter((found) => !isEqual(found));
  const rows = drawn.flatMap((found) => found.map((strip, i) => stripRow(cell, strip, i ? "" : named(strip))));
  const remark = "worst margin or error of the tokens of each square, in the order of the batch; a line where a row begins";
  const seen = Object.keys(SPECIALS).filter((kind) => cell.strips.some(({ classes }) => classes.includes(kind)));
  const specials = seen.map((kind) => legendOf([[make("b", SPECIALS[kind][1]), ` ${SPECIALS[kind][0]}`]]));
  const heads = [left("observable"), "step", make("th.tokens.left", "tokens"), "margin", make("th.wide", "largest, absolute"), left("worst token")];
  return folded(
    cell.state !== "conforms",
    ["Where in the batch ", make("small", remark)],
    make("p", shadeLegend(cell), specials),
    rows.length > 0 && table("Per-token errors", "numbers.strips", heads, rows),
    equal.length > 0 && make("p.note", `Exactly equal in every token: ${equal.join(", ")}.`),
  );
}

// Draws the distribution of each number per token over the reference's, at the step with the largest error.
function distributions(cell) {
  const worst = new Map();
  for (const strip of cell.strips.filter((strip) => strip.spread)) {
    const name = strip.tensor;
    const ratio = quantityOf(cell, strip).ratio;
    if (!(worst.get(name)?.ratio >= ratio)) worst.set(name, { ...strip, ratio });
  }
  if (!worst.size) return null;
  const notes = [masked(cell), zeroLoss(cell)].filter((note) => note).map((note) => make("p.note", note));
  const legend = legendOf([[make("i.k-reference"), "reference"], [make("i.k-own"), cell.backend]]);
  const figures = [...worst.values()].map((strip) => figure([strip.tensor, when(strip.step), histogram(strip)]));
  return folded(
    cell.state !== "conforms",
    ["Distributions over tokens ", make("small", "at the step with the largest error")],
    make("p", legend),
    notes,
    make("div.charts", figures),
  );
}

const quantityOf = (cell, strip) => cell.quantities.find((q) => q.stage === strip.stage && q.tensor === strip.tensor && q.step === strip.step);

function histogram({ tensor, spread: [low, high, own, [median, most, largest]], reference }) {
  const axis = { ...axes(low, high, 0, Math.max(...own, ...reference)), unit: "" };
  const width = (axis.x(high) - axis.x(low)) / own.length;
  const bars = (counts, kind) =>
    counts.map((count, i) => {
      const size = { x: (axis.x(low) + i * width).toFixed(1), y: axis.y(count).toFixed(1), width: width.toFixed(1), height: (axis.y(0) - axis.y(count)).toFixed(1) };
      return make(`rect.${kind}`, size);
    });
  const values = rounds(low, high, 3).map((v) => make("text", { x: axis.x(v).toFixed(1), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, label(v)));
  const ticks = rounds(0, axis.high).filter(Number.isInteger).map((v) => [axis.y(v), String(v)]);
  const words = `tokens by ${tensor}, over the reference's`;
  const drawn = drawing([frame(axis, ticks, false), bars(reference, "reference"), bars(own, "own"), values], words);
  return [drawn, make("p.note", `difference: p50 ${number(median)}, p99 ${number(most)}, max ${number(largest)}`)];
}

// Says how many tokens no loss sees: prompts, padding and the first token of each document.
function masked(cell) {
  const batches = cell.phases.flatMap((phase) => phase.batches);
  const [tokens, targets] = [batches.map((batch) => batch.tokens), batches.map((batch) => batch.targets.flat())].map((found) => found.flat().reduce((a, b) => a + b, 0));
  return batches.length && `${number(tokens - targets)} of ${number(tokens)} tokens are masked: prompts, padding, and tokens without a target.`;
}

// Says where a policy loss is 0 without any error, so that its curve proves nothing.
function zeroLoss(cell) {
  const advantage = cell.strips.find((strip) => strip.tensor === "advantage" && strip.spread);
  const losses = cell.oracle?.series.values.get("pg_loss") ?? cell.oracle?.series.values.get("loss");
  const size = advantage && Math.max(...advantage.spread.slice(0, 2).map(Math.abs));
  const steps = [...(size ? (losses ?? []) : [])].filter(([, loss]) => Math.abs(loss) < 1e-3 * size).map(([step]) => step);
  return steps.length > 0 && `The policy loss is 0 by construction at step ${steps.join(", ")}: advantages of a group add up to 0, and the ratio is 1 before the first update. Read gradients there.`;
}

function stripRow(cell, strip, name) {
  const q = quantityOf(cell, strip);
  return make(
    name ? "tr.begins" : "tr",
    [make("td.left", name), make("td", String(strip.step)), make("td.tokens", bins(cell, strip)), make("td", judgedMargin(q))],
    [make("td.wide", number(strip.largest)), make("td.name", q.ratio ? strip.where : "")],
  );
}

function bins(cell, { stage, tensor, step, tokens, starts, classes, where }) {
  const several = new Set(starts.map(([row]) => row)).size <= starts.length / 2; // of more rows, each bin begins one
  const drawn = starts.map(([row, target], i) => {
    const [end, start] = [i + 1, i].map((edge) => Math.floor((tokens * edge) / starts.length));
    const begins = several && i > 0 && starts[i - 1][0] !== row;
    const [words, text] = said(classes[i], cell.legend);
    const tip = `${stage}: ${tensor}, ${when(step)}\n${plural(end - start, "token")} from row ${row}, target ${target}\n${words}`;
    const shade = classes[i] in SPECIALS ? "9" : classes[i];
    return make(begins ? `i.h${shade}.begins` : `i.h${shade}`, { "data-tip": tip }, text);
  });
  return make("div.strip", { role: "img", "aria-label": `errors of ${tokens} tokens, the worst at ${where}` }, drawn);
}

function said(kind, { shades, beyond }) {
  if (kind in SPECIALS) return SPECIALS[kind];
  if (kind === "0") return ["exactly equal", ""];
  if (kind <= shades.length) return [`at most ${shades[kind - 1]} × allowed`, ""];
  const top = beyond[kind - 1 - shades.length];
  return [`outside the tolerance, ${top ? `at most ${share(top)}` : `more than ${share(beyond.at(-1))}`} off`, ""];
}
