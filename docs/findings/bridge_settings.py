"""Megatron-Bridge: settings of a Hugging Face configuration that its providers drop or misread in silence.

Needs megatron-bridge (scripts/framework megatron_bridge makes an environment). Exit code 0: all four are as described
in bridge-settings.md. 1: not so.
"""

import importlib
import sys
from typing import Any

from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3MoeConfig

import parity

for name in ("models.gpt.gpt_layer_specs", "models.gpt.gpt_model", "optimizer", "dist_checkpointing"):
    importlib.import_module(f"megatron.core.{name}")
with parity.on_cpu(stand_ins=("transformer_engine", "modelopt", "nvidia_resiliency_ext")):
    from megatron.bridge import AutoBridge

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def provider(kind: type, architecture: str, **settings: object) -> Any:
    config = kind(architectures=[architecture], torch_dtype="float32", **SIZES, **settings)
    return AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)


def main() -> bool:
    mistral = provider(MistralConfig, "MistralForCausalLM", sliding_window=128)
    left, _ = mistral.window_size  # both bounds are inclusive, so a token sees itself and this many before it
    print(f"Mistral, sliding_window 128: a token attends to {left + 1} tokens")

    qwen = provider(Qwen2Config, "Qwen2ForCausalLM", rope_scaling=YARN, max_position_embeddings=8192)
    print(f"Qwen2 with YaRN: position_embedding_type is {qwen.position_embedding_type!r}")

    llama = provider(LlamaConfig, "LlamaForCausalLM", rope_scaling=LLAMA3 | {"original_max_position_embeddings": 1024})
    kept = [value for key, value in vars(llama).items() if "original" in key]
    print(f"Llama scaled from 1,024 positions: the provider keeps {kept}; megatron-core scales from 8,192")

    mixture = provider(Qwen3MoeConfig, "Qwen3MoeForCausalLM", mlp_only_layers=[1], num_experts=4)
    print(f"Qwen3-MoE, layer 1 without experts: moe_layer_freq is {mixture.moe_layer_freq}")
    return left == 128 and qwen.position_embedding_type == "rope" and 1024 not in kept and mixture.moe_layer_freq == 1


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
