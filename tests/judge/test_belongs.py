"""A record is judged only as what it says it is: of this cell, in this place, by an oracle of the same training."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from report_sample import edit
from run_sample import EXACT, FOLDERS, FP32, JUDGED, ORACLE, OTHER, RESUMED, record_folders, write_sample_run
from safetensors.torch import load_file, save_file

from conformance.cli import main as cli
from conformance.judge import verdict
from conformance.judge.provenance import check_start
from conformance.records.record_format import RECORD_FILE, RecordError, record_digest
from conformance.records.step_tensors import Record, RecordWriter, read_record
from conformance.spec.objectives import all_observables
from conformance.spec.observables import Observable, observables_to_json
from conformance.spec.offline import Sft

Values = dict[str, Any]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every cell conforms. Never written to by a test."""
    return write_sample_run(tmp_path_factory.mktemp("run") / "out")


def spoiled(out: Path) -> dict[str, str]:
    """Judge again: the cells that cannot be judged, with the reason. All others conform, and the exit code tells."""
    code = cli.main(["judge", str(out)])
    cells = [cell for cell in json.loads((out / "summary.json").read_text())["cells"] if cell["id"] in JUDGED]
    found = {cell["id"]: cell["reason"] for cell in cells if cell["state"] == "infrastructure"}
    assert {cell["state"] for cell in cells if cell["id"] not in found} <= {"conforms"}
    assert code == (3 if found else 0)
    return found


def swap(out: Path, one: str, other: str) -> None:
    (out / one).rename(out / "between")
    (out / other).rename(out / one)
    (out / "between").rename(out / other)


def change_lines(record: Path, change: Callable[[list[Values]], object]) -> None:
    """Change the lines of a record, and mend its digest."""
    lines = [json.loads(line) for line in (record / RECORD_FILE).read_text().splitlines()]
    change(lines)
    body = "".join(json.dumps(line) + "\n" for line in lines[:-1])
    lines[-1]["sha256"] = record_digest(body.encode(), lines[-1])
    (record / RECORD_FILE).write_text(body + json.dumps(lines[-1]) + "\n")


def test_code_that_only_one_precision_ran_is_named(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ran(optimizer: object) -> Callable[[list[Values]], object]:
        return lambda lines: lines[0].update(resolved={"policy": {"code": {"optimizer": optimizer, "update": "AdamW"}}})

    for cell, optimizer in ((EXACT, "ZeroOptimizer"), (FP32, "ZeroOptimizer")):
        change_lines(out / record_folders(cell)[0], ran(optimizer))
    assert spoiled(out) == {}
    assert "the exact tier does not" not in capsys.readouterr().out
    change_lines(out / record_folders(FP32)[0], ran("BF16_Optimizer"))
    assert spoiled(out) == {}
    exact, fp32 = (f"optimizer {name}, update AdamW" for name in ("ZeroOptimizer", "BF16_Optimizer"))
    assert "fsdp2 in fp32 runs code that the exact tier does not: optimizer BF16_Optimizer\n" in capsys.readouterr().out
    assert {cell["code"] for cell in json.loads((out / "summary.json").read_text())["cells"]} == {exact, fp32, ""}
    change_lines(out / record_folders(FP32)[0], ran(["BF16_Optimizer"]))
    assert "names the code that ran other than by strings" in spoiled(out)[FP32]


def test_a_run_that_nobody_touched_conforms(out: Path) -> None:
    assert spoiled(out) == {}


def test_how_a_report_shows_it_is_no_part_of_what_was_observed(out: Path) -> None:
    def shown_otherwise(lines: list[Values]) -> None:
        first, *others = lines[0]["observables"]
        del first["panel"], first["title"]  # as an earlier version wrote it
        for observable in others:
            observable |= {"drawn": not observable["drawn"], "panel": "elsewhere", "title": "something else"}

    change_lines(out / record_folders(EXACT)[0], shown_otherwise)
    assert spoiled(out) == {}


def test_a_model_with_routers_is_not_judged_by_an_oracle_without(out: Path) -> None:
    """Nor the other way: routing that a record does not declare would not be missed."""

    def routed(lines: list[Values]) -> None:
        lines[0]["observables"] = observables_to_json(all_observables(Sft(), routed=True))

    change_lines(out / record_folders(EXACT)[0], routed)
    assert "observes something else than its oracle" in spoiled(out)[EXACT]


@pytest.mark.parametrize("other", [FP32, OTHER])
def test_swapped_records_are_rejected_for_both_cells(out: Path, other: str) -> None:
    swap(out, record_folders(EXACT)[0], record_folders(other)[0])
    reasons = spoiled(out)
    assert reasons.keys() == {EXACT, other}
    assert f"is a record of {other} and not of {EXACT}: folders were mixed up" in reasons[EXACT]


def test_phases_that_were_swapped_are_out_of_order(out: Path) -> None:
    swap(out, *record_folders(RESUMED))
    assert "begins with step 2, but 0 is next; put its phases in order" in spoiled(out)[RESUMED]


def test_one_phase_is_not_another(out: Path) -> None:
    first, second = record_folders(RESUMED)
    shutil.rmtree(out / second)
    shutil.copytree(out / first, out / second)
    assert "begins with step 0, but 2 is next" in spoiled(out)[RESUMED]


def test_a_record_is_no_oracle_of_itself(out: Path) -> None:
    shutil.copytree(out / record_folders(EXACT)[0], out / FOLDERS[EXACT] / "fake/float64")
    edit(out / FOLDERS[EXACT] / "verdict.json", oracle="fake")
    assert f"should be the oracle's record in float64, and is a record of {EXACT}" in spoiled(out)[EXACT]


def test_the_noise_is_no_oracle(out: Path) -> None:
    swap(out, f"{ORACLE}/float64", f"{ORACLE}/fp32")
    reasons = spoiled(out)
    assert reasons.keys() == set(JUDGED)
    assert "should be the oracle's record in float64, and is one of oracle in fp32" in reasons[EXACT]


@pytest.mark.parametrize(
    ("at", "change", "words"),
    [
        (0, lambda header: header.update(layout="tp2"), "has layout tp2, but this phase of"),
        (0, lambda header: header["scenario"].update(precision="fp32"), "trains sft-tiny in fp32 with seed 0"),
        (0, lambda header: header["scenario"].update(seed=3), "trains sft-tiny in exact with seed 3"),
        (0, lambda header: header["scenario"].update(name="sft-other"), "trains sft-other in exact"),
        (0, lambda header: header["scenario"]["optimizer"].update(lr=0.2), "are of different scenarios"),
        (0, lambda header: header.pop("scenario"), "cannot be read ('scenario')"),
        (0, lambda header: header["scenario"].update(steps=[]), "steps: Input should be a valid integer"),
        (0, lambda header: header["scenario"].update(objective={"kind": "os:nothing"}), "cannot be imported"),
        (0, lambda header: header["scenario"].update(objective={"kind": "os:getcwd"}), "cannot be read"),
        (0, lambda header: header["observables"].pop(), "observes something else than this version of the suite"),
        (0, lambda header: header["backend"].pop("default_zero"), "does not say which ZeRO stage the backend has"),
        (0, lambda header: header.update(optimizer="loaded"), "has the impossible optimizer state 'loaded'"),
        (-1, lambda footer: footer["evidence"].pop(), "has the evidence of 1 ranks, but dp2 has 2"),
        (-1, lambda footer: footer.pop("leaks"), "does not say what was left in a lower precision"),
    ],
)
def test_a_line_that_says_something_else_is_an_error(
    out: Path, at: int, change: Callable[[Values], object], words: str
) -> None:
    change_lines(out / record_folders(EXACT)[0], lambda lines: change(lines[at]))
    reasons = spoiled(out)
    assert reasons.keys() == {EXACT}
    assert words in reasons[EXACT]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda step: step["values"].pop("loss"), "has loss=None at step 0"),
        (lambda step: step["values"].update(token_count="inf"), "has token_count=inf at step 0"),
    ],
)
def test_an_oracle_has_every_number(out: Path, change: Callable[[Values], object], words: str) -> None:
    change_lines(out / ORACLE / "float64", lambda lines: change(lines[2]))
    assert all(words in reason for reason in spoiled(out).values())


def test_without_a_step_nothing_conforms(out: Path) -> None:
    def without_steps(lines: list[Values]) -> None:
        del lines[2:-1]
        lines[-1]["steps"] = 0

    for record in (*record_folders(EXACT), f"{ORACLE}/float64"):
        change_lines(out / record, without_steps)
    assert "has 0 steps, but its scenario has 3" in spoiled(out)[EXACT]


def test_noise_that_begins_elsewhere_is_no_bound(out: Path) -> None:
    file = out / ORACLE / "fp32/loaded.safetensors"
    save_file({name: 1.001 * tensor for name, tensor in load_file(file).items()}, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    change_lines(file.parent, lambda lines: lines[1]["tensors"].update(sha256=digest))
    reasons = spoiled(out)
    assert reasons.keys() == {FP32}
    assert re.search("fp32 has loaded different values of weight/.* than .*float64; run the cell again", reasons[FP32])


def test_a_defect_of_the_judge_is_told_as_that_and_stops_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(verdict, "measure", fail)
    reasons = spoiled(out)
    assert reasons.keys() == set(JUDGED)
    assert all(verdict.DEFECT in reason and "test_belongs.py" in reason for reason in reasons.values())


# --- where the noise begins ------------------------------------------------------------------------------------------

TRAINED = Observable(key="weight", stage="weights", kind="tensors", when="loaded")
FROZEN = Observable(key="reference.weight", stage="reference weights", kind="tensors", when="loaded", rounded=True)
THIRD = torch.full((2, 2), 1 / 3, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Start:
    trained: torch.Tensor
    frozen: torch.Tensor

    def write(self, path: Path) -> Record:
        writer = RecordWriter(path, {}, observables=(TRAINED, FROZEN))
        writer.loaded({"weight/a": self.trained.clone(), "reference.weight/a": self.frozen.clone()})
        writer.finish({})
        return read_record(path)


@pytest.mark.parametrize(
    ("noise", "agrees"),
    [
        (Start(trained=THIRD, frozen=THIRD), True),
        (Start(trained=THIRD, frozen=THIRD.bfloat16()), True),
        (Start(trained=THIRD.bfloat16(), frozen=THIRD), False),
        (Start(trained=THIRD * (1 + 1e-6), frozen=THIRD), False),
        (Start(trained=THIRD, frozen=THIRD.bfloat16() * 1.01), False),
        (Start(trained=THIRD[:1], frozen=THIRD), False),
    ],
)
def test_noise_run_starts_with_rounded_oracle_weights(tmp_path: Path, noise: Start, agrees: bool) -> None:
    oracle = Start(trained=THIRD.double(), frozen=THIRD.double()).write(tmp_path / "oracle")
    if agrees:
        check_start(noise.write(tmp_path / "noise"), oracle)
        return
    with pytest.raises(RecordError, match=r"has loaded different values of .*weight/a than"):
        check_start(noise.write(tmp_path / "noise"), oracle)
