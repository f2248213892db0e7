"""Whatever a user gives is used or refused in words: no traceback, no hang, no code that is run, nothing written."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import fuzz_inputs
import pytest
from fuzz_inputs import KINDS, Case, outcome, problem

from conformance.core.errors import UsageError

FEW = 25  # of each kind; tests/cli/test_fuzz_commands.py has thousands every night


def problems(kind: str, seeds: range, folder: Path) -> list[str]:
    found = []
    for seed in seeds:
        place = folder / str(seed)
        if wrong := problem(kind, seed, place):
            found.append(f"{kind} {seed}: {wrong}")
        shutil.rmtree(place)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_input_is_used_or_refused_in_words(kind: str, tmp_path: Path) -> None:
    assert problems(kind, range(FEW), tmp_path) == []


@pytest.mark.parametrize("seed", [195, 254])
def test_positions_that_are_none_are_refused_in_words(tmp_path: Path, seed: int) -> None:
    """Seeds of the thousands that were not: a name of 3,000 letters, and null for a kind of positions."""
    assert problems("config", range(seed, seed + 1), tmp_path) == []


def crash(case: Case) -> None:
    raise KeyError("model")


def hang(case: Case) -> None:
    time.sleep(60)


def write_outside(case: Case) -> None:
    (case.given / "new").write_text("x")


def run_code(case: Case) -> None:
    case.mark.write_text("x")


def say_nothing(case: Case) -> None:
    raise UsageError("something is wrong")


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (crash, "KeyError: 'model'"),
        (hang, "it hangs"),
        (write_outside, "changed outside the output folder"),
        (run_code, "code of the folder was run"),
        (say_nothing, "the message does not name file.toml"),
    ],
)
def test_the_fuzzer_sees(
    use: Callable[[Case], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz_inputs, "LIMIT_S", 0.2)
    case = Case(rng=random.Random(0), folder=tmp_path)
    case.given.mkdir()
    assert words in outcome(case, "file.toml", lambda: use(case))
