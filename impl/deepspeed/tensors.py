"""Weights and gradients by Hugging Face name, whole and in pieces, at every ZeRO stage.

``named`` is collective. Gradients can be asked for after the last backward of a step and before its update, and at no
other time: in between, the ranks that own a piece raise and the others wait for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

from conformance.backend import NamedTensors, Shard, TensorKind


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """What a rank holds: piece ``zero_rank`` of ``zero_size`` of what ZeRO cuts, and a part within ``tensor_group``."""

    zero_rank: int
    zero_size: int
    tensor_group: dist.ProcessGroup | None


class EngineTensors:
    """Reads an engine's weights and gradients, and writes its weights.

    Weights are the float32 masters, which in bf16 and fp16 are not what the ranks compute with. Gradients are unclipped
    and free of the loss scale. What is frozen has neither.
    """

    def __init__(self, engine: DeepSpeedEngine, place: RankPlace) -> None:
        self._engine, self._stage, self._place = engine, engine.zero_optimization_stage(), place
        # Below ZeRO-1 a half-precision model has its masters in the optimizer's wrapper, else it is its own master.
        wrapper = engine.optimizer
        self._masters: dict[torch.nn.Parameter, torch.Tensor] = {}
        if self._stage == 0 and hasattr(wrapper, "fp32_groups"):
            for half, full in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                self._masters |= dict(zip(half, full, strict=True))

    def named(self, kind: TensorKind) -> NamedTensors:
        """Full tensors, one at a time."""
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                tensor = self._weight(parameter) if kind == "weight" else self._gradient(parameter)
                yield name, _whole(parameter, tensor.detach(), self._place)
            elif kind == "weight":
                yield name, _whole(parameter, _computed_with(parameter), self._place)

    def optimizer_state(self, key: str) -> NamedTensors:
        """One state of the optimizer, such as ``exp_avg``, in full; one parameter's at a time."""
        if self._stage in (1, 2):
            # Linked when the first of several parameter groups had been stepped, the others to nothing
            # (docs/findings/deepspeed-optimizer-state.md); now there is something to link.
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self._engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            if self._stage == 0:
                state = self._engine.basic_optimizer.state[self._masters.get(parameter, parameter)][key]
            else:
                state = safe_get_full_optimizer_state(parameter, key)
            yield name, _whole(parameter, state.detach(), self._place)

    def local(self, kind: TensorKind) -> Iterator[Shard]:
        """This rank's own pieces."""
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                own = self._own_weight(parameter) if kind == "weight" else self._own_gradient(parameter)
            else:
                own = _own_computed_with(parameter, self._place) if kind == "weight" else None
            if own:
                yield Shard(name, _part(parameter, self._place) + own[0], own[1].detach())

    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Overwrite the masters with full float32 tensors by name."""
        for name, parameter in self._engine.module.named_parameters():
            weight = weights[name]
            if cut := _cut(parameter):
                sizes, at = cut["partition_sizes"], dist.get_rank(self._place.tensor_group)
                weight = weight.narrow(cut["partition_dim"], sum(sizes[:at]), sizes[at])
            if self._stage == 0:
                self._masters[parameter].data.copy_(weight)
            elif self._stage < 3:
                safe_set_full_fp32_param(parameter, weight)
            else:  # its own function for full tensors forgets the padding of the last rank's piece
                numel = parameter.ds_tensor.numel()
                flat = torch.nn.functional.pad(weight.flatten(), (0, numel * self._place.zero_size - weight.numel()))
                safe_set_local_fp32_param(parameter, flat.narrow(0, numel * self._place.zero_rank, numel))

    def mark_cut_gradients(self) -> None:
        """Say of gradients at ZeRO-0 that they are pieces: its norm in half precision asks them, not the parameters."""
        for parameter in self._engine.module.parameters():
            if _cut(parameter) and parameter.grad is not None:
                parameter.grad.tensor_model_parallel = True

    def _weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if self._stage == 0:
            return self._masters.get(parameter, parameter)
        full: torch.Tensor = safe_get_full_fp32_param(parameter)
        return full

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad if self._stage == 0 else safe_get_full_grad(parameter)
        assert gradient is not None, "no gradient: this is not between a step's last backward and its update"
        return self._unscaled(gradient.detach())

    def _own_weight(self, parameter: torch.nn.Parameter) -> tuple[str, torch.Tensor]:
        """(region, tensor) of this rank's copy of the compute weight.

        At ZeRO-3, of its fp32 partition, since the full weight is freed between steps.
        """
        if self._stage == 3:
            return f"piece {self._place.zero_rank}", _unpadded(
                parameter, safe_get_local_fp32_param(parameter), self._place
            )
        return "full", parameter

    def _own_gradient(self, parameter: torch.nn.Parameter) -> tuple[str, torch.Tensor] | None:
        """(region, tensor) of the piece of the gradient that this rank owns; None where it owns nothing of it."""
        if self._stage == 0:
            return "full", self._gradient(parameter)
        if self._stage == 3:
            own = _unpadded(parameter, safe_get_local_grad(parameter), self._place)
            return f"piece {self._place.zero_rank}", self._unscaled(own)
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        piece, index = mapping.lp_fragment_address, getattr(parameter, "_index_in_param_group", None)
        gradient: torch.Tensor = mapping.get_lp_grad_fragment(index).flatten()
        if gradient.numel() == parameter.numel():  # ZeRO-1 in bf16 adds up all of it on every rank
            gradient = gradient.narrow(0, piece.start, piece.numel)
        return f"{piece.start}:{piece.start + piece.numel}", self._unscaled(gradient)

    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """In float32 (float64 in the exact tier, which makes that the default), without the loss scale of fp16."""
        scale = getattr(self._engine.optimizer, "loss_scale", 1.0)
        return gradient.to(torch.get_default_dtype()) / scale


class FrozenTensors:
    """Reads the weights of a model without an optimizer, which are what it computes with."""

    def __init__(self, model: torch.nn.Module, place: RankPlace) -> None:
        self._model, self._place = model, place

    def named(self, kind: TensorKind) -> NamedTensors:
        """Full weights in float32 (float64 in the exact tier), one at a time."""
        assert kind == "weight", "a frozen model has no gradients"
        for name, parameter in self._model.named_parameters():
            yield name, _whole(parameter, _computed_with(parameter), self._place)

    def local(self, kind: TensorKind) -> Iterator[Shard]:
        """This rank's own pieces."""
        assert kind == "weight", "a frozen model has no gradients"
        for name, parameter in self._model.named_parameters():
            region, own = _own_computed_with(parameter, self._place)
            yield Shard(name, _part(parameter, self._place) + region, own.detach())


def _computed_with(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What the ranks compute with, without what ZeRO cut of it, in float32 (float64 in the exact tier)."""
    with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().to(torch.get_default_dtype(), copy=True)


def _own_computed_with(parameter: Any, place: RankPlace) -> tuple[str, torch.Tensor]:
    """(region, tensor) of this rank's piece of that. ``parameter``: with what zero.Init hangs onto it."""
    if not hasattr(parameter, "ds_id"):
        return "full", parameter
    return f"piece {place.zero_rank}", _unpadded(parameter, parameter.ds_tensor, place)


def _unpadded(parameter: Any, piece: torch.Tensor, place: RankPlace) -> torch.Tensor:
    """This rank's piece of a parameter that ZeRO-3 cut, flat, without the padding that makes all pieces equally long:
    nobody ever writes the padding, so it differs between ranks that hold the same numbers."""
    flat = piece.flatten()
    return flat[: max(0, parameter.ds_numel - place.zero_rank * flat.numel())]


def cut_count(model: torch.nn.Module) -> int:
    """How many parameters tensor parallelism has cut."""
    return sum(_cut(parameter) is not None for parameter in model.parameters())


def _part(parameter: torch.nn.Parameter, place: RankPlace) -> str:
    """Which tensor-parallel part of a parameter this rank holds, as the beginning of a region."""
    return f"tp{dist.get_rank(place.tensor_group)} " if _cut(parameter) else ""


def _whole(parameter: torch.nn.Parameter, tensor: torch.Tensor, place: RankPlace) -> torch.Tensor:
    """Put the tensor-parallel parts of a parameter together; collective over their ranks."""
    cut = _cut(parameter)
    if not cut:
        return tensor
    assert len(set(cut["partition_sizes"])) == 1, "parts of different sizes"
    parts = [torch.empty_like(tensor) for _ in cut["partition_sizes"]]
    dist.all_gather(parts, tensor.contiguous(), group=place.tensor_group)
    return torch.cat(parts, dim=cut["partition_dim"])


def _cut(parameter: torch.nn.Parameter) -> dict[str, Any] | None:
    """What AutoTP noted of a parameter that it cut; None if it is whole on every rank."""
    note: dict[str, Any] | None = getattr(parameter, DS_AUTOTP_UC_META, None)
    return None if note is None or note["replicated"] else note
