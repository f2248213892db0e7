// Switches views of charts: a linear or log axis of values, errors on a log or linear axis or with their sign, and a range
// of steps, chosen by dragging over a chart or by number.
const CHOICES = { values: ["linear", "log"], errors: ["log", "linear", "signed"] };
const within = (view, step) => step >= view.first && step <= view.last;

// Returns the charts of a panel with their controls; null if nothing can be drawn.
function adjustable(cells, panel) {
  const steps = [...new Set(cells.flatMap((cell) => cell.series.steps))].sort((a, b) => a - b);
  const view = { values: "linear", errors: "log", first: steps[0], last: steps.at(-1) };
  const figures = make("div.charts");
  const inputs = ["first", "last"].map((end) => make("input", { type: "number", min: steps[0], max: steps.at(-1), "aria-label": `${end} step` }));
  const whole = make("button", { type: "button" }, "all steps");
  const buttons = Object.entries(CHOICES).map(([of, choices]) => choices.map((choice) => make("button", { type: "button", "data-of": of, "data-choice": choice }, choice)));
  function draw(change = {}) {
    const next = { ...view, ...change };
    if (steps.some((step) => within(next, step))) Object.assign(view, next);
    inputs[0].value = view.first;
    inputs[1].value = view.last;
    whole.hidden = view.first === steps[0] && view.last === steps.at(-1);
    for (const button of buttons.flat()) button.setAttribute("aria-pressed", view[button.dataset.of] === button.dataset.choice);
    figures.replaceChildren(...charts(cells, panel, view).map(figure));
  }
  draw();
  if (!figures.children.length) return null;
  for (const button of buttons.flat()) button.addEventListener("click", () => draw({ [button.dataset.of]: button.dataset.choice }));
  for (const [i, end] of ["first", "last"].entries()) {
    inputs[i].addEventListener("change", () => draw({ [end]: inputs[i].value === "" ? view[end] : Number(inputs[i].value) }));
  }
  whole.addEventListener("click", () => draw({ first: steps[0], last: steps.at(-1) }));
  const at = (event) => event.target.closest?.(".hover")?.dataset.step;
  let from = null;
  figures.addEventListener("pointerdown", (event) => (from = event.pointerType === "touch" ? null : (at(event) ?? null)));
  figures.addEventListener("pointerup", (event) => {
    const ends = [Number(from), Number(at(event) ?? from)].sort((a, b) => a - b);
    if (from !== null && ends[0] < ends[1]) draw({ first: ends[0], last: ends[1] });
    from = null;
  });
  const zoom = steps.length > 2 && make("span.choice", make("span", "steps"), inputs, whole);
  const choices = Object.keys(CHOICES).map((of, i) => make("span.choice", { role: "group", "aria-label": of }, make("span", of), buttons[i]));
  return [make("div.views.screen", choices, zoom), figures];
}
