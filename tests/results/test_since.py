"""What has changed since earlier runs: suspects are versions that changed, flaky is what no version explains, and
slower is what a busy machine does not explain."""

import random
import re
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from conformance.results.baseline import (
    CHANGED,
    Outcome,
    RunFacts,
    baseline_from_json,
    make_baseline,
    outcome,
    versions_of,
)
from conformance.results.changes import Since, compare, version_changes
from conformance.results.verdict import State
from conformance.runner.earlier_run import commit

CELL = "sft/llama/fsdp2/dp2/exact"
SAME = {"torch": "2.13.0", "commit": "1f2e3d4c5b6a"}
BACKENDS = {"fsdp2": 12, "deepspeed": 10, "megatron": 9}


def since(nights: Sequence[Mapping[str, Outcome]], versions: Sequence[dict[str, str]] | None = None) -> Since:
    """What the last of some nights says of those before; all have the same versions if none are given."""
    of = versions or [SAME] * len(nights)
    earlier: list[RunFacts] = [
        (f"2026-08-{day:02}T03:00:00+00:00", "conforms", of[day - 1], night)
        for day, night in enumerate(nights[:-1], start=1)
    ]
    return compare(make_baseline("nights", earlier), nights[-1], started="2026-08-31T03:00:00+00:00", versions=of[-1])


# --- versions --------------------------------------------------------------------------------------------------------


def test_suspects_are_the_versions_that_changed_and_no_others() -> None:
    before = {"torch": "2.13.0", "deepspeed": "0.19.8", "commit": "aaa"}
    now = {"torch": "2.14.0", "deepspeed": "0.19.8", "commit": "bbb", "unheard-of": "1"}
    assert [str(change) for change in version_changes(before, now)] == ["torch 2.13.0 → 2.14.0", "commit aaa → bbb"]


def test_a_checkout_with_changed_files_is_a_suspect_although_its_name_is_the_same() -> None:
    (change,) = version_changes({"commit": "aaa-changed"}, {"commit": "aaa-changed"})
    assert str(change) == "commit aaa-changed (files were changed, so the code may differ)"


def test_the_platform_is_no_version() -> None:
    environment = {
        "platform": "Linux",
        "cpus": 8,
        "gpus": ["H200, 580.1", "H200, 580.1"],
        "cuda": None,
        "torch": "2.13",
    }
    assert versions_of(environment) == {"gpus": "H200, 580.1, H200, 580.1", "cuda": "none", "torch": "2.13"}


def test_the_commit_of_a_checkout_is_a_version(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c")
    (tmp_path / "code.py").write_text("1\n")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run([*git, *command], check=True)
    clean = commit(tmp_path)
    assert clean
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (tmp_path / "code.py").write_text("2\n")
    assert commit(tmp_path) == f"{clean}{CHANGED}"
    (tmp_path / "site-packages").mkdir()
    assert commit(tmp_path / "site-packages") is None  # another's repository around an installed suite


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nights", "drift"),
    [
        ([1e-14, 2e-14, 1.9e-13], []),
        ([1e-14, 2e-14, 1e-12], ["error of gradients 1e-12, at most 2e-14 before"]),
        ([0.0, 0.0, 9e-15], []),
        ([0.0, 0.0, 2e-14], ["error of gradients 2e-14, at most 0 before"]),
    ],
)
def test_drift_is_an_error_ten_times_that_of_any_passing_run(nights: Sequence[float], drift: Sequence[str]) -> None:
    found = [{CELL: outcome(state="conforms", seconds=1, errors={"gradients": error})} for error in nights]
    assert [str(grown) for grown in since(found).grown] == drift
    assert [line for line in since(found).text if "drift" in line] == [f"drift: {CELL}: {one}" for one in drift]


def test_errors_of_cells_that_differ_are_no_drift_and_hide_none() -> None:
    wrong = {CELL: outcome(state="differs", seconds=1, errors={"loss": 0.1})}
    right, worse = ({CELL: outcome(state="conforms", seconds=1, errors={"loss": error})} for error in (1e-14, 1e-12))
    assert [one.before for one in since([right, wrong, worse]).grown] == [1e-14]
    assert not since([right, wrong]).grown
    assert not since([wrong, worse]).grown


# --- oracles ---------------------------------------------------------------------------------------------------------


def test_only_oracles_that_are_known_can_have_changed() -> None:
    """A run of an older version did not keep them, and a cell that was not judged has none."""
    known = [outcome(state="conforms", seconds=1, second_class=whose) for whose in ("", "transformers' own Phi")]
    unknown = [Outcome(state="conforms"), outcome(state="unsupported", seconds=1, second_class="")]

    def told(before: Outcome, now: Outcome) -> int:
        last = since([{CELL: before}, {CELL: now}]).last
        assert last
        return len(last.oracles)

    assert [told(a, b) for a, b in pairwise([*known, known[0]])] == [1, 1]
    assert not any(told(a, b) for a in unknown for b in known)
    assert not any(told(one, one) for one in known)


# --- flaky -----------------------------------------------------------------------------------------------------------


def states(*told: State | None) -> list[dict[str, Outcome]]:
    return [{CELL: Outcome(state=state)} if state else {} for state in told]


@pytest.mark.parametrize(
    ("told", "flaky"),
    [
        (states("conforms", "differs"), True),
        (states("conforms", "infrastructure", "conforms"), True),
        (states("conforms", None, "differs"), True),
        (states("conforms", "not_run", "differs"), True),
        (states("conforms", "conforms"), False),
        (states("conforms", "not_run", "conforms"), False),
        (states("unsupported", "conforms"), False),
        (states(None, "differs"), False),
    ],
)
def test_a_cell_that_ends_otherwise_with_the_same_versions_is_flaky(
    told: list[dict[str, Outcome]], flaky: bool
) -> None:
    assert bool(since(told).flaky) == flaky


def test_a_cell_that_ends_otherwise_with_other_versions_is_not_flaky() -> None:
    told = states("conforms", "differs")
    assert since(told, [SAME, SAME | {"torch": "2.14.0"}]).flaky == ()
    assert since(told, [SAME, SAME | {"commit": "1f2e3d4c5b6a-changed"}]).flaky == ()
    assert since(told, [{}, {}]).flaky == ()  # unknown versions are not equal ones


def test_a_flaky_cell_is_told_with_its_last_turn() -> None:
    (flaky,) = since(states("conforms", "differs", "conforms")).flaky
    last = "fail on 2026-08-02 03:00, pass on 2026-08-31 03:00, with the same versions"
    assert flaky.why == f"{last} (2 times in 3 runs)"


def test_a_cell_that_ended_otherwise_when_it_was_run_again_is_flaky() -> None:
    again = {CELL: Outcome(state="conforms", before=("differs",))}
    assert [flaky.why for flaky in since([again]).flaky] == ["fail, and when it was run again pass"]
    assert since([{CELL: Outcome(state="differs", before=("differs",))}]).flaky == ()


# --- slower ----------------------------------------------------------------------------------------------------------


def timed(rng: random.Random, *, machine: float = 1.0, **backends: float) -> dict[str, Outcome]:
    """A night: cells of 5 s with noise, on a machine that is so many times slower, and backends that are."""
    cells = {f"sft/llama/{backend}/dp{n}/exact": backend for backend, count in BACKENDS.items() for n in range(count)}
    return {
        cell: Outcome(state="conforms", seconds=5 * machine * backends.get(backend, 1.0) * rng.lognormvariate(0, 0.3))
        for cell, backend in cells.items()
    }


def test_a_backend_that_takes_longer_is_told() -> None:
    rng = random.Random(0)
    nights = [timed(rng, machine=machine) for machine in (1, 1, 3, 1, 2)]
    (slower,) = since([*nights, timed(rng, machine=2, megatron=2.5)]).slower
    assert slower.what == "megatron"
    assert slower.times == pytest.approx(2.5, rel=0.3)
    assert [found.what for found in since([nights[0], timed(rng, machine=2, megatron=2.5)]).slower] == ["megatron"]


def test_a_busy_machine_is_not_slower() -> None:
    """A hundred nights of noise, on a machine that is up to four times slower some night: nothing is told."""
    rng = random.Random(1)
    nights = [timed(rng, machine=rng.choice([1, 1, 1.5, 2, 4])) for _ in range(105)]
    assert [found for day in range(5, 105) for found in since(nights[day - 5 : day + 1]).slower] == []


def test_of_one_backend_alone_it_is_said_that_it_may_be_the_machine() -> None:
    rng = random.Random(2)
    alone = [{c: o for c, o in timed(rng, fsdp2=f).items() if "/fsdp2/" in c} for f in (1, 1, 2)]
    (slower,) = since(alone).slower
    assert slower.what == "fsdp2"
    assert "machine and code cannot be told apart" in slower.why


def test_one_cell_that_takes_much_longer_than_ever_is_told() -> None:
    rng = random.Random(3)
    nights = [timed(rng) for _ in range(4)]
    cell = next(iter(nights[0]))
    cold = nights[3] | {cell: Outcome(state="conforms", seconds=30.0)}  # its ranks were started for it
    assert since([*nights[:3], cold]).slower == ()
    stuck = nights[3] | {cell: Outcome(state="conforms", seconds=90.0)}
    (slower,) = since([*nights[:3], stuck]).slower
    assert slower.what == cell
    assert since([*nights[:2], stuck]).slower == ()  # two earlier nights are no range


def test_only_seconds_that_can_be_compared_are() -> None:
    assert outcome(state="conforms", seconds=2.5).seconds == 2.5
    for state in ("differs", "infrastructure", "not_run", "unsupported"):
        assert outcome(state=state, seconds=2.5).seconds is None
    assert outcome(state="conforms", seconds=2.5, before=("differs",)).seconds is None
    assert outcome(state="conforms", seconds=float("inf")).seconds is None


RUN_OF_ONE: dict[str, Any] = {"versions": {}, "states": ["conforms"], "seconds": [None]}


def test_a_baseline_of_an_older_version_does_not_know_the_oracles() -> None:
    found = baseline_from_json({"path": "p", "cells": [CELL], "runs": [RUN_OF_ONE]})
    assert found.outcomes(found.runs[0]) == {CELL: Outcome(state="conforms", second_class=None)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "p", "cells": ["a"], "runs": [{"versions": {}, "states": [], "seconds": []}]},
        {"path": "p", "cells": ["a"], "runs": [{"versions": {}, "states": ["splendid"], "seconds": [None]}]},
        {"path": "p", "cells": ["a"], "runs": [{"versions": {}, "states": [None], "seconds": ["long"]}]},
        {"path": "p", "cells": ["a"], "runs": [{**RUN_OF_ONE, "second_class": ["", ""]}]},
        {"path": "p", "cells": ["a"], "runs": [{**RUN_OF_ONE, "second_class": [7]}]},
        {"path": "p", "runs": [{}]},
        {"cells": []},
        [],
    ],
)
def test_a_baseline_that_the_suite_did_not_write_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="a baseline, not one with "):
        baseline_from_json(wrong)
