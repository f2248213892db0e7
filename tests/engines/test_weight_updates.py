"""New weights of rollout engines: planted faults are named, broken updates are refused, trainers' weights arrive."""

import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import faulty_engines as faulty
import pytest
import torch

from conformance.backends.engines import ServedEngine
from conformance.backends.faults import Fault, faults_of, plant
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.prepare import batches_of, prepare_inputs
from conformance.judge.engines import Check
from conformance.models.folders import named_tensors
from conformance.runner.engine_run import EngineRun, Expected, Requests, judge_numbers
from conformance.runner.weight_updates import Trained, judge_against, judge_updates, moved
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import load_scenario
from impl.engines.transformers_engine import copy_tensors
from impl.faults.engines import ENGINE_FAULTS


@cache
def place(
    model: str, scenario: str = "sft-packed", precision: PrecisionName = "fp32"
) -> tuple[EngineRun, Expected, Trained]:
    """Returns a run, what is expected of it, and new weights. What the reference gives is computed once."""
    file, out = FIXTURES / "scenarios" / f"{scenario}.toml", Path(mkdtemp(prefix="parity-tests-"))
    loaded = load_scenario(file, model=f"models/{model}", precision=precision)
    folder = prepare_inputs(loaded, out).models["policy"]
    run = EngineRun(serve=lambda: ServedEngine(faulty.OneWay()), scenario=loaded, folder=folder)
    documents = Requests.of(batches_of(loaded, folder)[0]).documents
    expected = Expected(loaded, folder, Requests(documents=documents[:2]))
    return run, expected, next(moved(loaded, folder, out))


def updates(engine: faulty.OneWay, run: EngineRun, expected: Expected, new: Trained) -> list[Check]:
    return list(judge_updates(ServedEngine(engine), run, expected, new))


@pytest.mark.parametrize("fault", ENGINE_FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_caught_and_named(fault: Fault) -> None:
    run, expected, new = place(fault.cells.model, fault.cells.scenario)
    engine = faulty.with_way(fault.cells.layouts["transformers"])
    stage, _, words = fault.stage.partition(": ")
    with plant([fault.name], type(engine), faults_of(type(engine))) as calls:
        if stage == "update":
            (found,) = updates(engine, run, expected, new)
        else:
            engine.start(run.folder, "fp32", {})
            found = next(check for check in judge_numbers(ServedEngine(engine), expected) if check.name == stage)
    assert calls[fault.name]
    assert found.state == "differs"
    assert words in found.text


class TakesWhatItGets(faulty.OneWay):
    """Copies the tensors that it finds in a file, whether all are there or not."""

    def update(self, way: str, folder: Path) -> None:
        copy_tensors(self._engine.model, dict(named_tensors(folder)))


def test_incomplete_update_has_to_be_refused() -> None:
    updated, without, shape = updates(TakesWhatItGets(), *place("qwen3"))
    spoilt = "model.layers.1.input_layernorm.weight"
    assert updated.state == "conforms"
    assert without.state == "differs"
    assert f"no error, and {spoilt} without a tensor; the engine is left partly new: old: {spoilt}" in without.text
    assert shape.state == "differs"
    assert "raised: RuntimeError: The size of tensor a" in shape.text
    assert "the engine is left partly new" in shape.text


def test_too_small_update_is_not_judged() -> None:
    run, expected, _ = place("qwen3")
    same = run.folder.with_name("same")
    shutil.copytree(run.folder, same)
    (found,) = updates(faulty.OneWay(), run, expected, Trained(by="", folder=same))
    assert found.state == "unsupported"
    assert "too little to tell them from the old ones" in found.text


@pytest.mark.parametrize(("shift", "state"), [(0.0, "conforms"), (1e-3, "differs")])
def test_trainer_is_compared_at_targets_only(shift: float, state: str) -> None:
    _, expected, _ = place("qwen3")
    scored = expected.documents.reference
    of_trainer = [one + shift for one in scored]
    of_trainer[0][0] = torch.nan  # no target
    (found,) = judge_against(Trained(by="fsdp2", folder=Path(), logprobs=(*enumerate(of_trainer),)), scored, expected)
    assert (found.name, found.state) == ("against fsdp2", state)
    assert ("ratios 1 to 1," in found.text) == (state == "conforms")


def test_half_precision_says_what_rounding_hides() -> None:
    with plant(["stale-weights"], faulty.OneWay, faults_of(faulty.OneWay)):
        (stale,) = updates(faulty.OneWay(), *place("qwen3", precision="bf16"))
    assert (stale.state, stale.text) == ("differs", "stale: all weights are old")
    updated, *_ = updates(faulty.OneWay(), *place("qwen3", precision="bf16"))
    assert updated.state == "conforms"
    assert re.fullmatch(r"new, and back again; old parts that make less than \d\d% of the change .*", updated.text)


def test_unknown_way_or_fault_is_a_usage_error() -> None:
    run, expected, new = place("qwen3")
    with pytest.raises(UsageError, match="did you mean 'tensors'"):
        updates(faulty.OneWay(), replace(run, ways=("tensor",)), expected, new)
    with pytest.raises(UsageError, match="did you mean 'stale-weights'"):
        plant(["stale-weight"], faulty.OneWay, faults_of(faulty.OneWay)).__enter__()
