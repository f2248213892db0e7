"""How fast a training is, and how much memory it takes: what a line of the log says besides losses."""

import re
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from conformance.batch import Batch
from conformance.inputs.folder import runs_code
from conformance.inputs.model import EMBEDDING, HEAD, weight_shapes
from conformance.scenario import Precision

# Floating-point operations a second of dense products in half precision, by a word of the device's name: NVIDIA's data
# sheets, without sparsity. Cards for slots are slower, where they have the same name.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12}
_SLOWER = {"PCIe", "NVL"}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """parameters: of matrix products, and so without an input embedding. attention: layers x heads x head size."""

    parameters: int
    attention: int

    def flops(self, lengths: Iterable[int]) -> float:
        """Of forward and backward passes over documents of these lengths: 6 N T + 12 L H Q T^2 for one of T tokens.

        Chowdhery et al., arXiv 2204.02311, appendix B; nothing is added for recomputation.
        """
        return float(sum(6 * self.parameters * t + 12 * self.attention * t * t for t in lengths))


def model_size(folder: Path, *, trusted: bool) -> ModelSize:
    """Of the model in a Hugging Face folder."""
    shapes = weight_shapes(folder)
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    if any(name.endswith(HEAD) for name in shapes):  # else the embedding is the head
        count -= sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.endswith(EMBEDDING))
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=runs_code(folder, trusted=trusted))
    config = config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelSize(parameters=count, attention=config.num_hidden_layers * config.num_attention_heads * size)


def peak_flops(device: str, precision: Precision) -> float | None:
    """Of one device a second, for the precisions whose products run at that of bfloat16; None where it is not known."""
    if not device.startswith("cuda") or precision not in ("bf16", "fp16"):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Of the device of this name."""
    words = set(re.split("[ -]", name))
    return None if words & _SLOWER else next((PEAKS[word] for word in words & PEAKS.keys()), None)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """``models``: sizes of the trained ones. ``peak``: of all devices together; None where it is not known."""

    models: Mapping[str, ModelSize]
    peak: float | None

    def of(self, batch: Batch, seconds: float) -> dict[str, float | None]:
        """Tokens and samples of a step, and what that is a second. MFU is that of the step's updates."""
        lengths = [len(document.tokens) for document in batch.documents]
        flops = sum(size.flops(lengths) for size in self.models.values())
        return {
            "tokens": sum(lengths),
            "samples": len(lengths),
            "seconds": seconds,
            "tokens_per_second": sum(lengths) / seconds,
            "mfu": None if self.peak is None else flops / seconds / self.peak,
        }


def peak_memory(device: str) -> int:
    """Bytes: the most that tensors took of a GPU so far, or that the process had of the machine's memory."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
