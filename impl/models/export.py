"""Writes a Hugging Face folder with new weights; all other files are copied from the folder the model was loaded from.

The copied files are configuration, generation settings, chat template, tokenizer and code. A parameter with two names
is written once, under its first name; transformers ties it again because the configuration says so.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from conformance.backends.protocol import NamedTensors
from conformance.core.errors import UsageError
from conformance.models.folder_checks import CONFIG, NOT_COPIED
from conformance.models.folders import weight_files
from conformance.spec.lora import ADAPTER, is_adapter
from impl.interface.distributed import agree, on_first
from impl.interface.protocol import Dtype
from impl.interface.sharded_safetensors import (
    FILE_SIZE,
    SAFETENSORS_DTYPES,
    TensorWriter,
    run_through,
    whole_folder,
)
from impl.models.lora import merge_adapter, write_adapter

# The dtype of written tensors: that of the masters, or for each tensor the one that it has in the source folder.


def write_model(
    folder: Path,
    *,
    source: Path,
    weights: NamedTensors,
    dtype: Dtype,
    adapted: Any = None,
    file_size: int = FILE_SIZE,
) -> None:
    """Write ``weights`` and the other files of the Hugging Face folder ``source`` into ``folder``; collective.

    ``adapted``: peft's model, if some of the weights are those of an adapter, which is written into the folder ADAPTER
    in the dtype of the masters.

    The first rank calls ``check_target`` and ``write_folder``; an error there is raised on all ranks.
    """
    doing, failed = f"writing the model {folder}", None
    on_first(doing, lambda: check_target(folder, source=source))
    try:
        if dist.get_rank() == 0:
            write_folder(folder, source=source, weights=weights, dtype=dtype, adapted=adapted, file_size=file_size)
    except Exception as error:
        failed = error
    run_through(weights)
    agree(doing, failed)


def check_target(folder: Path, *, source: Path) -> None:
    """Raise UsageError if ``folder`` must not be replaced: it is ``source``, or has files and is no model folder."""
    if folder.resolve() == source.resolve():
        raise UsageError(f"{folder} is the folder that the model was loaded from; give another one")
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).is_file())):
        raise UsageError(f"{folder} exists and is no Hugging Face folder, so it is not replaced; give another one")


def write_folder(
    folder: Path,
    *,
    source: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: Dtype,
    adapted: Any = None,
    file_size: int = FILE_SIZE,
) -> None:
    """Write the folder, in one process, and replace an older one when it is complete
    (``impl.interface.sharded_safetensors.whole_folder``).

    One file's tensors at a time are in memory, and those of an adapter. The dtype in its config.json is the one that
    most of its numbers have.
    """
    stored = stored_dtypes(source) if dtype == "source" else {}
    usual = Counter(stored.values()).most_common(1)[0][0] if stored else None
    written: Counter[torch.dtype] = Counter()
    of_adapter: dict[str, torch.Tensor] = {}
    with whole_folder(folder) as beside:
        left_out = shutil.ignore_patterns(*NOT_COPIED, "*.index.json")
        shutil.copytree(source, beside, ignore=left_out, dirs_exist_ok=True)
        with TensorWriter(beside, file_size=file_size) as writer:
            for name, weight in weights:
                if is_adapter(name):
                    of_adapter[name] = weight.detach().to("cpu", copy=True)
                    continue
                kept = stored.get(name, usual) or weight.dtype
                written[kept] += weight.numel()
                writer.add(name, weight.detach().to(kept))
                del weight  # before the next one is put together
        if of_adapter:
            write_adapter(beside / ADAPTER, adapted, of_adapter)
        _say_dtype(beside / CONFIG, str(written.most_common(1)[0][0]).removeprefix("torch."))


def write_merged(folder: Path, *, dtype: Dtype, write: Callable[..., None], trusted: bool) -> None:
    """Write the folder of a model with an adapter, which is added to the weights; collective.

    ``write(path, dtype=...)`` writes the folder with the adapter beside the weights. peft adds it to them on the first
    rank, which holds the whole model.
    """
    apart = folder.with_name(f".{folder.name}.adapted")
    write(apart, dtype=dtype)
    on_first(f"merging the adapter into {folder}", lambda: merge_folder(apart, folder, trusted=trusted))
    dist.barrier()


def merge_folder(apart: Path, folder: Path, *, trusted: bool) -> None:
    """Move the model in ``apart`` to ``folder``, with its adapter added to the weights; in one process."""
    from impl.models.loading import load_model  # imports transformers, which takes seconds

    dtype = max(stored_dtypes(apart).values(), key=lambda one: one.itemsize)
    model = load_model(apart, dtype=dtype, attention="eager", trusted=trusted)
    weights = merge_adapter(model, apart / ADAPTER)
    write_folder(folder, source=apart, weights=weights.items(), dtype="source")
    shutil.rmtree(apart)


def stored_dtypes(source: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor in a Hugging Face folder, by name; only the headers of the files are read."""
    found = {}
    for file in weight_files(source):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = SAFETENSORS_DTYPES[tensors.get_slice(name).get_dtype()]
    return found


def _say_dtype(file: Path, dtype: str) -> None:
    """Set the dtype wherever a configuration file names one; a file that is right already is not written."""
    config = json.loads(file.read_text(encoding="utf-8"))
    if _replace_dtype(config, dtype):
        file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _replace_dtype(config: dict[str, Any], dtype: str) -> bool:
    changed = False
    for key, value in config.items():
        if isinstance(value, dict):  # the configuration of a sub-model, such as text_config
            changed |= _replace_dtype(value, dtype)
        elif key in ("dtype", "torch_dtype") and value not in (None, dtype):
            config[key] = dtype
            changed = True
    return changed
