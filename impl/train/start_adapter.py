"""The adapter that a training begins with: a folder in peft's format beside the log, which every backend loads.

A is drawn as peft draws it, uniform within 1 / sqrt(inputs), and B is 0 (Hu et al., arXiv 2106.09685, section 4.1), so
the first policy is the base. What a tensor gets depends on the seed and on its name alone.
"""

import hashlib
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from conformance.inputs.adapter import adapter_config, write_adapter_files
from conformance.lora import CONFIG_FILE, LoraConfig
from conformance.reading import read_json
from conformance.validation import UsageError


def adapter_shapes_of(lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A (r, in) and B (out, r) of each target of a model with these parameters. Raises UsageError for a target that it
    does not have."""
    found: dict[str, tuple[int, ...]] = {}
    for target in lora.targets(shapes):
        rows, columns = shapes[f"{target}.weight"]
        found |= {f"{target}.lora_A.weight": (lora.r, columns), f"{target}.lora_B.weight": (rows, lora.r)}
    return found


def write_start(folder: Path, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> None:
    """Write the adapter of a model with these parameters into ``folder``, which is made anew; in one process."""
    tensors = {name: _drawn(name, shape, seed) for name, shape in adapter_shapes_of(lora, shapes).items()}
    shutil.rmtree(folder, ignore_errors=True)
    write_adapter_files(folder, lora, lora.targets(shapes), tensors)


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (2 * drawn - 1) / math.sqrt(shape[1])


def check_same(folder: Path, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UsageError where a training goes on with an adapter of other settings, of which a checkpoint knows only
    the sizes."""
    began, asked = read_json(folder / CONFIG_FILE), adapter_config(lora, lora.targets(shapes))
    if other := [name for name, value in asked.items() if began.get(name) != value]:
        raise UsageError(
            f"the training began with {', '.join(f'{name}={began.get(name)}' for name in other)} ({folder}), and now "
            f"{', '.join(f'{name}={asked[name]}' for name in other)} are asked for; go on with what it began with"
        )
