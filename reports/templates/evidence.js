// Draws what was requested and what ran: configuration, denominators, evidence, memory, speed.
const CONFIGURATION = "configuration"; // the stage of what a layout and a precision imply (conformance/spec/observables.py)

// Returns each different row once, with how often it stands there.
function counted(rows) {
  const found = new Map();
  for (const row of rows) {
    const text = JSON.stringify(row);
    found.set(text, [row, (found.get(text)?.[1] ?? 0) + 1]);
  }
  return [...found.values()];
}

// Draws what layout and precision imply for a training step, and the observed collectives and matrix products.
function evidence(cell) {
  const requested = cell.quantities.filter((q) => q.stage === CONFIGURATION);
  const ran = cell.phases.filter((phase) => phase.evidence.collectives.length + phase.evidence.products.length);
  if (!requested.length && !ran.length) return null;
  const claims = counted(requested.map((q) => [q.ratio > 1, q.tensor])).map(([[fails, claim], count]) => [
    make("td.left", fails ? make("b.over", "\u2717 no") : "\u2713 yes"),
    make("td.left", claim, count > 1 && make("small", ` checked ${count} times`)),
  ]);
  const observed = ran.flatMap((phase) => [
    ...phase.evidence.collectives.map(([kind, size, dtype, pass, ranks, most]) => [phase.layout, kind, `${size} ranks`, dtype, pass, ranks, most]),
    ...phase.evidence.products.map(([dtype, pass, ranks, most]) => [phase.layout, "matrix product", "", dtype, pass, ranks, most]),
  ]);
  const several = (count) => (ran.length > 1 ? [count] : []);
  const rows = counted(observed).map(([row, count]) => [...row, ...several(count)].map((value, i) => make(i < 5 ? "td.left" : "td", String(value))));
  const heads = [...["layout", "operation", "group", "dtype", "pass"].map(left), "number of ranks", "largest count of a rank", ...several("phases")];
  const no = requested.filter((q) => q.ratio > 1).length;
  const remark = requested.length ? `${requested.length - no} of ${requested.length} hold` : "this layout implies nothing that can be observed";
  return folded(
    no > 0,
    ["Requested and observed ", make("small", remark)],
    claims.length > 0 && table("Requested", "numbers.asked", [left("holds"), left("implied by layout and precision")], claims),
    rows.length > 0 && make("p.note", "Observed below the backend, in one step of each phase:"),
    rows.length > 0 && table("Observed", "numbers", heads, rows),
  );
}

// Draws the targets of each micro-batch of each data-parallel rank, by which a mean per rank or micro-batch would divide.
function denominators(cell) {
  const batches = cell.phases.flatMap((phase) => phase.batches);
  if (!batches.length) return null;
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const wide = Math.max(...batches.map(({ targets }) => targets.length));
  const rows = batches.map(({ step, tokens, targets }) => {
    const all = sum(targets.flat());
    const ranks = targets.map((parts) => {
      const share = sum(parts) ? Number((all / targets.length / sum(parts)).toPrecision(4)) : "no";
      const tip = `a mean per rank would give a target of this rank ${share} times its weight`;
      return make("td", { "data-tip": tip }, parts.join(" + "), parts.length > 1 && ` = ${sum(parts)}`);
    });
    while (ranks.length < wide) ranks.push(make("td"));
    const counted = cell.series.values.get("token_count")?.get(step);
    const reference = cell.oracle?.series.values.get("token_count")?.get(step);
    return [step, tokens, ...ranks, all, counted === undefined ? "not shown" : String(counted), reference === undefined ? "" : String(reference)];
  });
  const heads = ["step", "tokens", ...Array.from({ length: wide }, (_, rank) => `dp rank ${rank}`), "targets", `${cell.backend} counts`, "reference"];
  const remark = "targets of each micro-batch of each data-parallel rank";
  return folded(false, ["Denominators ", make("small", remark)], table("Denominators", "numbers", heads, rows));
}

// Returns peak memory and speed if recorded. The first step of a phase, which warms up, is left out if there are more.
function costs(cell) {
  const facts = [];
  const memory = cell.phases.flatMap((phase) => phase.memory).filter((bytes) => bytes > 0);
  if (memory.length) facts.push(`peak ${(Math.max(...memory) / 2 ** 20).toFixed(0)} MiB of a rank`);
  const speeds = cell.phases.flatMap((phase) => {
    const found = phase.batches.filter(({ step }) => phase.seconds[step] > 0).map(({ step, tokens }) => tokens / phase.seconds[step]);
    return found.length > 1 ? found.slice(1) : found;
  });
  if (speeds.length) facts.push(`${number(speeds.sort((a, b) => a - b)[speeds.length >> 1])} tokens/s`);
  return facts;
}

// Says where the tolerances of a cell come from, with the numbers of the quantity that is closest to its own.
function provenance(cell) {
  const { exact, factor } = cell.legend.rule;
  const closest = [...cell.quantities].sort(byUrgency)[0];
  const floor = closest.allowed > 0 && ` (${number(closest.allowed / factor)} for ${closest.stage}, so ${number(closest.allowed)} is allowed)`;
  const text =
    cell.precision === "exact"
      ? `Tolerance in the exact tier: ${number(exact)}, more where the optimizer amplifies the rounding of gradients, less for values that are not computed. `
      : `Tolerance: ${factor} times the error of a single process in ${cell.precision}, measured in this run on the same data${floor || ""}. `;
  return [text, make("a", { href: "#tolerances" }, "Why these tolerances")];
}

const LONGEST_KEY = 48; // characters of a key that are not wrapped

// Draws keys in rows and configurations in columns, differing keys first. A key that only some have does not differ.
function configurations(heads, configs) {
  const rows = [...new Set(configs.flatMap((config) => [...config.keys()]))].map((name) => {
    const found = configs.filter((config) => config.has(name)).map((config) => config.get(name));
    return { name, same: found.every((value) => value === found[0]), everywhere: found.length === configs.length, several: found.length > 1 };
  });
  const rank = ({ same, everywhere }) => (same ? (everywhere ? 1 : 2) : 0);
  rows.sort((a, b) => rank(a) - rank(b));
  const lines = rows.map(({ name, same, everywhere }) => {
    const texts = configs.map((config, i) => make("td.name", same && everywhere && i ? "same" : (config.get(name) ?? "\u2013")));
    return make(same ? "tr" : "tr.changed", make("td.name", name), texts);
  });
  const count = (test) => rows.filter(test).length;
  const remark = `${count(({ same }) => !same)} differ, ${count(({ same, everywhere }) => same && everywhere)} are the same, ${count(({ everywhere }) => !everywhere)} are not in all`;
  const differing = rows.filter(({ same }) => !same).length;
  const longest = Math.min(LONGEST_KEY, Math.max(...rows.map(({ name }) => name.length)));
  const key = () => make("th", { style: `min-width: min(${longest + 3}ch, 40vw)` }, "key");
  const part = (...range) => table("Configuration", "numbers.config", [key(), ...heads], lines.slice(...range));
  const others = make("details", make("summary", plural(rows.length - differing, "other key")), part(differing));
  return { remark, drawn: [differing > 0 && part(0, differing), others] };
}

// Draws the configurations and environments of the phases and the oracle.
function configuration(cell) {
  const phases = cell.phases.map((phase) => phase.config);
  const ours = phases.length === 1 ? ["this cell"] : phases.map((_, i) => `phase ${i}`);
  const heads = [...ours, ...(cell.oracle ? ["reference"] : [])];
  const { remark, drawn } = configurations(heads, [...phases, ...(cell.oracle ? [cell.oracle.config] : [])]);
  return folded(false, ["Resolved configuration and environment ", make("small", remark)], drawn);
}
