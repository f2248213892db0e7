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

from conformance.backends.faults import Fault, Function
from conformance.models.folders import weight_files
from impl.faults.cells import FP16, ROUNDING, resume

Named = Iterable[tuple[str, torch.Tensor]]


def _without(*kinds: str) -> Callable[[Function], Function]:
    def wrap(load_kind: Function) -> Function:
        def faulty(model: Any, kind: str, folder: Path) -> None:
            if kind not in kinds:
                load_kind(model, kind, folder)

        return faulty

    return wrap


def _moments_exchanged(load_kind: Function) -> Function:
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}

    def faulty(model: Any, kind: str, folder: Path) -> None:
        load_kind(model, kind, folder.with_name(other.get(kind, kind)))

    return faulty


class _Renamed:
    """Reads another tensor than the requested one."""

    def __init__(self, read: Any, rename: Callable[[str], str]) -> None:
        self._read, self._rename = read, rename

    def __contains__(self, name: str) -> bool:
        return self._rename(name) in self._read

    def __call__(self, name: str, *place: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._read(self._rename(name), *place)
        return tensor

    def region(self, name: str, *place: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._read.region(self._rename(name), *place)
        return tensor

    def whole(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._read.whole(self._rename(name))
        return tensor


class _Zeros(_Renamed):
    def region(self, name: str, *place: Any) -> torch.Tensor:
        return super().region(name, *place).zero_()

    def whole(self, name: str) -> torch.Tensor:
        return super().whole(name).zero_()


class _Rounded(_Renamed):
    """Reads tensors rounded to bf16."""

    def __call__(self, name: str, *place: Any) -> torch.Tensor:
        return super().__call__(name, *place).to(torch.bfloat16)

    def region(self, name: str, *place: Any) -> torch.Tensor:
        return super().region(name, *place).to(torch.bfloat16)

    def whole(self, name: str) -> torch.Tensor:
        return super().whole(name).to(torch.bfloat16)


class _Transposed(_Renamed):
    """Reads the transposes of square matrices, whose shapes do not reveal it."""

    def __call__(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        return self.whole(name).narrow(dim, start, stop - start)

    def region(self, name: str, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return self.whole(name)[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]

    def whole(self, name: str) -> torch.Tensor:
        tensor = super().whole(name)
        return tensor.T.contiguous() if tensor.ndim == 2 and len({*tensor.shape}) == 1 else tensor


def _read_by(reader: Callable[[Any], Any], *kinds: str) -> Callable[[Function], Function]:
    """Replaces the reader that a model's ``write_state`` gets for some kinds of state."""

    def wrap(load_kind: Function) -> Function:
        def faulty(model: Any, kind: str, folder: Path) -> None:
            if kind not in kinds:
                load_kind(model, kind, folder)
                return
            write = model.write_state
            model.write_state = lambda kind, read: write(kind, reader(read))
            try:
                load_kind(model, kind, folder)
            finally:
                del model.write_state

        return faulty

    return wrap


def _same(name: str) -> str:
    return name


def _first_layer(name: str) -> str:
    """Renames the layer of the second of two pipeline stages as if the stage counted its layers from 0."""
    return name.replace("layers.1.", "layers.0.")


def _gate_for_up(name: str) -> str:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    *front, module, leaf = name.split(".")
    return ".".join([*front, other.get(module, module), leaf])


def _less_progress(*names: str) -> Callable[[Function], Function]:
    def wrap(load_progress: Function) -> Function:
        def faulty(model: Any, progress: Mapping[str, float]) -> None:
            restored = {name: value for name, value in progress.items() if name not in names}
            load_progress(model, restored if "schedule" in restored else {**restored, "schedule": 0.0})

        return faulty

    return wrap


def _one_count_for_all(load_kind: Function) -> Function:
    def faulty(model: Any, kind: str, folder: Path) -> None:
        load_kind(model, kind, folder)
        if kind == "step":
            counting = [state for state in _optimizer_state(model).values() if "step" in state]
            for state in counting:
                state["step"] = counting[0]["step"]

    return faulty


def _optimizer_state(model: Any) -> Mapping[Any, dict[str, Any]]:
    """Returns the state of the torch optimizer inside a backend's trainable."""
    optimizer = model.engine.basic_optimizer if hasattr(model, "engine") else model.optimizer
    chained = getattr(optimizer, "chained_optimizers", None)  # megatron-core has one, around torch's optimizer
    state: Mapping[Any, dict[str, Any]] = chained[0].optimizer.state if chained else optimizer.state
    return state


def _of_the_first_rank(read_file: Function) -> Function:
    def faulty(folder: Path, rank: int) -> Any:
        return read_file(folder, 0)

    return faulty


def _stale_shard(write_model: Function) -> Function:
    def faulty(folder: Path, *, source: Path, weights: Named, **options: Any) -> None:
        write_model(folder, source=source, weights=_with_an_old_one(source, weights), **options)

    return faulty


def _with_an_old_one(source: Path, weights: Named) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        yield name, _stored(source, name).to(weight) if name.endswith("down_proj.weight") else weight


def _stored(folder: Path, name: str) -> torch.Tensor:
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118
                tensor: torch.Tensor = tensors.get_tensor(name)
                return tensor
    raise KeyError(name)


def _untied(write_model: Function) -> Function:
    def faulty(folder: Path, *, source: Path, weights: Named, **options: Any) -> None:
        write_model(folder, source=source, weights=_with_a_head(weights), **options)
        if dist.get_rank() == 0:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
        dist.barrier()

    return faulty


def _with_a_head(weights: Named) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        yield name, weight
        if name.endswith("embed_tokens.weight"):
            yield "lm_head.weight", weight.clone()


_MEGATRON_LAYERS = "https://github.com/NVIDIA/Megatron-LM/issues/7452"

RESUME_FAULTS = (
    Fault(
        name="moments-not-loaded",
        summary="the optimizer state of a checkpoint is not loaded, and the optimizer starts from scratch",
        source="https://github.com/databricks/flashoptim/issues/3",
        seam="load_kind",
        stage="training state",
        cells=resume(),
        blind=("loss",),
        needs="a phase that resumes from training state",
        wrap=_without("exp_avg", "exp_avg_sq", "momentum_buffer", "step"),
    ),
    Fault(
        name="steps-not-loaded",
        summary="moments are loaded, but AdamW counts its steps from 0 again and repeats the bias correction",
        source="https://github.com/TrenTorch/TrenTorch/pull/187",
        seam="load_kind",
        stage="training state",
        cells=resume(),
        blind=("loss",),
        needs="a phase that resumes from training state of AdamW",
        wrap=_read_by(lambda read: _Zeros(read, _same), "step"),
    ),
    Fault(
        name="moments-exchanged",
        summary="the two moments of AdamW are exchanged while loading",
        source="a mistake of conversion scripts, which name them m and v, or exp_avg and exp_avg_sq",
        seam="load_kind",
        stage="training state",
        cells=resume(),
        blind=("loss",),
        needs="a phase that resumes from training state of AdamW",
        wrap=_moments_exchanged,
    ),
    Fault(
        name="moments-transposed",
        summary="moments of square matrices are loaded transposed, which their shapes do not reveal",
        source="a mistake of conversion scripts for formats that store kernels as (inputs, outputs)",
        seam="load_kind",
        stage="training state",
        cells=resume(),
        blind=("loss",),
        needs="a phase that resumes from training state of a model with square matrices",
        wrap=_read_by(lambda read: _Transposed(read, _same), "exp_avg", "exp_avg_sq", "momentum_buffer"),
    ),
    Fault(
        name="moments-of-another-layer",
        summary="optimizer state is read by a layer's number in its pipeline stage, weights by its number in the model",
        source=_MEGATRON_LAYERS,
        seam="load_kind",
        stage="training state",
        cells=resume(),
        blind=("loss",),
        needs="a phase that resumes from training state",
        wrap=_read_by(lambda read: _Renamed(read, _first_layer), "exp_avg", "exp_avg_sq", "momentum_buffer"),
    ),
    Fault(
        name="weights-of-another-layer",
        summary="weights are read by the layer's number in its pipeline stage; all shapes fit",
        source=_MEGATRON_LAYERS,
        seam="load_kind",
        stage="weights",
        cells=resume(),
        needs="a phase that resumes from training state",
        wrap=_read_by(lambda read: _Renamed(read, _first_layer), "weight"),
    ),
    Fault(
        name="gate-for-up",
        summary="the halves of a fused gate and up projection are split in the other order",
        source="https://github.com/NVIDIA-NeMo/RL/pull/2802, for another fused tensor",
        seam="load_kind",
        stage="weights",
        cells=resume(),
        needs="a phase that resumes from training state",
        wrap=_read_by(lambda read: _Renamed(read, _gate_for_up), "weight"),
    ),
    Fault(
        name="masters-from-bf16",
        summary="master weights are loaded from the bf16 copy that a checkpoint keeps for inference",
        source="https://github.com/TensorAuto/OpenTau/issues/185",
        seam="load_kind",
        stage="weights",
        cells=resume(only=ROUNDING),
        needs="a phase that resumes from training state",
        wrap=_read_by(lambda read: _Rounded(read, _same), "weight"),
    ),
    Fault(
        name="schedule-restarted",
        summary="the learning-rate schedule restarts after loading",
        source="https://github.com/huggingface/accelerate/issues/2926",
        seam="load_progress",
        stage="training state",
        cells=resume(),
        blind=("loss",),
        needs="a phase that resumes from training state",
        wrap=_less_progress("schedule"),
    ),
    Fault(
        name="loss-scale-forgotten",
        summary="the loss scale is not loaded and starts at its initial value",
        source="https://github.com/huggingface/transformers/pull/11663",
        seam="load_progress",
        stage="training state",
        cells=resume(only=FP16),
        blind=("loss",),
        needs="a phase that resumes from training state, in fp16",
        wrap=_less_progress("loss_scale", "good_steps"),
    ),
    Fault(
        name="one-count-for-all",
        summary="all parameters share one step counter of AdamW, and each parameter increments it",
        source="docs/findings/megatron-shared-step.md",
        seam="load_kind",
        stage="weights after N steps",
        cells=resume(),
        blind=("loss",),
        needs="a phase that resumes from training state of AdamW",
        wrap=_one_count_for_all,
    ),
    Fault(
        name="generators-of-first-rank",
        summary="all ranks continue with the random generators of the first rank, so dropout is the same on all",
        source="https://github.com/PaddlePaddle/PaddleFleetX/issues/1005",
        seam="read_generators",
        stage="generators",
        cells=resume("checkpoint"),
        blind=("loss",),
        needs="a checkpoint that is loaded in the layout that saved it, with at least two ranks",
        wrap=_of_the_first_rank,
    ),
    Fault(
        name="stale-shard",
        summary="an export contains some weights of an earlier export",
        source="https://github.com/huggingface/diffusers/issues/14769",
        seam="write_model",
        stage="weights",
        cells=resume("export"),
        needs="a phase that starts from an export",
        wrap=_stale_shard,
    ),
    Fault(
        name="untied-export",
        summary="a tied head is exported as a separate parameter, and trained separately from then on",
        source="https://github.com/NVIDIA/Megatron-LM/issues/6500",
        seam="write_model",
        stage="configuration",
        cells=resume("export", model="qwen3"),
        blind=("loss",),
        needs="a phase that starts from an export of a model with a tied head",
        wrap=_untied,
    ),
)
