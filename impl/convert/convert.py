"""Detects the format of a checkpoint, and converts it to a training state or a Hugging Face folder.

The files in a folder tell the format; no tensor is loaded for that. Folders of safetensors are formats, too: a Hugging
Face model, and the training state that all backends read. One process converts one file of tensors at a time.
Names and shapes are checked before anything is written. The new folder exists only when it is complete. A checkpoint
of a form that is not read is refused with the command of its framework that makes one that is read.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from conformance.core.errors import UsageError, first_few, one_line
from conformance.core.io import read_json
from conformance.models.folder_checks import CONFIG, check_model_folder
from conformance.models.folders import EMBEDDING, HEAD, weight_files, weight_shapes
from impl.checkpoints import training_state
from impl.checkpoints.manifest import verify_part
from impl.checkpoints.safe_pickle import METADATA, check_sums
from impl.checkpoints.training_state import WRITTEN, Checkpoint, StoredTensor
from impl.convert import deepspeed, torch_distributed
from impl.interface.sharded_safetensors import SAFETENSORS_DTYPES, TensorWriter, replacing_folder
from impl.models.export import write_folder

NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPTIMIZER = "optimizer.pt"  # of transformers' Trainer


def open_model(folder: Path) -> Checkpoint:
    """Opens a Hugging Face folder."""
    config = read_json(folder / CONFIG)
    facts = {"architectures": config.get("architectures"), "tied": bool(config.get("tie_word_embeddings"))}
    tensors = tuple(_describe("weight", weight_files(folder)))
    if (folder / OPTIMIZER).exists():
        facts["not read"] = OPTIMIZER
    return Checkpoint(format="Hugging Face folder", facts=facts, tensors=tensors, read=read)


def open_state(folder: Path) -> Checkpoint:
    """Opens a training state of impl.checkpoints.training_state."""
    contents = training_state.read_contents(folder)
    training_state.check_digests(folder, contents)
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
    """Describes a form of checkpoints. converts: whether ``convert`` reads it, in words for the documentation."""

    name: str
    converts: str = "yes"
    is_in: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]


TRAINING_STATE = Format(
    name="training state of this suite", is_in=lambda folder: (folder / training_state.FILE).is_file(), open=open_state
)
UNIVERSAL = Format(
    name="DeepSpeed universal",
    is_in=lambda folder: (folder / "zero").is_dir() and any(folder.glob(deepspeed.MODEL_FILES)),
    open=deepspeed.open_universal,
)
DEEPSPEED = Format(
    name="DeepSpeed ZeRO-0 to 3, with and without AutoTP",
    is_in=lambda folder: deepspeed.tag_folder(folder) is not None,
    open=deepspeed.open_native,
)
MEGATRON = Format(
    name="megatron-core's dist_checkpointing",
    converts="with `--model`; layers apart or stacked; no experts",
    is_in=lambda folder: all((folder / name).exists() for name in (METADATA, torch_distributed.MEGATRON_FILE)),
    open=torch_distributed.open_megatron,
)
FSDP2 = Format(
    name="torch.distributed.checkpoint, with a model's Hugging Face names or torchtitan's",
    converts="yes; torchtitan's Llama 3 and Qwen3 with `--model`; a tensor that is no part of a state is refused",
    is_in=lambda folder: (folder / METADATA).exists(),
    open=torch_distributed.open_fsdp2,
)
MODEL = Format(
    name="Hugging Face folder, also of transformers' Trainer",
    converts="needs none; `optimizer.pt` is not read",
    is_in=lambda folder: (folder / CONFIG).is_file(),
    open=open_model,
)
FORMATS = (TRAINING_STATE, UNIVERSAL, DEEPSPEED, MEGATRON, FSDP2, MODEL)  # the first match counts


def find_format(folder: Path) -> Format:
    """Returns the format of a checkpoint. Raises UsageError for unknown formats."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give the folder of a checkpoint")
    refuse(folder)
    for known in FORMATS:
        if known.is_in(folder):
            check_files(folder)
            return known
    forms = (*FORMATS, *FOREIGN)
    below = [
        path
        for pattern in ("*", "*/*")
        for path in sorted(folder.glob(pattern))
        if path.is_dir() and any(form.is_in(path) for form in forms)
    ]
    if below:
        raise UsageError(f"{folder} is not a checkpoint of one model; give one of {first_few(below, most=8)}")
    raise UsageError(
        f"{folder} is not a checkpoint of a known format (training state, Hugging Face folder, checkpoint of "
        f"DeepSpeed, torch.distributed.checkpoint or megatron-core); check the path"
    )


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens a checkpoint of any known format without loading its tensors; runs no code of it. Raises UsageError."""
    return open_as(find_format(folder), folder)


def open_as(known: Format, folder: Path) -> Checkpoint:
    """Opens a checkpoint of a format. Raises UsageError, also if files have the right names but other content."""
    with _readable(folder):
        return known.open(folder)


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raises UsageError for any error of reading: values of a damaged file may have any type."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{folder} cannot be read; it is damaged or of another version: {type(error).__name__}: {one_line(error)}"
        ) from None


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
        checkpoint = _without_tied_head(replace(found, read=partial(_read_one, found, source)))
        _check_state(checkpoint, source, to=to)
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
    verify_part(source)
    if kind is MODEL:
        open_as(kind, source)
        lost = (
            f"; its {OPTIMIZER} numbers moments without names and is not read" if (source / OPTIMIZER).exists() else ""
        )
        raise UsageError(f"{source} is a Hugging Face folder, which every training reads; it needs no conversion{lost}")
    for path in sorted((deepspeed.tag_folder(source) or source).rglob("*.pt")):
        with path.open("rb") as file:
            check_sums(file, str(path))
    if kind is MEGATRON:
        if model is None:
            raise UsageError(f"{source} is a checkpoint of Megatron, which fuses tensors: add --model")
        with _readable(source):
            named = torch_distributed.named(source, model)
        yield named
        return
    found = open_as(kind, source)
    if found.format.endswith(torch_distributed.TORCHTITAN):
        found = torch_distributed.as_hugging_face(found, source, model)
    if found.read is not None:
        yield found
        return
    assert kind is DEEPSPEED
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        with _readable(source):
            whole = deepspeed.universal(source, Path(folder) / "universal")  # it also writes beside this folder
        yield whole


def _read_one(found: Checkpoint, source: Path, stored: StoredTensor) -> torch.Tensor:
    assert found.read is not None
    with _readable(source):
        return found.read(stored)


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


def _check_state(found: Checkpoint, source: Path, *, to: Target) -> None:
    """Raises UsageError if a checkpoint cannot be a training state: weights, and state of the same shapes."""
    shapes = {stored.name: stored.shape for stored in found.of_kind("weight")}
    if not shapes:
        raise UsageError(f"{source} has no weights with names of a model; is it a checkpoint of something else?")
    if to == "state" and found.of_kind("exp_avg") and not found.of_kind("step"):
        raise UsageError(
            f"{source} has Adam's moments and does not say after how many updates, so no training state can be made; "
            f"convert only the weights, with --to hf"
        )
    for stored in found.tensors:
        if stored.kind not in ("other", "step") and stored.dtype not in NUMBERS:
            raise UsageError(
                f"{source}: {stored.name} is {str(stored.dtype).removeprefix('torch.')}, whose scales no training "
                f"state has; save the checkpoint with weights in bf16 or fp32"
            )
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
        training_state.write_contents(folder, kinds=kinds, progress=found.progress, has_manifest=False)


WEIGHTS = "model*.safetensors"
LFS = b"version https://git-lfs.github.com/spec/"
_SUFFIXES = (".pt", ".distcp", ".safetensors", ".json")  # of files in all forms; a folder of such a name is none


@dataclass(frozen=True, kw_only=True)
class ForeignForm:
    """Describes a form by its files. patterns: each matches a file of it; absent: matches no file of it.

    advice: what to run first; ``{folder}`` is the checkpoint.
    """

    name: str
    patterns: tuple[str, ...]
    absent: tuple[str, ...] = ()
    advice: str

    def is_in(self, folder: Path) -> bool:
        return all(any(folder.glob(p)) for p in self.patterns) and not any(any(folder.glob(p)) for p in self.absent)


FOREIGN = (
    ForeignForm(
        name="verl, FSDP",
        patterns=("model_world_size_*_rank_*.pt",),
        advice="python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir NEW",
    ),
    ForeignForm(
        name="verl, Megatron",
        patterns=("dist_ckpt", "huggingface"),
        advice="python -m verl.model_merger merge --backend megatron --local_dir {folder} --target_dir NEW",
    ),
    ForeignForm(
        name="Megatron-LM, legacy",
        patterns=("mp_rank_*/model_optim_rng.pt",),
        advice="Megatron-LM's training script with --load {folder}/.. --ckpt-convert-format torch_dist "
        "--ckpt-convert-save NEW",
    ),
    ForeignForm(
        name="PEFT adapter",
        patterns=("adapter_config.json",),
        absent=(WEIGHTS,),
        advice="AutoPeftModelForCausalLM.from_pretrained('{folder}').merge_and_unload().save_pretrained('NEW')",
    ),
    ForeignForm(
        name="Meta's consolidated files",
        patterns=("params.json", "consolidated*.pth"),
        absent=(WEIGHTS,),
        advice="python src/transformers/models/llama/convert_llama_weights_to_hf.py --input_dir {folder} --num_shards "
        "N --llama_version VERSION --output_dir NEW, in transformers' repository",
    ),
    ForeignForm(
        name="Mistral's consolidated files",
        patterns=("params.json", "consolidated*.safetensors"),
        absent=(WEIGHTS,),
        advice="python src/transformers/models/mistral/convert_mistral_weights_to_hf.py {folder} NEW, in transformers' "
        "repository",
    ),
    ForeignForm(
        name="PyTorch Lightning",
        patterns=("*.ckpt",),
        absent=(CONFIG,),
        advice="load the .ckpt file with load_from_checkpoint of its LightningModule, then save_pretrained('NEW') of "
        "the model in it",
    ),
    ForeignForm(
        name="Hugging Face folder with pickled weights",
        patterns=(CONFIG, "pytorch_model*.bin"),
        absent=(WEIGHTS,),
        advice="AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('NEW')",
    ),
    ForeignForm(
        name="accelerate's save_state",
        patterns=("random_states_*.pkl", WEIGHTS),
        absent=(CONFIG,),
        advice="load_state('{folder}') in the script that saved it, then save_pretrained('NEW') of the unwrapped model",
    ),
)


def refuse(folder: Path) -> None:
    """Raises UsageError, with the advice, for a checkpoint of a foreign form."""
    for form in FOREIGN:
        if form.is_in(folder):
            raise UsageError(
                f"{folder} is a checkpoint of another form ({form.name}), which is not read; run first: "
                f"{form.advice.format(folder=folder)}"
            )


def check_files(folder: Path) -> None:
    """Raises UsageError for what is no file in a checkpoint, and for pointers of Git LFS."""
    for path in _paths(folder):
        try:
            if not path.is_file():
                raise UsageError(
                    f"{path} is a folder, a pipe, a device or a broken link, but a checkpoint has a file there"
                )
            with path.open("rb") as file:
                start = file.read(len(LFS))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        if start == LFS:
            raise UsageError(
                f"{path} is a Git LFS pointer, not the file itself; run first: git lfs pull, in the clone of {folder}"
            )


def _paths(folder: Path) -> Iterator[Path]:
    """Yields all paths below that should be files; the files of a folder of the Hugging Face cache are links."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir() or path.suffix in _SUFFIXES:
            yield path
        elif not path.is_symlink():
            yield from _paths(path)
