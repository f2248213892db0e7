"""scripts/framework: one command makes a framework's environment of its lock file and runs its cells."""

import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cells import slow
from wheels import write_wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with a framework `toy` of two releases and a `broken` one whose package is in no index."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without uv
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    for name, version in (("toy", "2.0"), ("toy", "1.0"), ("suite", "1")):
        write_wheel(tmp_path / "wheels", name, version, {})
    loader = importlib.machinery.SourceFileLoader("framework_script", str(ROOT / "scripts" / "framework"))
    spec = importlib.util.spec_from_loader("framework_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "framework_script", module)
    loader.exec_module(module)
    locks = {"toy/requirements.lock": "toy==2.0", "toy/1.0.lock": "toy==1.0", "broken/requirements.lock": "broken==3"}
    for path, text in locks.items():
        file = tmp_path / "frameworks" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# why\n{text}\n")
        file.with_name("adapter.py").write_text('BACKENDS = ("ToySft", "ToyRl")\nimport no_such_module\n')
    monkeypatch.setattr(module, "FRAMEWORKS", tmp_path / "frameworks")
    monkeypatch.setattr(module, "SUITE", ("suite",))
    return module


@pytest.fixture
def runs(script: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """The calls of parity run, which are not made, and their PYTHONPATH; each would say that a cell differs."""
    made, run = list[tuple[list[str], str]](), subprocess.run

    def recorded(command: Sequence[str], **options: Any) -> Any:
        if "conformance.cli.main" not in command:
            return run(command, **options)
        made.append(([*command], options["env"]["PYTHONPATH"]))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(script.subprocess, "run", recorded)
    return made


# The Python of an environment: its pip keeps a requirement, and finds no package named broken.
PYTHON = """#!/bin/bash
installed=$(dirname "$0")/installed
[ "$1" != -c ] || { sed -n 's/^toy==//p' "$installed" | tail -n 1; exit; }
for word in "$@"; do
    case $word in
        toy==*) echo "$word" >>"$installed" ;;
        *requirements.txt) grep == "$word" >>"$installed" ;;
    esac
done
! grep -q ^broken "$installed" || { echo "ERROR: No matching distribution found for broken==3" >&2; exit 1; }
"""


@pytest.fixture(params=["stand-in", slow("pip")])
def installer(request: pytest.FixtureRequest, script: Any, runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes environments by venv and pip, which takes 15 s, or with a stand-in for Python."""
    run = subprocess.run

    def make(command: Sequence[str], **options: Any) -> Any:
        if command[1:3] != ["-m", "venv"]:
            return run(command, **options)
        (python := Path(command[3], "bin", "python")).parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
        return subprocess.CompletedProcess(command, 0)

    if request.param == "stand-in":
        monkeypatch.setattr(script.subprocess, "run", make)


@pytest.mark.usefixtures("installer")
def test_an_environment_is_made_once_and_the_cells_are_run(script: Any, runs: Any, tmp_path: Path, capsys: Any) -> None:
    options = ["--out", str(tmp_path / "out"), "--cells", "core-sft-*"]
    assert script.main(["broken", "toy", "no-such", *options]) == 1
    python = tmp_path / ".frameworks" / "toy-2.0" / "bin" / "python"
    ((command, path),) = runs
    assert command[2:6] == ["conformance.cli.main", "run", "--profile", "frameworks"]
    assert command[6:10] == ["--backend", "adapter:ToySft", "--python", f"adapter:ToySft={python}"]
    assert command[-4:] == ["--out", str(tmp_path / "out" / "toy-2.0"), "--cells", "core-sft-*"]
    assert path.split(":")[0] == str(tmp_path / "frameworks" / "toy")
    told = capsys.readouterr().err.splitlines()
    assert "toy-2.0: making its environment" in told[1] + told[2]
    assert sum("broken: its environment cannot be made" in line and line.endswith("broken 3") for line in told) == 1
    assert told[-1] == "no-such: there is no frameworks/no-such/adapter.py; known: broken, toy"
    assert script.main(["toy", *options]) == 1
    assert "making" not in capsys.readouterr().err
    lock = tmp_path / "frameworks" / "toy" / "requirements.lock"
    lock.write_text("toy==2.0\n# changed\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "toy==1.0"], check=True)
    script.make_environment(script.find("toy", ""))  # again, because the lock is another
    script.check_version(script.find("toy", ""))
    subprocess.run([python, "-m", "pip", "install", "--quiet", "toy==1.0"], check=True)
    assert script.main(["toy"]) == 3
    assert "has version 1.0, and its lock file says 2.0; run: rm -r" in capsys.readouterr().err


def test_a_version_selects_its_lock_file(script: Any) -> None:
    assert [script.find("toy", version).lock.name for version in ("", "2.0", "1.0")] == [
        *("requirements.lock", "requirements.lock", "1.0.lock"),
    ]
    assert [*script.asked(["toy", "1.0", "broken"])] == [("toy", "1.0"), ("broken", "")]


@pytest.mark.parametrize("package", ["two-words", "two_words", "Two_Words"])
def test_a_name_with_an_underscore_is_found(script: Any, package: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(f"{package}==1.5\n")
    assert script.pin(tmp_path / "lock", "two_words") == "1.5"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["toy", "3.0"],
            "toy 3.0: no lock file of this version; write frameworks/toy/3.0.lock, or run: scripts/framework toy "
            "1.0 or 2.0",
        ),
        (["unpinned"], "unpinned: frameworks/unpinned/requirements.lock has no line unpinned==VERSION; add it"),
        (["new"], "new: there is no frameworks/new/requirements.lock; write it with pip freeze"),
    ],
)
def test_an_unknown_version_is_told(script: Any, words: list[str], message: str, capsys: Any, tmp_path: Path) -> None:
    for name in ("unpinned", "new"):
        (tmp_path / "frameworks" / name).mkdir()
        (tmp_path / "frameworks" / name / "adapter.py").touch()
    (tmp_path / "frameworks" / "unpinned" / "requirements.lock").write_text("other==1\n")
    assert script.main(words) == 2
    assert capsys.readouterr().err.strip() == message
