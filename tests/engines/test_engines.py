"""Rollout engines: what is judged of them, which mistakes are named, and how they fail."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import faulty_engines as faulty
import pytest

from conformance.backends.engines import EngineFailed, EngineProcess, ServedEngine, load_engine
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.core.process import process_state
from conformance.data.prepare import batches_of, prepare_inputs
from conformance.judge.engines import Check
from conformance.runner import engine_run
from conformance.runner.engine_run import EngineRun, Requests, Trained, judge_engine, judge_updates, moved
from conformance.spec.scenario import load_scenario

UPDATE = f"update by {faulty.WAY}"
SCORED, SAMPLED, GREEDY = "scored log-probs", "sampled log-probs", "greedy tokens"
BY_UPDATE = [
    (faulty.updating(lambda name, new, old: old), "stale: all weights are old"),
    (faulty.updating(faulty.half_old), "partly new: the shards of rank 1 of 2 are old"),
    (faulty.old_if("norm"), "old: norms;"),
    (faulty.old_if("_proj"), "old: all linear layers; new: norms, the embedding, the head"),
    (faulty.OldTiedHead, "partly new: old: the head; new: all linear layers, norms, the embedding"),
    (faulty.old_if(r"layers\.1\.mlp\.up"), "old: model.layers.1.mlp.up_proj.weight;"),
    (faulty.KeepsCache, "the prefix cache was kept"),
    (faulty.FailsHalfWay, "connection to the trainer is lost; the engine is left partly new"),
]
BY_NUMBERS = [
    (faulty.reordered("qkv", "kqv"), SCORED, "q, k, v were loaded in the order k, q, v"),
    (faulty.reordered(("gate", "up"), ("up", "gate")), SCORED, "gate, up were loaded in the order up, gate"),
    (faulty.HeadInBf16, SCORED, "the head is computed in bf16"),
    (faulty.ShiftedScores, SCORED, "those of the token before"),
    (faulty.ProcessedAsRaw, SAMPLED, "processed, and declared as raw"),
    (faulty.Raw, SAMPLED, "raw, and declared as processed"),
    (faulty.Twice, SAMPLED, "the temperature 0.7 is applied twice"),
    (faulty.Shifted, SAMPLED, "those of the token before"),
    (faulty.ForNeighbour, SAMPLED, "prompt 0 got the response to prompt 1"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRun]:
    """Serves Qwen3, whose head is its embedding. What the reference gives is computed once."""
    scenario = load_scenario(FIXTURES / "scenarios" / "sft-packed.toml", model="models/qwen3", precision="fp32")
    folder = prepare_inputs(scenario, tmp_path_factory.mktemp("inputs")).models["policy"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_run, "Expected", cache(engine_run.Expected))
        patch.setattr(engine_run, "batches_of", cache(engine_run.batches_of))
        patch.setattr(engine_run, "DOCUMENTS", 3)
        yield EngineRun(serve=lambda: ServedEngine(faulty.OneWay()), scenario=scenario, folder=folder)


@pytest.fixture(scope="module")
def new(run: EngineRun, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return next(moved(run.scenario, tmp_path_factory.mktemp("new")))


def checks(run: EngineRun, engine: type, *trained: Trained) -> dict[str, Check]:
    own = replace(run, serve=lambda: ServedEngine(engine()))
    return {check.name: check for check in judge_engine(own, lambda: iter(trained))}


def test_honest_engine_conforms(run: EngineRun, new: Trained) -> None:
    found = checks(run, load_engine("impl.engines.transformers_engine:TransformersEngine"), new)
    assert {check.state for check in found.values()} == {"conforms"}, found
    assert {SCORED, "distributions", GREEDY, SAMPLED, UPDATE, "update by folder"} <= found.keys()
    assert found[UPDATE].text == "new, and back again"


@pytest.mark.parametrize(("engine", "cause"), BY_UPDATE, ids=[cause for _, cause in BY_UPDATE])
def test_wrong_update_is_named(run: EngineRun, new: Trained, engine: type, cause: str) -> None:
    expected = engine_run.Expected(run.scenario, run.folder, Requests.of(batches_of(run.scenario, run.folder)[0]))
    (found,) = judge_updates(ServedEngine(engine()), run, expected, new)
    assert found.state == "differs"
    assert cause in found.text


@pytest.mark.parametrize(("engine", "name", "cause"), BY_NUMBERS, ids=[cause for *_, cause in BY_NUMBERS])
def test_wrong_numbers_are_named(run: EngineRun, engine: type, name: str, cause: str) -> None:
    found = checks(run, engine)
    assert found[name].state == "differs"
    assert cause in found[name].text


@pytest.mark.parametrize(
    ("engine", "words"), [(faulty.NoNumbers, "not finite for request 0"), (faulty.TooFew, "log-probs for request 0")]
)
def test_unusable_numbers_are_no_verdict(run: EngineRun, engine: type, words: str) -> None:
    found = checks(run, engine)["engine"]
    assert found.state == "infrastructure"
    assert words in found.text


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("Dies", "exit code 7.*3 GiB are missing"),
        pytest.param("Hangs", "has not answered within 5 s", marks=pytest.mark.slow),
    ],
)
def test_dead_engine_leaves_nothing(engine: str, words: str) -> None:
    with EngineProcess(f"faulty_engines:{engine}", limit_s=600) as process:
        process.start(Path(), "fp32", {})
        process._process._limit_s = 5
        with pytest.raises(EngineFailed, match=words):
            process.score([[1, 2]])
        pid = process._process.process.pid
    assert process_state(pid) == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [("vlm", "did you mean 'vllm'"), ("nothing:Engine", "no module 'nothing'"), ("json:dumps", "has no describe")],
)
def test_wrong_engine_is_a_usage_error(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.backends.engines.registered_engines", lambda: {"vllm": "a:B"})
    with pytest.raises(UsageError, match=words):
        load_engine(name)
