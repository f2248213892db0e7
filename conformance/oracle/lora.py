"""LoRA of the oracle (Hu et al., arXiv 2106.09685, equation 3): h = W x + scale B A x, in every adapted linear layer.

The scale is alpha / r (section 4.1), or alpha / sqrt(r) (Kalajdzievski, arXiv 2312.03732, theorem 3.2).
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from conformance.lora import ADAPTER, FILE_PREFIX, PARTS, WEIGHTS_FILE, LoraConfig
from conformance.oracle.parts import Lora
from conformance.oracle.tap import Function, Module
from conformance.oracle.variant import Weights
from conformance.validation import UsageError


def lora_of(config: LoraConfig, parameters: Mapping[str, tuple[int, ...]]) -> Lora:
    """The part of an architecture with these parameters. Raises UsageError for targets that it does not have."""
    root = math.sqrt(config.r) if config.use_rslora else config.r
    return Lora(rank=config.r, scale=config.lora_alpha / root, targets=config.targets(parameters))


def adapter_shapes(lora: Lora, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all adapters: A (r, in) and B (out, r) of each target."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in lora.targets:
        rows, columns = parameters[f"{target}.weight"]
        shapes |= {f"{target}.lora_A.weight": (lora.rank, columns), f"{target}.lora_B.weight": (rows, lora.rank)}
    return shapes


def load_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Weights:
    """The adapter beside the weights in a model's folder. Raises UsageError where it is not of these ``shapes``."""
    file = folder / ADAPTER / WEIGHTS_FILE
    if not file.is_file():
        raise UsageError(
            f"{folder} has no adapter ({ADAPTER}/{WEIGHTS_FILE}); prepare the inputs of the scenario again"
        )
    found = {name.removeprefix(FILE_PREFIX): tensor for name, tensor in load_file(file).items()}
    if {name: tuple(tensor.shape) for name, tensor in found.items()} != dict(shapes):
        raise UsageError(f"{file} holds other tensors than the scenario's lora; prepare its inputs again")
    # Copied, as the weights are (forward.py).
    return {name: found[name].to(dtype, copy=True) for name in shapes}


def adapted(module: Module, w: Weights, lora: Lora | None) -> Module:
    """``module`` with the adapters of those modules that have one in ``w``, the weights by the names of the modules."""
    if lora is None:
        return module
    scale = lora.scale

    def run(name: str, function: Function, x: Tensor) -> Tensor:
        a, b = (w.get(f"{name}.{part}.weight") for part in PARTS)
        if a is None or b is None:
            return module(name, function, x)
        return module(name, lambda x: function(x) + F.linear(F.linear(x, a), b) * scale, x)

    return run


def merged(weights: Weights, lora: Lora) -> Weights:
    """The weights of a model without adapters that computes the same: W + scale B A (section 4.1)."""
    found = {name: tensor for name, tensor in weights.items() if not name.endswith(tuple(f"{p}.weight" for p in PARTS))}
    for target in lora.targets:
        a, b = (weights[f"{target}.{part}.weight"] for part in PARTS)
        found[f"{target}.weight"] = weights[f"{target}.weight"] + lora.scale * (b @ a)
    return found
