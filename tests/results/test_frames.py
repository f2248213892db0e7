"""``parity.load(OUT)``: a run as pandas tables, with the declared columns and dtypes. It trusts the same
cells as the reports.
"""

from pathlib import Path

import pandas as pd
import pytest
from nights import LENT, night
from report_sample import CELLS as SAMPLE
from report_sample import CONFORMS, DIFFERS, NOT_RUN, RESUMED, edit, entries_of, entry_of, folder_of, write_sample

import parity
from conformance.core.errors import UsageError
from conformance.results.verdict import STATES
from parity.api import CELLS, QUANTITIES, STEPS, Frames
from reports.load import read_report


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("frames") / "out")


@pytest.fixture(scope="module")
def frames(out: Path) -> Frames:
    return parity.load(out)


def tables(frames: Frames) -> dict[str, tuple[pd.DataFrame, dict[str, str]]]:
    return {
        "cells": (frames.cells, CELLS),
        "steps": (frames.steps, STEPS),
        "quantities": (frames.quantities, QUANTITIES),
    }


@pytest.mark.parametrize("name", ["cells", "steps", "quantities"])
def test_a_table_has_the_declared_columns_and_dtypes(name: str, frames: Frames) -> None:
    table, columns = tables(frames)[name]
    assert len(table)
    assert list(table.columns) == list(columns)
    text = pd.Series([""], dtype="str").dtype
    assert [str(d) if d != text else "str" for d in table.dtypes] == list(columns.values())


def test_cells_say_what_the_report_says(out: Path, frames: Frames) -> None:
    assert list(frames.cells["cell"]) == list(SAMPLE)
    assert list(frames.cells["state"].cat.categories) == list(STATES)
    rows = frames.cells.set_index("cell")
    for cell in read_report(out).cells:
        row = rows.loc[cell.id]
        assert (row["state"], row["reason"]) == (cell.state, cell.reason)
        assert row["worst"] == pytest.approx(cell.closest.ratio) if cell.closest else pd.isna(row["worst"])
    assert rows.loc[DIFFERS, "first_stage"] == "gradients"
    assert (rows.loc[NOT_RUN, "attempts"], rows.loc[CONFORMS, "attempts"]) == (0, 1)
    assert frames.run.profile == "quick"


def test_whose_the_oracle_was_is_a_column(tmp_path: Path) -> None:
    rows = parity.load(night(tmp_path / "out", 14, lent=[RESUMED])).cells.set_index("cell")
    assert rows.loc[RESUMED, "second_class"] == LENT
    assert rows.loc[CONFORMS, "second_class"] == ""


def test_every_quantity_is_a_row(out: Path, frames: Frames) -> None:
    assert len(frames.quantities) == sum(len(entry.verdict.quantities) for entry in entries_of(out))
    own = frames.quantities[frames.quantities["cell"] == DIFFERS]
    judged = entry_of(out, DIFFERS).verdict.quantities
    assert list(own["tensor"]) == [q.tensor for q in judged]
    assert list(own["ratio"]) == [q.ratio for q in judged]
    assert (own["ratio"] > 1).sum() == len(entry_of(out, DIFFERS).verdict.findings)


def test_steps_of_all_phases_are_beside_the_oracles(frames: Frames) -> None:
    own = frames.steps[(frames.steps["cell"] == RESUMED) & (frames.steps["key"] == "loss")]
    assert list(zip(own["leg"], own["step"], strict=True)) == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4)]
    assert (own["value"] / own["oracle"] - 1).abs().max() < 1e-5


def test_a_cell_that_cannot_be_believed_is_no_pass(tmp_path: Path) -> None:
    out = write_sample(tmp_path / "out")
    (folder_of(out, CONFORMS) / "legs/0/record/record.jsonl").unlink()
    row = parity.load(out).cells.set_index("cell").loc[CONFORMS]
    assert row["state"] == "infrastructure"
    assert "cannot be trusted" in row["reason"]


def test_a_folder_that_contradicts_itself_is_one_message(tmp_path: Path) -> None:
    out = write_sample(tmp_path / "out")
    edit(folder_of(out, CONFORMS) / "verdict.json", state="differs")
    with pytest.raises(UsageError, match="the summary says conforms"):
        parity.load(out)


def test_a_run_without_cells_that_ran_has_empty_tables(tmp_path: Path) -> None:
    out = write_sample(tmp_path / "out")
    edit(out / "summary.json", cells=[])
    for table, columns in tables(parity.load(out)).values():
        assert len(table) == 0
        assert list(table.columns) == list(columns)
