"""A user's checkpoint becomes a training state or a Hugging Face folder, in one process, one file of tensors at a time.

Everything is checked by names and shapes before anything is written: the new folder is there when it is whole.
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
from impl.convert.contents import Checkpoint, Held
from impl.convert.detect import DEEPSPEED, MEGATRON, MODEL, find_format, open_as
from impl.interface.sharded_safetensors import TensorWriter, whole_folder
from impl.models.export import write_folder

Target = Literal["state", "hf"]
Told = Callable[[str, int, int], None]  # of a kind, how many tensors of how many have been written


def convert(source: Path, target: Path, *, to: Target, model: Path | None, told: Told) -> None:
    """Write the checkpoint ``source`` as the new folder ``target``.

    model: the Hugging Face folder that the training began with; what a new one has beside the weights comes from it,
    and the dtypes. Raises UsageError for what cannot be converted or does not fit, and for a target that exists.
    """
    if target.exists():
        raise UsageError(f"{target} exists, and nothing is overwritten; give a new folder")
    if to == "hf" and model is None:
        raise UsageError("a Hugging Face folder needs configuration and tokenizer: add --model with the original one")
    if model is not None:
        check_model_folder(model)
    with _opened(source, model, beside=target) as found:
        checkpoint = _without_second_head(found)
        _check_state(checkpoint, source)
        if model is not None:
            _check_fits(checkpoint, source, model)
        if to == "hf":
            assert model is not None
            weights = checkpoint.of_kind("weight")
            write_folder(target, source=model, weights=_read(checkpoint, weights, told), dtype="source")
        else:
            _write_state(target, checkpoint, told)


@contextlib.contextmanager
def _opened(source: Path, model: Path | None, *, beside: Path) -> Iterator[Checkpoint]:
    """The checkpoint, with tensors that can be read; what has to be put together first lies beside the new folder."""
    kind = find_format(source)
    if kind is MODEL:
        raise UsageError(f"{source} is a Hugging Face folder, from which every training begins; there is no more in it")
    if kind is MEGATRON:
        if model is None:
            raise UsageError(f"{source} is Megatron's, whose tensors are fused by heads and layers: add --model")
        yield megatron.named(source, model)
        return
    found = open_as(kind, source)
    if found.read is not None:
        yield found
        return
    assert kind is DEEPSPEED
    beside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{beside.name}.", dir=beside.parent) as folder:
        yield deepspeed.universal(source, Path(folder) / "universal")  # which writes beside it, too


def _without_second_head(found: Checkpoint) -> Checkpoint:
    """A tied head is written once, under the embedding's name; some formats store it again, though never moments of
    it."""
    weights = found.of_kind("weight")
    heads = [held for held in weights if held.name.endswith(HEAD)]
    embeddings = [held for held in weights if held.name.endswith(EMBEDDING)]
    if len(heads) != 1 or len(embeddings) != 1 or heads[0].shape != embeddings[0].shape:
        return found
    moments = any(held.name == heads[0].name and held.kind != "weight" for held in found.tensors)
    assert found.read is not None
    if moments or not torch.equal(found.read(heads[0]), found.read(embeddings[0])):
        return found
    return replace(found, tensors=tuple(held for held in found.tensors if held is not heads[0]))


def _check_state(found: Checkpoint, source: Path) -> None:
    """Raises UsageError where a checkpoint is none of a training as it is written here."""
    shapes = {held.name: held.shape for held in found.of_kind("weight")}
    if not shapes:
        raise UsageError(f"{source} has no weights under names of a model; is it a checkpoint of something else?")
    if foreign := found.of_kind("other"):
        names = ", ".join(held.name for held in foreign[:3])
        raise UsageError(f"{source} holds {len(foreign)} tensors that have no place in a training state: {names}")
    for held in found.tensors:
        if held.kind not in ("weight", "step") and shapes.get(held.name) != held.shape:
            raise UsageError(f"{source} has {held.kind} of {held.name} in another shape than the weight")


def _check_fits(found: Checkpoint, source: Path, model: Path) -> None:
    """Raises UsageError where the model's folder has other weights; it may store a tied head, too."""
    own, due = {held.name: held.shape for held in found.of_kind("weight")}, weight_shapes(model)
    config = read_json(model / CONFIG)
    tied = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings"))
    missing = [name for name in due if name not in own and not (tied and name.endswith(HEAD))]
    wrong = [f"{name} is missing" for name in missing]
    wrong += [f"{name} is not expected" for name in own if name not in due]
    wrong += [f"{n} has shape {own[n]} instead of {due[n]}" for n in own if n in due and own[n] != due[n]]
    if wrong:
        raise UsageError(f"{source} does not fit the model in {model}: {'; '.join(wrong[:8])}")


def _read(found: Checkpoint, wanted: tuple[Held, ...], told: Told) -> Iterator[tuple[str, torch.Tensor]]:
    assert found.read is not None
    for number, held in enumerate(wanted, start=1):
        yield held.name, found.read(held)
        told(held.kind, number, len(wanted))


def _write_state(target: Path, found: Checkpoint, told: Told) -> None:
    kinds = [kind for kind in WRITTEN if found.of_kind(kind)]
    with whole_folder(target) as beside:
        for kind in kinds:
            with TensorWriter(beside / kind) as writer:
                for name, tensor in _read(found, found.of_kind(kind), told):
                    # As named_tensors gives it: a float64 without dimensions.
                    writer.add(name, tensor.double().reshape(()) if kind == "step" else tensor)
        training_state.write_told(beside, kinds=kinds, progress=found.progress)
