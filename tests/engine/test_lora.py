"""Adapters (LoRA): the oracle's are those of peft, only they are trained, saved, resumed and merged, and faults show.

The profile `quick`, which CI runs too, has a cell of FSDP2 and one of DeepSpeed; the cells here
are the nightly's.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import BACKENDS, MICRO_BATCHES, ROWS, assert_honest, cell_of, ranks_of, record_of
from conftest import make_cell
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conformance.backends.protocol import BackendEntry, Unsupported
from conformance.core.errors import UsageError
from conformance.core.host import resolve
from conformance.data.inputs import FrozenInputs, prepare_inputs
from conformance.matrix.cell import Cell, Handover, Phase
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.primitives import HONEST
from conformance.oracle.role_model import read_decoder
from conformance.oracle.run import POLICIES
from conformance.runner.session import Session
from conformance.runtime import Pool
from conformance.spec.layout import Layout
from conformance.spec.observables import POLICY
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import (
    ADAPTER,
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraConfig,
    Scenario,
    is_adapter,
    load_scenario,
    scenario_to_json,
)
from impl.faults.models import MERGE_FAULTS
from impl.models.lora import named_parameters

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
TOKENS = torch.tensor([[5, 17, 30, 211, 8, 90, 41, 3, 77, 150, 29]])


def scenario(model: str = "llama", **changes: Any) -> Scenario:
    file = resolve("scenarios") / "sft-lora.toml"
    return load_scenario(
        file,
        model=f"models/{model}",
        precision="exact",
        data_overrides={"rows": ROWS},
        accumulation=MICRO_BATCHES,
        **changes,
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> FrozenInputs:
    return prepare_inputs(scenario(), tmp_path_factory.mktemp("inputs"))


def of_peft(folder: Path, adapter: Path) -> Any:
    import peft  # takes long, and other workers of pytest do not need it

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True, torch_device="cpu").eval()


# The oracle


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS)),
        ("phi3", LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", use_rslora=True)),
        ("qwen2", LoraConfig(r=2, lora_alpha=1, target_modules=("layers.1.self_attn.k_proj", "up_proj"))),
    ],
)
def test_the_oracle_computes_what_peft_computes_and_merges(tmp_path: Path, family: str, lora: LoraConfig) -> None:
    asked = scenario(family, lora={**vars(lora), "target_modules": lora.target_modules})
    folder = prepare_inputs(asked, tmp_path).models["policy"]
    decoder = read_decoder(folder).adapted(lora)
    weights = decoder.load(folder, torch.float64, HONEST, trained=True, devices=["cpu"])
    leaves = {name: tensor.requires_grad_(is_adapter(name)) for name, tensor in weights.items()}
    with exact_tier():  # transformers rounds to float32 in places
        logits = decoder.forward(TOKENS[0], leaves, POLICIES["float64"])
        logits.square().sum().backward()
        model = of_peft(folder, folder / ADAPTER)
        theirs = model(input_ids=TOKENS, use_cache=False).logits
        theirs.square().sum().backward()
    assert (logits - theirs[0]).norm() <= 1e-13 * theirs.norm()
    gradients = {name: p.grad for name, p in named_parameters(model.get_base_model()) if p.requires_grad}
    assert gradients.keys() == set(decoder.adapter_names)
    for name, gradient in gradients.items():
        own = leaves[name].grad
        assert own is not None
        assert gradient is not None
        assert (own - gradient).norm() <= 1e-13 * gradient.norm(), name
    merged = dict(model.merge_and_unload().named_parameters())
    for name, tensor in decoder.merged(weights).items():
        assert (merged[name] - tensor).norm() <= 1e-15 * tensor.norm(), name


# What everybody begins with


def test_an_adapter_is_not_neutral_and_the_base_loses_nothing_in_bf16(inputs: FrozenInputs) -> None:
    folder = inputs.models["policy"]
    adapter = load_file(folder / ADAPTER / "adapter_model.safetensors")
    assert len(adapter) == 2 * 2 * len(TARGETS)  # A and B, two layers
    assert all(tensor.abs().min() > 0 for tensor in adapter.values())
    told = json.loads((folder / ADAPTER / "adapter_config.json").read_text(encoding="utf-8"))
    assert told["lora_alpha"] != told["r"]
    base = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in base.values())
    source = load_file(resolve("models/llama") / "model.safetensors")
    assert base.keys() == source.keys()
    assert all(torch.equal(base[name], tensor.bfloat16().float()) for name, tensor in source.items())


def test_another_seed_has_another_adapter_and_a_reference_is_the_base(tmp_path: Path) -> None:
    file = resolve("scenarios") / "grpo-lora.toml"
    found = [
        prepare_inputs(load_scenario(file, model="models/llama", precision="exact", seed=seed), tmp_path).models
        for seed in (0, 1)
    ]
    for models in found:
        policy, reference = (load_file(models[name] / "model.safetensors") for name in ("policy", "reference"))
        assert all(torch.equal(policy[name], reference[name]) for name in policy)
        assert not (models["reference"] / ADAPTER).exists()
    first, second = (load_file(models["policy"] / ADAPTER / "adapter_model.safetensors") for models in found)
    assert not any(torch.equal(first[name], second[name]) for name in first)


# Cells


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "name", "model", "layout"),
    [
        ("fsdp2", "sft-lora", "llama", "tp2.seqpar.losspar"),
        ("deepspeed", "sft-lora", "qwen3", "dp2.tp2.zero2"),
        ("fsdp2", "grpo-lora", "pangu", "tp2"),
        ("fsdp2", "grpo-lora", "llama", "dp2"),
        ("fsdp2", "sft-lora", "qwen3", "dp2.sp2"),
        ("fsdp2", "sft-lora", "gemma3", "tp2.plan"),
        ("fsdp2", "sft-lora", "olmo2", "tp2.seqpar"),
        ("fsdp2", "sft-lora", "llama", "dp2.ckpt.offload"),
        ("deepspeed", "grpo-lora", "pangu", "tp2"),
        ("deepspeed", "sft-lora", "llama", "dp2.zero0"),
        ("deepspeed", "sft-lora", "llama", "sp2.zero1"),
        ("deepspeed", "sft-lora", "llama", "ulysses2.zero3"),
        ("deepspeed", "sft-lora", "gemma3", "dp2.zero3.ckpt.offload"),
        ("megatron", "sft-lora", "llama", "tp2.seqpar"),
        ("megatron", "sft-lora", "llama", "dp2.zero1.overlap"),
        ("megatron", "sft-lora", "qwen3", "dp2.pp2.zero1.ckpt"),
        ("megatron", "grpo-lora", "pangu", "sp2"),
    ],
)
def test_exact(session: Session, backend: str, name: str, model: str, layout: str) -> None:
    asked = cell_of(backend, name, model, layout, "exact")
    assert_honest(session, asked)
    record = record_of(session, asked)
    loaded, last = record.loaded.tensors(), record.steps[-1].tensors()
    moved = {
        key.removeprefix("weight/") for key, tensor in last.items() if key in loaded and _moved(tensor, loaded[key])
    }
    # Ranks draw a step of which no gradient is read, and it may be the last one.
    shown = {key for step in record.steps for key in step.tensors() if key.startswith("gradient/")}
    assert moved == {key.removeprefix("gradient/") for key in shown}
    assert all(map(is_adapter, moved))


def _moved(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    return not torch.equal(tensor, before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp2", "dp2"),
        ("fsdp2", "tp2"),
        *(("deepspeed", f"dp2.zero{stage}") for stage in (1, 2, 3)),
        ("deepspeed", "tp2"),
        ("megatron", "tp2.seqpar"),
    ],
)
def test_lower_precisions_are_as_good_as_a_single_process(
    session: Session, backend: str, layout: str, precision: PrecisionName
) -> None:
    verdict = session.run(cell_of(backend, "sft-lora", "llama", layout, precision)).verdict
    assert verdict.state == "conforms", verdict.reason


def program(backends: str, layouts: str, save: Handover, *faults: str, precision: PrecisionName = "exact") -> Cell:
    """Two phases of two steps each; ``backends`` and ``layouts`` of both, with -to- between them."""
    chain, ways = backends.split("-to-"), layouts.split("-to-")
    asked = cell_of(chain[0], "sft-lora", "llama", ways[0], precision, steps=4)
    phases = [
        Phase(backend=BACKENDS[backend], layout=Layout.parse(layout), steps=2, save=None if number else save)
        for number, (backend, layout) in enumerate(zip(chain, ways, strict=True))
    ]
    return Cell(scenario=asked.scenario, phases=tuple(phases), program=save, faults=faults)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backends", "layouts", "save"),
    [
        ("fsdp2-to-fsdp2", "dp2-to-tp2", "checkpoint"),
        ("deepspeed-to-fsdp2", "tp2.zero1-to-dp2", "merge"),
        ("fsdp2-to-fsdp2", "dp2-to-dp2", "checkpoint"),
        ("fsdp2-to-deepspeed", "tp2-to-dp2.zero3", "state"),
        ("fsdp2-to-deepspeed", "sp2-to-tp2.zero0", "merge"),
        ("deepspeed-to-deepspeed", "dp2.zero1-to-tp2.zero1", "checkpoint"),
        ("deepspeed-to-deepspeed", "tp2.zero1-to-dp2.zero1", "checkpoint"),
        ("deepspeed-to-deepspeed", "dp2.zero3-to-dp2.zero3", "checkpoint"),
        ("deepspeed-to-deepspeed", "dp2.zero2-to-tp2.zero3", "state"),
        ("deepspeed-to-fsdp2", "dp2.zero3-to-tp2", "export"),
        ("megatron-to-megatron", "tp2.seqpar-to-pp2", "checkpoint"),
        ("megatron-to-fsdp2", "tp2-to-dp2", "merge"),
        ("fsdp2-to-megatron", "dp2-to-tp2", "state"),
    ],
)
def test_a_training_of_adapters_goes_on(session: Session, backends: str, layouts: str, save: Handover) -> None:
    asked = program(backends, layouts, save)
    verdict = assert_honest(session, asked)
    loaded = {quantity.tensor for quantity in verdict.quantities if (quantity.stage, quantity.step) == ("weights", 2)}
    assert len(loaded) == 2 * 9 + 3 + 2 * 2 * len(
        TARGETS
    )  # as loaded by the second phase: of layers, outside, adapters
    before, after = (record_of(session, asked, phase) for phase in (0, 1))
    last, first = before.steps[-1].tensors(), after.loaded.tensors()
    changed = {name for name in last if name.startswith("weight/") and _moved(first[name], last[name])}
    names = {name.removeprefix("weight/") for name in changed}
    targets = {name.rpartition(".lora_")[0] for name in names if is_adapter(name)}
    assert len(targets) == (2 * len(TARGETS) if save == "merge" else 0)
    assert {name for name in names if not is_adapter(name)} == {f"{target}.weight" for target in targets}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "backend"), [("exact", "fsdp2"), ("fp32", "fsdp2"), ("exact", "deepspeed")])
def test_a_merge_without_its_scale_is_told_directly_after_loading(
    session: Session, precision: PrecisionName, backend: str
) -> None:
    (fault,) = MERGE_FAULTS
    before = fault.cells.layouts[backend]
    asked = program(f"{backend}-to-{backend}", f"{before}-to-{before}", "merge", fault.name, precision=precision)
    verdict = session.run(asked).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", fault.stage), verdict.reason
    first = [finding for finding in verdict.findings if (finding.stage, finding.step) == ("weights", 2)]
    assert verdict.findings[0] == first[0]
    assert len(first) == 2 * len(TARGETS)
    (loss,) = (q for q in verdict.quantities if (q.stage, q.tensor, q.step) == ("loss", "loss", 2))
    assert (loss.ratio <= 1) == ("loss" in fault.blind)


# What is exported


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "layout"), [("fsdp2", "tp2"), ("deepspeed", "dp2.zero3")])
def test_an_adapter_is_loaded_by_peft_alone_and_what_is_merged_computes_the_same(
    pool: Pool, inputs: FrozenInputs, tmp_path: Path, backend: str, layout: str
) -> None:
    outcome = pool.run(
        key=f"lora {backend}",
        config=ranks_of(backend, 2),
        task="backend_tasks:export",
        kwargs={
            "backend": backend,
            "scenario": scenario_to_json(scenario()),
            "layout": layout,
            "models": {"policy": str(inputs.models["policy"])},
            "batches": str(inputs.batches),
            "out": str(tmp_path),
        },
        log_dir=tmp_path / "logs",
        budget_s=120.0,
    )
    assert outcome.state == "done", outcome.reason
    assert {file.name for file in (tmp_path / "apart" / ADAPTER).glob("adapter*")} == {CONFIG_FILE, WEIGHTS_FILE}
    assert not (tmp_path / "merged" / ADAPTER).exists()
    start = load_file(inputs.models["policy"] / ADAPTER / WEIGHTS_FILE)
    trained = load_file(tmp_path / "apart" / ADAPTER / WEIGHTS_FILE)
    assert trained.keys() == start.keys()
    assert not any(torch.equal(trained[name], start[name].double()) for name in start)
    with exact_tier(), torch.no_grad():
        adapted = of_peft(inputs.models["policy"], tmp_path / "apart" / ADAPTER)  # on the base that everybody has
        merged = AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float64, attn_implementation="eager"
        )
        apart, together = (model.eval()(input_ids=TOKENS, use_cache=False).logits for model in (adapted, merged))
    assert (apart - together).norm() <= 1e-14 * apart.norm()


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, r"lora.r: Input should be greater than or equal to 1 \(got 0\)"),
        ({"r": 2.5}, "lora.r: Input should be a valid integer"),
        ({"lora_alpha": -1}, "lora.lora_alpha: Input should be greater than or equal to 1"),
        ({"target_modules": []}, "target_modules"),
        ({"lora_dropout": 0.1}, "lora.lora_dropout: there is no such key"),
    ],
)
def test_settings_that_no_adapter_has_are_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scenario(lora={"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **changes})


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            "llama",
            {"target_modules": ["query"]},
            "names 'query', which matches no linear layer .* use some of q_proj, k_proj, v_",
        ),
        (
            "llama",
            {"target_modules": ["lm_head"]},
            "names 'lm_head', which matches no linear layer inside the model's layers",
        ),
        (
            "phi3",
            {"target_modules": ["q_proj"]},
            "use some of qkv_proj, o_proj, gate_up_proj, down_proj, or 'all-linear'",
        ),
        (
            "qwen3-moe",
            {"target_modules": ["gate_proj"]},
            "adapters of experts, .*; name linear layers outside of experts, such as k_proj",
        ),
        (
            "qwen2-moe",
            {"target_modules": "all-linear"},
            "adapters of experts, such as model.layers.1.mlp.experts.0.down_proj",
        ),
    ],
)
def test_targets_that_a_model_lacks_are_refused_before_anything_runs(
    tmp_path: Path, model: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        prepare_inputs(scenario(model, lora={"r": 4, "lora_alpha": 6, **changes}), tmp_path)


def test_frozen_patterns_are_about_adapters(tmp_path: Path) -> None:
    optimizer = {"name": "sgd", "lr": 0.1, "frozen": ["model.embed_tokens.weight"]}
    with pytest.raises(UsageError, match=r"matches no trained parameter of llama; names look like .*lora_A"):
        prepare_inputs(scenario(optimizer=optimizer), tmp_path)
    some = scenario(optimizer={**optimizer, "frozen": ["*.lora_A.weight"]})
    prepare_inputs(some, tmp_path)
    assert some.trains(POLICY, "model.layers.0.self_attn.q_proj.lora_B.weight")
    assert not some.trains(POLICY, "model.layers.0.self_attn.q_proj.lora_A.weight")


@pytest.mark.parametrize(
    ("backend", "layout", "precision", "lora", "advice"),
    [
        ("megatron", "dp2", "fp16", {}, "fp16 rounds it; use bf16"),
        ("megatron", "pp2", "exact", {"target_modules": ["layers.0.self_attn.q_proj"]}, "nothing to train; .*pp1"),
        ("deepspeed", "dp2", "fp16", {}, "fp16 rounds it; use bf16"),
        ("fsdp2", "tp2", "exact", {"target_modules": ["layers.0.self_attn.q_proj"]}, "layout option 'plan'"),
    ],
)
def test_what_a_backend_lacks_for_adapters_is_unsupported_with_advice(
    backend: str, layout: str, precision: PrecisionName, lora: dict[str, Any], advice: str
) -> None:
    chosen = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **lora}
    asked = cell_of(backend, "sft-lora", "llama", layout, precision, lora=chosen)
    answer = BACKENDS[backend].load().supports(asked.scenario, asked.phases[0].layout)
    assert isinstance(answer, Unsupported)
    assert re.search(advice, answer.reason)


def test_a_backend_that_knows_nothing_of_adapters_is_not_asked_to_train_them(session: Session) -> None:
    unaware = BackendEntry(name="unaware", target="backend_tasks:Unaware")
    refused = session.refusal(make_cell("sft-lora", "llama", "dp2", "exact", backend=unaware))
    assert refused is not None
    assert (refused.state, refused.reason) == (
        "unsupported",
        "unaware has no export_merged, so it trains no adapters (lora)",
    )


def test_only_adapters_are_merged() -> None:
    packed = cell_of("fsdp2", "sft-packed", "llama", "dp2", "exact", steps=4)
    phase = replace(packed.phases[0], steps=2)
    with pytest.raises(UsageError, match="merges adapters, and scenario sft-packed has none; use another scenario"):
        Cell(scenario=packed.scenario, phases=(replace(phase, save="merge"), phase), program="merge")
