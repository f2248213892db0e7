"""Builds models that no fixture has: transformers' classes, random weights, other sizes, the fixtures' tokenizer."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from conformance.core.host import FIXTURES
from conformance.matrix.cell import Cell
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import Scenario
from impl.fsdp2.adapter import Fsdp2Backend

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SIZES = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Nothing here is a family of the oracle. GPT-NeoX: parallel residuals, LayerNorm with biases, q, k and v in one matrix,
# rotary positions on a quarter of a head, other names. StableLM: attention of its own, no tensor-parallel plan.
# OLMoE: a mixture of experts. AFMoE (Trinity): another, with windows, whose code makes masks without positions.
# GLM-4-MoE: routers with a bias that is a buffer. GPT-2: learned positions, a configuration with other names, tied.
# Granite-4-micro: neither experts nor recurrent layers, and a plan that shards experts alone. Those in RECURRENT carry
# states: of a gated delta rule, of Mamba 2 beside attention or in a layer of its own, or of a convolution alone.
KINDS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {"hidden_size": 64, "intermediate_size": 96, "rotary_pct": 0.25},
    "StableLm": {"hidden_size": 64, "num_key_value_heads": 2, "use_qkv_bias": True},
    "Olmoe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "Afmoe": {
        **{"num_key_value_heads": 2, "head_dim": 12, "mup_enabled": True},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1},
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    },
    "GPT2": {"hidden_size": 64, "n_inner": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "GraniteMoeHybrid": {
        **{"num_key_value_heads": 2, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96},
        **{
            "layer_types": ["attention", "attention"],
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "mamba_n_groups": 1,
        },
    },
    "Glm4Moe": {
        **{"num_key_value_heads": 2, "head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1},
    },
}

_DELTA: dict[str, Any] = {
    **{"num_key_value_heads": 2, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
}
_MAMBA: dict[str, Any] = {
    **{"num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": _DELTA,
    "Granite4": {
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96, **_MAMBA},
        **{"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    },
    "Bamba": {"attn_layer_indices": [1], **_MAMBA},
    "FalconH1": {"mamba_d_ssm": 96, "mamba_d_head": 24, **_MAMBA},
    "NemotronH": {
        **{"num_key_value_heads": 2, "head_dim": 12, "layers_block_type": ["mamba", "attention"]},
        **{"mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 16},
    },
    "Lfm2": {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
}
CLASSES = {"Granite4": "GraniteMoeHybrid"}  # whose name is not that of the kind
# Image and text: text models of two layers, towers of two, whose patches are of 2 x 2 pixels.
_TEXT = {"vocab_size": 400, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "pad_token_id": 0}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
_TOWER = {"patch_size": 2, "hidden_size": 32, "intermediate_size": 40}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
_IDS = {"image_token_id": 7, "vision_start_token_id": 6, "vision_end_token_id": 5, "video_token_id": 4}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {
        "text_config": {**_TEXT, **_HEADS, "rope_parameters": _MROPE},
        "vision_config": {
            **{
                **_TOWER,
                "depth": 2,
                "num_heads": 2,
                "out_hidden_size": 48,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
        },
        **_IDS,
    },
    "Qwen3VL": {
        "text_config": {**_TEXT, **_HEADS, "head_dim": 12, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        "vision_config": {
            **{**_TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
            "num_position_embeddings": 16,
        },
        **_IDS,
    },
    "Gemma3": {
        "text_config": {
            **{**_TEXT, **_HEADS, "head_dim": 12, "sliding_window": 9, "query_pre_attn_scalar": 12},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            **_TOWER,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "vision_use_head": False,
        },
        **{"mm_tokens_per_image": 4, "image_token_index": 7, "boi_token_index": 6, "eoi_token_index": 5},
    },
}


def make_model(kind: str, folder: Path, **changes: Any) -> Path:
    """A tiny model of transformers' class ``kind``, whose norms and biases are not neutral."""
    own = WITH_IMAGES[kind] if kind in WITH_IMAGES else {**SIZES, **(KINDS | RECURRENT)[kind]}
    config = getattr(transformers, f"{CLASSES.get(kind, kind)}Config")(**{**own, **changes})
    generator = torch.Generator().manual_seed(0)
    auto = transformers.AutoModelForImageTextToText if kind in WITH_IMAGES else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.12
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            adds_one = kind == "Gemma3" and "vision_tower" not in name  # norms that multiply by 1 + weight
            parameter.copy_(1 + noise if is_scale and not adds_one else noise)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(FIXTURES / "models" / "llama" / name, folder)
    return folder


def cell_with(
    model: Path, *, backend: str, scenario: str, layout: str, precision: PrecisionName, trusted: bool = False
) -> Cell:
    """A small cell of a model that lies somewhere; what it reads of roll-outs are Llama's, whose tokenizer it has."""
    from cells import cell_of  # imports pytest and the command line, which ranks of WrongMlp need not

    cell = cell_of(backend, scenario, "llama", layout, precision)
    data = replace(cell.scenario.data, path=cell.scenario.data.path.replace("{model}", "llama"))
    phase = cell.phases[0]
    own = replace(cell.scenario, model=str(model), data=data, trust_remote_code=trusted)
    return Cell.single(scenario=own, backend=phase.backend, layout=phase.layout)


class WrongMlp(Fsdp2Backend):
    """The MLP of the first layer gives a little too much, on every rank."""

    def setup(self, scenario: Scenario, layout: Layout, weights: Mapping[str, Path], device: str) -> dict[str, Any]:
        resolved = super().setup(scenario, layout, weights, device)
        model = self.models["policy"].model  # type: ignore[attr-defined]
        next(m for m in model.modules() if hasattr(m, "mlp")).mlp.register_forward_hook(_too_much)
        return resolved


def _too_much(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + 1e-6)


class TextOrder(Fsdp2Backend):
    """Image tokens are counted like text, one after another."""

    def setup(self, scenario: Scenario, layout: Layout, weights: Mapping[str, Path], device: str) -> dict[str, Any]:
        resolved = super().setup(scenario, layout, weights, device)
        model = self.models["policy"].model  # type: ignore[attr-defined]
        model.register_forward_pre_hook(_in_text_order, with_kwargs=True)
        return resolved


def _in_text_order(_: object, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return inputs, {**options, "position_ids": options["position_ids"][:1].expand(4, -1, -1)}


class TrainedTower(Fsdp2Backend):
    """Trains parameters that the scenario freezes."""

    def setup(self, scenario: Scenario, layout: Layout, weights: Mapping[str, Path], device: str) -> dict[str, Any]:
        trained = replace(scenario, optimizer=replace(scenario.optimizer, frozen=()))
        return super().setup(trained, layout, weights, device)
