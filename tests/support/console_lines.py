"""Lines of consoles as trainers print them, and what parity diff reads in them."""

from collections.abc import Sequence

from reports.logdiff.readers import read_text
from reports.logdiff.run import Run, run_of

COUNTED = "the log counts no steps: its lines are counted instead (1, 2, 3, ...)"


def opened(text: str) -> Run:
    return run_of(read_text(text, name="log"), name="log")


def points(run: Run, metric: str = "loss") -> dict[float, float]:
    curve = run.curves[metric]
    return dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


def trainer(step: int, *, every: int = 1, total: int = 30, loss: float | None = None) -> str:
    """A line of the Trainer, whose epoch is rounded to two digits."""
    loss = 3 - step / 50 if loss is None else loss
    return f"{{'loss': {loss}, 'learning_rate': {1e-6 * step}, 'epoch': {round(step / total, 2)}}}\n"


def losses(steps: Sequence[int]) -> dict[float, float]:
    return {step: 3 - step / 50 for step in steps}
