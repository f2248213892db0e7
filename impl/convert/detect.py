"""Detects the format of a checkpoint by the files in its folder, and opens it without loading tensors.

It also opens folders of safetensors: a Hugging Face model, and the training state that all backends read.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from conformance.core.errors import UsageError, one_line
from conformance.core.io import read_json
from conformance.models.folder_checks import CONFIG
from conformance.models.folders import weight_files
from impl.checkpoints import training_state
from impl.checkpoints.safe_pickle import METADATA
from impl.convert import deepspeed, megatron, torch_distributed
from impl.convert.contents import Checkpoint, StoredTensor
from impl.interface.sharded_safetensors import SAFETENSORS_DTYPES


def open_model(folder: Path) -> Checkpoint:
    """Opens a Hugging Face folder."""
    config = read_json(folder / CONFIG)
    facts = {"architectures": config.get("architectures"), "tied": bool(config.get("tie_word_embeddings"))}
    tensors = tuple(_describe("weight", weight_files(folder)))
    return Checkpoint(format="Hugging Face folder", facts=facts, tensors=tensors, read=read)


def open_state(folder: Path) -> Checkpoint:
    """Opens a training state of impl.checkpoints.training_state."""
    contents = training_state.read_contents(folder)
    tensors = tuple(
        stored
        for kind in contents["kinds"]
        for stored in _describe(kind, sorted((folder / kind).glob("*.safetensors")))
    )
    steps = {float(read(stored)) for stored in tensors if stored.kind == "step"}
    return Checkpoint(
        format=f"training state, version {contents['version']}",
        facts={"step": max(steps)} if steps else {},
        tensors=tensors,
        progress={name: float(value) for name, value in contents["progress"].items()},
        read=read,
    )


def read(stored: StoredTensor) -> torch.Tensor:
    with safe_open(stored.place, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(stored.name)
    return tensor


def _describe(kind: str, files: Iterable[Path]) -> Iterable[StoredTensor]:
    """Lists the tensors in the files, reading only the headers. Raises UsageError for other than safetensors files."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    dtype = SAFETENSORS_DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise UsageError(f"{path} has {name} in the dtype {part.get_dtype()}, which is not supported")
                    yield StoredTensor(kind=kind, name=name, shape=tuple(part.get_shape()), dtype=dtype, place=path)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path} is not a readable safetensors file: {one_line(error)}") from None


@dataclass(frozen=True, kw_only=True)
class Format:
    is_in: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]


TRAINING_STATE = Format(is_in=lambda folder: (folder / training_state.FILE).is_file(), open=open_state)
UNIVERSAL = Format(
    is_in=lambda folder: (folder / "zero").is_dir() and any(folder.glob(deepspeed.MODEL_FILES)),
    open=deepspeed.open_universal,
)
DEEPSPEED = Format(is_in=lambda folder: deepspeed.tag_folder(folder) is not None, open=deepspeed.open_native)
MEGATRON = Format(
    is_in=lambda folder: all((folder / name).is_file() for name in (METADATA, megatron.FILE, megatron.COMMON)),
    open=megatron.open_megatron,
)
FSDP2 = Format(is_in=lambda folder: (folder / METADATA).is_file(), open=torch_distributed.open_fsdp2)
MODEL = Format(is_in=lambda folder: (folder / CONFIG).is_file(), open=open_model)
FORMATS = (TRAINING_STATE, UNIVERSAL, DEEPSPEED, MEGATRON, FSDP2, MODEL)  # the first match counts


def find_format(folder: Path) -> Format:
    """Returns the format of a checkpoint. Raises UsageError for unknown formats."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give the folder of a checkpoint")
    for known in FORMATS:
        if known.is_in(folder):
            return known
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and any(f.is_in(path) for f in FORMATS)]
    if below:
        raise UsageError(f"{folder} is not a checkpoint of one model; give one of {', '.join(map(str, below))}")
    raise UsageError(
        f"{folder} is not a checkpoint of a known format (training state, Hugging Face folder, checkpoint of "
        f"DeepSpeed, torch.distributed.checkpoint or megatron-core); check the path"
    )


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens a checkpoint of any known format without loading its tensors; runs no code of it. Raises UsageError."""
    return open_as(find_format(folder), folder)


def open_as(known: Format, folder: Path) -> Checkpoint:
    """Opens a checkpoint of a format. Raises UsageError, also if files have the right names but other content."""
    try:
        return known.open(folder)
    except UsageError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"{folder} cannot be read; it is damaged or of another version: {type(error).__name__}: {one_line(error)}"
        ) from None
