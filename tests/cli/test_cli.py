"""The command line: exit codes, machine-readable output, and one clear message for whatever is wrong.

Runs in this process, on the backend of plain_backend.py, which starts fast; its ranks are real.
"""

import gc
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plain_profile import write_profile

from conformance.backends.faults import catalogue
from conformance.backends.protocol import Support
from conformance.backends.registry import SubprocessAdapter
from conformance.cli import main as cli
from conformance.core.host import FIXTURES
from conformance.matrix.options import Ranks, Selection
from conformance.records.record_format import dumps, number
from conformance.results.history import read_baseline
from conformance.runtime.forkserver_client import Forkservers
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario

PLAIN = ("--backend", "plain_backend:Plain")
CONFORMS = "tiny/llama/plain/dp2/fp32"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def out(profile: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of one cell that conforms and one that is unsupported."""
    folder = tmp_path_factory.mktemp("cli") / "out"
    assert cli.main(["run", *PLAIN, "--profile", profile, "--out", str(folder), "--keep", "all"]) == 0
    return folder


@pytest.fixture
def copy(out: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(out, tmp_path / "copy", symlinks=True))


def read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text())
    return values


def test_garbage_is_kept_in_a_process_of_the_suite_alone(copy: Path) -> None:
    """Not in a process of a user who calls a command, such as this one."""
    before = gc.get_freeze_count()
    assert cli.main(["report", str(copy)]) == 0
    assert gc.get_freeze_count() <= before  # a kept object may be freed
    code = "import gc; from conformance.cli.main import main; main(); print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", code, "report", str(copy)], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) > 10_000


def test_children_have_status_where_a_supervisor_ignores_them(copy: Path) -> None:
    code = "import signal; from conformance.cli.main import main; main(); print(signal.getsignal(signal.SIGCHLD).name)"
    command = ["env", "--ignore-signal=CHLD", sys.executable, "-c", code, "report", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "SIG_DFL"


# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_is_added_to_a_history_and_is_the_baseline_of_the_next(out: Path, profile: str, tmp_path: Path) -> None:
    kept = str(tmp_path / "history")
    assert cli.main(["history", kept, "--add", str(out)]) == 0
    same = Selection(profile=f"elsewhere/{Path(profile).name}", backend=(PLAIN[1],))
    assert same.text(Ranks()) == read(out / "summary.json")["selection"]
    assert read_baseline(kept, same.text(Ranks())).demanded[CONFORMS] == "conforms"
    assert read_baseline(kept, same.text(Ranks(device="cuda"))).runs == ()
    assert read_baseline(kept, Selection(profile=profile, backend=(PLAIN[1],), seed=1).text(Ranks())).runs == ()


def test_run_leaves_summary_records_and_reports(out: Path) -> None:
    summary = read(out / "summary.json")
    assert summary["verdict"] == "conforms"
    assert {state: count for state, count in summary["counts"].items() if count} == {"conforms": 1, "unsupported": 1}
    cell = next(cell for cell in summary["cells"] if cell["state"] == "conforms")
    assert (cell["id"], cell["world_size"]) == (CONFORMS, 2)
    assert cell["ratios"]["gradients"] < 1
    rows = read(out / cell["folder"] / "verdict.json")["quantities"]["data"]
    assert cell["errors"]["gradients"] == max(row[3] for row in rows if row[0] == "gradients") > 0
    assert 2**25 < cell["memory"] < 2**33
    assert 2**25 < cell["host_memory"] < 2**33
    assert (out / cell["folder"] / "legs" / "0" / "record" / "record.jsonl").is_file()
    assert "ncomplete" not in (out / "report.md").read_text()  # the reports believe the records that were just written
    assert all((out / name).stat().st_size > 500 for name in ("report.html", "report.md", "junit.xml"))
    assert read(out / "side_by_side.json")["groups"] == []  # of one backend only


def test_the_reproduce_command_names_the_cell(out: Path) -> None:
    for file in out.glob("cells/*/verdict.json"):
        verdict = read(file)
        assert verdict["reproduce"].startswith("parity run --profile ")
        assert " --backend plain_backend:Plain " in verdict["reproduce"]
        assert verdict["reproduce"].endswith(f"--cells {verdict['cell']}")


def test_a_planted_fault_makes_the_run_differ(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAIN, "--profile", profile, "--faults", "inverted-clip", "--cells", CONFORMS, "--json"]
    assert cli.main(["run", *arguments, "--out", str(tmp_path / "out")]) == 1
    cell, control = json.loads(capsys.readouterr().out)["cells"]
    assert cell["id"] == f"{CONFORMS}/fault-inverted-clip"
    assert cell["reason"].startswith("first difference at clipped update, step 0")
    assert (control["id"], control["state"]) == (CONFORMS, "conforms")


def test_a_model_and_data_set_of_the_users_own(profile: str, tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    rows = [{"q": f"What is {i} plus {i}?", "a": f"It is {2 * i}."} for i in range(60)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = shutil.copytree(FIXTURES / "models" / "pangu", tmp_path / "my-pangu")
    arguments = ["--model", str(model), "--data", str(data), "--input-key", "q", "--output-key", "a"]
    selection = [*PLAIN, "--profile", profile, "--cells", "tiny/my-pangu/plain/dp2/fp32"]
    timeline = ("--timeline", str(tmp_path / "timeline.json"))
    assert cli.main(["run", *selection, *arguments, *timeline, "--out", str(tmp_path / "out")]) == 0
    events = read(tmp_path / "timeline.json")["traceEvents"]
    found = {(event["cat"], event["name"].partition(" ")[0]) for event in events if event["ph"] == "X"}
    assert {("controller", name) for name in ("plan", "announce", "prepare", "write", "report")} <= found
    assert {("ranks", name) for name in ("groups", "setup", "step", "observe", "write", "clean-up")} <= found
    assert {("oracle", "float64"), ("cells", "judging"), ("groups", "import")} <= found
    phases = read(tmp_path / "out" / "summary.json")["phases"]
    assert phases["ranks"]["step"] > 0


def test_a_timeline_without_a_folder_is_refused_at_once(profile: str, tmp_path: Path) -> None:
    arguments = [*PLAIN, "--profile", profile, "--out", str(tmp_path / "out"), "--timeline", str(tmp_path / "no" / "t")]
    assert cli.main(["run", *arguments]) == 2
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_is_incomplete_and_lists_what_was_not_run(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user interrupts while the adapter is asked about the second cell."""
    asked = SubprocessAdapter.supports

    def interrupted(adapter: SubprocessAdapter, scenario: Scenario, layout: Layout) -> Support:
        if layout.pp > 1:
            raise KeyboardInterrupt
        return asked(adapter, scenario, layout)

    monkeypatch.setattr(SubprocessAdapter, "supports", interrupted)
    arguments = [*PLAIN, "--profile", profile, "--out", str(tmp_path / "out")]
    assert cli.main(["run", *arguments]) == 130
    summary = read(tmp_path / "out" / "summary.json")
    assert (summary["verdict"], summary["finished"]) == ("incomplete", None)
    assert summary["counts"]["not_run"] == len(summary["cells"]) == 2


def test_a_run_without_a_cell_that_was_judged_is_no_success(profile: str, tmp_path: Path) -> None:
    arguments = [*PLAIN, "--profile", profile, "--cells", "*/pp2/*", "--out", str(tmp_path / "out")]
    assert cli.main(["run", *arguments]) == 3
    assert read(tmp_path / "out" / "summary.json")["counts"]["unsupported"] == 1


# --- old records -----------------------------------------------------------------------------------------------------


def test_old_records_are_judged_again_without_ranks(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read(copy / "summary.json")
    for file in copy.glob("cells/*/verdict.json"):
        if read(file)["records"]:
            blank = {"reason": "", "quantities": {"columns": [], "data": []}, "strips": []}
            file.write_text(json.dumps(read(file) | blank))
    assert cli.main(["judge", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == before["cells"]


def test_a_record_that_was_truncated_makes_the_run_incomplete(copy: Path) -> None:
    (record,) = copy.glob("cells/*/legs/0/record/record.jsonl")
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    assert cli.main(["judge", str(copy)]) == 3


def test_the_exit_code_of_a_report_says_what_the_report_says(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = copy.glob("cells/*/legs/0/record/record.jsonl")
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    assert read(copy / "summary.json")["verdict"] == "conforms"
    assert cli.main(["report", str(copy), "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["verdict"], said["counts"]["infrastructure"]) == ("incomplete", 1)
    assert "Incomplete" in (copy / "report.md").read_text()


def test_a_summary_that_claims_more_than_its_cells_is_not_believed(copy: Path) -> None:
    file = next(file for file in copy.glob("cells/*/verdict.json") if read(file)["records"])
    file.write_text(json.dumps(read(file) | {"state": "differs"}))
    summary = read(copy / "summary.json")
    cells = [{**cell, "state": "differs"} if cell["state"] == "conforms" else cell for cell in summary["cells"]]
    (copy / "summary.json").write_text(json.dumps({**summary, "cells": cells}))
    assert summary["verdict"] == "conforms"
    assert cli.main(["report", str(copy)]) == 1


def test_a_record_that_is_gone_makes_the_run_incomplete(copy: Path) -> None:
    (record,) = copy.glob("cells/*/legs/0/record")
    shutil.rmtree(record)
    assert cli.main(["judge", str(copy)]) == 3


def test_a_cell_that_ended_badly_is_not_judged_by_its_record(copy: Path) -> None:
    file = next(file for file in copy.glob("cells/*/verdict.json") if read(file)["records"])
    ended = {"state": "infrastructure", "reason": "rank 1 raised during 'teardown'", "completed": False}
    verdict = read(file) | ended
    file.write_text(json.dumps(verdict))
    summary = read(copy / "summary.json")
    cells = [cell | {"state": "infrastructure"} if cell["id"] == verdict["cell"] else cell for cell in summary["cells"]]
    (copy / "summary.json").write_text(json.dumps(summary | {"cells": cells}))
    assert cli.main(["judge", str(copy)]) == 3
    assert read(file)["reason"] == ended["reason"]


# --- reporters -------------------------------------------------------------------------------------------------------


def install(folder: Path, name: str, *, group: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one module, announced under an entry point, as pip would leave it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:write\n")
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))


def test_a_reporter_of_another_package_writes_and_is_named(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "def write(out):\n    (out / 'mine.txt').write_text('seen')\n    return out / 'mine.txt'\n"
    install(tmp_path, "own_reporter", group="parity.reporters", code=code, monkeypatch=monkeypatch)
    assert cli.main(["report", str(copy)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "pass: 1 unsupported, 1 pass"
    assert f"own_reporter: {copy / 'mine.txt'}" in said[1:]
    assert (copy / "mine.txt").read_text() == "seen"


def test_a_reporter_that_lacks_a_package_says_which_and_changes_no_verdict(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import a_package_that_is_not_there\n"
    install(tmp_path, "lacking_reporter", group="parity.reporters", code=code, monkeypatch=monkeypatch)
    assert cli.main(["report", str(copy)]) == 0
    assert "no lacking_reporter report: a_package_that_is_not_there is not installed" in capsys.readouterr().out


# --- wrong usage -----------------------------------------------------------------------------------------------------


def message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error of a call that has to end with exit code 2."""
    assert cli.main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--backend", "nobody"], "unknown backend 'nobody'; registered: "),
        (
            ["list", "--profile", "slow"],
            "no profile 'slow'; known: any-model, checkpoints, families, frameworks, full, gpu, nightly, quick",
        ),
        (["list", "--faults", "typo"], "unknown fault 'typo'; known: "),
        (["list", "--cells", "nothing*"], "no cell matches 'nothing*'"),
        (["judge", "nowhere"], "there is no nowhere/summary.json; give the complete --out folder of a parity run"),
        (["report", "nowhere"], "nowhere"),
        (["compare", "nowhere"], "nowhere"),
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
        (["--input-key", "prompt"], "prompt"),
    ],
)
def test_inputs_that_cannot_be_used_are_one_message_and_leave_the_folder_free(
    arguments: list[str], words: str, tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = message(["run", *PLAIN, "--profile", profile, "--out", str(tmp_path / "out"), *arguments], capsys)
    assert words in error
    assert not (tmp_path / "out").exists()


def untrusted(folder: Path) -> tuple[Path, Path]:
    """A copy of the shipped openPangu whose code leaves a mark where it is run, and the mark."""
    model, mark = Path(shutil.copytree(FIXTURES / "models" / "pangu", folder / "mine")), folder / "mark"
    with (model / "configuration_openpangu_dense.py").open("a") as code:
        code.write(f"open({str(mark)!r}, 'w').close()\n")
    return model, mark


@pytest.mark.parametrize("command", ["list", "run"])
def test_code_of_a_model_is_not_run_without_the_option(
    command: str, tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, mark = untrusted(tmp_path)
    out = ["--out", str(tmp_path / "out")] if command == "run" else []
    error = message([command, *PLAIN, "--profile", profile, "--model", str(model), *out], capsys)
    (said,) = [line for line in error.splitlines() if line.startswith("parity: ")]
    assert f"{model}/config.json names Python code of the folder (auto_map)" in said
    assert "add --trust-remote-code if you trust it" in said
    assert "Traceback" not in error
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # in a fast run test_folder runs such code in ranks, and test_pytest_plugin keeps the option
def test_code_that_is_trusted_is_run_and_the_reproduce_command_trusts_it(tmp_path: Path, profile: str) -> None:
    model, mark = untrusted(tmp_path)
    arguments = [*PLAIN, "--profile", profile, "--model", str(model), "--trust-remote-code"]
    cell = "tiny/mine/plain/dp2/fp32"
    assert cli.main(["run", *arguments, "--cells", cell, "--out", str(tmp_path / "out")]) == 0
    assert mark.exists()
    (file,) = (tmp_path / "out").glob("cells/*/verdict.json")
    assert read(file)["reproduce"].endswith(f"--model {model} --trust-remote-code --cells {cell}")


def test_a_run_inside_the_model_folder_is_refused_and_copies_nothing(
    tmp_path: Path, profile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(FIXTURES / "models" / "llama", tmp_path / "mine"))
    before = {file for file in model.rglob("*") if file.is_file()}
    monkeypatch.chdir(model)
    error = message(["run", *PLAIN, "--profile", profile, "--model", "."], capsys)
    assert f"lies inside the model folder {model}, which is copied there; give another --out" in error
    assert {file for file in model.rglob("*") if file.is_file()} == before


# --- the rest --------------------------------------------------------------------------------------------------------


def test_listing_cells_starts_no_process_of_ranks(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would import torch and transformers, in more processor seconds than listing takes."""
    started: list[object] = []
    monkeypatch.setattr(Forkservers, "prepare", lambda *call: started.append(call))
    monkeypatch.setattr(Forkservers, "of", lambda *call: started.append(call))
    assert cli.main(["list", "--profile", profile]) == 0
    assert not started


def test_list_and_doctor_speak_json(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", *PLAIN, "--profile", profile, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["world_size"]) for row in listed["cells"]] == [
        (CONFORMS, 2),
        ("tiny/llama/plain/pp2/fp32", 2),
    ]
    assert [row["refused"].partition(":")[0] for row in listed["cells"]] == ["", "unsupported"]
    assert {"fsdp2", "deepspeed", "megatron"} <= listed["backends"].keys()
    assert {"full", "quick"} <= set(listed["profiles"])
    assert "inverted-clip" in listed["faults"]
    assert cli.main(["doctor", "--json"]) in (0, 3)
    assert {check["state"] for check in json.loads(capsys.readouterr().out)} <= {"ok", "note", "problem"}


def test_list_puts_cells_before_faults_in_lines_that_fit(
    profile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["list", *PLAIN, "--profile", profile]) == 0
    listed = capsys.readouterr().out
    cells, _, faults = listed.partition(" faults that --faults plants")
    assert CONFORMS in cells
    assert all(name in faults for name in catalogue())
    assert max(map(len, faults.partition("\n")[2].splitlines())) <= 80
    assert "cleared-\n" not in faults


def test_a_crash_is_not_taken_for_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("conformance.cli.doctor.examine", crash)
    assert cli.main(["doctor"]) == 3


def test_numbers_that_are_not_finite_are_written_as_json_can_say_them() -> None:
    text = dumps({"ratio": math.inf, "observed": [-math.inf, math.nan], "reason": 'of "Infinity"'})
    assert text == '{"ratio": "inf", "observed": ["-inf", "nan"], "reason": "of \\"Infinity\\""}'
    read = json.loads(text)
    assert number(read["ratio"]) == math.inf
    assert [str(number(value)) for value in read["observed"]] == ["-inf", "nan"]
