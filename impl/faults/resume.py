"""Plants faults in saving and resuming: the next phase does not continue from the state that was saved.

Tests of resuming usually check the first loss after loading, which most of these faults do not change.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from conformance.backends.faults import Function
from conformance.core.io import read_json
from conformance.models.folders import weight_files
from impl.faults.declaration import FP16, ROUNDING, Faults, resume

Named = Iterable[tuple[str, Tensor]]
Progress = Mapping[str, float]
Rename = Callable[[str], str]

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
MEGATRON_LAYERS = "https://github.com/NVIDIA/Megatron-LM/issues/7452"
RESUME_FAULTS = Faults()


class _ChangedReader:
    """Reads a tensor of another name, or with other numbers, than the requested one."""

    def __init__(self, read: Any, *, rename: Rename = str, change: Callable[[Tensor], Tensor] = torch.clone) -> None:
        self._read, self._rename, self._change = read, rename, change

    def __contains__(self, name: str) -> bool:
        return self._rename(name) in self._read

    def whole(self, name: str) -> Tensor:
        return self._change(self._read.whole(self._rename(name)))

    def __call__(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.whole(name).narrow(dim, start, stop - start)

    def region(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        return self.whole(name)[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]


def _load_changed(
    load_kind: Function, model: Any, kind: str, folder: Path, *, kinds: Sequence[str], **changes: Any
) -> None:
    """Loads one kind of state; the model reads those in ``kinds`` by a _ChangedReader with ``changes``."""
    write = model.write_state
    if kind in kinds:
        model.write_state = lambda kind, read: write(kind, _ChangedReader(read, **changes))
    try:
        load_kind(model, kind, folder)
    finally:
        vars(model).pop("write_state", None)


def _first_layer(name: str) -> str:
    """Renames the layer of the second of two pipeline stages as if the stage counted its layers from 0."""
    return name.replace("layers.1.", "layers.0.")


def _gate_for_up(name: str) -> str:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    *front, module, leaf = name.split(".")
    return ".".join([*front, other.get(module, module), leaf])


def _transposed(tensor: Tensor) -> Tensor:
    """Transposes a square matrix, whose shape does not reveal it."""
    return tensor.T.contiguous() if tensor.ndim == 2 and len({*tensor.shape}) == 1 else tensor


def _load_progress_without(names: Sequence[str], load_progress: Function, model: Any, progress: Progress) -> None:
    load_progress(model, {"schedule": 0.0} | {name: value for name, value in progress.items() if name not in names})


@RESUME_FAULTS.add(
    summary="the momentum of Muon is not taken from a checkpoint and begins at 0",
    source="https://github.com/deepspeedai/DeepSpeed/pull/8433",
    stage="training state",
    cells=resume("checkpoint", scenario="sft-muon", fsdp2="dp2"),
    blind=("loss",),
    needs="Muon, and a checkpoint",
)
def momentum_forgotten(restore_state: Function, optimizer: Any, state: dict[str, Any]) -> None:
    restore_state(optimizer, state)
    for own in optimizer.state.values():
        own.pop("momentum_buffer", None)


@RESUME_FAULTS.add(
    summary="the optimizer state of a checkpoint is not loaded, and the optimizer starts from scratch",
    source="https://github.com/databricks/flashoptim/issues/3",
    stage="training state",
    cells=resume(),
    blind=("loss",),
    needs="a phase that resumes from training state",
)
def moments_not_loaded(load_kind: Function, model: Any, kind: str, folder: Path) -> None:
    if kind not in (*MOMENTS, "step"):
        load_kind(model, kind, folder)


@RESUME_FAULTS.add(
    summary="moments are loaded, but AdamW counts its steps from 0 again and repeats the bias correction",
    source="https://github.com/TrenTorch/TrenTorch/pull/187",
    stage="training state",
    cells=resume(),
    blind=("loss",),
    needs="a phase that resumes from training state of AdamW",
)
def steps_not_loaded(load_kind: Function, model: Any, kind: str, folder: Path) -> None:
    _load_changed(load_kind, model, kind, folder, kinds=("step",), change=torch.zeros_like)


@RESUME_FAULTS.add(
    summary="the two moments of AdamW are exchanged while loading",
    source="a mistake of conversion scripts, which name them m and v, or exp_avg and exp_avg_sq",
    stage="training state",
    cells=resume(),
    blind=("loss",),
    needs="a phase that resumes from training state of AdamW",
)
def moments_exchanged(load_kind: Function, model: Any, kind: str, folder: Path) -> None:
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    load_kind(model, kind, folder.with_name(other.get(kind, kind)))


@RESUME_FAULTS.add(
    summary="moments of square matrices are loaded transposed, which their shapes do not reveal",
    source="a mistake of conversion scripts for formats that store kernels as (inputs, outputs)",
    stage="training state",
    cells=resume(),
    blind=("loss",),
    needs="a phase that resumes from training state of a model with square matrices",
)
def moments_transposed(load_kind: Function, model: Any, kind: str, folder: Path) -> None:
    _load_changed(load_kind, model, kind, folder, kinds=MOMENTS, change=_transposed)


@RESUME_FAULTS.add(
    summary="optimizer state is read by a layer's number in its pipeline stage, weights by its number in the model",
    source=MEGATRON_LAYERS,
    stage="training state",
    cells=resume(),
    blind=("loss",),
    needs="a phase that resumes from training state",
)
def moments_of_another_layer(load_kind: Function, model: Any, kind: str, folder: Path) -> None:
    _load_changed(load_kind, model, kind, folder, kinds=MOMENTS, rename=_first_layer)


@RESUME_FAULTS.add(
    summary="weights are read by the layer's number in its pipeline stage; all shapes fit",
    source=MEGATRON_LAYERS,
    stage="weights",
    cells=resume(),
    needs="a phase that resumes from training state",
)
def weights_of_another_layer(load_kind: Function, model: Any, kind: str, folder: Path) -> None:
    _load_changed(load_kind, model, kind, folder, kinds=("weight",), rename=_first_layer)


@RESUME_FAULTS.add(
    summary="the halves of a fused gate and up projection are split in the other order",
    source="https://github.com/NVIDIA-NeMo/RL/pull/2802, for another fused tensor",
    stage="weights",
    cells=resume(),
    needs="a phase that resumes from training state",
)
def gate_for_up(load_kind: Function, model: Any, kind: str, folder: Path) -> None:
    _load_changed(load_kind, model, kind, folder, kinds=("weight",), rename=_gate_for_up)


@RESUME_FAULTS.add(
    summary="master weights are loaded from the bf16 copy that a checkpoint keeps for inference",
    source="https://github.com/TensorAuto/OpenTau/issues/185",
    stage="weights",
    cells=resume(only=ROUNDING),
    needs="a phase that resumes from training state",
)
def masters_from_bf16(load_kind: Function, model: Any, kind: str, folder: Path) -> None:
    _load_changed(load_kind, model, kind, folder, kinds=("weight",), change=torch.Tensor.bfloat16)


@RESUME_FAULTS.add(
    summary="the learning-rate schedule restarts after loading",
    source="https://github.com/huggingface/accelerate/issues/2926",
    stage="training state",
    cells=resume(),
    blind=("loss",),
    needs="a phase that resumes from training state",
)
def schedule_restarted(load_progress: Function, model: Any, progress: Progress) -> None:
    _load_progress_without(("schedule",), load_progress, model, progress)


@RESUME_FAULTS.add(
    summary="the loss scale is not loaded and starts at its initial value",
    source="https://github.com/huggingface/transformers/pull/11663",
    stage="training state",
    cells=resume(only=FP16),
    blind=("loss",),
    needs="a phase that resumes from training state, in fp16",
)
def loss_scale_forgotten(load_progress: Function, model: Any, progress: Progress) -> None:
    _load_progress_without(("loss_scale", "good_steps"), load_progress, model, progress)


@RESUME_FAULTS.add(
    summary="all parameters share one step counter of AdamW, and each parameter increments it",
    source="docs/findings/megatron-shared-step.md",
    stage="weights after N steps",
    cells=resume(),
    blind=("loss",),
    needs="a phase that resumes from training state of AdamW",
)
def one_count_for_all(load_kind: Function, model: Any, kind: str, folder: Path) -> None:
    load_kind(model, kind, folder)
    if kind == "step":
        counting = [state for state in _optimizer_state(model).values() if "step" in state]
        for state in counting:
            state["step"] = counting[0]["step"]


def _optimizer_state(model: Any) -> Mapping[Any, dict[str, Any]]:
    """Returns the state of the torch optimizer inside a backend's trainable."""
    optimizer = model.engine.basic_optimizer if hasattr(model, "engine") else model.optimizer
    chained = getattr(optimizer, "chained_optimizers", None)  # megatron-core has one, around torch's optimizer
    state: Mapping[Any, dict[str, Any]] = chained[0].optimizer.state if chained else optimizer.state
    return state


@RESUME_FAULTS.add(
    summary="all ranks continue with the random generators of the first rank, so dropout is the same on all",
    source="https://github.com/PaddlePaddle/PaddleFleetX/issues/1005",
    stage="generators",
    cells=resume("checkpoint"),
    blind=("loss",),
    needs="a checkpoint that is loaded in the layout that saved it, with at least two ranks",
)
def generators_of_first_rank(read_generators: Function, folder: Path, rank: int) -> Any:
    return read_generators(folder, 0)


@RESUME_FAULTS.add(
    summary="an export contains some weights of an earlier export",
    source="https://github.com/huggingface/diffusers/issues/14769",
    stage="weights",
    cells=resume("export"),
    needs="a phase that starts from an export",
)
def stale_shard(write_model: Function, folder: Path, *, source: Path, weights: Named, **options: Any) -> None:
    write_model(folder, source=source, weights=_with_an_old_one(source, weights), **options)


def _with_an_old_one(source: Path, weights: Named) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        yield name, _stored(source, name).to(weight) if name.endswith("down_proj.weight") else weight


def _stored(folder: Path, name: str) -> Tensor:
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118
                tensor: Tensor = tensors.get_tensor(name)
                return tensor
    raise KeyError(name)


@RESUME_FAULTS.add(
    summary="a tied head is exported as a separate parameter, and trained separately from then on",
    source="https://github.com/NVIDIA/Megatron-LM/issues/6500",
    stage="configuration",
    cells=resume("export", model="qwen3"),
    blind=("loss",),
    needs="a phase that starts from an export of a model with a tied head",
)
def untied_export(write_model: Function, folder: Path, *, source: Path, weights: Named, **options: Any) -> None:
    write_model(folder, source=source, weights=_with_a_head(weights), **options)
    if dist.get_rank() == 0:
        config = read_json(folder / "config.json")
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
    dist.barrier()


def _with_a_head(weights: Named) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        yield name, weight
        if name.endswith("embed_tokens.weight"):
            yield "lm_head.weight", weight.clone()
