"""What a user gets wrong is one message that says what was meant, and `parity list` says what `parity run` will say.

Runs in this process, on the backend of plain_backend.py; no cell here comes so far that it needs ranks.
"""

import contextlib
import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from plain_profile import PROFILE, SCENARIO
from safetensors.torch import load_file, save_file

from conformance.backends import registry
from conformance.backends.protocol import find_backend
from conformance.cli import main as cli
from conformance.cli.main import command_names
from conformance.core.host import FIXTURES, HostResources, host_resources_of
from conformance.data import inputs as frozen_inputs
from conformance.matrix.options import GROUPS
from conformance.runner import session
from conformance.spec.layout import Layout
from impl.train.flags import COMMANDS as TRAININGS

PLAIN = ("--backend", "plain_backend:Plain")
FAULT = ("--faults", "cleared-gradients")
ZERO = "--scenario sft-packed --model models/llama --backend fsdp2 --layout dp2.zero1 --precision exact"


def profile(folder: Path, *, scenario: str = SCENARIO, file: str = "tiny.toml", **changes: str) -> str:
    """A profile with one value in place of another, by key; returns its path."""
    (folder / file).write_text(scenario)
    text = PROFILE.format(scenario=folder / file)
    for key, value in changes.items():
        lines = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
        text = "\n".join([*lines, f"{key} = {value}"])
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "fsdp"], "unknown backend 'fsdp'; did you mean 'fsdp2'?"),
        (["--backend", "json:JSONDecoder"], "json:JSONDecoder is not a backend, it has no describe and no supports"),
        (["--profile", "ful"], "no profile 'ful'; did you mean 'full'?"),
        (["--profile", "."], "profile '.' is a folder; give one of its .toml files"),
        (["--faults", "inverted-clp"], "unknown fault 'inverted-clp'; did you mean 'inverted-clip' or"),
        (["--cells", "sft-packd/*"], "no cell matches 'sft-packd/*'; did you mean 'sft-packed'"),
        (["--model", "models/lama"], "did you mean 'models/llama'"),
        (["--cells", "sft-packed/llama/fsdp2/dp2.zero1/exact"], f"run: parity list {ZERO}"),
        (["--model", "llama"], "did you mean 'models/llama'?"),
        (["--backend", "fsdp2,megatro"], "unknown backend 'megatro'; did you mean 'megatron'?"),
    ],
)
def test_a_name_that_is_nearly_right_is_told_the_right_one(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["list", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scenarios": '["sft-packd"]'}, "did you mean 'sft-packed'"),
        ({"backends": '["fsdp3"]'}, "a table names the backend 'fsdp3'; did you mean 'fsdp2'?"),
        ({"backends": '["fsdp2"]'}, "has no cell for plain; its tables are for fsdp2"),
        ({"modls": "1"}, "cells.0.modls: there is no such key (got 1)"),
        ({"models": '"llama"'}, "cells.0.models: must be a list (got 'llama')"),
        (
            {"precisions": '["fp99"]'},
            "cells.0.precisions.0: Input should be 'exact', 'fp32', 'bf16', 'bf16-reduce', 'bf16-nearest', "
            "'bf16-stochastic' or 'fp16'",
        ),
    ],
)
def test_a_profile_that_names_what_is_not_there_is_refused_by_list_and_by_run(
    changes: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [*PLAIN, "--profile", profile(tmp_path, **changes)]
    for command in (["list"], ["run", "--out", str(tmp_path / "out")]):
        assert cli.main([*command, *chosen]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert "should have" not in error  # what only follows from the first error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["merge", "a", "./a"], "a folder is given twice; give the folder of each shard or job once"),
        (["judge", "x" * 5000], "cannot be used as a path: File name too long"),
        (["history", "a", "--keep", "3"], "there is no a/history.sqlite; parity history a --add OUT starts"),
    ],
)
def test_folders_without_sense_are_refused_and_not_made(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("command", [["run", "--resume"], ["report"], ["inspect"]])
def test_link_to_itself_is_no_path(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert cli.main([*command, str(tmp_path / "loop")]) == 2
    assert "loop" in capsys.readouterr().err


def test_a_file_name_that_cannot_name_a_scenario_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", *PLAIN, "--profile", profile(tmp_path, file="my_own.toml")]) == 2
    assert "my_own.toml: the name of a scenario's file must consist" in capsys.readouterr().err
    assert cli.main(["list", *PLAIN, "--profile", profile(tmp_path, scenario=f'name = "mine"{SCENARIO}')]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "nan"], "--budget: must be a positive number of seconds, got 'nan'"),
        (["--budget", "0"], "--budget: must be a positive number of seconds, got '0'"),
        (["--budget", "-1"], "--budget: must be a positive number of seconds, got '-1'"),
        (["--ring-head-stride", "0"], "--ring-head-stride: must be a whole number from 1 to 1048576, got '0'"),
        (["--seed", "-1"], "--seed: must be a whole number from 0 to 4294967295, got '-1'"),
        (
            ["--seed", "99999999999999999999"],
            "--seed: must be a whole number from 0 to 4294967295, got '99999999999999999999'",
        ),
        (["--max-len", "0"], "--max-len: must be a whole number from 1 to 1048576, got '0'"),
        (["--max-samples", "many"], "--max-samples: must be a whole number from 1 to 1048576, got 'many'"),
        (["--min-judged", "-5"], "--min-judged: must be a whole number from 1 to 1048576, got '-5'"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lst"], "there is no command 'lst'; did you mean 'list'"),
        (["train", "mtp"], "backends are judged on it by parity run --profile full --cells 'mtp*'; commands: sft"),
        (["train", "srt"], "there is no command 'srt'; did you mean 'sft'"),
        (["run", "--profil", "quick"], "there is no option --profil; did you mean '--profile'"),
        (["run", "--prof", "quick"], "there is no option --prof; "),
        (["list", "--max_lem=5"], "there is no option --max_lem; did you mean '--max-len'"),
        (["run", "--too-long", "drops"], "--too-long: invalid choice 'drops'; did you mean 'drop'"),
        (["train", "sfft"], "did you mean 'sft'"),
        (["run", "--quite"], "there is no option --quite; did you mean '--quiet'"),
    ],
)
def test_a_command_or_an_option_that_is_nearly_right_is_told_the_right_one(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_underscores_are_accepted_in_options() -> None:
    for arguments in (
        ["run", "--ranks-per-gpu", "2", "--max-len=8", "--no-bisect"],
        ["run", "--ranks_per_gpu", "2", "--max_len=8", "--no_bisect"],
    ):
        options = cli._parser().parse_args([*arguments, "--input-key", "a_b", "--data", "x_y"])
        assert (options.ranks_per_gpu, options.max_len, options.no_bisect) == (2, 8, True)
        assert (options.input_key, options.data) == ("a_b", "x_y")


@pytest.mark.parametrize("command", [[name] for name in command_names()] + [["train", name] for name in TRAININGS])
def test_help_has_dashes_and_groups(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert not re.findall(r"--\w+_\w+", text)
    assert command != ["run"] or [line for line in text.splitlines() if re.fullmatch(r"\w.*:", line)] == [
        "options:",
        *(f"{group}:" for group in GROUPS),
    ]


def test_the_help_says_first_what_the_program_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    usage, *told = capsys.readouterr().out.split("\n\n")
    assert usage.startswith("usage: parity")
    assert told[0] == (
        "Runs the same training steps on several training backends and judges each of them by an independent reference."
    )


def test_a_column_that_is_not_there_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.jsonl").write_text('{"q": "a", "a": "b"}\n')
    data = ["--data", str(tmp_path / "d.jsonl")]
    assert cli.main(["run", *PLAIN, "--profile", profile(tmp_path), *data, "--out", str(tmp_path / "out")]) == 2
    assert "name the columns with --input-key and --output-key" in capsys.readouterr().err


def test_an_option_that_changes_no_cell_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", *PLAIN, "--profile", profile(tmp_path), "--ring-head-stride", "2"]) == 2
    assert "--ring-head-stride 2 changes no cell" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *PLAIN, "--profile", profile(tmp_path), "--out", "/dev/null/x"]) == 2
    assert "/dev/null/x cannot be created: Not a directory; give another --out" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert cli.main(["run", *PLAIN, "--profile", profile(tmp_path), "--out", str(tmp_path / "link")]) == 2
    said = capsys.readouterr().err
    assert "link cannot be created: it is a link to nothing; give another --out" in said
    assert "running" not in said


@pytest.mark.parametrize(
    "wrong", [["--precision", "fp8"], ["--layout", "dp2x"], ["--scenario", "sftt"], ["--cells", "*/nothing/*"]]
)
def test_a_name_that_does_not_exist_starts_no_process(wrong: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_there", {})
    monkeypatch.setattr(registry, "_begun", {})
    assert cli.main(["run", *wrong]) == 2
    assert (registry._there, registry._begun) == ({}, {})


def test_memory_is_checked_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*_: object) -> NoReturn:
        raise AssertionError("read")

    monkeypatch.setattr(session, "host_resources_of", lambda out: dataclasses.replace(host_resources_of(out), memory=1))
    monkeypatch.setattr(frozen_inputs, "input_sha256", read)
    monkeypatch.setattr(frozen_inputs, "check_finite", read)
    assert cli.main(["run", *PLAIN, "--profile", profile(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "parity plan shows the estimates" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_before_a_run(
    number: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(FIXTURES / "models" / "llama", tmp_path / "llama")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] = number
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    own = ["--model", str(model), "--out", str(tmp_path / "out")]
    assert cli.main(["run", *PLAIN, "--profile", profile(tmp_path), *own]) == 2
    said = capsys.readouterr().err
    assert "llama/model.safetensors has 1 numbers that are not finite in model.norm.weight; copy or download" in said
    assert not (tmp_path / "out").exists()


def test_a_machine_without_gpus_runs_nothing_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    chosen = [*PLAIN, "--profile", profile(tmp_path), "--device", "cuda"]
    assert cli.main(["run", *chosen, "--out", str(tmp_path / "out")]) == 2
    assert "--device cuda: no GPU is visible" in capsys.readouterr().err
    assert cli.main(["list", *chosen]) == 0
    assert "dp2/fp32  [2 ranks] not here: needs 2 GPUs, 0 visible" in capsys.readouterr().out


def test_a_machine_without_gpus_plans_for_one_that_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what it cannot know: that of its own memory, disk and GPUs nothing is said, and nothing refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(
        "conformance.cli.plan.host_resources_of", lambda _: HostResources(memory=1.0, disk=1.0, cache=1.0)
    )
    chosen = [*PLAIN, "--profile", profile(tmp_path, layouts='["dp2", "pp2", "dp4"]')]
    assert cli.main(["plan", *chosen, "--device", "cuda"]) == 0
    _, two, four, _, cells, why, memory, disk, gpus = capsys.readouterr().out.splitlines()
    assert [line.split()[0].split("/")[3] for line in (two, four)] == ["dp2", "dp4"]
    assert cells.startswith("cells   2 of 3 are supported")  # pp2 is refused by the backend, on any machine
    assert why.split()[0].split("/")[3] == "pp2"
    assert ": unsupported: " in why
    assert "free" not in memory + disk
    assert gpus.startswith("gpus    none is visible here: whether there are enough")
    assert cli.main(["plan", *chosen]) == 2, "on the CPU it would be this machine"
    assert "cannot fit" in capsys.readouterr().out
    assert cli.main(["plan", *PLAIN, "--profile", profile(tmp_path, layouts='["pp2"]'), "--device", "cuda"]) == 2
    assert "none of the 1 selected cells is supported" in capsys.readouterr().err


def test_plan_lists_fitting_layouts_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["plan", "--backend", "fsdp2", "--gpus", "4", "--precision", "bf16"]

    def planned(*more: str, code: int = 0) -> tuple[dict[str, float], list[str]]:
        assert cli.main([*chosen, *more]) == code
        lines = capsys.readouterr().out.splitlines()
        rows = [line.split() for line in lines if not line.startswith(" ")]
        cells = {row[0].split("/")[3]: row for row in rows if row and "/" in row[0]}
        return {layout: float(row[1]) for layout, row in cells.items()}, [row[2] for row in cells.values()]

    gigabytes, _ = planned()
    assert "dp4" in gigabytes
    assert all(Layout.parse(layout).world_size == 4 for layout in gigabytes)
    middle = gigabytes["dp4"] * 1.5
    fits = ["yes" if each <= middle else "no" for each in gigabytes.values()]
    assert planned("--gpu-memory", f"{middle}") == (gigabytes, fits)
    assert {*fits} == {"yes", "no"}
    assert set(planned("--gpu-memory", "0.0001", code=2)[1]) == {"no"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "must be a number of GPUs from 1"),
        (["--gpus", "four"], "must be a number of GPUs from 1"),
        (["--gpus", "2", "--gpu-memory", "nan"], "must be a positive number of GB, got 'nan'"),
        (["--gpu-memory", "80"], "give --gpus, too"),
        (["--gpus", "2", "--layout", "dp2"], "leave out --layout and --profile"),
    ],
)
def test_unusable_gpus_of_plan_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert cli.main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


def test_ranks_that_share_a_gpu_need_fewer_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one GPU: every refusal says how many ranks would have to share it. On the CPU there is nothing to share."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("conformance.runner.earlier_run._gpus", list)
    chosen = [*PLAIN, "--profile", profile(tmp_path, layouts='["dp2", "dp4"]'), "--device", "cuda"]
    shared = "a layout of at most {} ranks would run, and --ranks-per-gpu {} lets {} ranks share a GPU"

    def told(*also: str) -> dict[str, str]:
        assert cli.main(["list", *chosen, *also, "--json"]) == 0
        return {cell["id"].split("/")[3]: cell["refused"] for cell in json.loads(capsys.readouterr().out)["cells"]}

    assert told() == {
        "dp2": "not here: needs 2 GPUs, 1 visible; " + shared.format(1, 2, 2),
        "dp4": "not here: needs 4 GPUs, 1 visible; " + shared.format(1, 4, 4),
    }
    of_two = "not here: needs 4 GPUs, 1 visible for 2 ranks each; " + shared.format(2, 4, 4)
    assert told("--ranks-per-gpu", "2") == {"dp2": "", "dp4": of_two}
    assert told("--ranks-per-gpu", "4") == {"dp2": "", "dp4": ""}
    monkeypatch.setattr("conformance.runner.preflight.gpus_of_host", lambda: ("GPU-a",))
    cli.main(["plan", *chosen, "--ranks-per-gpu", "4"])  # this host may lack the memory
    assert "gpus    1, divided into 4 shares; a rank leases one or more" in capsys.readouterr().out
    for command in (["run", "--out", str(tmp_path / "out")], ["plan"]):
        assert cli.main([*command, *chosen, "--device", "cpu", "--ranks-per-gpu", "2"]) == 2
        assert "--ranks-per-gpu is about GPUs: add --device cuda" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layout", "also", "state", "reason"),
    [
        ("dp300", (), "not_run", "this host cannot start 300 ranks: one host starts at most 248"),
        ("pp2", (), "unsupported", "plain torch is data parallel; use dp2"),
        ("dp3", (), "unsupported", "8 rows per step cannot be divided over dp=3"),
        ("dp2", FAULT, "unsupported", "fault 'cleared-gradients' cannot be planted: plain has no patch point"),
    ],
)
def test_list_and_run_refuse_a_cell_for_the_same_reason(
    layout: str,
    also: tuple[str, ...],
    state: str,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = SCENARIO.replace("data.rows = 8", "data.rows = 600") if layout == "dp300" else SCENARIO
    chosen = [*PLAIN, "--profile", profile(tmp_path, scenario=rows, layouts=f'["{layout}"]'), *also, "--json"]
    assert cli.main(["list", *chosen]) == 0
    listed, *controls = json.loads(capsys.readouterr().out)["cells"]
    assert len(controls) == (also == FAULT)
    assert cli.main(["run", *chosen, "--out", str(tmp_path / "out")]) == 3
    ran, *controls = json.loads(capsys.readouterr().out)["cells"]
    assert (ran["state"], listed["id"]) == (state, ran["id"])
    assert ran["reason"].startswith(reason)
    assert listed["refused"] == f"{'not here' if state == 'not_run' else state}: {ran['reason']}"
    assert [control["state"] for control in controls] == ["conforms"] * (also == FAULT)
    assert len(list((tmp_path / "out").glob("cells/*/legs"))) == len(controls)


# --- what an adapter is called ---------------------------------------------------------------------------------------

NAMED = """
from plain_backend import Plain

class AnyClass(Plain):
    @classmethod
    def describe(cls):
        return cls.info.__class__(name="{name}")
"""


def test_an_adapter_that_is_not_registered_is_called_what_it_calls_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, name in (("named_well", "my-framework"), ("named_badly", "my/framework")):
        (tmp_path / f"{module}.py").write_text(NAMED.format(name=name))
        sys.modules.pop(module, None)
    assert find_backend("named_well:AnyClass").name == "my-framework"
    with pytest.raises(ValueError, match="named_badly:AnyClass calls itself 'my/framework'; a name has letters"):
        find_backend("named_badly:AnyClass")
