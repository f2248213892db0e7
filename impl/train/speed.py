"""How fast a training is, and how much memory it takes: what a line of the log says besides losses."""

import re
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from conformance.batch import Batch
from conformance.inputs.model import EMBEDDING, HEAD
from conformance.role import Head
from conformance.scenario import Precision
from impl.train.shapes import elements, parameter_shapes, read_sizes

# Floating-point operations a second of dense products in half precision, by a word of the device's name: NVIDIA's data
# sheets, without sparsity. Cards for slots are slower, where they have the same name; of the A100 they are not.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12}
_SLOTS, _AS_FAST = {"PCIE", "NVL"}, {"A100"}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """parameters: of matrix products, and so without an input embedding. attention: layers x heads x head size.
    frozen: those of ``parameters`` that get no gradient."""

    parameters: int
    attention: int
    frozen: int = 0

    def flops(self, lengths: Iterable[int]) -> float:
        """Of forward and backward passes over documents of these lengths: 6 N T + 12 L H Q T^2 for one of T tokens, and
        2 T less for each frozen parameter.

        Chowdhery et al., arXiv 2204.02311, appendix B; nothing is added for recomputation.
        """
        products = 6 * self.parameters - 2 * self.frozen
        return float(sum(products * t + 12 * self.attention * t * t for t in lengths))


def model_size(folder: Path, head: Head) -> ModelSize:
    """Of the model that a Hugging Face folder makes with a head. An embedding that is no head looks up and computes
    nothing; a tied head is its embedding."""
    shapes, sizes = parameter_shapes(folder, head), read_sizes(folder)
    tied = head == "causal" and not any(name.endswith(HEAD) for name in shapes)
    looked_up = {name: shape for name, shape in shapes.items() if name.endswith(EMBEDDING) and not tied}
    return ModelSize(parameters=elements(shapes) - elements(looked_up), attention=sizes.layers * sizes.queries)


def peak_flops(device: str, precision: Precision) -> float | None:
    """Of one device a second, for the precisions whose products run at that of bfloat16; None where it is not known."""
    if not device.startswith("cuda") or precision not in ("bf16", "fp16"):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Of the device of this name."""
    words = set(re.split("[ -]", name.upper()))
    known = next(iter(words & PEAKS.keys()), None)
    return None if known is None or (words & _SLOTS and known not in _AS_FAST) else PEAKS[known]


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
