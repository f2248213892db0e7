"""gpt-oss, DeepSeek-V2 and V3, Qwen3-Next: sinks, latent and linear attention, other routers and experts.

What all mixtures share is in test_mixture.py and test_mixture_cells.py, and test_oracle.py holds the oracle of all
against transformers.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import BACKENDS, assert_honest, cell_of, exhaustive, record_of
from test_oracle import BATCH, DOCUMENTS, FLOAT64, LONG, folder, observe_sft, policy_model
from transformers import AutoConfig, AutoModelForCausalLM

from conformance.backends.protocol import Unsupported
from conformance.core.errors import UsageError
from conformance.matrix.cell import Handover
from conformance.models.components import ClampedMlp, LatentAttention, Norm, Yarn
from conformance.models.families import read_architecture
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.decoder import forward, load_weights
from conformance.oracle.role_model import Written
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from impl.models.lazy_weights import published_buffers
from impl.models.loading import load_model

pytestmark = pytest.mark.slow

DEEPSEEK = ("deepseek-v3", "deepseek-v2")
ON_MEGATRON = ("dp2.zero1", "pp2", "ep2.ckpt", "ep2.tp2.seqpar", "ep2.pp2", "ep2.sp2", "pp2.vpp2")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("backend", "scenario", "model", "layout"),
    [
        ("fsdp2", "sft-packed", "gpt-oss", "sp2"),
        ("deepspeed", "sft-packed", "deepseek-v3", "dp2.zero2"),
        ("fsdp2", "sft-packed", "qwen3-next", "dp2"),
        *(exhaustive("deepspeed", "sft-packed", "qwen3-next", f"dp2.zero{stage}") for stage in (1, 2, 3)),
        *(exhaustive("fsdp2", "sft-packed", "qwen3-next", layout) for layout in ("dp2.ckpt", "dp2.rep2", "dp2.ep2")),
        *(exhaustive("fsdp2", scenario, "qwen3-next", "dp2") for scenario in ("sft-padded", "grpo")),
        exhaustive("megatron", "sft-packed", "gpt-oss", "tp2.seqpar"),
        *(
            exhaustive("fsdp2", "sft-packed", "gpt-oss", layout)
            for layout in ("dp2", "tp2.plan", "dp2.ep2", "sp2.tp2.plan")
        ),
        *(exhaustive("fsdp2", "grpo", "gpt-oss", layout) for layout in ("tp2.seqpar", "ep2")),
        exhaustive("fsdp2", "sft-padded", "gpt-oss", "dp2.ckpt"),
        exhaustive("deepspeed", "sft-packed", "gpt-oss", "sp2"),
        *(
            exhaustive("megatron", "sft-packed", "gpt-oss", layout)
            for layout in (
                *(
                    "dp2",
                    "dp2.zero1",
                    "pp2",
                    "pp2.vpp2.zero1",
                    "ep2",
                    "ep2.zero1.overlap",
                    "sp2",
                    "ep2.sp2",
                    "dp2.ckpt",
                ),
                *("tp2.seqpar.zero1", "dp2.tp2.seqpar", "tp2.pp2.seqpar"),
            )
        ),
        *(exhaustive("megatron", "grpo", "gpt-oss", layout) for layout in ("dp2", "ep2", "tp2.seqpar")),
        exhaustive("megatron", "sft-packed", "deepseek-v3", "tp2.seqpar"),
        exhaustive("deepspeed", "sft-packed", "gpt-oss", "dp2.zero2"),
        exhaustive("deepspeed", "sft-packed", "gpt-oss", "dp2.zero3"),
        exhaustive("fsdp2", "sft-padded", "gpt-oss", "tp2.seqpar.losspar.ckpt"),
        exhaustive("fsdp2", "sft-padded", "gpt-oss", "ep2.tp2.seqpar.losspar.ckpt"),
        *(exhaustive("fsdp2", "sft-packed", m, layout) for m in DEEPSEEK for layout in ("dp2", "tp2", "sp2", "ep2")),
        *(exhaustive("megatron", "sft-packed", m, layout) for m in DEEPSEEK for layout in ON_MEGATRON),
        *(exhaustive("megatron", "grpo", model, "pp2") for model in DEEPSEEK),
        *(exhaustive("megatron", "sft-padded", model, "sp2.zigzag") for model in DEEPSEEK),
        *(exhaustive("deepspeed", "sft-packed", model, "dp2.zero3") for model in DEEPSEEK),
        *(exhaustive("deepspeed", "sft-packed", model, "sp2.zero2") for model in DEEPSEEK),
        *(exhaustive("fsdp2", "grpo", model, "dp2") for model in ("gpt-oss", *DEEPSEEK)),
        *(exhaustive("deepspeed", "grpo", model, "dp2.zero2") for model in ("gpt-oss", *DEEPSEEK)),
    ],
)
def test_exact(session: Session, backend: str, scenario: str, model: str, layout: str) -> None:
    assert_honest(session, cell_of(backend, scenario, model, layout, "exact"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("backend", "layout", "model"),
    [
        *(("fsdp2", "dp2", model) for model in ("gpt-oss", *DEEPSEEK)),
        *(("deepspeed", "dp2.zero2", model) for model in ("gpt-oss", *DEEPSEEK)),
        *(("megatron", layout, model) for model in DEEPSEEK for layout in ("dp2", "ep2", "tp2.seqpar")),
        ("megatron", "tp2.seqpar", "gpt-oss"),
        ("deepspeed", "sp2", "gpt-oss"),
    ],
)
def test_lower_precisions_are_as_good_as_a_single_process(
    session: Session, backend: str, layout: str, model: str, precision: PrecisionName
) -> None:
    verdict = session.run(cell_of(backend, "sft-packed", model, layout, precision)).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "layout"), [("fsdp2", "dp2"), ("deepspeed", "dp2"), ("megatron", "ep2"), ("megatron", "tp2.seqpar")]
)
def test_grpo_on_deepseek_v3_in_bf16(session: Session, backend: str, layout: str) -> None:
    """Its noisiest row of a gradient is still one that can be judged: docs/explanations/mixture-of-experts.md."""
    verdict = session.run(cell_of(backend, "grpo-half", "deepseek-v3", layout, "bf16")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "scenario", "layout"),
    [
        ("fsdp2", "sft-packed", "sp2"),
        ("deepspeed", "sft-packed", "dp2"),
        ("megatron", "sft-packed", "tp2.seqpar"),
        ("megatron", "sft-overflow", "ep2"),
    ],
)
def test_gpt_oss_in_fp16(session: Session, backend: str, scenario: str, layout: str) -> None:
    verdict = session.run(cell_of(backend, scenario, "gpt-oss", layout, "fp16")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize(
    ("backend", "model", "layout", "advice"),
    [
        ("fsdp2", "gpt-oss", "sp2.zigzag", "zigzag has no attention sinks; use default context parallelism"),
        ("deepspeed", "gpt-oss", "ulysses2", "Ulysses has no attention sinks; use default context parallelism"),
        ("fsdp2", "gpt-oss", "tp2", "carries no tensor-parallel plan; use the layout option 'plan', or tp1"),
        ("fsdp2", "deepseek-v3", "tp2.plan", "plan has no tensor-parallel plan for 'deepseek_v3'; leave it out"),
        ("deepspeed", "gpt-oss", "tp2", "use tp1"),
        ("deepspeed", "deepseek-v3", "ulysses2", "has several; use sp2"),
        ("deepspeed", "deepseek-v3", "tp2", "use tp1"),
        ("megatron", "gpt-oss", "tp2", "add seqpar"),
        (
            "megatron",
            "gpt-oss",
            "tp4.seqpar",
            "share out 6 whole experts; use a tp that divides this number, without ep",
        ),
        (
            "megatron",
            "gpt-oss",
            "ep2.tp2.seqpar",
            "share out 6 whole experts; use a tp that divides this number, without ep",
        ),
        ("megatron", "deepseek-v3", "tp2", "only with sequence parallelism; add seqpar"),
    ],
)
def test_what_a_backend_lacks_is_unsupported_with_advice(backend: str, model: str, layout: str, advice: str) -> None:
    cell = cell_of(backend, "sft-packed", model, layout, "exact")
    answer = cell.phases[0].backend.load().supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(answer, Unsupported)
    assert advice in answer.reason


# gpt-oss ------------------------------------------------------------------------------------------------------------


def logits_with(family: str, **changed: torch.Tensor) -> torch.Tensor:
    """Of the longest document, with other weights of the names that end so."""
    model = policy_model(family)
    weights = {n: changed.get(n.rpartition(".")[2], w).expand(w.shape) for n, w in model.weights.items()}
    return model.decoder.forward(torch.tensor(LONG.tokens), weights, FLOAT64)


def test_sinks_take_part_in_the_softmax() -> None:
    own = logits_with("gpt-oss")
    without = logits_with("gpt-oss", sinks=torch.tensor(-torch.inf, dtype=torch.float64))
    assert (own - without).abs().max() > 0.1
    assert bool(without.isfinite().all())


def test_the_clamp_of_the_experts_acts_on_gates_and_on_ups() -> None:
    own, model = logits_with("gpt-oss"), policy_model("gpt-oss")
    assert isinstance(model.decoder, Written)
    moe = model.decoder.architecture.routers[0]
    assert isinstance(moe.expert, ClampedMlp)
    without = replace(moe, expert=replace(moe.expert, limit=1e9))
    layers = tuple(replace(layer, feed_forward=without) for layer in model.decoder.architecture.layers)
    unclamped = replace(model.decoder.architecture, layers=layers)
    assert (forward(torch.tensor(LONG.tokens), model.weights, unclamped, FLOAT64) - own).abs().max() > 1e-2
    biases = torch.stack([w for name, w in model.weights.items() if name.endswith("gate_up_proj_bias")])
    assert float(biases[..., ::2].max()) > 7
    assert float(biases[..., 1::2].abs().max()) > 7


def test_quantized_weights_are_refused_with_a_way_on(tmp_path: Path) -> None:
    values = json.loads((folder("gpt-oss") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(UsageError, match="dequantize=True"):
        read_architecture(tmp_path)


# DeepSeek-V2 and V3 ---------------------------------------------------------------------------------------------------


def test_latent_attention_is_as_declared_and_its_scores_are_scaled_twice() -> None:
    attention = read_architecture(folder("deepseek-v3")).layers[0].attention
    assert isinstance(attention, LatentAttention)
    assert isinstance(attention.rotary.scaling, Yarn)
    assert attention.norm == Norm(eps=1e-6), "transformers' own, and not rms_norm_eps"
    assert attention.scale > 1.5 * (attention.plain_dim + attention.rotary.dims) ** -0.5
    assert abs(attention.rotary.scaling.attention_factor - 1) > 0.1


def random_model(folder_: Path, family: str, changes: dict[str, Any]) -> Path:
    """A folder of a model with these changes in its configuration, random weights, and its tokenizer."""
    shutil.copytree(folder(family), folder_, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    values = json.loads((folder(family) / "config.json").read_text()) | changes
    (folder_ / "config.json").write_text(json.dumps(values))
    torch.manual_seed(0)
    random = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder_))
    with torch.no_grad():
        for tensor in (*random.parameters(), *published_buffers(random).values()):
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    random.save_pretrained(folder_)
    (folder_ / "config.json").write_text(json.dumps(values))
    return folder_


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek-v3", {"rope_interleave": False, "norm_topk_prob": False}),
        ("deepseek-v3", {"q_lora_rank": None}),
        ("deepseek-v3", {"first_k_dense_replace": 0}),
        ("deepseek-v2", {"q_lora_rank": None, "topk_method": "greedy"}),
        ("deepseek-v2", {"first_k_dense_replace": 0, "mlp_bias": True, "attention_bias": True}),
        ("qwen3-next", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_bias": True}),
        ("qwen3-next", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "mlp_only_layers": [1]}),
    ],
    ids=[
        "pairs apart, not normalised",
        "whole queries",
        "no dense layer",
        "V2-Lite",
        "biases",
        "default share",
        "MLPs",
    ],
)
def test_other_settings_agree_with_transformers_too(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    random_model(tmp_path, family, changes)
    tokens = torch.tensor(LONG.tokens)
    with exact_tier():
        model = load_model(tmp_path, dtype=torch.float64, attention="eager")
        expected = model(input_ids=tokens[None]).logits[0].detach()
    architecture = read_architecture(tmp_path)
    found = forward(tokens, load_weights(tmp_path, architecture, torch.float64), architecture, FLOAT64)
    assert float((found - expected).norm() / expected.norm()) < 1e-13


@pytest.mark.parametrize(
    ("family", "changes", "layout", "advice"),
    [
        ("qwen3-moe", {"moe_intermediate_size": 13}, "tp2", "tp=2 does not divide the 13 features of an expert; use"),
        (
            "gpt-oss",
            {"intermediate_size": 7},
            "dp2.ep2",
            "over the 2 ranks that hold the same ones, which have to divide",
        ),
        ("gpt-oss", {"intermediate_size": 7}, "ep2", ""),
    ],
)
def test_experts_that_cannot_be_cut_into_equal_parts_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], layout: str, advice: str
) -> None:
    values = json.loads((folder(family) / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    scenario = replace(cell_of("fsdp2", "sft-packed", family, layout, "exact").scenario, model=str(tmp_path))
    answer = BACKENDS["fsdp2"].load().supports(scenario, Layout.parse(layout))
    assert isinstance(answer, Unsupported) == bool(advice)
    assert not isinstance(answer, Unsupported) or advice in answer.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16", "exact"])
def test_experts_of_odd_sizes_are_computed_one_by_one(
    session: Session, tmp_path: Path, precision: PrecisionName
) -> None:
    """transformers' kernels for groups of experts want whole 16 bytes."""
    cell = cell_of("fsdp2", "sft-packed", "qwen3-moe", "dp2", precision)
    scenario = replace(cell.scenario, model=str(random_model(tmp_path, "qwen3-moe", {"moe_intermediate_size": 12})))
    scenario = replace(scenario, data=replace(scenario.data, path=scenario.data.path.replace("{model}", "qwen3-moe")))
    verdict = session.run(replace(cell, scenario=scenario)).verdict
    assert verdict.state == "conforms", verdict.reason


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
WIDE = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}  # two experts in a group, by the best one


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("deepseek-v3", {"rope_interleave": False, "num_experts_per_tok": 4}, "tp2.seqpar"),
        ("deepseek-v3", {"q_lora_rank": None, "rope_parameters": PLAIN}, "tp2.seqpar"),
        ("deepseek-v3", {"first_k_dense_replace": 0, "attention_bias": False, "tie_word_embeddings": False}, "ep2"),
        ("deepseek-v2", {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True}, "tp2.seqpar"),
        ("deepseek-v2", {"first_k_dense_replace": 0, **WIDE}, "pp2"),
    ],
    ids=["pairs apart", "whole queries", "no dense layer", "V2-Lite", "two in a group"],
)
def test_other_settings_are_exact_on_megatron_too(
    session: Session, tmp_path: Path, family: str, changes: dict[str, Any], layout: str
) -> None:
    cell = cell_of("megatron", "sft-packed", family, layout, "exact")
    scenario = replace(cell.scenario, model=str(random_model(tmp_path, family, changes)))
    scenario = replace(scenario, data=replace(scenario.data, path=scenario.data.path.replace("{model}", family)))
    assert_honest(session, replace(cell, scenario=scenario))


def test_groups_limit_some_choices_of_v2() -> None:
    own, model = logits_with("deepseek-v2"), policy_model("deepseek-v2")
    assert isinstance(model.decoder, Written)
    whole = model.decoder.architecture
    greedy = replace(whole.routers[0], grouped=None)
    layers = tuple(
        replace(layer, feed_forward=greedy) if layer.feed_forward == whole.routers[0] else layer
        for layer in whole.layers
    )
    found = forward(torch.tensor(LONG.tokens), model.weights, replace(whole, layers=layers), FLOAT64)
    assert (found - own).abs().max() > 1e-2


def test_the_bias_that_corrects_choices_decides_some_and_is_not_trained() -> None:
    own, model = observe_sft(BATCH, "deepseek-v3"), policy_model("deepseek-v3")
    assert BIAS in model.weights
    assert BIAS not in own.gradients["policy"]
    assert BIAS not in model.decoder.parameter_names("causal")
    chosen = own.rows["routing"][0] > 0
    zero = logits_with("deepseek-v3", e_score_correction_bias=torch.zeros((), dtype=torch.float64))
    assert (zero - logits_with("deepseek-v3")).abs().max() > 1e-2
    assert int(chosen.sum()) == 3 * len(DOCUMENTS[0].tokens)


@pytest.mark.parametrize(("backend", "layout"), [("deepspeed", "dp2.zero2"), exhaustive("megatron", "ep2")])
def test_the_bias_is_loaded_in_full_precision_recorded_and_stays_as_it_is(
    session: Session, backend: str, layout: str
) -> None:
    for dtype in (torch.float32, torch.float64):
        loaded = load_model(folder("deepseek-v3"), dtype=dtype, attention="eager")
        assert {name: buffer.dtype for name, buffer in published_buffers(loaded).items()} == {BIAS: dtype}
    cell = cell_of(backend, "sft-packed", "deepseek-v3", layout, "exact")
    session.run(cell)
    record = record_of(session, cell)
    for step in record.steps:
        assert torch.equal(step.tensors()[f"weight/{BIAS}"], policy_model("deepseek-v3").weights[BIAS])


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["state", "export", "checkpoint"])
@pytest.mark.parametrize("model", DEEPSEEK)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp2", "dp2"), ("fsdp2", "dp2")),
        (("deepspeed", "dp2.zero3"), ("deepspeed", "dp2.zero3")),
        (("megatron", "ep2.zero1"), ("megatron", "ep2.tp2.seqpar.zero1")),
        (("megatron", "pp2"), ("megatron", "tp2.seqpar")),
        (("fsdp2", "ep2.tp2"), ("megatron", "ep2")),
        (("megatron", "tp2.seqpar"), ("deepspeed", "dp2.zero2")),
    ],
)
def test_a_training_goes_on_elsewhere_with_the_bias(
    session: Session, what: Handover, model: str, before: tuple[str, str], after: tuple[str, str]
) -> None:
    if what == "checkpoint" and before[0] != after[0]:
        pytest.skip("a checkpoint is read by the library that wrote it")
    cells = [cell_of(backend, "sft-packed", model, layout, "exact", steps=4) for backend, layout in (before, after)]
    first, second = (cell.phases[0] for cell in cells)
    phases = (replace(first, steps=2, save=what), replace(second, steps=2))
    assert_honest(session, replace(cells[0], phases=phases, program=what))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek-v3", {"n_group": 3}, "which is not possible"),
        ("deepseek-v3", {"topk_group": 1}, "chooses 3 of 8 experts in 1 of 4 groups"),
        ("deepseek-v3", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek-v3", {"routed_scaling_factor": None}, "does not say 'routed_scaling_factor'"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, "convert them to bfloat16"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "known are greedy and group_limited_greedy"),
        ("deepseek-v2", {"n_group": None}, "does not say 'n_group'"),
        ("deepseek-v2", {"norm_topk_prob": True}, "only computes norm_topk_prob=False"),
        ("deepseek-v2", {"rope_interleave": False}, "only computes rope_interleave=True"),
        ("qwen3-next", {"linear_num_value_heads": 3}, "3 value heads, not a multiple of its 2 key heads"),
        ("qwen3-next", {"layer_types": ["linear_attention", "conv"]}, "one of linear_attention, full_attention"),
        ("qwen3-next", {"linear_conv_kernel_dim": None}, "does not say 'linear_conv_kernel_dim'"),
    ],
)
def test_what_a_configuration_gets_wrong_is_told(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    shutil.copy(folder(family) / "config.json", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(UsageError, match=message):
        read_architecture(tmp_path)
