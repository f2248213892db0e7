"""Checks each command in README and docs: a few cheap ones are run, of all others options, cells and files exist.

A command is a line of a block marked ``sh``, or an inline one that begins with ``parity``. Names such as ``OUT`` stand
for the user's own files; SUBSTITUTES says what takes their place here.
"""

import fnmatch
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformance.backends.faults import catalogue
from conformance.cli import main as cli
from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from conformance.suite import plugin

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/index.md", "docs/start", "docs/guides", "docs/explanations", "docs/measurements")
SUBSTITUTES = {
    **dict.fromkeys(("path/to/hf-folder", "MODEL", "FOLDER"), str(ROOT / "fixtures/models/llama")),
    **dict.fromkeys(("train.jsonl", "FILE"), str(ROOT / "fixtures/data/word_problems.jsonl")),
    "preferences.jsonl": str(ROOT / "fixtures/data/preferences.jsonl"),
    "CELL": "sft-packed/pangu/fsdp2/dp2/exact",
    "NAME": "cleared-gradients",
    "my-backend": "fsdp2",
}
PYTHON = f"fsdp2={sys.executable}"
LOGS = ["a", "b", "deepspeed", "fsdp2", "megatron", "verl", "torchtitan", "ds-1", "ds-2", "fsdp-1", "fsdp-2"]
NEW_MODEL = "*/NAME/*"  # of a family that the reader adds
# Commands that are run, with their right exit codes. For diff 1 is a difference, for doctor 3 is a machine that lacks
# something. "*" stands for any arguments.
CHEAP = {
    ("parity", "compare", "reports/published/2026-11-22-side-by-side"): (0,),
    ("parity", "diff", "*"): (0, 1),
    ("parity", "doctor"): (0, 3),
    ("parity", "list"): (0,),
}
RECORDS = {"run-a", "a"}  # folders of parity.record, which are not made here


def commands() -> Iterator[tuple[str, str]]:
    """The page and the text of each command."""
    for page in PAGES:
        for file in sorted((ROOT / page).glob("*.md")) if (ROOT / page).is_dir() else [ROOT / page]:
            text = file.read_text(encoding="utf-8")
            blocks = re.findall(r"^ *```(?:sh|console|bash)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
            lines = "".join(blocks).replace("\\\n", " ").splitlines()
            inline = re.findall(r"`(parity [a-z]+ [^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))
            for line in (*lines, *inline):
                if line.strip() and not line.strip().startswith("#"):
                    yield file.relative_to(ROOT).as_posix(), line.strip()


ALL = sorted(set(commands()))


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    return [SUBSTITUTES.get(word, word.replace("my-backend=/path/to/venv/bin/python", PYTHON)) for word in words]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with logs of trainings under the names that the commands use."""
    for number in range(2):
        lines = (f'{{"step": {step}, "loss": {2 / (step + 1) + number / 10}, "tokens": 8}}\n' for step in range(20))
        text = "".join(lines)
        for name in (
            "a",
            "b",
            "deepspeed",
            "fsdp2",
            "megatron",
            "verl",
            "torchtitan",
            "ds-1",
            "ds-2",
            "fsdp-1",
            "fsdp-2",
        ):
            for end in ("jsonl", "log"):
                (tmp_path / f"{name}.{end}").write_text(text)
    table = "step,run-a - loss,run-b - loss\n" + "".join(f"{step},{2 / (step + 1)},1\n" for step in range(20))
    (tmp_path / "panel.csv").write_text(table)
    (tmp_path / "panel-norm.csv").write_text(table.replace("loss", "grad_norm"))
    (tmp_path / "reports").symlink_to(ROOT / "reports")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_pages_have_commands() -> None:
    assert len(ALL) > 60
    assert {page for page, _ in ALL} >= {"README.md", "docs/start/first-run.md", "docs/guides/ci.md"}


@pytest.mark.parametrize(("page", "line"), ALL, ids=[f"{page}: {line}" for page, line in ALL])
def test_command_exists_with_its_options_and_cells(page: str, line: str, files: Path) -> None:
    words = words_of(line)
    if words[0] == "parity":
        check_parity(words[1:])
        codes = CHEAP.get(tuple(words)) or CHEAP.get((*words[:2], "*"), ())
        if codes and not RECORDS & set(words):
            assert cli.main(words[1:]) in codes
    elif words[0] == "pytest":
        check_pytest(words[1:])
    elif words[0] in ("python", "torchrun"):
        check_program(words[1:])
    else:
        assert (ROOT / words[0]).stat().st_mode & 0o100, "neither a command nor an executable of the checkout"


@cache
def parser() -> ArgumentParser:
    return cli._parser()


def check_parity(words: list[str]) -> None:
    """Parses with the command's own parser. Selects the cells, each of whose patterns has to match one."""
    if words[-1] == "--help":
        with pytest.raises(SystemExit, match="0"):
            parser().parse_args(words)
        return
    options = parser().parse_args(words)
    if config := getattr(options, "config", None):
        assert (ROOT / config).is_file()
    if words[0] not in ("run", "list", "plan", "bisect") or NEW_MODEL in words:
        return
    if words[0] == "bisect":
        options.cells = [options.cell]
    selection = Selection.from_options(options)
    assert set(selection.faults) <= set(catalogue())
    choosing = ("profile", "backend", "model", "scenario", "layout", "precision")
    names = cells_of(Selection(**{name: getattr(selection, name) for name in choosing}))
    for pattern in selection.cells or ("*",):
        assert fnmatch.filter(names, pattern), f"no cell of {selection.profile_name} is {pattern}"


@cache
def cells_of(selection: Selection) -> list[str]:
    return [str(cell) for cell in select_cells(selection)]


def check_pytest(words: list[str]) -> None:
    from _pytest.config.argparsing import Parser

    own = Parser(_ispytest=True)
    plugin.pytest_addoption(own)
    known = {name for group in (own._anonymous, *own._groups) for option in group.options for name in option.names()}
    for word in words:
        if word.startswith("--parity-"):
            assert word.partition("=")[0] in known
        elif word.startswith("tests/"):
            assert (ROOT / word).exists()


def check_program(words: list[str]) -> None:
    """A script or a module of this repository, whose source names the options; behind ``run`` those of parity."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        found = find_spec(module)
        assert found
        assert found.origin
        if "run" in words:
            check_parity(words[words.index("run") :])
        inner = next((word for word in words if word in ("run", "pytest")), None)
        own = words[words.index("-m") + 2 : words.index(inner) if inner else None]
        source = Path(found.origin)
    else:
        source = ROOT / next(word for word in words if word.endswith(".py"))
        own = words[words.index(next(word for word in words if word.endswith(".py"))) + 1 :]
    text = "".join(file.read_text(encoding="utf-8") for file in (source, *source.parent.glob("timing.py")))
    for word in own:
        if word.startswith("--"):
            assert f'"{word}"' in text, f"{source.name} has no option {word}"
