"""Folders of safetensors: a Hugging Face model, and the training state that all backends read."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from conformance.inputs.folder import CONFIG
from conformance.inputs.model import weight_files
from conformance.reading import read_json
from conformance.validation import UsageError, one_line
from impl import training_state
from impl.files import SAFETENSORS_DTYPES
from impl.formats.contents import Checkpoint, Held


def open_model(folder: Path) -> Checkpoint:
    """A Hugging Face folder."""
    config = read_json(folder / CONFIG)
    facts = {"architectures": config.get("architectures"), "tied": bool(config.get("tie_word_embeddings"))}
    tensors = tuple(_held("weight", weight_files(folder)))
    return Checkpoint(format="Hugging Face folder", facts=facts, tensors=tensors, read=read)


def open_state(folder: Path) -> Checkpoint:
    """A training state of impl.training_state."""
    told = training_state.read_told(folder)
    tensors = tuple(
        held for kind in told["kinds"] for held in _held(kind, sorted((folder / kind).glob("*.safetensors")))
    )
    steps = {float(read(held)) for held in tensors if held.kind == "step"}
    return Checkpoint(
        format=f"training state, version {told['version']}",
        facts={"step": max(steps)} if steps else {},
        tensors=tensors,
        progress={name: float(value) for name, value in told["progress"].items()},
        read=read,
    )


def read(held: Held) -> torch.Tensor:
    with safe_open(held.place, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(held.name)
    return tensor


def _held(kind: str, files: Iterable[Path]) -> Iterable[Held]:
    """What the files hold; only their heads are read. Raises UsageError for what is no safetensors file."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    dtype = SAFETENSORS_DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise UsageError(f"{path} holds {name} as {part.get_dtype()}, which is not read here")
                    yield Held(kind=kind, name=name, shape=tuple(part.get_shape()), dtype=dtype, place=path)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} is no safetensors file that can be read: {one_line(error)}") from None
