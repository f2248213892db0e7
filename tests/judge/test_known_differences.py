"""Expected differences in an output folder: judged again, believed and set side by side, with both oracles."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from judge_sample import both
from report_sample import edit
from side_sample import MEMBERS, NAMES, SCENARIO, Change, scaled, write_oracle, write_run, wrong_loss
from test_side_by_side import group_of

from conformance.cli import main as cli
from conformance.results.trust import read_cells
from conformance.spec.conventions import RoundedMasters
from conformance.spec.known_defects import Known, Unmodelled, defects_to_json

DEEPSPEED = MEMBERS[0]
WRONG = scaled(f"gradient/{NAMES[1]}", 1.01)


def variants_of(known: Known, folder: str) -> list[dict[str, Any]]:
    return [{"defects": defects_to_json(known.defects), "folder": folder}] if known.defects else []


def known_to_differ(out: Path, known: Known, change: Change = wrong_loss) -> Path:
    """A run in which DEEPSPEED differs by ``change``, and this is said to be known; its verdict's file."""
    write_run(out, {DEEPSPEED: change})
    file = out / "cells" / "01" / "verdict.json"
    edit(file, expected=[asdict(known)], variants=variants_of(known, "../../oracle/defective"))
    return file


def test_a_known_difference_is_expected_here_too(tmp_path: Path) -> None:
    out, allowed = tmp_path / "out", Unmodelled(stage="loss", tensors=("loss",))
    known_to_differ(out, Known(reason="a bug", link="https://example.org", unmodelled=allowed))
    assert cli.main(["judge", str(out)]) == 0
    group = group_of(out)
    assert group["state"] == "expected_difference"
    assert "deepspeed dp2 stands alone because of a known difference: loss 1.0e-02 from the reference." in group["text"]
    assert cli.main(["compare", str(out)]) == 0


DEFECTS = (RoundedMasters(precision="bf16"),)
DEFECTIVE = Known(reason="a bug", link="https://example.org", defects=DEFECTS)


def test_records_of_an_expected_difference_are_judged_again_by_both_oracles(tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = known_to_differ(out, DEFECTIVE)
    write_oracle(out / "oracle/defective/float64", SCENARIO, wrong_loss, defects=DEFECTS)
    for _ in range(2):
        assert cli.main(["judge", str(out)]) == 0
        assert json.loads(file.read_text())["state"] == "expected_difference"
    assert group_of(out)["state"] == "expected_difference"


def test_a_difference_behind_an_expected_one_is_found_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = known_to_differ(out, DEFECTIVE, both(wrong_loss, WRONG))
    write_oracle(out / "oracle/defective/float64", SCENARIO, wrong_loss, defects=DEFECTS)
    assert cli.main(["judge", str(out)]) == 1
    assert "but not like this: gradients, step 0: " in json.loads(file.read_text())["reason"]
    group = group_of(out)
    assert group["state"] == "differs"
    assert "Not compared: deepspeed dp2, it also differs from the oracle with its expected defect" in group["text"]


@pytest.mark.parametrize("defects", [None, (), (RoundedMasters(precision="fp16"),)])
def test_an_expected_difference_rests_on_the_oracle_that_has_these_defects(
    defects: tuple[RoundedMasters, ...] | None, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    file = known_to_differ(out, DEFECTIVE)
    if defects is not None:
        write_oracle(out / "oracle/defective/float64", SCENARIO, wrong_loss, defects=defects)
    assert cli.main(["judge", str(out)]) == 3
    values = json.loads(file.read_text())
    assert values["state"] == "infrastructure"
    edit(file, state="expected_difference")
    summary = json.loads((out / "summary.json").read_text())
    for cell in summary["cells"]:
        cell["state"] = "expected_difference" if cell["folder"] == "cells/01" else cell["state"]
    edit(out / "summary.json", cells=summary["cells"])
    (believed,) = (cell for cell in read_cells(out)[1] if cell.entry.folder == "cells/01")
    assert believed.entry.verdict.state == "infrastructure"
    assert "of the oracle with rounded-masters: " in believed.problem


def test_an_oracle_with_defects_is_read_from_the_output_folder_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    file = known_to_differ(out, DEFECTIVE)
    write_oracle(tmp_path / "elsewhere/float64", SCENARIO, wrong_loss, defects=DEFECTS)
    edit(file, variants=variants_of(DEFECTIVE, "../../../elsewhere"))
    assert cli.main(["judge", str(out)]) == 2
    assert "which lies outside of" in capsys.readouterr().err
