"""megatron-core: of the four numbers of Llama 3's positions, one can be set; the others are Llama 3.1's.

One process, CPU. The reference is transformers' own function. Exit code 0: defect present (the numbers of Llama 3.1 and
3.2 are right, any others are not, and the remedy mends them). 1: gone. See megatron-rope-scaling.md.
"""

import sys

import megatron.core
import megatron_on_cpu  # noqa: F401 (megatron-core asks for CUDA by name)
import torch
import transformers
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HEAD, BASE, POSITION = 64, 500_000, 4_000
MODELS = {  # factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
    "Llama 3.1": (8.0, 1.0, 4.0, 8192),
    "Llama 3.2": (32.0, 1.0, 4.0, 8192),
    "a model of 2,048 positions, extended": (8.0, 1.0, 4.0, 2048),
    "another band": (8.0, 1.0, 16.0, 8192),
}
NAMES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def right(numbers: tuple[float, ...]) -> torch.Tensor:
    rope = {"rope_type": "llama3", "rope_theta": float(BASE), **dict(zip(NAMES, numbers, strict=True))}
    config = transformers.LlamaConfig(
        hidden_size=HEAD, num_attention_heads=1, rope_parameters=rope, max_position_embeddings=131_072
    )
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    return frequencies


def of_megatron(numbers: tuple[float, ...], *, remedy: bool) -> torch.Tensor:
    options = {"kv_channels": HEAD, "rotary_percent": 1.0, "rotary_base": BASE, "use_cpu_initialization": True}
    frequencies: torch.Tensor
    if not remedy:
        frequencies = RotaryEmbedding(**options, rope_scaling=True, rope_scaling_factor=numbers[0]).inv_freq
        return frequencies
    made = RotaryEmbedding(**options)
    frequencies = made._apply_scaling(made.inv_freq, **dict(zip(NAMES, numbers, strict=True)))
    return frequencies


def main() -> bool:
    print(f"megatron-core {megatron.core.__version__}, torch {torch.__version__}, transformers", end=" ")
    print(transformers.__version__)
    present = []
    for name, numbers in MODELS.items():
        expected = right(numbers)
        wrong, mended = ((of_megatron(numbers, remedy=r) / expected - 1).abs().max().item() for r in (False, True))
        angle = POSITION * (of_megatron(numbers, remedy=False) - expected).abs().max().item()
        print(f"{name}: frequencies {wrong:.2g} off, {angle:.3g} radians at position {POSITION}; REMEDY {mended:.1e}")
        own = numbers[1:] == MODELS["Llama 3.1"][1:]
        present.append(mended < 1e-6 and (wrong < 1e-6 if own else wrong > 0.1))
    return all(present)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
