"""Notes: what two records were not compared in, and why; what was told of one side only."""

from collections.abc import Iterator, Sequence

from parity.files import Run
from parity.quantities import Pair
from parity.stages import CLASS, common, setting

NOTED = 4


def notes(pair: Pair) -> Iterator[str]:
    """Sentences."""
    a, b = pair.a, pair.b
    both = min(len(a.steps), len(b.steps))
    if len(a.steps) != len(b.steps):
        yield f"Compared are the first {both} steps, which both have."
    for what in ("batch", "loss", "tokens"):
        without = {run.name: sum(line[what] is None for line in run.steps[:both]) for run in (a, b)}
        lacking = [f"{name}{_some(count, both)}" for name, count in without.items() if count]
        if lacking:
            yield f"Not compared: {what}, which {' and '.join(lacking)} did not record."
    for run in (a, b):
        for name, rows in run.header["left_out"].items():
            yield f"Not compared: {rows} of {name}, which names= leaves out in {run.name}."
        if unseen := max((line["unseen"] for line in run.steps), default=0):
            yield f"Not recorded: {unseen} parameters of the optimizers of {run.name}, which are not the model's."
        if run.steps and not any(line["computed_in"] for line in run.steps):
            yield f"Not seen: what {run.name} computes in; taken for the dtype of its parameters."
    yield from _optimizers(a, b)
    yield from _undetermined(pair)


def _some(count: int, every: int) -> str:
    return "" if count == every else f" (in {count} of {every} steps)"


def _optimizers(a: Run, b: Run) -> Iterator[str]:
    """Optimizers of other classes, at the first step that both made; and what only one of these is set to."""
    made = [
        (here, there) for here, there in zip(a.steps, b.steps, strict=False) if here["stepped"] and there["stepped"]
    ]
    told: dict[str, None] = {}  # in order
    for name in common(a, b, trained=True) if made else ():
        p, q = setting(a, made[0][0], name), setting(b, made[0][1], name)
        if p and q and p[CLASS] != q[CLASS]:
            told[f"{a.name} steps with {p[CLASS]} and {b.name} with {q[CLASS]}; compared is what both are set to."] = (
                None
            )
        if p and q:
            for run, own, its in ((a, p, q), (b, q, p)):
                if only := [key for key in own if key not in its]:
                    told[f"Not compared: {_first_names(only)} of {own[CLASS]}, which only {run.name} is set to."] = None
    yield from told


def _undetermined(pair: Pair) -> Iterator[str]:
    found = [(stage, name) for stage in pair.stages for name in stage.undetermined]
    if found:
        names, steps = list(dict.fromkeys(name for _, name in found)), {stage.step for stage, _ in found}
        compared = sum(len(stage.quantities) for stage in pair.stages if stage.name == "update")
        yield (
            f"Not compared: {len(found)} of {len(found) + compared} updates, which rounding decides, in {len(steps)} "
            f"steps, of {_first_names(names)}."
        )


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:NOTED]) + (f" and {len(names) - NOTED} more" if len(names) > NOTED else "")
