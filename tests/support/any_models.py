"""Builds models that no fixture has: transformers' classes, random weights, other sizes, the fixtures' tokenizer."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from cells import cell_of

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


def make_model(kind: str, folder: Path, **changes: Any) -> Path:
    """A tiny model of transformers' class ``kind``, whose norms and biases are not neutral."""
    own = (KINDS | RECURRENT)[kind]
    config = getattr(transformers, f"{CLASSES.get(kind, kind)}Config")(**{**SIZES, **own, **changes})
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.12
            parameter.copy_(1 + noise if parameter.ndim == 1 and name.endswith("weight") else noise)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(FIXTURES / "models" / "llama" / name, folder)
    return folder


def cell_with(
    model: Path, *, backend: str, scenario: str, layout: str, precision: PrecisionName, trusted: bool = False
) -> Cell:
    """A small cell of a model that lies somewhere; what it reads of roll-outs are Llama's, whose tokenizer it has."""
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
