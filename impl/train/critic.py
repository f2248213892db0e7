"""The critic's folder, where the user gave a language model for it: its layers, and a new head of one number per token.

Backends load every model from a folder, so that all of them begin with the same weights.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open

from conformance.inputs.folder import CONFIG
from conformance.inputs.model import HEAD, value_config, weight_files, weight_shapes
from impl.megatron.shape import VALUE_HEAD
from impl.model_folder import write_folder


def is_value_model(folder: Path) -> bool:
    """Whether a Hugging Face folder has the head of a value model."""
    return VALUE_HEAD in weight_shapes(folder)


def write_critic(folder: Path, *, source: Path, seed: int) -> None:
    """Write the value model ``folder`` with the layers of the language model ``source``; in one process.

    The head (1, hidden) is normal with a deviation of 1 / (hidden + 1), as OpenRLHF begins, and follows from ``seed``.
    """
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    hidden = config.get("text_config", config)["hidden_size"]
    drawn = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    write_folder(
        folder, source=source, weights=chain(_layers(source), [(VALUE_HEAD, drawn / (hidden + 1))]), dtype="source"
    )
    value_config(folder / CONFIG)


def _layers(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weight_files(source):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if not name.endswith(HEAD):
                    yield name, tensors.get_tensor(name)
