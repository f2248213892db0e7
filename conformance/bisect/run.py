"""Run: a cell that differs is run again up to its first differing step, with its activations captured, and bisected."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from conformance.asking import adapter_of
from conformance.batch import read_batches
from conformance.bisect.capture import read_pieces
from conformance.bisect.find import Bisected, bisect
from conformance.bisect.reference import Reference, reference
from conformance.plan.cell import Cell
from conformance.record.identity import FLOAT64
from conformance.record.tensors import read_record
from conformance.record.verdict import Verdict
from conformance.run.session import Session
from conformance.validation import UsageError


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What was found in ``step``, and the oracle's values of it."""

    step: int
    found: Bisected
    oracle: Reference


def bisect_cell(session: Session, cell: Cell) -> tuple[Verdict, Traced | None]:
    """Run and judge a cell; if it differs, bisect its first differing step.

    Raises UsageError for a cell that cannot be bisected, and TraceFailed if it cannot be run once more.
    """
    if why := not_bisected(session, cell):
        raise UsageError(f"{cell} cannot be bisected: {why}")
    verdict = session.run(cell).verdict
    if not verdict.findings:
        return verdict, None
    return verdict, bisect_step(session, cell, max(0, verdict.findings[0].step))  # -1: as loaded


def bisect_step(session: Session, cell: Cell, step: int) -> Traced:
    """Run a cell up to ``step``, and hold this step against the oracle, from the oracle's weights before the step.

    The cell was run in this session before, unless ``step`` is 0.
    """
    inputs, folder = session.trace(cell, step)
    oracle = reference(
        scenario=cell.scenario.reference,
        models=inputs.models,
        batch=read_batches(inputs.batches)[step],
        weights=_of_kind("weight", session.oracle_folder(cell) / FLOAT64, step - 1) if step else None,
    )
    found = bisect(read_pieces(folder / "trace"), _of_kind("gradient", folder / "record", step), oracle)
    return Traced(step=step, found=found, oracle=oracle)


def _of_kind(kind: str, record: Path, step: int) -> dict[str, Tensor]:
    """The tensors of a kind at a step of a record, by the parameter's name."""
    tensors = read_record(record).steps[step].tensors()
    return {name.removeprefix(f"{kind}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{kind}/")}


def not_bisected(session: Session, cell: Cell) -> str:
    """Why a cell cannot be bisected, and what to do; empty if it can be."""
    if refused := session.refusal(cell):
        return refused.reason
    if len(cell.legs) > 1:
        return f"it has {len(cell.legs)} legs; bisect the cell of one leg in the layout that differs"
    if cell.scenario.precision != "exact":
        return "what is right can be told from noise only in the exact tier; bisect the same cell there (.../exact)"
    if cell.scenario.objective.kind != "sft":
        return f"modules are traced for SFT only, and it trains {cell.scenario.objective.kind!r}"
    (leg,) = cell.legs
    if "ckpt" in leg.layout.options:
        return "recomputation (ckpt) runs modules more than once; bisect the layout without it"
    if "traced" not in adapter_of(leg.backend).traits.methods:
        return f"{leg.backend.name} does not say which modules it runs; its adapter needs the method traced()"
    return ""
