"""Adapters: every backend and the oracle begin with the same one, from a file beside the weights, in peft's format.

Serves claim 6. Nothing in it is neutral. A usual adapter begins with B = 0, where a backend that leaves it out, or
scales it twice, would compute the same numbers until the first update, and A would have no gradient at all.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from conformance.lora import CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE, LoraConfig

B_SIZE = 0.2  # of B x for x of size 1; with the usual scales an adapter's part is a third of what the layer gives


def write_adapter(folder: Path, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]], *, key: str) -> None:
    """Write the adapter of a model with parameters of these ``shapes`` into ``folder``; ``key`` decides its numbers.

    Raises UsageError for a target that the model does not have.
    """
    targets = lora.targets(shapes)
    tensors = {}
    for target in targets:
        rows, columns = shapes[f"{target}.weight"]
        a, b = f"{target}.lora_A.weight", f"{target}.lora_B.weight"
        tensors[a] = _normal((lora.r, columns), f"{key} {a}") / columns**0.5
        tensors[b] = _normal((rows, lora.r), f"{key} {b}") * B_SIZE / lora.r**0.5
    write_adapter_files(folder, lora, targets, tensors)


def adapter_config(lora: LoraConfig, targets: Sequence[str]) -> dict[str, Any]:
    """What CONFIG_FILE says, in peft's words."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "use_rslora": lora.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }


def write_adapter_files(
    folder: Path, lora: LoraConfig, targets: Sequence[str], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write an adapter in peft's format, in float32, into ``folder``, which is new."""
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(adapter_config(lora, targets), indent=2), encoding="utf-8")
    save_file({FILE_PREFIX + name: t.float() for name, t in tensors.items()}, folder / WEIGHTS_FILE)


def _normal(shape: tuple[int, int], key: str) -> torch.Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
