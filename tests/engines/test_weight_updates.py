"""New weights of rollout engines: planted faults are named, broken updates are refused, trainers' weights arrive."""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

import faulty_engines as faulty
import pytest
import torch
import transformers
from safetensors.torch import load_file

from conformance.backends.engines import EngineFailed, EngineInfo, NotSupported, ServedEngine
from conformance.backends.faults import Fault, faults_of, plant
from conformance.cli.main import main
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.inputs import batches_of, prepare_inputs
from conformance.judge.engines import Check, judge_experts
from conformance.models.folders import named_tensors
from conformance.runner.engine_rollouts import judge_interrupted
from conformance.runner.engine_run import EngineRun, Expected, Requests, _experts, judge_numbers, write_weights
from conformance.runner.weight_updates import Trained, judge_against, judge_updates, moved
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import ADAPTER, WEIGHTS_FILE, load_scenario
from impl.engines.sglang_engine import SglangEngine
from impl.engines.transformers_engine import copy_tensors
from impl.engines.vllm_engine import VllmEngine
from impl.faults.served import ENGINE_FAULTS


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


def interrupted(engine: type[faulty.OneWay]) -> Check:
    run, expected, new = place("qwen3")
    served = ServedEngine(engine())
    served.start(run.folder, "fp32", {})
    return judge_interrupted(served, "it", faulty.WAY, new.folder, expected.at(new.folder).asked, expected.asked)


def test_interrupted_requests_have_both_weights() -> None:
    found = interrupted(faulty.OneWay)
    assert (found.state, found.text) == ("conforms", "6 tokens of the old weights, 6 of the new ones")


def test_keys_of_old_weights_are_named() -> None:
    found = interrupted(faulty.KeepsKeys)
    assert found.state == "differs"
    assert re.fullmatch("tokens after the update are of neither weights, up to .* off: keys and values .*", found.text)


def test_old_weights_after_an_interruption_are_named() -> None:
    with plant(["stale-weights"], faulty.OneWay, faults_of(faulty.OneWay)):
        found = interrupted(faulty.OneWay)
    assert (found.state, found.text) == ("differs", "tokens after the update are of the other weights")


def test_experts_are_those_of_the_reference() -> None:
    run, expected, _ = place("mixtral")
    served = ServedEngine(faulty.OneWay())
    found = _experts(served, run, {}, expected)
    assert (found.state, found.text.partition(" of ")[0]) == ("conforms", "0.0%"), found


EXPERTS = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:2] for i in range(60)])
EXPERTS = EXPERTS.unflatten(0, (20, 3))  # (tokens, routers, K)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda x: torch.cat([x[:1], x[:-1]]), "those of the token before"),
        (lambda x: torch.cat([x[1:], x[-1:]]), "those of the token after"),
        (lambda x: x.roll(-1, 1), "those of the next router"),
        (lambda x: x - 1, "expert i + 1 is called expert i"),
        (lambda x: x * 0, "not explained"),
    ],
)
def test_wrong_experts_are_named(spoil: Callable[[torch.Tensor], torch.Tensor], why: str) -> None:
    found = judge_experts([spoil(EXPERTS)], [EXPERTS], [[EXPERTS]])
    assert (found.state, found.text.partition(";")[0]) == ("differs", why)
    assert judge_experts([EXPERTS.flip(-1)], [EXPERTS], [[EXPERTS]]).state == "conforms"


def test_rounding_may_change_an_expert() -> None:
    other = EXPERTS.clone()
    other[0, 0, 0] = next(expert for expert in range(8) if expert not in EXPERTS[0, 0])
    assert judge_experts([other], [EXPERTS], [[other]]).state == "conforms"
    assert judge_experts([other], [EXPERTS], [[EXPERTS]]).state == "differs"


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


class DiesInTwoWays(faulty.OneWay):
    """Answers nothing after an update in two of its ways, of which one raises."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return replace(super().describe(), ways={"raises": "", "silent": "", faulty.WAY: ""})

    def update(self, way: str, folder: Path) -> None:
        if way != faulty.WAY:
            del self._engine
        if way != "silent":
            super().update(way, folder)


def test_way_after_a_dead_engine_is_judged() -> None:
    run, expected, new = place("qwen3")
    served: list[ServedEngine] = []

    def serve() -> ServedEngine:
        served.append(ServedEngine(DiesInTwoWays()))
        return served[-1]

    found = list(judge_updates(serve(), replace(run, serve=serve), expected, new))
    assert len(served) == 3
    assert [check.state for check in found] == ["unsupported", "differs", "conforms", "conforms", "conforms"]
    assert re.match("raised: .* has no attribute '_engine'; the engine answers nothing", found[0].text)
    assert found[1].text.startswith("no error; the engine answers nothing any more: AttributeError")


class SkipsNorms(faulty.OneWay):
    """Updates all but norms in its first way, and nothing in its second one."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return replace(super().describe(), ways={"skips": "", "nothing": ""})

    def update(self, way: str, folder: Path) -> None:
        if way == "skips":
            copy_tensors(self._engine.model, {n: t for n, t in named_tensors(folder) if "norm" not in n})


def test_each_way_begins_with_the_first_weights() -> None:
    found = updates(SkipsNorms(), *place("qwen3"))
    assert [check.text.partition(":")[0] for check in found] == ["partly new", "stale"]


class StopsAtBrokenWeights(faulty.OneWay):
    """Answers nothing after an update that fails, until it is started again."""

    error: ClassVar[type[Exception]] = UsageError

    @classmethod
    def describe(cls) -> EngineInfo:
        return replace(super().describe(), ways={"first": "", faulty.WAY: ""})

    def update(self, way: str, folder: Path) -> None:
        kept = self._engine
        del self._engine
        if "broken" in folder.name:
            raise self.error("the weights do not fit")
        self._engine = kept
        super().update(way, folder)


@pytest.mark.parametrize("error", [UsageError, NotSupported])
def test_stopped_engine_is_started_again(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopsAtBrokenWeights, "error", error)
    run, expected, new = place("qwen3")
    found = updates(
        StopsAtBrokenWeights(), replace(run, serve=lambda: ServedEngine(StopsAtBrokenWeights())), expected, new
    )
    assert [check.state for check in found] == ["conforms"] * 6, found
    assert "and answers nothing until" in found[1].text


def test_engine_that_cannot_run_leaves_the_next_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "one": NotSupported("head size 8 is not among 32, 64"),
        "two": EngineFailed("its process has ended: memory"),
    }

    def serve(name: str, **_: object) -> ServedEngine:
        raise words[name]

    monkeypatch.setattr("conformance.cli.engine.EngineProcess", serve)
    model = str(FIXTURES / "models" / "qwen3")
    capsys.readouterr()
    assert main(["engine", "--model", model, "--engine", "one", "--engine", "two", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in found] == ["unsupported", "infrastructure"]
    assert [one["checks"][0]["text"] for one in found] == [str(error) for error in words.values()]


def test_missing_package_or_precision_is_unsupported() -> None:
    for package, engine in (("vllm", VllmEngine), ("sglang", SglangEngine)):
        if importlib.util.find_spec(package) is None:
            with pytest.raises(NotSupported, match="install it in an environment of its own"):
                engine()
    with pytest.raises(NotSupported, match="computes in fp32, bf16, not in fp16"):
        ServedEngine(faulty.OneWay()).start(Path(), "fp16", {})


@pytest.mark.slow
def test_weights_of_several_trainers_arrive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama = FIXTURES / "models" / "llama"
    config = transformers.AutoConfig.from_pretrained(llama, num_hidden_layers=3, head_dim=16, vocab_size=416)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "own")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / name, tmp_path / "own")
    engine = ["--engine", "impl.engines.transformers_engine:TransformersEngine", "--way", "tensors"]
    capsys.readouterr()
    against = ["--against", "fsdp2,megatron", "--budget", "900"]
    code = main(["engine", "--model", str(tmp_path / "own"), *engine, *against, "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check["text"] for check in found["checks"]}
    assert code == 0, checks
    for trainer in ("fsdp2 dp2", "megatron dp2"):
        assert "agree with the reference" in checks[f"training by {trainer}"]
        assert "ratios" in checks[f"against {trainer}"]
        assert checks[f"update by tensors, from {trainer}"] == "new, and back again"
    broken = [name for name in checks if ", with" in name]
    assert len(broken) == 2, "what an engine refuses is judged once"


@pytest.mark.parametrize(("model", "scenario"), [("mixtral", "sft-packed"), ("qwen3", "sft-lora")])
def test_written_weights_have_the_names_of_their_source(model: str, scenario: str) -> None:
    run, expected, _ = place(model, scenario)
    folder = run.folder.with_name("written")
    write_weights(expected.weights, source=run.folder, folder=folder)
    written, source = dict(named_tensors(folder)), dict(named_tensors(run.folder))
    assert written.keys() == source.keys()
    assert all(torch.equal(tensor, source[name].float()) for name, tensor in written.items())
    files = [one / ADAPTER / WEIGHTS_FILE for one in (folder, run.folder) if (one / ADAPTER).exists()]
    assert len(files) == 2 * (scenario == "sft-lora")
    assert all(torch.equal(*pair) for pair in zip(*(load_file(one).values() for one in files), strict=True))
