"""The command line: exit codes, machine-readable output, and one clear message for whatever is wrong."""

import json
import math
import shutil
from pathlib import Path

import pytest

from conformance import cli
from conformance.record.results import dumps

TINY = """
description = "two cells"
[[cells]]
scenarios = ["sft-padded"]
models = ["llama"]
layouts = ["dp2"]
precisions = ["exact"]
[[cells]]
scenarios = ["sft-padded"]
models = ["llama"]
layouts = ["pp2"]
precisions = ["exact"]
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("profile") / "tiny.toml"
    file.write_text(TINY)
    return str(file)


@pytest.fixture(scope="module")
def out(profile: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of one cell that conforms and one that is unsupported."""
    folder = tmp_path_factory.mktemp("cli") / "out"
    assert cli.main(["run", "--backend", "fsdp2", "--profile", profile, "--out", str(folder)]) == 0
    return folder


def test_run_leaves_summary_records_and_reports(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    assert summary["verdict"] == "conforms"
    assert summary["counts"]["conforms"] == summary["counts"]["unsupported"] == 1
    cell = next(cell for cell in summary["cells"] if cell["state"] == "conforms")
    assert cell["world_size"] == 2
    assert cell["ratios"]["gradients"] < 1
    assert (out / cell["folder"] / "record" / "record.jsonl").is_file()
    assert "ncomplete" not in (out / "report.md").read_text()  # the reports believe the records that were just written
    assert all((out / name).stat().st_size > 500 for name in ("report.html", "report.md", "junit.xml"))
    assert json.loads((out / "side_by_side.json").read_text())["groups"] == []  # of one backend only


def test_the_reproduce_command_names_the_cell(out: Path) -> None:
    for file in out.glob("cells/*/verdict.json"):
        verdict = json.loads(file.read_text())
        assert verdict["reproduce"].startswith("parity run --backend fsdp2 --profile ")
        assert verdict["reproduce"].endswith(f"--cells {verdict['cell']}")


def test_old_records_are_judged_again_without_ranks(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(out, tmp_path / "copy", symlinks=True)
    before = json.loads((copy / "summary.json").read_text())
    assert cli.main(["judge", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == before["cells"]


def test_a_record_that_was_truncated_makes_the_run_incomplete(out: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(out, tmp_path / "copy", symlinks=True)
    (record,) = copy.glob("cells/*/record/record.jsonl")
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    assert cli.main(["judge", str(copy)]) == 3


def test_a_cell_that_ended_badly_is_not_judged_by_its_record(out: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(out, tmp_path / "copy", symlinks=True)
    file = next(file for file in copy.glob("cells/*/verdict.json") if json.loads(file.read_text())["record"])
    ended = {"state": "infrastructure", "reason": "rank 1 raised during 'teardown'", "completed": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | ended))
    assert cli.main(["judge", str(copy)]) == 3


def test_a_planted_fault_makes_the_run_differ(profile: str, tmp_path: Path) -> None:
    arguments = ["--backend", "fsdp2", "--profile", profile, "--faults", "local-token-mean", "--cells", "*dp2*"]
    assert cli.main(["run", *arguments, "--out", str(tmp_path / "out")]) == 1


def test_a_model_and_data_set_of_the_users_own(profile: str, tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    rows = [{"q": f"What is {i} plus {i}?", "a": f"It is {2 * i}."} for i in range(60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = shutil.copytree(Path(cli.__file__).parent.parent / "fixtures/models/pangu", tmp_path / "my-pangu")
    arguments = ["--model", str(model), "--data", str(data), "--input_key", "q", "--output_key", "a"]
    selection = ["--backend", "fsdp2", "--profile", profile, "--cells", "sft-padded/my-pangu/fsdp2/dp2/exact"]
    assert cli.main(["run", *selection, *arguments, "--out", str(tmp_path / "out")]) == 0


def message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error of a call that has to end with exit code 2."""
    assert cli.main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--backend", "nobody"], "unknown backend 'nobody'; registered: "),
        (["list", "--profile", "slow"], "no profile 'slow'; known: full, gpu, quick"),
        (["list", "--faults", "typo"], "unknown fault 'typo'; known: "),
        (["list", "--cells", "nothing*"], "no cell matches 'nothing*'"),
        (["judge", "nowhere"], "there is no nowhere/summary.json; give the --out folder of a parity run"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_wrong_usage_is_one_message(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = message(arguments, capsys)
    assert words in error
    assert "Traceback" not in error


def test_an_output_folder_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").touch()
    assert "nothing is overwritten" in message(["run", "--out", str(tmp_path)], capsys)
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such/folder"], "there is no 'no/such/folder'"),
        (["--data", "no/such/file.jsonl"], "there is no 'no/such/file.jsonl'"),
        (["--input_key", "prompt"], "prompt"),
    ],
)
def test_inputs_that_cannot_be_used_are_one_message(
    arguments: list[str], words: str, tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = message(["run", "--profile", profile, "--out", str(tmp_path / "out"), *arguments], capsys)
    assert words in error


def test_list_and_doctor_speak_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) >= 14
    assert cli.main(["doctor", "--json"]) in (0, 3)
    assert {check["state"] for check in json.loads(capsys.readouterr().out)} <= {"ok", "note", "problem"}


def test_a_crash_is_not_taken_for_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("conformance.doctor.examine", crash)
    assert cli.main(["doctor"]) == 3


def test_infinity_is_written_as_json_can_say_it() -> None:
    text = dumps({"ratio": math.inf, "reason": 'of "Infinity"'})
    assert text == '{"ratio": 1e999, "reason": "of \\"Infinity\\""}'
    assert json.loads(text)["ratio"] == math.inf
