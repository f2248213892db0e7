"""Checks by the header of a record to which cell or oracle the record belongs. Does not import torch.

Folders can be copied, swapped and renamed. So a record counts as a cell's only if its header names this cell, and as
the oracle's only if its header names the oracle with the requested precision and defects (docs/principles.md).
"""

from pathlib import Path
from typing import Any

from conformance.core.errors import shown
from conformance.records.record_format import Line, RecordError
from conformance.spec.known_defects import Defect, defects_to_json
from conformance.spec.precision import PRECISIONS, PrecisionName

ORACLE = "oracle"  # the name of both the cell and the backend in the headers of the oracle's records
FLOAT64 = "float64"  # the precision of the oracle run that cells are compared with
OF_RANKS = "-dp"  # in the name of a run, before the number of data-parallel ranks
CHOICES = "choices.safetensors"  # in the folder of that run: the frozen batches with the choices of its routers


def noise_runs(precision: str, data_ranks: int | None = None) -> tuple[str, ...]:
    """Names the oracle runs whose distance to float64 bounds a cell of this precision; none in the exact tier.

    The first run uses torch's fused attention kernel. The second run uses the plain formula, except in passes before
    the first update of a rollout; it is only made if a cell differs by the first run. A backend uses one of the two.
    On a CPU there is a second run in half precision for each number of ``data_ranks`` of a cell, because rounding
    depends on the rows whose embeddings a rank adds up (conformance.oracle.primitives.OneLookup). On a GPU, where it
    does not, ``data_ranks`` is None.
    """
    tier = next((tier for name, tier in PRECISIONS.items() if name == precision and not tier.is_exact), None)
    if not tier:
        return ()
    return precision, f"{precision}-plain" + (f"{OF_RANKS}{data_ranks}" if tier.is_half and data_ranks else "")


def parts_of_run(run: str) -> tuple[str, int]:
    """Returns the name of a run without its number of data-parallel ranks, and this number."""
    name, _, ranks = run.partition(OF_RANKS)
    return name, int(ranks or 1)


def precision_of_run(run: str) -> PrecisionName:
    """Returns the precision in which the oracle computes this run."""
    return next(name for name in PRECISIONS if parts_of_run(run)[0] in (noise_runs(name) or (FLOAT64,)))


def check_cell(folder: Path, header: Line, *, cell: str) -> None:
    """Raises RecordError if the record in ``folder`` does not belong to ``cell``."""
    if (found := header.get("cell")) != cell:
        raise RecordError(
            f"{folder} is a record of {found or 'an unnamed cell'} and not of {cell}: folders were mixed up; "
            f"put the cell's own record there, or run the cell again"
        )


def check_oracle(folder: Path, header: Line, *, precision: str, defects: tuple[Defect, ...] = ()) -> None:
    """Raises RecordError if the record in ``folder`` is not the oracle's with this precision and these defects."""
    backend = header.get("backend", {})
    found = header.get("cell"), backend.get("name"), backend.get("precision")
    if found != (ORACLE, ORACLE, precision):
        what = f"one of {found[0]} in {found[2]}" if found[0] == ORACLE else f"a record of {found[0] or 'nothing'}"
        raise RecordError(
            f"{folder} should be the oracle's record in {precision}, and is {what}: folders were mixed up; run the "
            f"cell again"
        )
    if backend.get("defects") != (requested := defects_to_json(defects)):
        observed = _describe(backend["defects"]) if "defects" in backend else "an unknown list of defects"
        raise RecordError(
            f"{folder} should be the oracle's record with {_describe(requested)}, and is one with {observed}: "
            f"folders were mixed up; run the cell again"
        )


def _describe(defects: Any) -> str:
    return shown(defects) if defects else "no defect"


def second_class(header: Line) -> object:
    """Returns whose implementation computed an oracle's record with this header; empty for the suite's own oracle."""
    resolved = header.get("resolved")
    return resolved.get("second_class", "") if isinstance(resolved, dict) else ""
