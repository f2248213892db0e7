"""Reads a model's weights from files to where they lie in training, once there is memory for them there."""

from collections.abc import Iterable
from pathlib import Path

import torch

from conformance.inputs.model import weight_files
from impl.files import SliceReader
from impl.megatron.shape import ModelShape
from impl.megatron.tensors import held_by, load_parameter, parameter_names


def release_trained(chunks: Iterable[torch.nn.Module]) -> None:
    """Give back the memory of trained parameters, which have no numbers yet.

    With the distributed optimizer, DistributedDataParallel allocates a buffer for parameters and copies each of them
    there. There would be two copies of the model for a moment; of zeros, one number is enough to copy.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.new_zeros(()).expand(parameter.shape)


def read_weights(chunks: Iterable[torch.nn.Module], shape: ModelShape, folder: Path, *, device: str) -> None:
    """Set what this rank holds of the model; it reads nothing else."""
    with SliceReader(weight_files(folder), device=device) as read, torch.no_grad():
        for chunk in chunks:
            names = parameter_names(chunk)
            for name, parameter in held_by(chunk).items():
                load_parameter(parameter, names[name], shape, read)
