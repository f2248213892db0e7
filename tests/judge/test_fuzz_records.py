"""Checks that any mutation of an output folder gives an exit code in time, and no false pass."""

from pathlib import Path

import pytest
from cells import exhaustive
from fuzz_records import check, main
from run_sample import write_sample_run

SEEDS, FAST = 120, 10


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_run(tmp_path_factory.mktemp("run") / "out")


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=() if n < FAST else pytest.mark.exhaustive) for n in range(0, SEEDS, 10)]
)
def test_fuzzed_records_are_judged_and_do_not_conform(sample: Path, first: int) -> None:
    for seed in range(first, first + 10):
        check(seed, sample)


@pytest.mark.parametrize("seed", [100_032, 104_694, *map(exhaustive, (102_351, 102_974, 103_205, 103_552, 104_106))])
def test_times_and_names_that_are_none_do_not_keep_reports_from_being_written(sample: Path, seed: int) -> None:
    """Seeds of the five thousand that had an exception instead of an answer."""
    check(seed, sample)


@pytest.mark.parametrize("seed", [100_712, 103_856, *map(exhaustive, (100_868, 101_481, 101_785, 102_702, 103_876))])
def test_fuzz_seeds_that_once_conformed_are_rejected(sample: Path, seed: int) -> None:
    """Seeds of the five thousand that conformed although they were spoiled."""
    check(seed, sample)


@pytest.mark.exhaustive
def test_five_thousand_mutations() -> None:
    assert main(100_000, 5_000) == 0
