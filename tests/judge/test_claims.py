"""What a run says of what it could not judge: who broke, what this machine lacks, what was demanded, what was lost.

Runs in this process, on variants of plain_backend.py, which start fast; their ranks are real.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.backends import registry
from conformance.backends.protocol import BackendEntry
from conformance.cli import doctor
from conformance.cli import main as cli
from conformance.core.host import FIXTURES, resolve
from conformance.matrix.cell import Cell, Handover, Phase
from conformance.matrix.options import Demands
from conformance.results.run_results import OUTPUT_SCHEMA
from conformance.runner.preflight import Refusals
from conformance.runtime import Device
from conformance.spec.layout import Layout
from conformance.spec.scenario import load_scenario

SCENARIO = """
steps = 2
accumulation = 2
data.rows = 8
[optimizer]
name = "sgd"
lr = 0.05
"""
PROFILE = """
description = "one rank and two"
[[cells]]
scenarios = ["{scenario}"]
models = ["llama"]
layouts = ["dp1", "dp2"]
precisions = ["fp32"]
"""
ONE, TWO = "tiny/llama/picky/dp1/fp32", "tiny/llama/picky/dp2/fp32"


class Ran:
    """A ``parity run`` that has ended: exit code, standard output and output folder."""

    def __init__(self, code: int, said: str, out: Path) -> None:
        self.code, self.said, self.out = code, said.splitlines(), out
        self.summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
        cells = {"/".join(cell["id"].split("/")[2:4]): cell for cell in self.summary["cells"]}
        self.states = {name: cell["state"] for name, cell in cells.items()}  # by backend and layout
        self.reasons = {name: cell["reason"] for name, cell in cells.items()}


Runner = Callable[..., Ran]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("profile")
    (folder / "tiny.toml").write_text(SCENARIO)
    (folder / "two.toml").write_text(PROFILE.format(scenario=folder / "tiny.toml"))
    return str(folder / "two.toml")


@pytest.fixture
def run(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    def run(*backends: str, also: tuple[str, ...] = ()) -> Ran:
        monkeypatch.setattr(registry, "_there", {})  # as a command of its own, with adapters' processes of its own
        chosen = [
            part for name in backends for part in ("--backend", name if ":" in name else f"plain_variants:{name}")
        ]
        code = cli.main(["run", "--profile", profile, *chosen, *also, "--out", str(tmp_path / "out")])
        return Ran(code, capsys.readouterr().out, tmp_path / "out")

    return run


# --- who could not be asked ------------------------------------------------------------------------------------------


def test_broken_adapter_fails_beside_conforming_one(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_adapter.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    ran = run("Picky", "broken_adapter:Broken", also=("--cells", "*/dp1/*"))
    assert ran.code == 3
    assert ran.states == {"picky/dp1": "conforms", "broken/dp1": "infrastructure"}
    assert ran.reasons["broken/dp1"] == (
        "backend 'broken' cannot be imported: ZeroDivisionError at broken_adapter.py:1: division by zero"
    )
    assert ran.said[0] == "incomplete: 1 infrastructure failure, 1 pass"


def test_an_adapter_that_breaks_when_it_is_asked_is_a_failure(run: Runner) -> None:
    ran = run("Clumsy", also=("--cells", "*/dp1/*"))
    assert (ran.code, ran.states) == (3, {"clumsy/dp1": "infrastructure"})
    assert "KeyError at plain_variants.py:" in ran.reasons["clumsy/dp1"]


@pytest.mark.parametrize(
    ("save", "state", "reason"),
    [
        ("state", "unsupported", "selfish has no export_state, so it cannot transfer training state"),
        (
            "checkpoint",
            "infrastructure",
            "selfish was asked whether it supports the cell: KeyError at plain_variants.py:",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_backend_does_not_hand_over_is_said_before_anything_runs(
    save: Handover, state: str, reason: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its layouts need GPUs that are not here: no other machine could run it either."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    scenario = load_scenario(FIXTURES / "scenarios" / "sft-sgd.toml", model="models/llama", precision="exact")
    selfish = BackendEntry(name="selfish", target="plain_variants:Selfish")
    phases = [
        Phase(backend=selfish, layout=Layout(dp=2), steps=2, save=save),
        Phase(backend=selfish, layout=Layout(dp=2), steps=scenario.steps - 2),
    ]
    cell = Cell(scenario=scenario, phases=tuple(phases), program="mine")
    refused = Refusals(device).refusal(cell, resolve(scenario.model))
    assert refused
    assert refused.state == state
    assert refused.reason.startswith(reason)


def test_broken_later_phase_is_reported_before_missing_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "broken_backend.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    scenario = load_scenario(FIXTURES / "scenarios" / "sft-sgd.toml", model="models/llama", precision="exact")
    plain, broken = (BackendEntry(name=name, target=f"{name}_backend:Plain") for name in ("plain", "broken"))
    whole = Phase(backend=plain, layout=Layout(dp=2), steps=scenario.steps)
    first, second = replace(whole, steps=2, save="export"), replace(whole, backend=broken, steps=scenario.steps - 2)
    for phases, state in (((whole,), "not_run"), ((first, second), "infrastructure")):
        cell = Cell(scenario=scenario, phases=phases, program="mine")
        refused = Refusals("cuda").refusal(cell, resolve(scenario.model))
        assert refused
        assert refused.state == state


def test_the_doctor_tells_a_broken_adapter_from_one_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_adapter.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = {"broken": BackendEntry(name="broken", target="broken_adapter:Broken")}
    monkeypatch.setattr(doctor, "registered_backends", lambda: entries)
    (check,) = (check for check in doctor.examine() if check.name == "backend broken")
    assert (check.state, "ZeroDivisionError" in check.message) == ("problem", True)


def test_too_few_gpus_are_no_answer_of_the_backend(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("conformance.runner.earlier_run._gpus", list)
    monkeypatch.setattr("conformance.cli.run.leased_gpus", lambda *_, **__: ("GPU-a",))
    ran = run("Picky", also=("--device", "cuda", "--cells", "*/dp2/*"))
    assert (ran.code, ran.states) == (3, {"picky/dp2": "not_run"})
    assert ran.reasons["picky/dp2"] == (
        "needs 2 GPUs, 1 visible; a layout of at most 1 ranks would run, and --ranks-per-gpu 2 lets 2 ranks share a GPU"
    )
    assert ran.summary["finished"]  # the run came to its end; it is incomplete all the same
    assert not list(ran.out.glob("cells/*/legs"))


# --- what was not shown ----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_what_a_backend_does_not_show_is_in_the_state_of_its_cells_and_of_the_run(run: Runner) -> None:
    demands = ("--require", "*/normless/*", "--require", "*/shy/dp1/*", "--min-judged", "6")
    ran = run("Silent", "Shy", "Normless", also=demands)
    assert ran.states == {
        **{"silent/dp1": "partly_observed", "silent/dp2": "partly_observed"},  # no log-probs
        **{"shy/dp1": "conforms", "shy/dp2": "partly_observed"},  # pieces of one rank have no replicas
        **{"normless/dp1": "conforms", "normless/dp2": "conforms"},  # the update tells what norms do
    }
    assert "; not observed: log-probs" in ran.reasons["silent/dp2"]
    assert "; not observed: gradient replicas, weight replicas; " in ran.reasons["shy/dp2"]
    assert (ran.code, ran.summary["verdict"], ran.summary["unmet"]) == (0, "partly_observed", [])
    assert ran.said[0] == "partly observed: 3 partly observed, 3 pass"
    assert "3 cells of 6 do not show every stage" in (ran.out / "report.md").read_text()
    again = [json.loads(file.read_text())["reproduce"] for file in ran.out.glob("cells/*/verdict.json")]
    assert not any("--require" in command or "--min-judged" in command for command in again)


def test_duplicate_name_does_not_pass(run: Runner) -> None:
    ran = run("NamesAGradientTwice", "NamesAPieceTwice")
    assert set(ran.states.values()) == {"infrastructure"}
    assert ran.code == 3
    for layout in ("dp1", "dp2"):
        assert (
            "named_tensors('gradient', 'policy') names model.norm.weight twice"
            in (ran.reasons[f"namesagradienttwice/{layout}"])
        )
        assert (
            "local_shards names model.norm.weight, region full, twice for gradient"
            in (ran.reasons[f"namesapiecetwice/{layout}"])
        )


# --- what was demanded, and what was lost ----------------------------------------------------------------------------


def earlier(path: Path, **states: str) -> str:
    """The published list of an earlier run: its summary alone."""
    cells = [{"id": f"tiny/llama/picky/{layout}/fp32", "state": state} for layout, state in states.items()]
    path.write_text(json.dumps({"schema": OUTPUT_SCHEMA, "cells": cells}))
    return str(path)


def test_less_than_was_demanded_is_incomplete_and_says_what_is_missing(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSED", "dp2")
    old = earlier(tmp_path / "old.json", dp1="conforms", dp2="conforms")
    ran = run("Picky", also=("--require", "*", "--min-judged", "2", "--baseline", old))
    assert (ran.code, ran.summary["verdict"]) == (3, "incomplete")
    assert ran.said[:4] == [
        "incomplete: 1 unsupported, 1 pass",
        f"required: '*', but {TWO} (unsupported)",
        "judged: 1 of at least 2 cells",
        f"coverage lost since {old}: {TWO} (unsupported)",
    ]
    assert ran.summary["floor"]["backends"] == ["picky"]
    refused = {"kind": "refused", "cell": TWO, "before": "conforms", "now": "unsupported"}
    assert ran.summary["since"]["last"]["changes"] == [refused]
    reason = "dp2 is not offered any more; use another layout"
    assert ran.summary["claims"] == {"picky": {"claimed": [ONE], "refused": {TWO: reason}}}
    markdown = (ran.out / "report.md").read_text()
    assert "Incomplete: not a pass" in markdown
    assert "less was judged than required" in markdown
    assert f"- `{TWO}`: pass, now unsupported\n" in markdown
    assert f"<code>{TWO}</code> pass, now unsupported" in (ran.out / "report.html").read_text()
    assert 'errors="1"' in (ran.out / "junit.xml").read_text()
    assert cli.main(["report", str(ran.out)]) == cli.main(["judge", str(ran.out)]) == 3  # it is not forgotten
    assert json.loads((ran.out / "summary.json").read_text())["unmet"] == ran.summary["unmet"]


@pytest.mark.exhaustive
def test_coverage_that_was_gained_is_told_and_changes_nothing(run: Runner, tmp_path: Path) -> None:
    old = earlier(tmp_path / "old.json", dp1="conforms", dp2="unsupported")
    ran = run("Picky", also=("--baseline", old))
    assert (ran.code, ran.said[:2]) == (0, ["pass: 2 pass", f"since the last run: newly judged: {TWO}"])
    judged = {"kind": "judged", "cell": TWO, "before": "unsupported", "now": "conforms"}
    assert ran.summary["since"]["last"]["changes"] == [judged]
    assert f"- `{TWO}`: unsupported, now pass\n" in (ran.out / "report.md").read_text()


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (("--require", "typo*"), "no cell matches 'typo*'"),
        (("--min-judged", "3"), "--min-judged 3, but only 2 cells are selected"),
        (("--baseline", "nowhere"), "there is no nowhere"),
    ],
)
def test_a_demand_that_cannot_be_met_is_one_message_before_anything_runs(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], demand: tuple[str, ...], words: str
) -> None:
    arguments = ["--profile", profile, "--backend", "plain_variants:Picky", "--out", str(tmp_path / "out")]
    assert cli.main(["run", *arguments, *demand]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_earlier_run_with_states_that_are_unknown_is_one_message(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--profile", profile, "--backend", "plain_variants:Picky"]
    assert cli.main(["run", *arguments, "--baseline", earlier(tmp_path / "old.json", dp1="splendid")]) == 2
    assert "has states splendid; known: " in capsys.readouterr().err


def test_demands_survive_the_way_through_the_command_line() -> None:
    parsed = cli._parser().parse_args(["run", "--require", "a", "--require", "b", "--min-judged", "3"])
    assert Demands.from_options(parsed) == Demands(require=("a", "b"), min_judged=3)
