// Formats numbers and phrases like reports/wording.py does for the matrix, Markdown and JUnit.
function number(value) {
  if (value === null) return "";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "-∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) return size < 1000 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
  const [mantissa, exponent] = value.toExponential(2).split("e");
  return `${Number(mantissa)}e${Number(exponent)}`;
}

// Formats observed / allowed as a margin in digits.
function margin(ratio) {
  if (ratio === 0) return "=";
  const digits = Number.isFinite(ratio) ? Math.abs(Math.log10(ratio)) : Infinity;
  return `${ratio <= 1 ? "+" : "-"}${digits === Infinity ? "∞" : digits.toFixed(digits < 9.95 ? 1 : 0)}`;
}

// Formats a relative error in percent.
const share = (error) => (Number.isFinite(error) ? `${number(Number((100 * error).toPrecision(2)))} %` : number(error));

// Formats a quantity for a square: the margin within the tolerance, the error in percent outside of it.
const inSquare = (q) => (q.ratio > 1 ? share(q.observed) : margin(q.ratio));

// Sorts quantities, the most urgent first: within their tolerances, comparisons with rebuilt numbers and shares come last.
const isUrgent = (q) => q.ratio > 1 || q.isError;
const byUrgency = (a, b) => isUrgent(b) - isUrgent(a) || b.ratio - a.ratio || 0;

// Explains stages; those of a critic or of the reference policy have the same names behind a word.
const STAGES = {
  configuration: "what layout and precision imply, and whether it was observed",
  weights: "parameters as loaded",
  "log-probs": "log-probability of each target token",
  loss: "the number that is minimized, and the counts that it is divided by",
  gradients: "of each parameter, summed over micro-batches and ranks, before clipping",
  "gradient replicas": "ranks that hold the same gradient hold the same numbers",
  "gradient norm": "over all parameters, before clipping",
  "clipped update": "what the optimizer adds to each parameter at the first step",
  "weights after N steps": "what all updates together have added to each parameter",
  "weight replicas": "ranks that hold the same parameter hold the same numbers",
  "training state": "moments, steps and rates as loaded by a resume",
  advantages: "of each token, from rewards, groups or values",
  ratios: "of the new policy's to the old policy's probability of each token",
  entropy: "of the policy at each token",
  "policy metrics": "numbers that frameworks log, such as the clip fraction",
};
const meaningOf = (stage) => STAGES[stage] ?? STAGES[stage.replace(/^\w+ /, "")] ?? null;

const plural = (count, word) => (count === 1 ? `${count} ${word}` : `${count} ${word}s`);
const when = (step) => (step < 0 ? "as loaded" : `at step ${step}`);
const tensorAtStep = (q) => `${q.tensor}, ${when(q.step)}`;
const judgedMargin = (q) => make(q.ratio > 1 ? "b.over" : "b", margin(q.ratio));

// Formats an error and its bound in words.
function off(q) {
  const allowed = `allowed ${q.allowed > 0 ? number(q.allowed) : "nothing"}`;
  const error = q.observed;
  if (Number.isNaN(error)) return `not a number, ${allowed}`;
  if (error === Infinity) return `beyond any tolerance, ${allowed}`;
  if (error >= 10) return `${Number(error.toPrecision(2)).toLocaleString("en")} times its size off, ${allowed}`;
  return `${error >= 1e-4 ? `${Number((100 * error).toPrecision(2))} %` : number(error)} off, ${allowed}`;
}

// Makes links of web addresses, and of names of findings that the page has.
function linked(text) {
  return text.split(/(https?:\/\/[^\s<>"']*[^\s<>"'.,;:)]|docs\/findings\/[a-z0-9-]+\.md)/).map((part, index) => {
    if (!(index % 2)) return part;
    if (!part.startsWith("docs/")) return make("a", { href: part, rel: "noreferrer" }, part);
    const finding = `finding-${part.slice(14, -3)}`;
    return document.getElementById(finding) ? make("a", { href: `#${finding}` }, part) : part;
  });
}
