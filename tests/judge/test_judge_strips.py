"""Errors by token: the judge keeps where in the batch rows are off; a reader believes only what fits the verdict."""

import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_sample import STEPS, Change, Tensors, Values, verdict_of
from report_sample import edit
from run_sample import EXACT, FOLDERS, JUDGED, write_sample_run

from conformance.core.errors import UsageError
from conformance.judge.cells import combine_verdicts, rejudge
from conformance.judge.measurements import token_errors_of
from conformance.results.run_results import read_entry
from conformance.results.verdict import BINS, Verdict
from conformance.spec.observables import LOGPROBS


def off_by(error: float) -> Change:
    """The third target of row 7 is off at step 1, the others a ten thousandth of it."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 1:
            tensors["logprob/0"] += 1e-4 * error
            tensors["logprob/7"] += error * torch.tensor([1e-4, 1e-4, 1])

    return change


def test_the_worst_token_has_the_error_that_is_judged_and_its_place(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, off_by(1e-3))
    assert [strip.step for strip in verdict.strips] == list(range(STEPS))
    before, strip, after = verdict.strips
    assert before.errors == after.errors == (0.0,) * 5
    [judged] = [q for q in verdict.findings if q.stage == "log-probs"]
    assert strip.starts == ((0, 0), (0, 1), (7, 0), (7, 1), (7, 2))
    assert strip.errors[-1] == judged.observed
    assert strip.errors[:-1] == pytest.approx([1e-4 * judged.observed] * 4, rel=5e-3, abs=0)
    assert strip.where == judged.where == "row 7, target 2"
    assert strip.max_abs == pytest.approx(1e-3)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_hides_no_other_token(tmp_path: Path, wrong: float) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        off_by(1e-3)(step, values, tensors)
        if step == 1:
            tensors["logprob/0"][1] = wrong

    strip = verdict_of(tmp_path, change).strips[1]
    assert repr(strip.errors[1]) == repr(wrong)
    assert all(0 < error < 1e-3 for error in strip.errors[:1] + strip.errors[2:])
    assert strip.errors[4] == max(strip.errors[2:])
    assert (strip.where, repr(strip.max_abs)) == ("row 0, target 1", repr(wrong))


def test_many_tokens_are_the_worst_of_their_bins() -> None:
    rng = random.Random(0)
    lengths = {row: rng.randrange(1, 40) for row in range(3, 60)}
    places = [(row, target) for row, length in lengths.items() for target in range(length)]
    off = torch.rand(len(places), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    strip = token_errors_of(LOGPROBS, 0, off, torch.zeros_like(off), lengths, norm=10.0)
    assert strip.spread
    assert sum(strip.spread.observed) == sum(strip.spread.reference) == strip.spread.reference[0] == len(places)
    assert strip.spread.quantiles == pytest.approx((0.5, 0.99, off.max().item()), abs=0.02)
    assert (strip.tokens, len(strip.errors)) == (len(places), BINS)
    assert strip.where == "row {}, target {}".format(*places[int(off.argmax())])
    edges = [*map(places.index, strip.starts), len(places)]
    assert max(b - a for a, b in pairwise(edges)) <= len(places) // BINS + 1
    error = off.norm().item() / 10
    expected = [off[a:b].max().item() / off.max().item() * error for a, b in pairwise(edges)]
    assert list(strip.errors) == pytest.approx(expected, rel=5e-3, abs=0)
    assert max(strip.errors) == error


def test_of_two_attempts_the_strips_are_of_the_one_whose_quantities_are_told(tmp_path: Path) -> None:
    good, bad = verdict_of(tmp_path / "1", off_by(0)), verdict_of(tmp_path / "2", off_by(1))
    failed = Verdict(state="infrastructure", reason="rank 0 ended")
    assert combine_verdicts(good, bad).strips == combine_verdicts(bad, good).strips == bad.strips
    assert combine_verdicts(failed, good).strips == good.strips


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every cell conforms. Never written to by a test."""
    return write_sample_run(tmp_path_factory.mktemp("run") / "out")


def test_rejudge_adds_token_errors_to_older_verdict(out: Path) -> None:
    files = [out / FOLDERS[cell] / "verdict.json" for cell in JUDGED]
    strips = [read_entry(file).verdict.strips for file in files]
    assert all(strips)
    for file in files:
        values = json.loads(file.read_text())
        del values["strips"]
        file.write_text(json.dumps(values))
    assert [read_entry(file).verdict.strips for file in files] == [()] * len(files)
    rejudge(out)
    assert [read_entry(file).verdict.strips for file in files] == strips


def _without_first_bin(strip: dict[str, Any]) -> None:
    del strip["errors"][0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda strip: strip.update(step=7),
        lambda strip: strip.update(tensor="loss"),
        lambda strip: strip.update(errors=[1.0] * len(strip["errors"])),
        lambda strip: strip.update(errors=["nan"] * len(strip["errors"])),
        lambda strip: strip.update(errors=[-1.0] * len(strip["errors"])),
        lambda strip: strip.update(errors=[], starts=[]),
        lambda strip: strip.update(errors=[0.0] * 10**4, starts=[[0, 0]] * 10**4, tokens=10**6),
        lambda strip: strip.update(tokens=1),
        lambda strip: strip.update(starts="all"),
        lambda strip: strip.pop("where"),
        _without_first_bin,
    ],
)
def test_strips_that_do_not_fit_the_verdict_are_refused(out: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    file = out / FOLDERS[EXACT] / "verdict.json"
    strips = json.loads(file.read_text())["strips"]
    damage(strips[0])
    edit(file, strips=strips)
    with pytest.raises(UsageError, match="edited"):
        read_entry(file)
