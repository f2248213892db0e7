"""What is kept of a run: the tensors of cells that differ; of all others what reports and comparisons need."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_sample import edit
from side_sample import MEMBERS, NAMES, cell_id, scaled, write_run

from conformance.cli import main as cli
from conformance.judge.cells import rejudge
from conformance.judge.side_by_side import write_side_by_side
from conformance.results.output_folders import slim
from conformance.results.run_results import read_run
from conformance.results.trust import read_cells

WRONG = scaled(f"gradient/{NAMES[1]}", 1.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four members that agree; never written to."""
    return write_run(tmp_path_factory.mktemp("slim") / "out")


@pytest.fixture
def slimmed(whole: Path, tmp_path: Path) -> Path:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    slim(out)
    return out


def compared(out: Path) -> Any:
    return json.loads((out / "side_by_side.json").read_text())


def test_cells_that_conform_and_their_oracle_keep_no_tensor(slimmed: Path) -> None:
    assert list(slimmed.rglob("*.safetensors")) == []
    assert len(list(slimmed.rglob("record.jsonl"))) == len(MEMBERS) + 1


def test_a_cell_that_differs_and_its_oracle_keep_theirs(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", {MEMBERS[1]: WRONG})
    before = {entry.cell: entry for entry in read_run(out)[1]}[cell_id(MEMBERS[1])]
    slim(out)
    kept = {file.relative_to(out).parts[:2] for file in out.rglob("*.safetensors")}
    assert kept == {("cells", "02"), ("oracle", "tiny")}
    assert rejudge(out) == len(MEMBERS) - 1
    after = {entry.cell: entry for entry in read_run(out)[1]}[cell_id(MEMBERS[1])]
    assert after.verdict == before.verdict


def test_verdicts_are_believed_as_before(whole: Path, slimmed: Path) -> None:
    assert [cell.entry.verdict for cell in read_cells(slimmed)[1]] == [c.entry.verdict for c in read_cells(whole)[1]]
    assert all(not cell.problem and cell.phases and cell.oracle for cell in read_cells(slimmed)[1])


def test_lines_that_were_changed_are_still_found(slimmed: Path) -> None:
    record = slimmed / "cells/01/legs/0/record/record.jsonl"
    record.write_text(record.read_text().replace('"seconds": ', '"seconds": 1'))
    assert [cell.entry.verdict.state for cell in read_cells(slimmed)[1]][:2] == ["infrastructure", "conforms"]


def test_backends_are_still_compared_by_what_was_found_of_these_records(whole: Path, slimmed: Path) -> None:
    write_side_by_side(slimmed)
    assert compared(slimmed) == compared(whole)


def test_a_comparison_of_other_records_is_not_taken_for_one_of_these(slimmed: Path) -> None:
    values = compared(slimmed)
    values["groups"][0]["members"][0]["records"] = ["0" * 64]
    (slimmed / "side_by_side.json").write_text(json.dumps(values))
    write_side_by_side(slimmed)
    (group,) = compared(slimmed)["groups"]
    assert "its tensors were not kept (--keep all keeps them)" in group["members"][0]["problem"]
    of_first = [pair["columns"].keys() for pair in group["pairs"] if 0 in pair["members"]]
    others = [pair["columns"].keys() for pair in group["pairs"] if 0 not in pair["members"]]
    assert all("gradients" not in columns for columns in of_first)
    assert all("gradients" in columns for columns in others)


def test_judging_again_says_which_verdicts_stand(slimmed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [entry.verdict for entry in read_run(slimmed)[1]]
    assert cli.main(["judge", str(slimmed)]) == 0
    assert "4 cells keep their verdicts, because their tensors were not kept" in capsys.readouterr().err
    assert [entry.verdict for entry in read_run(slimmed)[1]] == before


def test_a_verdict_that_only_says_that_its_tensors_are_gone_is_judged_again(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", {MEMBERS[1]: WRONG})
    file = out / "cells/02/verdict.json"
    told = json.loads(file.read_text())
    observed = told["quantities"]["columns"].index("observed")
    for row in told["quantities"]["data"]:
        row[observed] = 0.0
    file.write_text(json.dumps(told | {"state": "conforms", "slim": True}))
    summary = json.loads((out / "summary.json").read_text())
    summary["cells"][1]["state"] = "conforms"
    (out / "summary.json").write_text(json.dumps(summary))
    assert rejudge(out) == 0
    assert [entry.verdict.state for entry in read_run(out)[1]].count("differs") == 1


def test_verdict_naming_other_reference_is_rejected(slimmed: Path) -> None:
    file = slimmed / "cells/01/verdict.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"second_class": "somebody's own"}))
    assert [cell.entry.verdict.state for cell in read_cells(slimmed)[1]][:2] == ["infrastructure", "conforms"]


def rewritten(out: Path, keep: Callable[[dict[str, Any]], bool]) -> str:
    """The verdict of the first cell without the quantities that ``keep`` does not keep, as it is believed."""
    file = out / "cells/01/verdict.json"
    told = json.loads(file.read_text())
    told["strips"], table = [], told["quantities"]
    table["data"] = [row for row in table["data"] if keep(dict(zip(table["columns"], row, strict=True)))]
    file.write_text(json.dumps(told))
    first = read_cells(out)[1][0].entry.verdict
    assert first.state == "infrastructure"
    return first.reason


@pytest.mark.parametrize("stage", ["weights", "loss", "gradients", "clipped update", "weights after N steps"])
@pytest.mark.parametrize("tensors", ["kept", "not kept"])
def test_a_verdict_without_a_stage_that_its_record_demands_is_not_believed(
    stage: str, tensors: str, whole: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    if tensors == "not kept":
        slim(out)
    reason = rewritten(out, lambda q: q["stage"] != stage)
    assert f"that cannot be trusted: {stage} (" in reason
    assert "was not judged, but its record requires it. Run it again." in reason


def test_what_need_not_be_shown_makes_a_cell_conform_in_part_only(slimmed: Path) -> None:
    reason = rewritten(slimmed, lambda q: q["stage"] != "log-probs")
    assert "the verdict is 'conforms', but log-probs (logprob) was not judged" in reason


def test_a_verdict_without_a_step_or_a_tensor_is_not_believed(slimmed: Path, whole: Path, tmp_path: Path) -> None:
    reason = rewritten(slimmed, lambda q: (q["stage"], q["step"]) != ("loss", 1))
    assert " of step 1 was not judged" in reason
    out = Path(shutil.copytree(whole, tmp_path / "again"))
    reason = rewritten(out, lambda q: (q["stage"], q["step"], q["tensor"]) != ("gradients", 0, NAMES[1]))
    assert f"were not judged for the same tensors, such as {NAMES[1]}" in reason


def test_folders_whose_tensors_are_gone_are_merged_with_all_that_was_found(whole: Path, tmp_path: Path) -> None:
    """Two folders of the same cells, each slim."""
    parts = []
    for part in (1, 2):
        out = Path(shutil.copytree(whole, tmp_path / str(part)))
        slim(out)
        edit(out / "summary.json", selected="same")
        parts.append(str(out))
    before = [entry.verdict for entry in read_run(whole)[1]]
    merged = tmp_path / "merged"
    assert cli.main(["merge", *parts, "--out", str(merged)]) == 0
    assert list(merged.rglob("*.safetensors")) == []
    found = read_cells(merged)[1]
    assert [cell.entry.verdict for cell in found] == before
    assert all(cell.entry.slim and not cell.problem for cell in found)
    assert compared(merged)["groups"] == compared(whole)["groups"]


@pytest.mark.parametrize("removed", [0, 1, 5])
def test_a_removal_that_was_stopped_is_no_damage_and_goes_on(
    removed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many files, of which each cell has four."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    before = [entry.verdict for entry in read_run(out)[1]]
    unlink, left = Path.unlink, iter(range(removed))

    def stopped(file: Path, missing_ok: bool = False) -> None:
        if file.suffix == ".safetensors" and next(left, None) is None:
            raise KeyboardInterrupt
        unlink(file, missing_ok)

    monkeypatch.setattr(Path, "unlink", stopped)
    with pytest.raises(KeyboardInterrupt):
        slim(out)
    monkeypatch.undo()
    rejudge(out)
    assert [entry.verdict for entry in read_run(out)[1]] == before
    assert all(not cell.problem for cell in read_cells(out)[1])
    slim(out)
    assert list(out.rglob("*.safetensors")) == []
    assert [entry.slim for entry in read_run(out)[1]] == [True] * len(MEMBERS)


def test_removing_twice_is_removing_once(slimmed: Path) -> None:
    before = {file: file.read_bytes() for file in slimmed.rglob("*.json*")}
    slim(slimmed)
    assert {file: file.read_bytes() for file in slimmed.rglob("*.json*")} == before
