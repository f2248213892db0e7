"""``parity train`` with adapters (LoRA): what is trained, sampled from, saved, resumed and counted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import exhaustive
from safetensors.torch import load_file
from test_train_memory import held
from train_runs import TINY, Trainings, assert_same, config_of, training, writing_to
from transformers import AutoModelForCausalLM

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.models.families import read_architecture
from conformance.oracle.decoder import load_weights
from conformance.runtime import Pool
from conformance.spec.layout import Layout
from conformance.spec.scenario import (
    ADAPTER,
    CONFIG_FILE,
    FILE_PREFIX,
    WEIGHTS_FILE,
    LoraConfig,
    Scenario,
    load_scenario,
    scenario_to_json,
)
from impl.models.lora import adapter_shapes_of, write_adapter, write_start
from impl.train.config import TrainConfig
from impl.train.experience import LOGPROB_GAP
from impl.train.plan import memory_of, parameter_shapes, states_of

LORA = LoraConfig(r=4, lora_alpha=6, target_modules=("q_proj", "v_proj", "down_proj"))
LLAMA = FIXTURES / "models" / "llama"


@pytest.fixture
def trainings(pool: Pool, tmp_path: Path) -> Trainings:
    return Trainings(pool, tmp_path / "logs")


def adapted(folder: Path, kind: str, **changes: Any) -> TrainConfig:
    config = training(folder, kind, **changes)
    return replace(config, scenario=replace(config.scenario, lora=LORA))


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """Of some tokens, in float64, by transformers and peft."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    if adapter:
        model = peft.PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False).double()
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits
    return found


def test_the_start_is_the_base_and_follows_from_the_seed(tmp_path: Path) -> None:
    shapes = parameter_shapes(LLAMA, "causal")
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        write_start(tmp_path / name, LORA, shapes, seed=seed)
    one, again, other = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("one", "again", "other"))
    assert all(torch.equal(one[name], again[name]) for name in one)
    for name, tensor in one.items():
        if ".lora_B." in name:
            assert not tensor.any()
        else:
            assert not torch.equal(tensor, other[name])
            assert 0.5 < float(tensor.abs().max()) * tensor.shape[1] ** 0.5 <= 1
    assert torch.equal(logits(LLAMA, tmp_path / "one"), logits(LLAMA))
    trained = {name.removeprefix(FILE_PREFIX): tensor + 0.1 for name, tensor in one.items()}
    write_adapter(tmp_path / "trained", tmp_path / "one", trained)
    assert not torch.equal(logits(LLAMA, tmp_path / "trained"), logits(LLAMA))  # peft finds them
    assert all(
        torch.equal(load_file(tmp_path / "trained" / WEIGHTS_FILE)[FILE_PREFIX + n], t) for n, t in trained.items()
    )


@pytest.mark.parametrize(
    ("backend", "layout"),
    [exhaustive(*one) for one in (("fsdp2", "dp2"), ("fsdp2", "tp2"), ("deepspeed", "dp2.zero2"), ("megatron", "tp2"))],
)
def test_lora_training_saves_adapter_apart_or_merged(
    trainings: Trainings, tmp_path: Path, backend: str, layout: str
) -> None:
    config = adapted(tmp_path, "sft", backend=backend, layout=layout)
    config = writing_to(config, save_path=tmp_path / "apart")
    lines = trainings(config)
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    base, saved = (load_weights(at, read_architecture(LLAMA), torch.float64) for at in (LLAMA, tmp_path / "apart"))
    assert all(torch.equal(base[name], saved[name]) for name in base)
    began = load_file(tmp_path / "log.jsonl.adapter" / WEIGHTS_FILE)
    ended = load_file(tmp_path / "apart" / ADAPTER / WEIGHTS_FILE)
    assert began.keys() == ended.keys()
    assert not any(torch.equal(began[name].double(), ended[name].double()) for name in began)
    merged = writing_to(config, log=tmp_path / "merged.jsonl", save_path=tmp_path / "merged", merged=True)
    assert_same(trainings(merged), lines, 1e-12)
    assert not (tmp_path / "merged" / ADAPTER).exists()
    apart, together = logits(tmp_path / "apart", tmp_path / "apart" / ADAPTER), logits(tmp_path / "merged")
    assert (apart - logits(LLAMA)).norm() > 1e-3 * apart.norm()
    assert (apart - together).norm() < 1e-6 * apart.norm(), "weights are written as the source has them, in float32"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "layout"), [("fsdp2", "dp2"), ("deepspeed", "dp2.zero3")])
def test_responses_are_sampled_from_the_policy_with_its_adapter(
    trainings: Trainings, tmp_path: Path, backend: str, layout: str
) -> None:
    config = adapted(tmp_path, "grpo", backend=backend, layout=layout, objective={"kl_loss_coef": 0.1})
    lines = trainings(config)
    assert max(line[f"{LOGPROB_GAP}/max"] for line in lines) < 1e-12
    assert lines[0]["actor/kl_loss"] == 0.0 < lines[-1]["actor/kl_loss"], (
        "the reference is the base, which the policy leaves"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "layout"),
    [("fsdp2", "tp2"), ("fsdp2", "sp2"), ("deepspeed", "dp2.zero2"), ("deepspeed", "dp2"), ("megatron", "pp2")],
)
@pytest.mark.parametrize("kind", ["sft", "grpo", "ppo"])
def test_all_backends_and_layouts_train_the_same(
    trainings: Trainings, tmp_path: Path, backend: str, layout: str, kind: str
) -> None:
    first = trainings(adapted(tmp_path, kind))
    assert_same(trainings(adapted(tmp_path / "other", kind, backend=backend, layout=layout)), first, 1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["sft", "grpo"])
@pytest.mark.parametrize(("backend", "layout"), [("fsdp2", "dp2"), ("deepspeed", "dp2.zero2")])
def test_a_training_of_adapters_goes_on_as_if_it_never_had_stopped(
    trainings: Trainings, tmp_path: Path, backend: str, layout: str, kind: str
) -> None:
    config = adapted(tmp_path, kind, backend=backend, layout=layout, steps=4)
    whole = trainings(config)
    divergence = writing_to(config, log=tmp_path / "divergence.jsonl", ckpt_path=tmp_path / "checkpoints")
    trainings(replace(divergence, scenario=replace(divergence.scenario, steps=2)))
    again = writing_to(divergence, load_checkpoint=True)
    scaled = replace(again, scenario=replace(again.scenario, lora=replace(LORA, lora_alpha=12)))
    refused = trainings.outcome(scaled, fresh=True)
    assert "began with lora_alpha=6" in refused.reason
    assert trainings(again, fresh=True) == whole


def test_options_become_adapters() -> None:
    config = config_of("sft", "fsdp2", *TINY, "--lora-rank", "8", "--target-modules", "q_proj,v_proj")
    assert config.scenario.lora == LoraConfig(r=8, lora_alpha=16, target_modules=("q_proj", "v_proj"))
    said = ("--lora-rank", "2", "--lora-alpha", "3", "--lora-save", "merged", "--save-path", "out")
    config = config_of("grpo", "deepspeed", *TINY, *said)
    assert config.scenario.lora == LoraConfig(r=2, lora_alpha=3, target_modules="all-linear")
    assert config.output.merged
    assert config_of("sft", "fsdp2", *TINY).scenario.lora is None


@pytest.mark.parametrize(
    ("backend", "said", "told"),
    [
        ("fsdp2", "--lora-alpha 8", "without --lora-rank there are none; give a rank"),
        ("fsdp2", "--target-modules q_proj", "without --lora-rank there are none"),
        ("fsdp2", "--lora-rank 4 --target-modules w1", "names 'w1', which matches no linear layer"),
        ("fsdp2", "--lora-rank 4 --target-modules q_proj,", "--target-modules"),
        ("fsdp2", "--lora-rank 4 --lora-save merged", "needs a folder; give --save-path"),
        ("fsdp2", "--lora-rank 0", "--lora-rank must be 1 or more"),
        ("deepspeed", "--lora-rank 4 --param-dtype fp16", "fp16"),
    ],
)
def test_what_no_adapter_can_be_is_refused_with_advice(backend: str, said: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        config_of("sft", backend, *TINY, *said.split())
    assert told in str(refused.value)


def test_a_plan_counts_gradients_and_moments_of_adapters_alone() -> None:
    whole, adapters = (config_of("sft", "fsdp2", *TINY, *said) for said in ((), ("--lora-rank", "4")))
    (before,), (after,) = memory_of(whole), memory_of(adapters)
    assert after.states.gradients < before.states.gradients / 5
    assert after.states.optimizer == 2 * after.states.gradients
    assert after.states.weights == before.states.weights + after.states.gradients


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "layout", "precision"),
    [("fsdp2", "dp2", "bf16"), ("deepspeed", "dp2.zero2", "bf16"), ("deepspeed", "dp2.zero3", "fp32")],
)
def test_calculated_states_are_what_a_rank_holds(
    pool: Pool, tmp_path: Path, backend: str, layout: str, precision: str
) -> None:
    scenario = _scenario(precision)
    shapes = parameter_shapes(LLAMA, "causal")
    model = tmp_path / "model"
    model.mkdir()
    for file in LLAMA.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    write_start(model / ADAPTER, LORA, shapes, seed=0)
    assert json.loads((model / ADAPTER / CONFIG_FILE).read_text())["r"] == LORA.r
    measured = held(pool, tmp_path, backend, scenario_to_json(scenario), layout, {"policy": str(model)})
    of = Layout.parse(layout)
    states = states_of(backend, of, scenario.precision, shapes, trained=False)
    states += states_of(backend, of, scenario.precision, adapter_shapes_of(LORA, shapes), trained=True)
    assert {"policy": states.ready} == pytest.approx(measured, rel=0.05)


def _scenario(precision: str) -> Scenario:
    scenario = load_scenario(
        FIXTURES / "scenarios" / "sft-packed.toml",
        data_overrides={"rows": 8},
        model="models/llama",
        precision=precision,
        steps=2,
        accumulation=2,
    )
    return replace(scenario, lora=LORA)
