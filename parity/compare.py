"""Compares two records step by step in causal order, until they differ: ``parity diff RUN-A RUN-B``.

Everything after the first stage that differs follows from it, so that stage and its parameters are reported.
"""

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conformance.core.errors import UsageError
from parity import explain
from parity.differences import (
    EXACT,
    MOST,
    Pair,
    Stage,
    allowed_update,
    batch,
    coarsest,
    common,
    compared,
    difference,
    epsilon,
    noise,
    number,
    parameters,
    replicas,
    setting,
    settings,
    tensors,
)
from parity.record_files import Line, Run, read_run


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparisons of the first record with each of the other records."""

    pairs: tuple[Pair, ...]

    @property
    def differs(self) -> bool:
        return any(pair.divergence for pair in self.pairs)

    @property
    def comparable(self) -> bool:
        """Whether every pair differs, or has gradients of at least one step to compare."""
        return all(pair.divergence or any(stage.name == "gradients" for stage in pair.stages) for pair in self.pairs)

    @property
    def next_command(self) -> str:
        """The command that tells more, with a word on what it does."""
        first, *others = self.pairs[0].a.folder, *(pair.b.folder for pair in self.pairs)
        command = shlex.join(["parity", "diff", str(first), *map(str, others)])
        if not self.differs and not self.comparable:
            return "parity diff --help   (the notes say what the records lack)"
        if self.differs and not all("tensors" in run.loaded for pair in self.pairs for run in (pair.a, pair.b)):
            return f"{command} --out diff   (draws the curves; record with full=True for the elements that differ)"
        return f"{command} --out diff   (draws the curves: diff/diff.html)"

    def text(self) -> str:
        """Describe all comparisons for a person, in plain text that is Markdown as well."""
        return "\n\n".join([*map(explain.text, self.pairs), f"Next: {self.next_command}"])

    def to_json(self) -> dict[str, Any]:
        """Give the comparisons as JSON values; numbers that are not finite are the strings "inf" and "nan"."""
        return {
            "differs": self.differs,
            "pairs": [explain.values(pair) for pair in self.pairs],
            "next": self.next_command,
        }


def compare_records(folders: Sequence[Path], *, threshold: float | None) -> Comparison:
    """Compare folders that ``parity.record`` wrote with the first of them.

    threshold: the largest relative difference allowed for losses, gradients and updates. None allows half of the
        digits of the coarsest dtype, a tenth of that for losses, and for updates what follows
        (docs/guides/recording.md).

    Raises UsageError for fewer than two folders, for a folder without a record or with a damaged one, for a record that
    is given twice, and for a threshold that is not between 0 and 1.
    """
    if len(folders) < 2:
        raise UsageError(f"{len(folders)} record: name two or more, the one to compare with first")
    if threshold is not None and not 0 < threshold < 1:
        raise UsageError(f"threshold {threshold}: it has to lie between 0 and 1")
    first, *other_runs = (read_run(Path(folder)) for folder in folders)
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise UsageError("the same record is given twice; a record agrees with itself whatever is in it")
    return Comparison(pairs=tuple(_compare(first, other, threshold) for other in other_runs))


def _compare(a: Run, b: Run, threshold: float | None) -> Pair:
    rounding, because = coarsest(a, b)
    derived = math.sqrt(rounding)
    allowed, of_loss = (derived, derived / 10) if threshold is None else (threshold, threshold)
    stages: list[Stage] = []
    for stage in _walk(a, b, allowed, of_loss, given=threshold is not None):
        stages.append(stage)
        if stage.different:
            break
    because = because if threshold is None else "the threshold was given"
    return Pair(a=a, b=b, threshold=allowed, loss_threshold=of_loss, because=because, stages=tuple(stages))


def _walk(a: Run, b: Run, threshold: float, of_loss: float, *, given: bool) -> Iterator[Stage]:
    """Yield all stages in causal order; each is computed when it is asked for."""
    yield Stage(name="parameters", step=None, quantities=tuple(parameters(a, b)))
    runs, every = (a, b), common(a, b, trained=False)
    x, y = (tensors(run.arrays(run.loaded), "weight", tuple(run.parameters), every) for run in runs)
    loaded = [EXACT if _dtype(a, name) == _dtype(b, name) else _rounding(runs, name) for name in every]
    yield Stage(name="weights", step=None, quantities=tuple(compared(every, x, y, loaded, runs=runs)))
    yield _replicas(a, b, a.loaded, b.loaded, kind="weight", step=None)

    names = common(a, b, trained=True)
    before = [tensors(run.arrays(run.loaded), "weight", tuple(run.parameters), names) for run in runs]
    uncertain = np.zeros_like(before[0].rows)  # the largest noise of each gradient so far
    for step, (here, there) in enumerate(zip(a.steps, b.steps, strict=False)):
        yield Stage(name="batch", step=step, quantities=tuple(batch(here, there)))
        if here["loss"] is not None and there["loss"] is not None:
            yield Stage(name="loss", step=step, quantities=(number("loss", here["loss"], there["loss"], of_loss),))
        if here["stepped"] and there["stepped"]:
            arrays = a.arrays(here), b.arrays(there)
            x, y = (tensors(found, "gradient", run.trained, names) for run, found in zip(runs, arrays, strict=True))
            uncertain = np.maximum(uncertain, noise(x, y))
            gradients = compared(names, x, y, [threshold] * len(names), runs=runs)
            yield Stage(name="gradients", step=step, quantities=tuple(gradients))
            yield _replicas(a, b, here, there, kind="gradient", step=step)
        yield Stage(name="optimizer", step=step, quantities=tuple(settings(a, b, here, there, names)))
        if here["stepped"] and there["stepped"]:
            after = [tensors(found, "weight", run.trained, names) for run, found in zip(runs, arrays, strict=True)]
            x, y = (difference(old, new) for old, new in zip(before, after, strict=True))
            adaptive = ["betas" in setting(a, here, name) | setting(b, there, name) for name in names]
            derived = [
                allowed_update(
                    threshold,
                    noise=uncertain[i] if adaptive[i] else np.zeros(0),
                    stored=_rounding(runs, name) * float(after[0].norms[i]),
                    updates=(float(x.norms[i]), float(y.norms[i])),
                )
                for i, name in enumerate(names)
            ]
            allowed = [threshold if given else MOST if bound is None else bound for bound in derived]
            undetermined = [] if given else [name for name, bound in zip(names, derived, strict=True) if bound is None]
            quantities = compared(names, x, y, allowed, runs=runs)
            yield Stage(
                name="update",
                step=step,
                quantities=tuple(q for q in quantities if q.description or q.what not in undetermined),
                undetermined=tuple(undetermined),
            )
            yield _replicas(a, b, here, there, kind="weight", step=step)
            before = after


def _dtype(run: Run, name: str) -> str:
    return str(run.parameters[name]["dtype"])


def _rounding(runs: tuple[Run, Run], name: str) -> float:
    """Give the rounding of a parameter in the coarser of its two dtypes."""
    return max(epsilon(_dtype(run, name)) for run in runs)


def _replicas(a: Run, b: Run, here: Line, there: Line, *, kind: str, step: int | None) -> Stage:
    quantities = replicas(a, b, here["replicas"][kind], there["replicas"][kind])
    return Stage(name=f"{kind} replicas", step=step, quantities=tuple(quantities))
