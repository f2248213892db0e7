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
from conformance.core.io import read_json
from conformance.models.folder_checks import CONFIG, NOT_COPIED
from conformance.models.folders import weight_files
from conformance.spec.scenario import ADAPTER, is_adapter
from impl.interface.distributed import agree, on_first
from impl.interface.sharded_safetensors import FILE_SIZE, SAFETENSORS_DTYPES, TensorWriter, drain, replacing_folder
from impl.interface.trainable import Dtype
from impl.models.lora import merge_adapter, write_adapter


def write_model(
    folder: Path,
    *,
    source: Path,
    weights: NamedTensors,
    dtype: Dtype,
    adapter: Path | None = None,
    file_size: int = FILE_SIZE,
) -> None:
    """Writes ``weights`` and the other files of the Hugging Face folder ``source`` into ``folder``; collective.

    dtype: ``masters`` keeps the dtype of ``weights``, ``source`` gives each tensor the dtype that it has in ``source``.
    adapter: the folder of the adapter that some of the weights are of. The adapter is written into the folder
        ADAPTER in the dtype of the masters.

    The first rank calls ``check_target`` and ``write_folder``; an error there is raised on all ranks.
    """
    doing, failed = f"writing the model {folder}", None
    on_first(doing, lambda: check_target(folder, source=source))
    try:
        if dist.get_rank() == 0:
            write_folder(folder, source=source, weights=weights, dtype=dtype, adapter=adapter, file_size=file_size)
    except Exception as error:
        failed = error
    drain(weights)
    agree(doing, failed)


def check_target(folder: Path, *, source: Path) -> None:
    """Raises UsageError if ``folder`` must not be replaced: it is ``source``, or non-empty without a model."""
    if folder.resolve() == source.resolve():
        raise UsageError(f"{folder} is the folder that the model was loaded from; give another one")
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).is_file())):
        raise UsageError(f"{folder} exists and is not a Hugging Face folder, so it is not replaced; give another one")


def write_folder(
    folder: Path,
    *,
    source: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: Dtype,
    adapter: Path | None = None,
    file_size: int = FILE_SIZE,
) -> None:
    """Writes the folder in one process, and replaces an older folder when the new one is complete.

    At most one file's tensors and those of an adapter are in memory. The dtype in config.json is the most common dtype
    of the written numbers.
    """
    stored = stored_dtypes(source) if dtype == "source" else {}
    usual = Counter(stored.values()).most_common(1)[0][0] if stored else None
    written: Counter[torch.dtype] = Counter()
    adapter_weights: dict[str, torch.Tensor] = {}
    with replacing_folder(folder) as draft:
        not_copied = shutil.ignore_patterns(*NOT_COPIED, "*.index.json")
        shutil.copytree(source, draft, ignore=not_copied, dirs_exist_ok=True)
        with TensorWriter(draft, file_size=file_size) as writer:
            for name, weight in weights:
                if is_adapter(name):
                    adapter_weights[name] = weight.detach().to("cpu", copy=True)
                    continue
                dtype_to_write = stored.get(name, usual) or weight.dtype
                written[dtype_to_write] += weight.numel()
                writer.add(name, weight.detach().to(dtype_to_write))
                del weight  # before the next one is gathered
        if adapter_weights:
            assert adapter, "weights of an adapter come from a folder with its configuration"
            write_adapter(draft / ADAPTER, adapter, adapter_weights)
        _set_dtype(draft / CONFIG, str(written.most_common(1)[0][0]).removeprefix("torch."))


def write_merged(folder: Path, *, dtype: Dtype, write: Callable[..., None], trusted: bool) -> None:
    """Writes the folder of a model whose adapter is merged into the weights; collective.

    ``write(path, dtype=...)`` writes the folder with the adapter beside the weights. peft merges it on the first rank,
    which holds the whole model.
    """
    adapted_folder = folder.with_name(f".{folder.name}.adapted")
    write(adapted_folder, dtype=dtype)
    on_first(f"merging the adapter into {folder}", lambda: merge_folder(adapted_folder, folder, trusted=trusted))
    dist.barrier()


def merge_folder(adapted_folder: Path, folder: Path, *, trusted: bool) -> None:
    """Moves the model in ``adapted_folder`` to ``folder``, with its adapter merged into the weights; in one process."""
    from impl.models.loading import load_model  # imports transformers, which takes seconds

    dtype = max(stored_dtypes(adapted_folder).values(), key=lambda one: one.itemsize)
    model = load_model(adapted_folder, dtype=dtype, attention="eager", trusted=trusted)
    weights = merge_adapter(model, adapted_folder / ADAPTER)
    write_folder(folder, source=adapted_folder, weights=weights.items(), dtype="source")
    shutil.rmtree(adapted_folder)


def stored_dtypes(source: Path) -> dict[str, torch.dtype]:
    """Returns the dtype of each tensor in a Hugging Face folder, by name; only the headers of the files are read."""
    found = {}
    for file in weight_files(source):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = SAFETENSORS_DTYPES[tensors.get_slice(name).get_dtype()]
    return found


def _set_dtype(file: Path, dtype: str) -> None:
    """Sets the dtype wherever a configuration file names one; a file that is right already is not written."""
    config = read_json(file)
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
