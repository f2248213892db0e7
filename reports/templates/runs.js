// Draws metrics of training runs: the curve of every run, coloured by side, and the difference of the sides with the band.
const RUNS = 8; // named in a read-out
const MARKED = 60; // positions; more are drawn as a line alone

function limits(values) {
  const low = Math.min(...values), high = Math.max(...values);
  const margin = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
  return [low - margin, high + margin];
}

function runsChart(metric) {
  const finite = metric.runs.flatMap((run) => run.values).filter(Number.isFinite);
  if (!finite.length) return null;
  const axis = { ...axes(metric.positions[0], metric.positions.at(-1), ...limits(finite)), unit: metric.unit };
  const body = [frame(axis, rounds(axis.low, axis.high).map((v) => [axis.y(v), label(v)]))];
  for (const run of metric.runs) {
    const points = metric.positions.map((x, i) => ({ x: axis.x(x), y: axis.y(run.values[i]) }));
    for (const part of split(points, (p) => Number.isFinite(p.y))) body.push(line(part.map((p) => [p.x, p.y]), SHAPES[run.side]));
    for (const p of points) {
      if (!Number.isFinite(p.y)) body.push(cross(p.x));
      else if (points.length <= MARKED) body.push(mark(SHAPES[run.side], p.x, p.y));
    }
  }
  const tips = metric.positions.map((x, i) => [
    x,
    metric.runs.slice(0, RUNS).map((run) => `${run.name}: ${Number(run.values[i].toPrecision(6))}`),
  ]);
  return drawing([...body, hovers(axis, tips)], `${metric.name} of every run`);
}

function differenceChart(metric) {
  const finite = metric.difference.filter(Number.isFinite);
  if (!finite.length) return null;
  const allowed = metric.allowed.map((v) => (Number.isFinite(v) ? v : 0));
  const usual = [...allowed].sort((a, b) => a - b)[allowed.length >> 1];
  const [low, high] = limits([...finite, usual, -usual]);
  const axis = { ...axes(metric.positions[0], metric.positions.at(-1), low, high), unit: metric.unit };
  const percent = (v) => `${number(100 * v)}%`;
  const y = (v) => axis.y(Math.min(Math.max(v, low), high)).toFixed(1);
  const edge = (sign) => metric.positions.map((x, i) => `${axis.x(x).toFixed(1)} ${y(sign * allowed[i])}`);
  const body = [
    make("path.band", { d: `M${edge(1).join("L")}L${edge(-1).reverse().join("L")}Z` }),
    frame(axis, rounds(low, high).map((v) => [axis.y(v), percent(v)])),
  ];
  const points = metric.positions.map((x, i) => ({ x: axis.x(x), y: axis.y(metric.difference[i]) }));
  for (const part of split(points, (p) => Number.isFinite(p.y))) body.push(line(part.map((p) => [p.x, p.y]), "ours"));
  for (const p of points) if (!Number.isFinite(p.y)) body.push(cross(p.x));
  const first = metric.positions.indexOf(metric.first);
  if (first >= 0 && Number.isFinite(points[first].y)) body.push(mark("ours over", points[first].x, points[first].y));
  const tips = metric.positions.map((x, i) => [
    x,
    [`difference ${percent(metric.difference[i])}`, `allowed \u00b1${percent(metric.allowed[i])}`],
  ]);
  return drawing([...body, hovers(axis, tips)], `${metric.name}: difference of the sides, with the band`);
}

unpack("curves").then((comparisons) => {
  comparisons.forEach((metrics, number) => {
    const place = document.getElementById(`curves-${number}`);
    for (const metric of metrics) {
      metric.difference = metric.difference.map(numeric);
      metric.allowed = metric.allowed.map(numeric);
      for (const run of metric.runs) run.values = run.values.map(numeric);
      const drawn = [
        [metric.name, "per step", runsChart(metric)],
        [`${metric.name}: difference`, "B \u2212 A, and the band", differenceChart(metric)],
      ];
      place.append(...drawn.filter(([, , chart]) => chart).map(figure));
    }
  });
});
