"""Commands take any file, or refuse it with one message: in time, without a traceback, code, or wrong success."""

import random
from pathlib import Path

import fuzz_commands
import pytest
from fuzz_commands import KINDS, command, problem
from fuzz_inputs import KINDS as INPUTS
from fuzz_inputs import Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHEAP = ("logs", "records", "checkpoints", "history")
MANY = settings(deadline=None, database=None, max_examples=10_000, suppress_health_check=list(HealthCheck))


@settings(MANY, max_examples=40, derandomize=True)
@given(kind=st.sampled_from(CHEAP), seed=st.integers(0, 2**32))
def test_mutated_files_are_read_or_refused(kind: str, seed: int) -> None:
    assert problem(kind, random.Random(seed)) == ""


@pytest.mark.exhaustive
@MANY
@given(kind=st.sampled_from([*KINDS, *INPUTS]), seed=st.integers(0, 2**32))
def test_ten_thousand_mutations_are_read_or_refused(kind: str, seed: int) -> None:
    assert problem(kind, random.Random(seed)) == ""


def test_fuzzer_sees_what_must_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(text: str, *, never: int | None = None, leaves: str = "") -> str:
        def run(_: list[str]) -> int:
            print(text)
            (case.out / "tmp" / leaves).touch() if leaves else None
            return 0

        case = Case(rng=random.Random(0), folder=tmp_path / str(len(list(tmp_path.iterdir()))))
        monkeypatch.setattr(fuzz_commands.cli, "main", run)
        return fuzz_commands.outcome(case, *command(case, [], never=never))

    assert seen("all is well") == ""
    assert "Traceback" in seen("Traceback (most recent call last)")
    assert "control characters" in seen("\x1b[2J")
    assert "prints" in seen("x" * 2**20)
    assert "other numbers" in seen("", never=0)
    assert "TMPDIR" in seen("", leaves="x")
