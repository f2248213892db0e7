"""Runs a differing cell again up to its first differing step, with its activations captured, and bisects it.

Right values can be distinguished from noise only in the exact tier. In another precision, the exact twin of the cell
is bisected. If the twin conforms, an error that no rounding explains is bisected in the cell's own precision.
After a run, its first differing cells are bisected, one for each group and backend, which changes no verdict: small
worker groups first, and the exact tier before other tiers.
"""

import contextlib
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, zip_longest
from pathlib import Path

from conformance.backends.registry import adapter_of
from conformance.core.errors import UsageError, first_few, one_line
from conformance.core.host import resolve
from conformance.matrix.cell import Cell
from conformance.models.families import is_written
from conformance.models.synthetic import is_sketched
from conformance.records.record_format import RecordError, read_lines
from conformance.results.bisection import (
    OUTSIDE,
    Bisected,
    Bisection,
    Collectives,
    Issued,
    read_bisection,
    write_bisection,
)
from conformance.results.run_results import SUMMARY, VERDICT, read_entry, read_output_json
from conformance.results.verdict import Quantity, Verdict
from conformance.runner.attempt import TRACED
from conformance.runner.phases import TraceFailed
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.observables import MULTI_TOKEN
from conformance.worker.activation_capture import read_issued

NO_FINDING = "no quantity is outside its tolerance, so there is nothing to bisect; the verdict says why it differs"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of bisecting ``step``: the most telling model first, and the collectives at the defect."""

    step: int
    models: tuple[Bisected, ...]
    collectives: Collectives | None

    @property
    def found(self) -> Bisected:
        return self.models[0]


def bisect_cell(session: Session, cell: Cell) -> tuple[Verdict, Bisection | None]:
    """Runs and judges a cell and, if it differs, bisects it.

    Raises UsageError for a cell that cannot be bisected, and TraceFailed if it cannot be run once more.
    """
    if why := not_bisected(session, cell):
        raise UsageError(f"{cell} cannot be bisected: {why}")
    judged = session.run(cell)
    if not judged.verdict.findings:
        return judged.verdict, None
    return judged.verdict, bisect_judged(session, cell, judged.verdict.findings[0])


def bisect_judged(session: Session, cell: Cell, finding: Quantity, conforming: Cell | None = None) -> Bisection:
    """Bisects a cell that was run and judged in the output folder of this session, and can be bisected.

    finding: its first finding. conforming: a cell of another layout that conforms in the exact tier.
    Raises TraceFailed if the cell cannot be run once more.
    """
    twin = exact_twin(cell)
    bisection = Bisection(cell=str(cell), records=_records(session, cell), stage=finding.stage, traced=str(twin))
    if twin == cell:
        return _with(bisection, bisect_step(session, cell, max(0, finding.step), conforming))  # -1: as loaded
    with _temporary_twin(session, twin):
        verdict = _verdict_of(session, twin)
        if not verdict.findings:
            if verdict.state in ("conforms", "partly_observed") and finding.ratio > FAR:
                found = bisect_step(session, cell, max(0, finding.step))
                if not found.models[0].is_right:
                    return _with(replace(bisection, traced=str(cell)), found)
            return replace(bisection, why_not=_why_no_twin(verdict, cell.scenario.precision, finding))
        if known := read_bisection(session.folder(twin), cell=str(twin), records=_records(session, twin)):
            return replace(known, cell=bisection.cell, records=bisection.records)
        first = verdict.findings[0]
        return _with(replace(bisection, stage=first.stage), bisect_step(session, twin, max(0, first.step), conforming))


def _records(session: Session, cell: Cell) -> tuple[str, ...]:
    """Returns the digests of the records of a judged cell; empty for a twin that is not a cell of the run."""
    file = session.folder(cell) / VERDICT
    if not file.exists():
        return ()
    return tuple(read_lines(file.parent / record).digest for record in read_entry(file).records)


def _with(bisection: Bisection, found: Found) -> Bisection:
    return replace(bisection, step=found.step, models=found.models, collectives=found.collectives)


def exact_twin(cell: Cell) -> Cell:
    """Returns the same cell in the exact tier."""
    return replace(cell, scenario=replace(cell.scenario, precision="exact"))


@contextlib.contextmanager
def _temporary_twin(session: Session, twin: Cell) -> Iterator[None]:
    """Removes the files that this block writes for a twin that is not a cell of the run."""
    folder = session.folder(twin)
    existed = folder.exists()
    try:
        yield
    finally:
        if not existed:
            shutil.rmtree(folder, ignore_errors=True)


def _verdict_of(session: Session, twin: Cell) -> Verdict:
    """Returns the run's verdict of a twin; runs and judges a twin that has none."""
    with contextlib.suppress(UsageError):
        verdict = read_entry(session.folder(twin) / VERDICT).verdict
        if verdict.state != "not_run":
            return verdict
    return session.judged(twin).verdict


FAR = 10  # times what is allowed: an error that no rounding explains


def _why_no_twin(verdict: Verdict, precision: str, finding: Quantity) -> str:
    if verdict.state in ("conforms", "partly_observed"):
        agrees = f"it agrees with the reference in the exact tier, so the defect needs {precision}: look for"
        if finding.ratio > FAR:  # infinite too
            return f"{agrees} code that only this precision runs, since rounding explains no error of this size"
        return f"{agrees} values that are computed, summed or stored in a wrong dtype"
    if verdict.state == "differs":
        return f"in the exact tier {NO_FINDING}: {verdict.reason}"
    return (
        "right values can be distinguished from noise only in the exact tier, where it gave no answer: "
        f"{verdict.reason}"
    )


def bisect_step(session: Session, cell: Cell, step: int, conforming: Cell | None = None) -> Found:
    """Runs a cell up to ``step``, and compares this step with the oracle, from the oracle's weights before the step."""
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
    """Returns the collectives at the same place of a conforming cell; None if it cannot be traced."""
    assert main.first
    with contextlib.suppress(TraceFailed), _traced(session, conforming):
        return read_issued(session.trace(conforming, step) / "trace" / main.model, main.first)
    return None


@contextlib.contextmanager
def _traced(session: Session, cell: Cell) -> Iterator[None]:
    """Removes the traced files after this block, because activations are large."""
    try:
        yield
    finally:
        shutil.rmtree(session.folder(cell) / TRACED, ignore_errors=True)


def not_bisected(session: Session, cell: Cell) -> str:
    """Returns why a cell cannot be bisected, and how to proceed; empty if it can be. In another precision than
    ``exact``, its twin is bisected."""
    if unsupported := session.refusal(cell):
        return unsupported.reason
    if len(cell.phases) > 1:
        return f"it has {len(cell.phases)} phases; bisect the cell of one phase in the layout that differs"
    if not is_written(resolve(cell.scenario.model)):
        return (
            "its model is known to transformers only, so the reference lacks its modules; compare backends with each "
            "other"
        )
    if is_sketched(cell.scenario):
        return (
            "its records keep sketches, and the reference begins a step with whole weights; bisect it with fewer "
            "layers of the same architecture"
        )
    if MULTI_TOKEN in cell.scenario.objective.roles:
        return (
            "modules for multi-token prediction run the embedding and the head again; bisect the scenario with the "
            "objective sft"
        )
    (phase,) = cell.phases
    if "ckpt" in phase.layout.options:
        return "recomputation (ckpt) runs modules more than once; bisect the layout without it"
    if "compile" in phase.layout.options:
        return "compiled layers (compile) do not show their modules; bisect the layout without it"
    if "traced" not in adapter_of(phase.backend).traits.methods:
        return f"{phase.backend.name} does not say which modules it runs; its adapter needs the method traced()"
    return ""


MOST = 8  # most cells of a run that are bisected automatically
Group = tuple[str, str, str, str]  # scenario, model, variant and backend


def any_differs(out: Path) -> bool:
    """Whether the summary in ``out`` has a cell that differs."""
    return "differs" in _states(out).values()


def bisect_run(session: Session, cells: Sequence[Cell], *, say: Callable[[str], None]) -> None:
    """Bisects the first differing cell of each group of a finished run, and writes ``bisect.json`` next to its verdict.

    Cells that an earlier run has bisected are left out. ``say`` receives a line for each that was not bisected.
    """
    states = _states(session.config.out)
    of_state = {state: [cell for cell in cells if states.get(str(cell)) == state] for state in ("differs", "conforms")}
    findings = {cell: _findings(session, cell) for cell in of_state["differs"] if not not_bisected(session, cell)}
    if without := [cell for cell, found in findings.items() if not found]:
        say(f"not bisected: {first_few(without, most=MOST)}: {NO_FINDING}")
    chosen = [
        cell for cell in _chosen([cell for cell, found in findings.items() if found]) if not _known(session, cell)
    ]
    for cell in chosen[:MOST]:
        conforming = [other for other in of_state["conforms"] if _group(other) == _group(exact_twin(cell))]
        why_not = _bisect(session, cell, findings[cell][0], _most_similar(session, cell, conforming))
        session.check()
        if why_not:
            say(f"bisect {cell}: not bisected: {why_not}")
    if len(chosen) > MOST:
        say(f"{len(chosen) - MOST} more groups differ and were not bisected; parity bisect CELL does it")


def _known(session: Session, cell: Cell) -> bool:
    try:
        found = read_bisection(session.folder(cell), cell=str(cell), records=_records(session, cell))
    except RecordError:  # told when the cell is bisected
        return False
    return found is not None and bool(found.models)


def _findings(session: Session, cell: Cell) -> tuple[Quantity, ...]:
    return read_entry(session.folder(cell) / VERDICT).verdict.findings


def _bisect(session: Session, cell: Cell, finding: Quantity, conforming: Cell | None) -> str:
    """Bisects one cell, and writes the result. Returns why it could not be bisected, or an empty text."""
    try:
        found = bisect_judged(session, cell, finding, conforming)
        session.check()
        write_bisection(session.folder(cell), found)
    except Exception as error:  # a failed bisection must not spoil the run and its verdicts
        return f"{type(error).__name__}: {one_line(error)}"
    return ""


def _states(out: Path) -> Mapping[str, str]:
    return {cell["id"]: cell["state"] for cell in read_output_json(out / SUMMARY)["cells"]}


def _group(cell: Cell) -> Group:
    return cell.scenario.name, cell.scenario.model_name, cell.variant, cell.backend


def _chosen(differ: Sequence[Cell]) -> Iterator[Cell]:
    """Yields the smallest cell of each group; backends take turns."""
    groups: dict[Group, list[Cell]] = defaultdict(list)
    for cell in sorted(differ, key=lambda cell: (not cell.scenario.tier.is_exact, cell.world_size)):
        groups[_group(cell)].append(cell)
    of_backends: dict[str, list[Cell]] = defaultdict(list)
    for first, *_ in groups.values():
        of_backends[first.backend].append(first)
    return filter(None, chain.from_iterable(zip_longest(*of_backends.values())))


def _most_similar(session: Session, cell: Cell, candidates: Sequence[Cell]) -> Cell | None:
    """Returns the traceable cell with the most similar layout; the smallest one of several."""
    (phase,) = cell.phases

    def distance(other: Cell) -> tuple[int, int]:
        layout = other.phases[0].layout
        same = [getattr(layout, f.name) == getattr(phase.layout, f.name) for f in fields(Layout)]
        return same.count(False), other.world_size

    return min((other for other in candidates if not not_bisected(session, other)), key=distance, default=None)
