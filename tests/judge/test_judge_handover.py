"""The judge on handovers: what a phase has loaded is what the phase before had, to the bit, before any step is made."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from judge_sample import Change, Tensors, Values, write

from conformance.judge.verdict import judge
from conformance.records.step_tensors import read_record
from conformance.results.verdict import Verdict
from conformance.worker import rank_state
from conformance.worker.rank_state import generator_states, goes_on, seed_generators

MOMENTUM = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
LOADED = 1  # the first phase has one step


def with_momentum(at: int, momentum: Tensors) -> Change:
    """The optimizer's state as it is shown at a step, or as loaded before the next one."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == at:
            tensors.update({f"momentum_buffer/{name}": tensor.clone() for name, tensor in momentum.items()})

    return change


def verdict_of(tmp_path: Path, before: Change, after: Change) -> Verdict:
    phases = [write(tmp_path / "0", before, until=LOADED), write(tmp_path / "1", after, first=LOADED)]
    return judge(phases, oracle=write(tmp_path / "oracle"), noise=())


BOTH = {"a": MOMENTUM, "b": MOMENTUM + 1}


@pytest.mark.parametrize(
    ("loaded", "first_finding"),
    [
        (BOTH, ""),
        ({"a": MOMENTUM, "b": MOMENTUM}, "momentum_buffer of b"),
        ({"a": MOMENTUM}, "momentum_buffer of b (missing)"),
        ({}, "momentum_buffer of a (missing)"),
        (BOTH | {"c": MOMENTUM}, "momentum_buffer of c (unexpected)"),
        (BOTH | {"a": MOMENTUM * (1 + 2**-52)}, "momentum_buffer of a"),
        (BOTH | {"a": MOMENTUM[:, :2]}, "momentum_buffer of a (shape (4, 2) instead of (4, 3))"),
        (BOTH | {"a": MOMENTUM.float()}, "momentum_buffer of a (torch.float32 instead of torch.float64)"),
    ],
    ids=["same", "other", "one missing", "all missing", "one more", "a digit", "shape", "dtype"],
)
def test_training_state_is_compared_directly_after_loading(
    tmp_path: Path, loaded: dict[str, torch.Tensor], first_finding: str
) -> None:
    verdict = verdict_of(tmp_path, with_momentum(LOADED - 1, BOTH), with_momentum(LOADED - 1, loaded))
    found = [f.tensor for f in verdict.findings if f.stage == "training state"]
    assert first_finding in found if first_finding else verdict.state == "conforms", verdict.reason
    if first_finding:
        assert (verdict.state, verdict.first_stage) == ("differs", "training state")
        assert {f.step for f in verdict.findings} == {LOADED}


def test_weights_are_handed_over_to_the_last_bit(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == LOADED - 1:
            tensors["weight/b"] *= 1 + 2**-52

    verdict = verdict_of(tmp_path, lambda *_: None, change)
    assert (verdict.state, verdict.first_stage) == ("differs", "weights")
    assert [(f.tensor, f.step) for f in verdict.findings] == [("b", LOADED)]


def test_state_that_is_not_shown_is_told_and_judged_by_what_follows(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, lambda *_: None, lambda *_: None)
    assert verdict.state == "conforms"
    assert "the training state as loaded is not reported, and judged by its effect at weights after N" in verdict.reason


def test_every_rank_goes_on_with_its_own_generators(tmp_path: Path) -> None:
    """The first rank's for all is the classical mistake: dropout is then the same everywhere."""

    def of_the_first_rank(step: int, values: Values, tensors: Tensors) -> None:
        values["generators"] = [{"torch": f"of rank {max(rank, 1)}"} for rank in range(4)]

    def change(step: int, values: dict[str, Any], tensors: Tensors) -> None:
        if step == LOADED - 1:
            of_the_first_rank(step, values, tensors)

    verdict = verdict_of(tmp_path, change, lambda *_: None)
    assert (verdict.state, verdict.first_stage) == ("differs", "generators"), verdict.reason
    assert [f.tensor for f in verdict.findings] == ["torch of rank 0"]


def test_generators_that_are_seeded_after_loading_are_found(tmp_path: Path) -> None:
    seeded = [[], [(LOADED, "torch")], [], []]
    phases = [write(tmp_path / "0", until=LOADED), write(tmp_path / "1", first=LOADED, reseeded=seeded)]
    verdict = judge(phases, oracle=write(tmp_path / "oracle"), noise=())
    assert (verdict.state, verdict.first_stage) == ("differs", "generators"), verdict.reason
    assert [f.tensor for f in verdict.findings] == ["torch of rank 1 (does not follow from what was loaded)"]
    phases = [write(tmp_path / "first", until=LOADED, reseeded=seeded), write(tmp_path / "second", first=LOADED)]
    assert judge(phases, oracle=write(tmp_path / "other"), noise=()).state == "conforms"  # nothing was loaded before


def drawn(count: int) -> None:
    torch.rand(count)
    numpy.random.rand(count)
    [random.random() for _ in range(count)]


@pytest.mark.parametrize("count", [0, 1, 312, 700, 3000])
def test_a_generator_follows_its_stream_however_much_it_draws(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_state, "TWISTS", 12)
    tracker = {"tensor-parallel": torch.Generator().get_state()}
    seed_generators(3, 1, 2, library=tracker)
    before = generator_states(tracker)
    drawn(count)
    after = generator_states(tracker)
    assert all(goes_on(before[name], after[name]) for name in before)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == ({"python", "numpy", "torch"} if count else set())
    assert not any(goes_on(after[name], before[name]) for name in changed)


def test_a_generator_is_followed_over_the_draws_of_many_masks() -> None:
    generator = torch.Generator().manual_seed(5)
    states = [generator.get_state().numpy().tobytes()]
    for twists in (250, 251, 1999):
        torch.rand(twists * 624, generator=generator)
        states.append(generator.get_state().numpy().tobytes())
    assert all(goes_on(before, after) for before, after in pairwise(states))
    assert goes_on(states[0], states[-1])
    assert not any(goes_on(after, before) for before, after in pairwise(states))


def test_seeding_a_generator_breaks_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_state, "TWISTS", 12)
    tracker = {"on a CPU": torch.Generator().get_state(), "on a GPU": torch.zeros(16, dtype=torch.uint8)}
    states = []
    for rank in (0, 1):
        seed_generators(3, rank, 2, library=tracker)
        states.append(generator_states(tracker))
    assert not any(goes_on(states[0][name], states[1][name]) for name in states[0])
    later = bytes(states[0]["on a GPU of the library"][:8]) + (4).to_bytes(8, "little")
    assert goes_on(states[0]["on a GPU of the library"], later)


@pytest.mark.parametrize(("control", "state"), [("failed", "conforms"), ("differs", "conforms"), ("same", "differs")])
def test_a_changed_copy_that_loads_the_same_was_not_read(tmp_path: Path, control: str, state: str) -> None:
    phases = [write(tmp_path / "0", until=LOADED), write(tmp_path / "1", first=LOADED)]
    oracle, unproven = write(tmp_path / "oracle"), "nothing loaded but what was saved"
    assert unproven in judge(phases, oracle=oracle, noise=()).reason
    (tmp_path / "1" / "control.json").write_text(f'{{"control": "{control}"}}')
    verdict = judge([phases[0], read_record(tmp_path / "1")], oracle=oracle, noise=())
    assert (verdict.state, verdict.first_stage) == (state, "weights" if state == "differs" else ""), verdict.reason
    assert unproven not in verdict.reason
