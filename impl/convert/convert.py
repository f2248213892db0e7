"""Converts a checkpoint to a training state or a Hugging Face folder, in one process, one file of tensors at a time.

Names and shapes are checked before anything is written. The new folder exists only when it is complete.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from conformance.core.errors import UsageError
from conformance.core.io import read_json
from conformance.models.folder_checks import CONFIG, check_model_folder
from conformance.models.folders import EMBEDDING, HEAD, weight_shapes
from impl.checkpoints import training_state
from impl.checkpoints.training_state import WRITTEN
from impl.convert import deepspeed, megatron
from impl.convert.contents import Checkpoint, StoredTensor
from impl.convert.detect import DEEPSPEED, MEGATRON, MODEL, find_format, open_as
from impl.interface.sharded_safetensors import TensorWriter, replacing_folder
from impl.models.export import write_folder

Target = Literal["state", "hf"]
Progress = Callable[[str, int, int], None]  # (kind, tensors written, tensors in all)


def convert(source: Path, target: Path, *, to: Target, model: Path | None, report: Progress) -> None:
    """Writes the checkpoint ``source`` as the new folder ``target``.

    model: the Hugging Face folder that the training started from; a new one gets its dtypes and all files but the
    weights. Raises UsageError if the checkpoint cannot be converted or does not fit, and if the target exists.
    """
    if target.exists():
        raise UsageError(f"{target} exists, and nothing is overwritten; give a new folder")
    if to == "hf" and model is None:
        raise UsageError("a Hugging Face folder needs configuration and tokenizer: add --model with the original one")
    if model is not None:
        check_model_folder(model)
    with _opened(source, model, target=target) as found:
        checkpoint = _without_tied_head(found)
        _check_state(checkpoint, source)
        if model is not None:
            _check_fits(checkpoint, source, model)
        if to == "hf":
            assert model is not None
            weights = checkpoint.of_kind("weight")
            write_folder(target, source=model, weights=_read(checkpoint, weights, report), dtype="source")
        else:
            _write_state(target, checkpoint, report)


@contextlib.contextmanager
def _opened(source: Path, model: Path | None, *, target: Path) -> Iterator[Checkpoint]:
    """Opens the checkpoint with readable tensors; assembles DeepSpeed's pieces in a folder beside ``target`` first."""
    kind = find_format(source)
    if kind is MODEL:
        raise UsageError(f"{source} is a Hugging Face folder, which every training reads; it needs no conversion")
    if kind is MEGATRON:
        if model is None:
            raise UsageError(f"{source} is a checkpoint of Megatron, which fuses tensors: add --model")
        yield megatron.named(source, model)
        return
    found = open_as(kind, source)
    if found.read is not None:
        yield found
        return
    assert kind is DEEPSPEED
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        yield deepspeed.universal(source, Path(folder) / "universal")  # it also writes beside this folder


def _without_tied_head(found: Checkpoint) -> Checkpoint:
    """Drops a tied head, which some formats store in addition to the embedding, but never with moments."""
    weights = found.of_kind("weight")
    heads = [stored for stored in weights if stored.name.endswith(HEAD)]
    embeddings = [stored for stored in weights if stored.name.endswith(EMBEDDING)]
    if len(heads) != 1 or len(embeddings) != 1 or heads[0].shape != embeddings[0].shape:
        return found
    moments = any(stored.name == heads[0].name and stored.kind != "weight" for stored in found.tensors)
    assert found.read is not None
    if moments or not torch.equal(found.read(heads[0]), found.read(embeddings[0])):
        return found
    return replace(found, tensors=tuple(stored for stored in found.tensors if stored is not heads[0]))


def _check_state(found: Checkpoint, source: Path) -> None:
    """Raises UsageError if a checkpoint cannot be a training state: weights, and state of the same shapes."""
    shapes = {stored.name: stored.shape for stored in found.of_kind("weight")}
    if not shapes:
        raise UsageError(f"{source} has no weights with names of a model; is it a checkpoint of something else?")
    if foreign := found.of_kind("other"):
        names = ", ".join(stored.name for stored in foreign[:3])
        raise UsageError(f"{source} has {len(foreign)} tensors that a training state cannot contain: {names}")
    for stored in found.tensors:
        if stored.kind not in ("weight", "step") and shapes.get(stored.name) != stored.shape:
            raise UsageError(f"{source}: {stored.kind} of {stored.name} has another shape than the weight")


def _check_fits(found: Checkpoint, source: Path, model: Path) -> None:
    """Raises UsageError if the model's folder has other weights; it may also store a tied head."""
    own, due = {stored.name: stored.shape for stored in found.of_kind("weight")}, weight_shapes(model)
    config = read_json(model / CONFIG)
    tied = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings"))
    missing = [name for name in due if name not in own and not (tied and name.endswith(HEAD))]
    wrong = [f"{name} is missing" for name in missing]
    wrong += [f"{name} is not expected" for name in own if name not in due]
    wrong += [f"{n} has shape {own[n]} instead of {due[n]}" for n in own if n in due and own[n] != due[n]]
    if wrong:
        raise UsageError(f"{source} does not fit the model in {model}: {'; '.join(wrong[:8])}")


def _read(found: Checkpoint, wanted: tuple[StoredTensor, ...], report: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    assert found.read is not None
    for number, stored in enumerate(wanted, start=1):
        yield stored.name, found.read(stored)
        report(stored.kind, number, len(wanted))


def _write_state(target: Path, found: Checkpoint, report: Progress) -> None:
    kinds = [kind for kind in WRITTEN if found.of_kind(kind)]
    with replacing_folder(target) as folder:
        for kind in kinds:
            with TensorWriter(folder / kind) as writer:
                for name, tensor in _read(found, found.of_kind(kind), report):
                    # named_tensors yields steps as float64 scalars.
                    writer.add(name, tensor.double().reshape(()) if kind == "step" else tensor)
        training_state.write_contents(folder, kinds=kinds, progress=found.progress)
