"""Two curves of a learning rate, which are exact: a factor, a lag, another pace, or a schedule that begins again."""

from collections.abc import Iterator

import numpy as np

from reports.runs.factors import Factor, constant_factor, integer_of
from reports.runs.run import Floats

EXACT = 1e-3  # relative to the largest rate; logs print three digits or more
FEWEST = 4  # points that have to agree
PACES = range(2, 65)


def lr_hints(curves: tuple[Floats, Floats, Floats] | None) -> Iterator[tuple[str, str]]:
    """(name, sentence) for positions [T] and the learning rates of both sides [T]; nothing if they are the same."""
    if curves is None or len(curves[0]) < 2:
        return
    steps, a, b = curves
    if _same(a, b, a):
        return
    yield _lag(steps, a, b) or _factor(a, b) or _restart(steps, a, b) or _pace(steps, a, b) or _other(steps, a, b)


def _same(x: Floats, y: Floats, whole: Floats) -> bool:
    return bool(np.abs(x - y).max(initial=0.0) <= EXACT * np.abs(whole).max())


def _varies(x: Floats) -> bool:
    return bool(np.ptp(x) > 10 * EXACT * np.abs(x).max())


def _factor(a: Floats, b: Floats) -> tuple[str, str] | None:
    kept = (a > EXACT * a.max()) & (b > EXACT * b.max())
    found = constant_factor(np.log(b[kept] / a[kept])) if kept.sum() >= 3 else None
    if found is None or not _same(a * np.exp(found.log), b, b):
        return None
    number = integer_of(Factor(log=found.log, error=EXACT))
    exact = f", the square root of {number[0]}" if number and number[1] else ""
    direction = "larger" if found.log > 0 else "smaller"
    return (
        "learning rate: factor",
        f"the learning rate is {found.size:.4g} times {direction} on side B{exact}, at every step",
    )


def _lag(steps: Floats, a: Floats, b: Floats) -> tuple[str, str] | None:
    stride = float(np.median(np.diff(steps)))
    for k in range(1, len(a) // 2):
        for late, early, who in ((b, a, "B"), (a, b, "A")):
            if _varies(late[k:]) and len(late) - k >= FEWEST and _same(late[k:], early[:-k], a):
                return (
                    "learning rate: lag",
                    f"the learning rate of side {who} is the other's {k * stride:.0f} steps later: the schedule is"
                    " advanced before instead of after the update, counts its steps from another one, or skips some;"
                    " or the log has the rate of the next step",
                )
    return None


def _restart(steps: Floats, a: Floats, b: Floats) -> tuple[str, str] | None:
    """The schedule of one side begins again where both were the same before."""
    apart = np.flatnonzero(np.abs(a - b) > EXACT * np.abs(a).max())
    s = int(apart[0])
    for at in (s, s - 1):
        count = len(a) - at
        for new, old, who in ((b, a, "B"), (a, b, "A")):
            if at > 1 and count >= FEWEST and _varies(old[:count]) and _same(new[at:], old[:count], a):
                return (
                    "learning rate: begins again",
                    f"the learning rate of side {who} begins again at step {steps[at]:.0f}: a resume without the"
                    " state of the schedule",
                )
    return None


def _pace(steps: Floats, a: Floats, b: Floats) -> tuple[str, str] | None:
    begin = steps[0] - (1 if steps[0] == 1 else 0)
    for n in PACES:
        for fast, slow, who in ((b, a, "B"), (a, b, "A")):
            for offset in (0.0, 1.0):  # a schedule that was advanced n times before the first log, or not yet
                there = (steps - begin - offset) * n + begin + offset
                inside = (there >= steps[0]) & (there <= steps[-1])
                expected = np.interp(there[inside], steps, slow)
                if inside.sum() >= FEWEST and _varies(expected) and _same(fast[inside], expected, slow):
                    return (
                        "learning rate: pace",
                        f"the schedule of side {who} runs {n} times as fast: it is advanced with every micro-batch or"
                        " on every rank, or planned for fewer steps",
                    )
    return None


def _other(steps: Floats, a: Floats, b: Floats) -> tuple[str, str]:
    apart = int(np.flatnonzero(np.abs(a - b) > EXACT * np.abs(a).max())[0])
    return (
        "learning rate",
        f"the learning rates differ from step {steps[apart]:.0f} on ({a[apart]:.4g} and {b[apart]:.4g}): another"
        " schedule, warm-up or number of steps",
    )
