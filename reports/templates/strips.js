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

function stripRow(cell, strip, name) {
  const q = cell.quantities.find((q) => q.stage === strip.stage && q.tensor === strip.tensor && q.step === strip.step);
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
