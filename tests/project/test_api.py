"""The public API: what ``import parity`` has, and what importing it costs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plain_profile import write_profile

import parity
from conformance.core.errors import UsageError

ROOT = Path(__file__).parents[2]


def test_every_name_is_there_and_listed() -> None:
    assert dir(parity) == sorted(parity.__all__)
    for name in parity.__all__:
        assert getattr(parity, name) is not None
    with pytest.raises(AttributeError, match="module 'parity' has no attribute 'lod'"):
        parity.lod  # noqa: B018


@pytest.mark.parametrize("name", ["record", "TrainerRecord", "diff", "load", "run"])
def test_a_function_has_an_example(name: str) -> None:
    said = getattr(parity, name).__doc__
    assert f"parity.{name}(" in said


def test_importing_it_imports_nothing_slow() -> None:
    code = "import parity, sys; assert not {'torch', 'numpy', 'pandas', 'pydantic', 'conformance'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_examples_and_docs_import_only_parity() -> None:
    files = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "docs" / "guides").glob("*.md")]
    internal = ("import conformance", "from conformance", "import impl", "from impl", "import reports", "from reports")
    assert not [file for file in files if any(words in file.read_text() for words in internal)]


def test_logs_are_compared(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 2.0 - step / 10} for step in range(10)]
    logs = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for log, factor in zip(logs, (1.0, 1.0, 1.5), strict=True):
        log.write_text("".join(json.dumps(line | {"loss": line["loss"] * factor}) + "\n" for line in lines))
    same, other = parity.diff(logs[0], logs[1]), parity.diff(logs[0], str(logs[2]), metrics=["loss"])
    assert (same.differs, same.comparable, other.differs) == (False, True, True)
    assert "diverge at step 0" in other.text()
    assert other.to_json()["differs"]
    with pytest.raises(UsageError, match="the same log is given twice"):
        parity.diff(logs[0], logs[0])


def test_a_run_is_like_that_of_the_command(tmp_path: Path) -> None:
    profile = write_profile(tmp_path)
    chosen: dict[str, Any] = {"profile": profile, "backend": "plain_backend:Plain", "cells": ["*/dp2/*"]}
    result = parity.run(out=tmp_path / "out", quiet=True, max_samples=64, **chosen)
    assert (result.passed, result.out) == (True, tmp_path / "out")
    assert parity.load(result.out).cells.state.tolist() == ["conforms"]
    assert "--max-samples" in json.loads((result.out / "summary.json").read_text())["command"]
    with pytest.raises(UsageError, match=r"out exists and is not an empty folder; give another --out"):
        parity.run(out=tmp_path / "out", **chosen | {"backend": "no_such:Backend"})  # told before backends are asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lem": 5}, "there is no option --max-lem; did you mean '--max-len'"),
        ({"device": "tpu"}, "argument --device: invalid choice 'tpu'; .*give one of cpu, cuda"),
        ({"max_len": 0}, "argument --max-len: must be a whole number from 1"),
        ({"profile": "ful"}, "no profile 'ful'; did you mean 'full'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parity.run(**options)  # type: ignore[arg-type]
