// Draws a group of backends side by side when it is opened; the blocks of its cells have the curves.
async function openSide(details) {
  if (details.dataset.drawn) return;
  details.dataset.drawn = "yes";
  const group = await unpack(details.dataset.block);
  const cells = await Promise.all(group.drawn.map(readCell));
  details.append(
    ...[members(group, await shared()), between(group), outside(group)].filter((part) => part),
    ...panels(cells).flatMap((panel) => groupCurves(cells, panel)),
    ...memberConfiguration(cells),
  );
}

const difference = (values) => values && judged(values);

function members(group, legend) {
  const { states } = legend;
  const squares = group.squares && pairSquares(group, legend);
  const count = group.members.length;
  const first = make("tr", make("th", { colspan: 3 }), make("th.of", { colspan: group.columns.length }, "against the reference"));
  if (squares) first.append(make("th.of", { colspan: count }, "against each other"));
  const heads = [make("th"), make("th", "backend"), make("th", "layout")];
  heads.push(...group.columns.map((column, i) => make(i ? "th.value" : "th.value.of", column)));
  if (squares) heads.push(...group.members.map((_, i) => make(i ? "th.n" : "th.n.of", String(i + 1))));
  const rows = group.members.map((member, row) => {
    const state = states[member.state];
    const box = boxOf.get(member.number); // none of a comparison that is older than the run
    const link = make("a", { href: box ? box.hash : null, title: `${state.name}: open this cell` }, member.layout);
    const name = make("td.name", link, " ", make("span", { title: state.name }, state.symbol));
    const worst = member.worst.map((values, i) => make(i ? "td.pairof" : "td.pairof.of", againstOracle(difference(values))));
    return make("tr", make("td.n", String(row + 1)), make("td.left", member.backend), name, worst, squares?.[row] ?? []);
  });
  return make(
    "div.scroll",
    { tabindex: 0, role: "region", "aria-label": `${group.name} side by side` },
    make("table.numbers.sides", make("thead", first, make("tr", heads)), make("tbody", rows)),
  );
}

function againstOracle(q) {
  if (!q) return make("small", "none");
  const tip = `${tensorAtStep(q)}\nerror ${number(q.observed)}, allowed ${number(q.allowed)}`;
  return make("span", { "data-tip": tip }, number(q.observed), " ", judgedMargin(q));
}

// Draws the squares of each row: the largest difference of two members, in the colour of the smallest margin.
function pairSquares(group, legend) {
  const drawn = group.members.map((_, row) =>
    group.members.map((_, column) => (row === column ? () => make("td.square.self") : () => make("td.square", "?"))),
  );
  for (const [a, b, columns] of group.squares) {
    const found = (columns ?? []).map(difference).filter((q) => q);
    if (!found.length) continue;
    const largest = Math.max(...found.map((q) => (Number.isNaN(q.observed) ? Infinity : q.observed)));
    const lines = found.map((q) => `${q.stage}: ${number(q.observed)}, margin ${margin(q.ratio)}\n  ${tensorAtStep(q)}`);
    const names = [a, b].map((i) => `${group.members[i].backend} ${group.members[i].layout}`).join(" and ");
    const colour = shade(found.reduce((a, b) => (b.ratio > a.ratio ? b : a)), legend);
    const text = number(Number(largest.toPrecision(1)));
    drawn[a][b] = drawn[b][a] = () => make(`td.square.${colour}`, { "data-tip": [names, ...lines].join("\n") }, text);
  }
  return drawn.map((row) => row.map((one) => one()));
}

// Draws, for many members, the pair that is furthest apart for each two backends, and for the layouts of each backend.
function between(group) {
  if (!group.between.length) return null;
  const rows = group.between.map(([names, count, pair, values]) => {
    const q = difference(values);
    const at = make("td.left", { title: tensorAtStep(q) }, q.stage);
    return [make("td.left", names), count, make("td.left", pair), at, ...apart(q)];
  });
  const heads = ["between", "pairs", left("furthest apart"), left("in"), "difference", "allowed", "margin"];
  return table("Furthest apart, by backend", "numbers", heads, rows);
}

function outside(group) {
  if (!group.outside.length) return null;
  const rows = group.outside.map(([pair, values]) => {
    const q = difference(values);
    return [make("td.left", pair), make("td.left", q.stage), make("td.name", tensorAtStep(q)), ...apart(q)];
  });
  const heads = ["pair", left("in"), left("at"), "difference", "allowed", "margin"];
  return make(
    "div",
    make("h3", "Outside their tolerance"),
    table("Pairs outside their tolerance", "numbers", heads, rows),
    group.more > 0 && make("p.note", `${plural(group.more, "more pair")} in side_by_side.json.`),
  );
}

const apart = (q) => [number(q.observed), number(q.allowed), make("td", judgedMargin(q))];

function groupCurves(cells, panel) {
  const drawn = adjustable(cells, panel);
  if (!drawn) return [];
  const backends = new Map(kinds(cells).map((kind, i) => [cells[i].backend, kind]));
  const legend = [...backends].map(([backend, kind]) => [key(mark(kind, 6, 5)), backend]);
  legend.push(...oracleLegend("allowed against the reference", cells));
  if (panel) return [folded(false, panel, make("p", legendOf(legend)), drawn)];
  return [make("div", make("h3", "Curves ", legendOf(legend)), drawn)];
}

// Draws the configurations of the members, those of their first phases.
function memberConfiguration(cells) {
  const known = cells.filter((cell) => cell.phases.length);
  if (known.length < 2) return [];
  const heads = known.map((cell) => `${cell.backend} ${cell.layout}`);
  const { remark, drawn } = configurations(heads, known.map((cell) => cell.phases[0].config));
  return [folded(false, ["Configuration of the members ", make("small", remark)], drawn)];
}
