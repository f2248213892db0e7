// What a cell was told, what its ranks were given, and what ran: configuration, denominators, evidence, memory, speed.
const CONFIGURATION = "configuration"; // the stage of what a layout and a precision imply (conformance/observable.py)

// What a layout and a precision imply for a training step, and the collectives and matrix products that were seen.
function evidence(cell) {
  const asked = cell.quantities.filter((q) => q.stage === CONFIGURATION);
  const ran = cell.legs.filter((leg) => leg.evidence.collectives.length + leg.evidence.products.length);
  if (!asked.length && !ran.length) return null;
  const claims = asked.map((q) => [make("td.left", q.ratio > 1 ? make("b.over", "\u2717 no") : "\u2713 yes"), make("td.left", q.tensor)]);
  const seen = ran.flatMap((leg) => [
    ...leg.evidence.collectives.map(([kind, size, dtype, pass, ranks, most]) => [leg.layout, kind, `${size} ranks`, dtype, pass, ranks, most]),
    ...leg.evidence.products.map(([dtype, pass, ranks, most]) => [leg.layout, "matrix product", "", dtype, pass, ranks, most]),
  ]);
  const rows = seen.map((row) => row.map((value, i) => make(i < 5 ? "td.left" : "td", String(value))));
  const heads = [...["layout", "what", "group", "dtype", "pass"].map(left), "ranks that did", "most of a rank"];
  const no = asked.filter((q) => q.ratio > 1).length;
  const remark = asked.length ? `${asked.length - no} of ${asked.length} hold` : "nothing follows from this layout that could be seen";
  return folded(
    no > 0,
    ["Asked for, and ran ", make("small", remark)],
    claims.length > 0 && table("Asked for", "numbers.asked", [left("so it was"), left("what the layout and the precision ask for")], claims),
    rows.length > 0 && make("p.note", "Seen below the backend, in one step of each leg:"),
    rows.length > 0 && table("Ran", "numbers", heads, rows),
  );
}

// The targets of each micro-batch of each data-parallel rank: what a mean per rank or per micro-batch would divide by.
function denominators(cell) {
  const batches = cell.legs.flatMap((leg) => leg.batches);
  if (!batches.length) return null;
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const wide = Math.max(...batches.map(({ targets }) => targets.length));
  const rows = batches.map(({ step, tokens, targets }) => {
    const all = sum(targets.flat());
    const ranks = targets.map((parts) => {
      const share = sum(parts) ? ratio((all / targets.length) / sum(parts)) : "no";
      const tip = `a mean per rank would give a target of this rank ${share} times its weight`;
      return make("td", { "data-tip": tip }, parts.join(" + "), parts.length > 1 && ` = ${sum(parts)}`);
    });
    while (ranks.length < wide) ranks.push(make("td"));
    const counted = cell.series.values.get("token_count")?.get(step);
    const theirs = cell.oracle?.series.values.get("token_count")?.get(step);
    return [step, tokens, ...ranks, all, counted === undefined ? "not shown" : String(counted), theirs === undefined ? "" : String(theirs)];
  });
  const heads = ["step", "tokens", ...Array.from({ length: wide }, (_, rank) => `dp rank ${rank}`), "targets", `${cell.backend} counts`, "oracle"];
  const remark = "targets of each micro-batch of each data-parallel rank";
  return folded(false, ["Denominators ", make("small", remark)], table("Denominators", "numbers", heads, rows));
}

// Peak memory and speed, where the record has them. The first step of a leg, which warms up, is left out if it can be.
function costs(cell) {
  const facts = [];
  const memory = cell.legs.flatMap((leg) => leg.memory).filter((bytes) => bytes > 0);
  if (memory.length) facts.push(`peak ${(Math.max(...memory) / 2 ** 20).toFixed(0)} MiB of a rank`);
  const speeds = cell.legs.flatMap((leg) => {
    const found = leg.batches.filter(({ step }) => leg.seconds[step] > 0).map(({ step, tokens }) => tokens / leg.seconds[step]);
    return found.length > 1 ? found.slice(1) : found;
  });
  if (speeds.length) facts.push(`${number(speeds.sort((a, b) => a - b)[speeds.length >> 1])} tokens/s`);
  return facts;
}

// By which rule the bounds of a cell came about; docs/explanations/tolerances.md has the reasons.
function provenance(cell) {
  const { exact, factor } = cell.legend.rule;
  if (cell.precision === "exact") return `Allowed, by rule: ${number(exact)} for all in the exact tier, or what the optimizer makes of it; less where nothing is computed.`;
  return `Allowed, by rule: ${factor} times the error of a single process in ${cell.precision}, measured in this run on the same data; fixed where nothing is computed, or where ranks and the cell's own numbers are compared.`;
}

// Keys in rows and what was told in columns, keys that differ first. One that only some have is no difference.
function configurations(heads, told) {
  const rows = [...new Set(told.flatMap((config) => [...config.keys()]))].map((name) => {
    const found = told.filter((config) => config.has(name)).map((config) => config.get(name));
    return { name, same: found.every((value) => value === found[0]), everywhere: found.length === told.length, several: found.length > 1 };
  });
  const rank = ({ same, everywhere }) => (same ? (everywhere ? 1 : 2) : 0);
  rows.sort((a, b) => rank(a) - rank(b));
  const drawn = rows.map(({ name, same, everywhere }) => {
    const texts = told.map((config, i) => make("td.name", same && everywhere && i ? "same" : (config.get(name) ?? "\u2013")));
    return make(same ? "tr" : "tr.changed", make("td.name", name), texts);
  });
  const count = (test) => rows.filter(test).length;
  const remark = `${count(({ same }) => !same)} differ, ${count(({ same, everywhere }) => same && everywhere)} are the same, ${count(({ everywhere }) => !everywhere)} are of some only`;
  return { remark, drawn: table("Configuration", "numbers.config", ["key", ...heads], drawn) };
}

// What the legs and the oracle were told and where they ran.
function configuration(cell) {
  const legs = cell.legs.map((leg) => leg.config);
  const ours = legs.length === 1 ? ["this cell"] : legs.map((_, i) => `leg ${i}`);
  const heads = [...ours, ...(cell.oracle ? ["oracle"] : [])];
  const { remark, drawn } = configurations(heads, [...legs, ...(cell.oracle ? [cell.oracle.config] : [])]);
  return folded(false, ["Resolved configuration and environment ", make("small", remark)], drawn);
}
