"""Faults of handing over: what one leg saved is not what the next one goes on from.

The first loss after loading is right in most of them, which is what tests of resuming look at.
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
    """A reader that gives other tensors than those that it is asked for."""

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
    """A reader of a file in bf16."""

    def __call__(self, name: str, *place: Any) -> torch.Tensor:
        return super().__call__(name, *place).to(torch.bfloat16)

    def region(self, name: str, *place: Any) -> torch.Tensor:
        return super().region(name, *place).to(torch.bfloat16)

    def whole(self, name: str) -> torch.Tensor:
        return super().whole(name).to(torch.bfloat16)


class _Transposed(_Renamed):
    """A reader that gives the transposes of square matrices; their shapes tell nobody."""

    def __call__(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        return self.whole(name).narrow(dim, start, stop - start)

    def region(self, name: str, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return self.whole(name)[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]

    def whole(self, name: str) -> torch.Tensor:
        tensor = super().whole(name)
        return tensor.T.contiguous() if tensor.ndim == 2 and len({*tensor.shape}) == 1 else tensor


def _read_by(reader: Callable[[Any], Any], *kinds: str) -> Callable[[Function], Function]:
    """What a model's ``write_state`` reads some kinds by is another reader, made of the right one."""

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
    """As the second of two pipeline stages names its layer where it counts from 0 again."""
    return name.replace("layers.1.", "layers.0.")


def _gate_for_up(name: str) -> str:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    *front, module, leaf = name.split(".")
    return ".".join([*front, other.get(module, module), leaf])


def _less_progress(*names: str) -> Callable[[Function], Function]:
    def wrap(load_progress: Function) -> Function:
        def faulty(model: Any, progress: Mapping[str, float]) -> None:
            begun = {name: value for name, value in progress.items() if name not in names}
            load_progress(model, begun if "schedule" in begun else {**begun, "schedule": 0.0})

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
    """The state of torch's optimizer inside of a backend's trainable."""
    optimizer = model.engine.basic_optimizer if hasattr(model, "engine") else model.optimizer
    chained = getattr(optimizer, "chained_optimizers", None)  # of megatron-core: one, around torch's
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
                found: torch.Tensor = tensors.get_tensor(name)
                return found
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

HANDOVER_FAULTS = (
    Fault(
        name="moments-not-loaded",
        summary="a checkpoint's optimizer state is not loaded, and the optimizer begins anew",
        source="https://github.com/databricks/flashoptim/issues/3",
        seam="load_kind",
        stage="training state",
        loss_blind=True,
        needs="a handover of training state to another leg",
        wrap=_without("exp_avg", "exp_avg_sq", "momentum_buffer", "step"),
    ),
    Fault(
        name="steps-not-loaded",
        summary="moments are loaded, but AdamW counts its steps from 0 again, so they are corrected once more",
        source="https://github.com/TrenTorch/TrenTorch/pull/187",
        seam="load_kind",
        stage="training state",
        loss_blind=True,
        needs="a handover of training state of AdamW to another leg",
        wrap=_read_by(lambda read: _Zeros(read, _same), "step"),
    ),
    Fault(
        name="moments-exchanged",
        summary="each moment is loaded in the place of the other",
        source="a mistake of conversion scripts, which name them m and v, or exp_avg and exp_avg_sq",
        seam="load_kind",
        stage="training state",
        loss_blind=True,
        needs="a handover of training state of AdamW to another leg",
        wrap=_moments_exchanged,
    ),
    Fault(
        name="moments-transposed",
        summary="moments of square matrices are loaded transposed, which no shape tells",
        source="a mistake of conversion scripts, where a format has kernels as (inputs, outputs)",
        seam="load_kind",
        stage="training state",
        loss_blind=True,
        needs="a handover of training state of a model with square matrices to another leg",
        wrap=_read_by(lambda read: _Transposed(read, _same), "exp_avg", "exp_avg_sq", "momentum_buffer"),
    ),
    Fault(
        name="moments-of-another-layer",
        summary="optimizer state is read by the number of a layer in its pipeline stage, weights by that in the model",
        source=_MEGATRON_LAYERS,
        seam="load_kind",
        stage="training state",
        loss_blind=True,
        needs="a handover of training state to another leg",
        wrap=_read_by(lambda read: _Renamed(read, _first_layer), "exp_avg", "exp_avg_sq", "momentum_buffer"),
    ),
    Fault(
        name="weights-of-another-layer",
        summary="weights are read by the number of a layer in its pipeline stage; all shapes fit",
        source=_MEGATRON_LAYERS,
        seam="load_kind",
        stage="weights",
        loss_blind=False,
        needs="a handover of training state to another leg",
        wrap=_read_by(lambda read: _Renamed(read, _first_layer), "weight"),
    ),
    Fault(
        name="gate-for-up",
        summary="the halves of a fused gate and up projection are split in the other order",
        source="https://github.com/NVIDIA-NeMo/RL/pull/2802, of another fused tensor",
        seam="load_kind",
        stage="weights",
        loss_blind=False,
        needs="a handover of training state to another leg",
        wrap=_read_by(lambda read: _Renamed(read, _gate_for_up), "weight"),
    ),
    Fault(
        name="masters-from-bf16",
        summary="master weights are loaded from the bf16 copy that a checkpoint has for inference",
        source="https://github.com/TensorAuto/OpenTau/issues/185",
        seam="load_kind",
        stage="weights",
        loss_blind=False,
        needs="a handover of training state to another leg",
        wrap=_read_by(lambda read: _Rounded(read, _same), "weight"),
    ),
    Fault(
        name="schedule-restarted",
        summary="the learning-rate schedule begins anew after loading",
        source="https://github.com/huggingface/accelerate/issues/2926",
        seam="load_progress",
        stage="training state",
        loss_blind=True,
        needs="a handover of training state to another leg",
        wrap=_less_progress("schedule"),
    ),
    Fault(
        name="loss-scale-forgotten",
        summary="the loss scale is not loaded, and begins where it began first",
        source="https://github.com/huggingface/transformers/pull/11663",
        seam="load_progress",
        stage="training state",
        loss_blind=True,
        needs="a handover of training state to another leg, in fp16",
        wrap=_less_progress("loss_scale", "good_steps"),
    ),
    Fault(
        name="one-count-for-all",
        summary="all parameters share the tensor in which AdamW counts its steps, and each of them counts",
        source="docs/findings/megatron-shared-step.md",
        seam="load_kind",
        stage="weights after N steps",
        loss_blind=True,
        needs="a handover of training state of AdamW to another leg",
        wrap=_one_count_for_all,
    ),
    Fault(
        name="generators-of-first-rank",
        summary="all ranks go on with the first one's random generators, so all drop out the same",
        source="https://github.com/PaddlePaddle/PaddleFleetX/issues/1005",
        seam="read_generators",
        stage="generators",
        loss_blind=True,
        needs="a checkpoint that is loaded in the layout that saved it, of two ranks or more",
        wrap=_of_the_first_rank,
    ),
    Fault(
        name="stale-shard",
        summary="an export has weights of an earlier one among its own",
        source="https://github.com/huggingface/diffusers/issues/14769",
        seam="write_model",
        stage="weights",
        loss_blind=False,
        needs="an export to another leg",
        wrap=_stale_shard,
    ),
    Fault(
        name="untied-export",
        summary="a tied head is exported as a parameter of its own, and trained apart from then on",
        source="https://github.com/NVIDIA/Megatron-LM/issues/6500",
        seam="write_model",
        stage="configuration",
        loss_blind=True,
        needs="an export of a model with a tied head to another leg",
        wrap=_untied,
    ),
)
