"""Run: a cell that differs is run again up to its first differing step, with its activations captured, and bisected.

What is right can be told from noise in the exact tier only. Of a cell in another precision, its exact twin is bisected.
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

from conformance.asking import adapter_of
from conformance.bisect.collectives import read_issued
from conformance.inputs.random_model import is_sketched
from conformance.oracle.decoder import is_written
from conformance.paths import resolve
from conformance.plan.cell import Cell
from conformance.record.bisection import OUTSIDE, Bisected, Bisection, Collectives, Issued, read_bisection
from conformance.record.format import read_lines
from conformance.record.results import VERDICT, read_entry
from conformance.record.verdict import Quantity, Verdict
from conformance.run.legs import TraceFailed
from conformance.run.session import TRACED, Session
from conformance.validation import UsageError


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found in ``step``, the most telling model first, and the collectives of its place."""

    step: int
    models: tuple[Bisected, ...]
    collectives: Collectives | None

    @property
    def found(self) -> Bisected:
        return self.models[0]


def bisect_cell(session: Session, cell: Cell) -> tuple[Verdict, Bisection | None]:
    """Run and judge a cell and, if it differs, bisect it.

    Raises UsageError for a cell that cannot be bisected, and TraceFailed if it cannot be run once more.
    """
    if why := not_bisected(session, cell):
        raise UsageError(f"{cell} cannot be bisected: {why}")
    judged = session.run(cell)
    if not judged.verdict.findings:
        return judged.verdict, None
    return judged.verdict, bisect_judged(session, cell, judged.verdict.findings[0])


def bisect_judged(session: Session, cell: Cell, finding: Quantity, conforming: Cell | None = None) -> Bisection:
    """Bisect a cell that was run and judged in the output folder of this session, and can be bisected.

    finding: its first one. conforming: a cell of another layout that conforms in the exact tier.
    Raises TraceFailed if the cell cannot be run once more.
    """
    twin = exact_twin(cell)
    said = Bisection(cell=str(cell), records=_records(session, cell), stage=finding.stage, traced=str(twin))
    if twin == cell:
        return _with(said, bisect_step(session, cell, max(0, finding.step), conforming))  # -1: as loaded
    with _beside(session, twin):
        verdict = _verdict_of(session, twin)
        if verdict.state != "differs":
            return replace(said, why_not=_why_no_twin(verdict, cell.scenario.precision))
        if known := read_bisection(session.folder(twin), cell=str(twin), records=_records(session, twin)):
            return replace(known, cell=said.cell, records=said.records)
        first = verdict.findings[0]
        return _with(replace(said, stage=first.stage), bisect_step(session, twin, max(0, first.step), conforming))


def _records(session: Session, cell: Cell) -> tuple[str, ...]:
    """The digests of the records of a cell that was judged; of a twin that is no cell of the run, there are none."""
    file = session.folder(cell) / VERDICT
    if not file.exists():
        return ()
    return tuple(read_lines(file.parent / record).digest for record in read_entry(file).records)


def _with(said: Bisection, found: Found) -> Bisection:
    return replace(said, step=found.step, models=found.models, collectives=found.collectives)


def exact_twin(cell: Cell) -> Cell:
    """The same cell in the exact tier."""
    return replace(cell, scenario=replace(cell.scenario, precision="exact"))


@contextlib.contextmanager
def _beside(session: Session, twin: Cell) -> Iterator[None]:
    """Remove what a twin that is no cell of the run leaves inside of this block."""
    folder = session.folder(twin)
    existed = folder.exists()
    try:
        yield
    finally:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)


def _verdict_of(session: Session, twin: Cell) -> Verdict:
    """The verdict of a twin: the run's own if it has one, else it is run and judged now, beside the run."""
    with contextlib.suppress(UsageError):
        verdict = read_entry(session.folder(twin) / VERDICT).verdict
        if verdict.state != "not_run":
            return verdict
    return session.judged(twin).verdict


def _why_no_twin(verdict: Verdict, precision: str) -> str:
    if verdict.state in ("conforms", "partly_observed"):
        return (
            f"it agrees with the oracle in the exact tier, so the defect needs {precision}: look for what is computed, "
            f"summed or kept in another dtype than it should be"
        )
    return f"what is right can be told from noise only in the exact tier, where it gave no answer: {verdict.reason}"


def bisect_step(session: Session, cell: Cell, step: int, conforming: Cell | None = None) -> Found:
    """Run a cell up to ``step``, and hold this step against the oracle, from the oracle's weights before the step."""
    with _traced(session, cell):
        trace = session.trace(cell, step) / "trace"
        models = session.compare_traced(cell, step)
        main = models[0]
        if main.first is None or main.where == OUTSIDE:
            return Found(step=step, models=models, collectives=None)
        issued = read_issued(trace / main.model, main.first)
    there = _issued_in(session, conforming, step, main) if conforming else None
    other = str(conforming) if there is not None else ""
    return Found(step=step, models=models, collectives=Collectives(issued=issued, conforming=other, there=there or ()))


def _issued_in(session: Session, conforming: Cell, step: int, main: Bisected) -> tuple[Issued, ...] | None:
    """What the same place of a cell that conforms issues; None if it cannot be traced."""
    assert main.first
    with contextlib.suppress(TraceFailed), _traced(session, conforming):
        return read_issued(session.trace(conforming, step) / "trace" / main.model, main.first)
    return None


@contextlib.contextmanager
def _traced(session: Session, cell: Cell) -> Iterator[None]:
    """Remove what is traced inside of this block: activations are large."""
    try:
        yield
    finally:
        shutil.rmtree(session.folder(cell) / TRACED, ignore_errors=True)


def not_bisected(session: Session, cell: Cell) -> str:
    """Why a cell cannot be bisected, and what to do; empty if it can be. In another precision than ``exact``, its twin
    is."""
    if refused := session.refusal(cell):
        return refused.reason
    if len(cell.legs) > 1:
        return f"it has {len(cell.legs)} legs; bisect the cell of one leg in the layout that differs"
    if not is_written(resolve(cell.scenario.model)):
        return (
            "its model is known to transformers only, whose modules are no oracle's; compare backends with each other"
        )
    if is_sketched(cell.scenario):
        return (
            "its records keep sketches, and the oracle begins a step with whole weights; bisect it with fewer layers "
            "of the same architecture"
        )
    (leg,) = cell.legs
    if "ckpt" in leg.layout.options:
        return "recomputation (ckpt) runs modules more than once; bisect the layout without it"
    if "compile" in leg.layout.options:
        return "compiled layers (compile) do not show their modules; bisect the layout without it"
    if "traced" not in adapter_of(leg.backend).traits.methods:
        return f"{leg.backend.name} does not say which modules it runs; its adapter needs the method traced()"
    return ""
