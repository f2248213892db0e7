"""What ``--dry-run`` calculates: states as ranks really hold them, parameters of the real models, the table."""

import math
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive, ranks_of
from fsdp2_tasks import value_folder

from conformance.core.host import FIXTURES
from conformance.models.folders import weight_shapes
from conformance.runtime import Pool
from conformance.spec.layout import Layout
from conformance.spec.observables import CRITIC, POLICY
from conformance.spec.precision import PRECISIONS
from conformance.spec.scenario import load_scenario, scenario_to_json
from impl.engine.memory_estimate import States, elements
from impl.train.plan import (
    Activations,
    ModelMemory,
    Sampler,
    activations_of,
    parameter_shapes,
    peak_of,
    read_sizes,
    states_of,
)

MODELS = FIXTURES / "models"


def held(
    pool: Pool, tmp_path: Path, backend: str, scenario: dict[str, Any], layout: str, models: dict[str, str]
) -> dict[str, int]:
    """Bytes of the rank that holds most when the gradients of a model are ready, without buckets."""
    outcome = pool.run(
        key=backend,  # the world of its cells
        config=ranks_of(backend, Layout.parse(layout).world_size),
        task="backend_tasks:held_bytes",
        kwargs={"backend": backend, "scenario": scenario, "layout": layout, "models": models},
        log_dir=tmp_path,
        budget_s=120,
    )
    assert outcome.state == "done", outcome.reason
    return {model: max(int(result[model]) for result in outcome.results) for model in outcome.results[0]}


@pytest.mark.parametrize(
    ("backend", "layout", "precision", "model"),
    [
        ("fsdp2", "dp2", "bf16", "pangu"),
        exhaustive("fsdp2", "dp2", "exact", "gemma3"),
        exhaustive("fsdp2", "tp2.plan", "bf16", "pangu"),
        exhaustive("fsdp2", "tp2", "fp32", "qwen3"),
        exhaustive("fsdp2", "sp2", "fp16", "llama"),
        exhaustive("fsdp2", "dp2.tp2", "bf16", "llama"),
        exhaustive("deepspeed", "dp2.zero0", "bf16", "pangu"),
        exhaustive("deepspeed", "dp2.zero0", "fp32", "pangu"),
        exhaustive("deepspeed", "dp2.zero1", "bf16", "pangu"),
        exhaustive("deepspeed", "dp2.zero1", "fp16", "pangu"),
        exhaustive("deepspeed", "dp2.zero1", "fp32", "pangu"),
        exhaustive("deepspeed", "dp2.zero2", "bf16", "qwen3"),
        exhaustive("deepspeed", "dp2.zero2", "fp32", "pangu"),
        exhaustive("deepspeed", "dp2.zero3", "bf16", "pangu"),
        exhaustive("deepspeed", "dp2.zero3", "exact", "llama"),
        exhaustive("deepspeed", "tp2", "bf16", "pangu"),
        exhaustive("deepspeed", "dp2.tp2.zero2", "bf16", "llama"),
        exhaustive("megatron", "dp2", "bf16", "pangu"),
        exhaustive("megatron", "dp2.zero1", "bf16", "pangu"),
        exhaustive("megatron", "dp2.zero1", "fp32", "llama"),
        exhaustive("megatron", "sp2.zero1", "fp16", "llama"),
        exhaustive("megatron", "tp2", "exact", "pangu"),
        exhaustive("megatron", "pp2", "bf16", "qwen3"),
        exhaustive("megatron", "pp2", "bf16", "llama"),
        exhaustive("megatron", "tp2.pp2", "fp32", "pangu"),
        ("deepspeed", "dp2.zero3.offload", "exact", "pangu"),
        exhaustive("deepspeed", "dp2.zero3.offload", "bf16", "pangu"),
        exhaustive("deepspeed", "dp2.zero2.offload", "exact", "pangu"),
        exhaustive("deepspeed", "dp2.zero2.offload", "bf16", "pangu"),
        exhaustive("deepspeed", "dp2.zero1.offload", "bf16", "pangu"),
        exhaustive("fsdp2", "dp2.offload", "exact", "pangu"),
        exhaustive("fsdp2", "dp2.offload", "bf16", "pangu"),
    ],
)
def test_calculated_states_are_what_a_rank_holds(
    pool: Pool, tmp_path: Path, backend: str, layout: str, precision: Any, model: str
) -> None:
    """On the CPU, offloaded states lie in the same memory as those that stay on the device."""
    scenario = load_scenario(
        FIXTURES / "scenarios" / "sft-packed.toml",
        data_overrides={"rows": 8},
        model=f"models/{model}",
        precision=precision,
        steps=2,
        accumulation=2,
    )
    folder = MODELS / model
    measured = held(pool, tmp_path, backend, scenario_to_json(scenario), layout, {"policy": str(folder)})
    shapes = parameter_shapes(folder, "causal")
    states = states_of(backend, Layout.parse(layout), precision, shapes, trained=True)
    largest = max(map(math.prod, shapes.values())) * PRECISIONS[precision].compute.bytes  # on its way to the host
    on_its_way = largest if "offload" in layout and ("zero1" in layout or "zero2" in layout) else 0
    assert {"policy": states.ready + states.host + on_its_way} == pytest.approx(measured, rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp2", "dp2"),
        ("deepspeed", "dp2.zero0"),
        ("deepspeed", "dp2.zero1"),
        ("deepspeed", "dp2.zero2"),
        ("deepspeed", "dp2.zero3"),
        ("megatron", "tp2"),
        ("megatron", "pp2"),
    ],
)
def test_frozen_models_and_critics_are_counted_as_they_are_held(
    pool: Pool, tmp_path: Path, backend: str, layout: str
) -> None:
    """At the moment when the policy's gradients are ready, and when the critic's are, which has its own beside them or
    in their place."""
    scenario = load_scenario(FIXTURES / "scenarios" / "ppo.toml", model="models/pangu", precision="bf16", steps=2)
    policy, critic = MODELS / "pangu", value_folder("pangu", tmp_path / "critic")
    folders = {"reference": policy, "policy": policy, "critic": critic}
    models = {role: str(folder) for role, folder in folders.items()}
    measured = held(pool, tmp_path, backend, scenario_to_json(scenario), layout, models)
    parsed, shapes = (
        Layout.parse(layout),
        {r: parameter_shapes(folders[r.name], r.head) for r in scenario.objective.roles},
    )
    states = {
        r.name: states_of(backend, parsed, "bf16", shapes[r], trained=r.trained) for r in scenario.objective.roles
    }
    lasting = sum(one.lasting for one in states.values())
    calculated = {name: lasting + states[name].freed for name in ("policy", "critic")}
    assert calculated == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("model", ["pangu", "llama", "qwen3"])
def test_shapes_of_a_configuration_are_those_of_the_weights(model: str, tmp_path: Path) -> None:
    bare = tmp_path / model
    bare.mkdir()
    (bare / "config.json").write_bytes((MODELS / model / "config.json").read_bytes())
    assert parameter_shapes(bare, "causal") == parameter_shapes(MODELS / model, "causal")
    assert parameter_shapes(bare, "causal") == weight_shapes(MODELS / model)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("openpangu-embedded-1b", 1.16e9),
        ("openpangu-embedded-7b", 8.03e9),
        ("llama-3-8b", 8.03e9),
        ("qwen3-8b", 8.19e9),
    ],
)
def test_real_models_have_as_many_parameters_as_they_are_named_for(model: str, parameters: float) -> None:
    assert elements(parameter_shapes(MODELS / model, "causal")) == pytest.approx(parameters, rel=0.005)


def test_a_value_model_has_a_head_of_one_row() -> None:
    shapes = parameter_shapes(MODELS / "openpangu-embedded-7b", "value")
    assert shapes["score.weight"] == (1, 4096)
    assert "lm_head.weight" not in shapes


def test_offload_takes_what_lasts_off_the_device() -> None:
    shapes = parameter_shapes(MODELS / "llama", "causal")
    for backend, zero in (("fsdp2", ""), ("deepspeed", ".zero3"), ("deepspeed", ".zero2")):
        plain, away = (
            states_of(backend, Layout.parse(f"dp2{zero}{option}"), "bf16", shapes, trained=True)
            for option in ("", ".offload")
        )
        assert away.ready + away.host >= plain.ready, "DeepSpeed has buffers beside"
        assert (away.ready + away.host == plain.ready) == (backend == "fsdp2")
        assert away.ready == (plain.weights if zero == ".zero2" else 0)


@pytest.mark.parametrize(("frees", "peak"), [(False, 9 + 30 + 12), (True, 9 + 20 + 3)])
def test_memory_estimate_frees_gradients_after_update(frees: bool, peak: int) -> None:
    models = [
        ModelMemory(
            role=role,
            parameters=0,
            states=States(weights=weights, gradients=gradients, freed=frees * gradients, update=3),
            activations=Activations(kept=0, layer=0, logits=0),
        )
        for role, weights, gradients in ((POLICY, 5, 20), (CRITIC, 4, 10))
    ]
    assert peak_of(models, Sampler(cache=12)) == peak


def activations(layout: str, **changes: Any) -> Any:
    given: dict[str, Any] = {"compute": 2, "tokens": 4096, "micro_batches": 4, "entropy": False}
    sizes = read_sizes(MODELS / "llama-3-8b")
    return activations_of("megatron", Layout.parse(layout), sizes, **{**given, **changes})


def test_a_layer_keeps_the_terms_of_the_formula() -> None:
    h, f, kv, a = 4096, 14336, 1024, 32
    of_norms, of_attention, of_mlp = 2 * 2 * 2 * h, 2 * (2 * h + 2 * kv) + 4 * a, 2 * 4 * f
    assert activations("dp1").kept == 32 * 4096 * (of_norms + of_attention + of_mlp)
    assert activations("tp2").kept == 32 * 4096 * (of_norms + (of_attention + of_mlp) // 2)
    assert activations("tp2.seqpar").kept * 2 == activations("dp1").kept


def test_checkpointing_keeps_the_input_of_each_layer_and_one_layer_again() -> None:
    plain, again = activations("dp1"), activations("dp1.ckpt")
    assert again.kept == 32 * 4096 * 2 * 4096
    assert again.layer * 32 == plain.kept


def test_the_first_stage_keeps_a_micro_batch_for_every_stage() -> None:
    assert activations("pp4").kept == activations("dp1").kept  # a quarter of the layers, four micro-batches
    assert activations("pp4", micro_batches=1).kept * 4 == activations("dp1").kept


def test_logits_are_counted_with_the_copies_of_the_loss() -> None:
    padded = 128256  # a multiple of 128
    assert activations("dp1").logits == 4096 * padded * (2 + 4 + 2)
    assert activations("dp1", entropy=True).logits == 4096 * padded * (2 + 4 + 4 + 2)
    assert activations("tp2").logits * 2 == 4096 * padded * (2 + 4 + 2)
    assert activations("dp1", compute=4).logits == 4096 * padded * (4 + 4)
