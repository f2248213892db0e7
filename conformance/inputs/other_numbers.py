"""A model folder with other numbers: what a leg begins with that continues from a checkpoint or a training state.

Serves claim 7: what is not restored shows, also of parameters that nothing trains. If such a leg began with the folder
of the leg before, frozen weights would be right whatever was saved of them.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_other_numbers(folder: Path, out: Path) -> Path:
    """Copy a Hugging Face folder, with its adapter, to ``out``, with the same shapes and dtypes and other numbers."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in folder.rglob("*.safetensors"):
        save_file({name: _other(tensor) for name, tensor in load_file(file).items()}, out / file.relative_to(folder))
    return out


def _other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 0.5 + 0.25 if tensor.is_floating_point() else tensor
