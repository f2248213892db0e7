"""Checks and reads the pickles of a checkpoint, without running the code that a pickle may name.

Libraries read four kinds of pickles with ``weights_only=False``: ``.pt`` files (DeepSpeed, megatron-core), the
``.metadata`` of torch.distributed.checkpoint, in its ``.distcp`` files every value that is not a tensor, and in tensors
of bytes TransformerEngine's state of float8. An allow list checks all of them before a library opens them. This project
itself reads with ``weights_only=True``; only ``.metadata`` is not a file of torch.save and has a separate unpickler.
The lists contain only names that honest checkpoints need. tests/checkpoints/test_checkpoint_pickles.py plants code in
each kind and shows that it is rejected.
"""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from conformance.core.errors import UsageError, one_line, shown
from conformance.core.io import MIB

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_OF_METADATA = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
    *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
ALLOWED_IN_METADATA = {
    *((f"{_DCP}.metadata", name) for name in _OF_METADATA),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    # megatron-core stores the plan of its save
    *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),  # path of the save; _local is Python 3.13's
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
# In addition to what torch allows with weights_only=True. Megatron-LM saves the options of its command line.
ALLOWED_IN_TORCH_FILES = {
    *("argparse.Namespace", "pathlib.PosixPath", "signal.Signals", "types.SimpleNamespace"),
    "megatron.core.enums.ModelType",
    *(f"megatron.core.rerun_state_machine.Rerun{name}" for name in ("Diagnostic", "Mode", "State")),
    *(
        f"megatron.core.transformer.enums.{name}"
        for name in ("AttnBackend", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope")
    ),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


# What TransformerEngine's state of a layer needs, in which recipes are objects.
ALLOWED_IN_FLOAT8 = {
    "collections.OrderedDict",
    "megatron.core.extensions.transformer_engine.TEDelayedScaling",
    "torch._utils._rebuild_tensor_v2",
    *(
        f"transformer_engine.common.recipe.{name}"
        for name in ("DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MMParams", "QParams")
    ),
    "transformer_engine.common.recipe._FormatHelper",
}


def check_pickle(path: Path) -> None:
    """Raises UsageError if a library would read a pickle from this file that names anything outside the allow lists."""
    if path.suffix == ".pt":
        with path.open("rb") as file:
            _check_saved_by_torch(file, str(path))
    elif path.name == METADATA:
        _check_values(path.parent, read_metadata(path))


def read_metadata(path: Path) -> Any:
    """Reads a ``.metadata`` file of torch.distributed.checkpoint. Raises UsageError; runs no code of the file."""
    try:
        with path.open("rb") as file:
            return _Metadata(file).load()
    except pickle.UnpicklingError as error:
        raise UsageError(f"{path} is rejected: {one_line(error)}") from None
    except Exception as error:  # a broken file makes pickle raise any exception
        raise UsageError(f"{path} is not the metadata of a checkpoint: {one_line(error)}; give another one") from None


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_IN_METADATA:
            raise pickle.UnpicklingError(f"it names {shown(f'{module}.{name}')}, which no checkpoint needs")
        return super().find_class(module, name)


def checked_float8(state: torch.Tensor, source: str) -> torch.Tensor:
    """Returns the state of a layer in float8, as TransformerEngine stores it: a pickle as bytes (N), which it reads
    without a check. Raises UsageError if the pickle names anything outside the allow list.

    The pickle is written anew, because tensors in it are pickles as well.
    """
    if not state.numel():  # of a layer without float8
        return state
    try:
        found = _Float8(io.BytesIO(state.cpu().numpy().tobytes())).load()
    except pickle.UnpicklingError as error:
        raise UsageError(f"{source} is rejected: {one_line(error)}") from None
    except Exception as error:  # a broken file makes pickle raise any exception
        raise UsageError(f"{source} is no state of float8: {one_line(error)}; give another checkpoint") from None
    return torch.frombuffer(bytearray(pickle.dumps(found)), dtype=torch.uint8)


class _Float8(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _tensor_in_pickle
        if f"{module}.{name}" not in ALLOWED_IN_FLOAT8:
            raise pickle.UnpicklingError(f"it names {shown(f'{module}.{name}')}, which no state of float8 needs")
        return super().find_class(module, name)


def _tensor_in_pickle(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError:  # its message says how to run the code
        raise pickle.UnpicklingError("a tensor in it names what no tensor needs") from None


def _check_values(folder: Path, metadata: Any) -> None:
    """Checks the values that are not tensors; each is a part of a file, written by torch.save."""
    source = str(folder / METADATA)
    try:
        kinds = {name: type(entry).__name__ for name, entry in metadata.state_dict_metadata.items()}
        places = [
            (index.fqn, folder / place.relative_path, place.offset, place.length)
            for index, place in metadata.storage_data.items()
            if kinds.get(index.fqn) != "TensorStorageMetadata"  # torch reads tensors with weights_only=True
        ]
        for name, path, offset, length in places:
            if path.parent != folder or not path.is_file():
                raise UsageError(f"{source} is rejected: it says that {shown(name)} lies in {shown(str(path))}")
            with path.open("rb") as file:
                file.seek(offset)
                _check_saved_by_torch(io.BytesIO(file.read(length)), f"{path}, {shown(name)},")
    except UsageError:
        raise
    except Exception as error:  # the classes are allowed, but their attributes may be anything
        raise UsageError(f"{source} is not the metadata of a checkpoint: {one_line(error)}; give another one") from None


def _check_saved_by_torch(file: BinaryIO, source: str) -> None:
    """Lets torch disassemble the pickle without running it; torch raises at opcodes that could hide a name."""
    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception as error:  # ValueError, RuntimeError, UnpicklingError, EOFError and more
        raise UsageError(f"{source} is rejected: torch cannot list its contents: {one_line(error)}") from None
    if foreign := sorted(named - ALLOWED_IN_TORCH_FILES):
        raise UsageError(f"{source} is rejected: it names {shown(', '.join(foreign))}, which no checkpoint needs")


def check_sums(file: BinaryIO, source: str) -> None:
    """Raises UsageError if a record of torch.save differs from its CRC-32, which torch writes and does not compare."""
    file.seek(0)
    try:
        if not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.CRC:  # 0 without torch.serialization.set_crc32_options
                    with archive.open(record) as content:
                        while content.read(MIB):
                            pass
    except Exception as error:  # BadZipFile, ValueError, RuntimeError and more
        raise UsageError(f"{source} is damaged: {one_line(error)}; give another checkpoint") from None


class Opaque:
    """Replaces an object of a library: it has the attributes from the file, and no code of the library."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def read_torch_file(path: Path) -> Any:
    """Reads a file of torch.save, with tensors mapped from the file and an Opaque for each object of DeepSpeed.

    Raises UsageError; runs no code of the file.
    """
    with path.open("rb") as file:
        _check_saved_by_torch(file, str(path))
    return _load(path, source=path, mmap=True)


def read_torch_bytes(data: bytes, *, source: Path) -> Any:
    """Reads a part of the file ``source`` likewise; torch.distributed.checkpoint saves each small value in a part."""
    check_sums(io.BytesIO(data), str(source))
    _check_saved_by_torch(io.BytesIO(data), str(source))
    return _load(io.BytesIO(data), source=source)


def _load(data: Path | io.BytesIO, *, source: Path, **options: Any) -> Any:
    # torch needs a distinct type for each name.
    stand_ins: list[Any] = [(type("Opaque", (Opaque,), {}), name) for name in sorted(ALLOWED_IN_TORCH_FILES)]
    try:
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(data, map_location="cpu", weights_only=True, **options)
    except Exception as error:  # UnpicklingError, RuntimeError, EOFError and more
        raise UsageError(f"{source} is not a readable file of torch.save: {one_line(error)}") from None
