"""Identity: whose record it is, as its header says; without torch, for the judge and the reports alike.

Folders can be copied, swapped and given another name. So a record is taken for a cell's only if it says so itself, and
for the oracle's only if it says that it is one, of the precision and with the defects that are asked for (claim 9).
"""

from pathlib import Path
from typing import Any

from conformance.defect import Defect, defects_to_json
from conformance.record.format import Line, RecordError
from conformance.validation import shown

ORACLE = "oracle"  # the cell and the backend in the header of the oracle's records
FLOAT64 = "float64"  # the precision of the oracle that cells are compared with


def noise_runs(precision: str) -> tuple[str, ...]:
    """The oracle's runs whose distance to float64 bounds a cell of this precision; none in the exact tier.

    One has torch's fused attention kernel and one the plain formula, because backends have the one or the other.
    """
    return () if precision == "exact" else (precision, f"{precision}-plain")


def check_cell(folder: Path, header: Line, *, cell: str) -> None:
    """Raises RecordError where the record in ``folder`` is of another cell, or of none."""
    if (found := header.get("cell")) != cell:
        raise RecordError(
            f"{folder} is a record of {found or 'nothing that has a name'} and not of {cell}: folders were mixed up; "
            f"put the cell's own record there, or run the cell again"
        )


def check_oracle(folder: Path, header: Line, *, precision: str, defects: tuple[Defect, ...] = ()) -> None:
    """Raises RecordError where the record in ``folder`` is not the oracle's, of this precision, with these defects."""
    backend = header.get("backend", {})
    found = header.get("cell"), backend.get("name"), backend.get("precision")
    if found != (ORACLE, ORACLE, precision):
        what = f"one of {found[0]} in {found[2]}" if found[0] == ORACLE else f"a record of {found[0] or 'nothing'}"
        raise RecordError(
            f"{folder} should be the oracle's record in {precision}, and is {what}: folders were mixed up; run the "
            f"cell again"
        )
    if backend.get("defects", []) != (asked := defects_to_json(defects)):
        raise RecordError(
            f"{folder} should be the oracle's record with {_named(asked)}, and is one with "
            f"{_named(backend['defects'])}: folders were mixed up; run the cell again"
        )


def _named(defects: Any) -> str:
    return shown(defects) if defects else "no defect"
