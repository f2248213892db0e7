"""Reads and writes weights, gradients and optimizer state by Hugging Face name, at every ZeRO stage.

``named`` is collective. Gradients can only be read after the last backward pass of a step and before its update; at any
other time, the ranks that own a piece raise while the others wait for them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
)

from conformance.backends.protocol import NamedTensors, Shard, TensorKind
from impl.deepspeed.partition import RankPlace, ReadRegion, SteppedTensors, cut_of
from impl.interface.trainable import WrittenKind
from impl.models.lora import named_parameters


class EngineTensors:
    """Reads an engine's weights, gradients and optimizer state, and writes its weights and optimizer state.

    Weights are the float32 masters, which in bf16 and fp16 differ from the weights that the ranks compute with.
    Gradients are unclipped and without the loss scale. A frozen parameter has no master and no gradient.
    """

    def __init__(self, engine: DeepSpeedEngine, place: RankPlace) -> None:
        self._engine, self._stage, self._place = engine, engine.zero_optimization_stage(), place
        self._stepped = SteppedTensors(engine, place)

    def named(self, kind: TensorKind) -> NamedTensors:
        """Yields (Hugging Face name, full tensor), one parameter at a time; a step count has no dimensions."""
        if kind not in ("weight", "gradient"):
            self._stepped.link_state()
        for name, parameter in named_parameters(self._engine.module):
            if not parameter.requires_grad:
                if kind == "weight":
                    yield name, self._place.whole(parameter, _computed_with(parameter))
            elif kind in ("weight", "gradient"):
                tensor = self._weight(parameter) if kind == "weight" else self._gradient(parameter)
                yield name, self._place.whole(parameter, tensor.detach())
            elif kind in (state := self._stepped.state(parameter)):
                if kind == "step":
                    yield name, torch.tensor(float(state[kind]), dtype=torch.float64)
                else:
                    full = state[kind] if self._stage == 0 else safe_get_full_optimizer_state(parameter, kind)
                    yield name, self._place.whole(parameter, full.detach())

    @torch.no_grad()
    def write(self, kind: WrittenKind, read: ReadRegion) -> None:
        """Overwrites one state of the optimizer or, for ``weight``, masters and compute weights; collective."""
        for name, parameter in named_parameters(self._engine.module):
            if not parameter.requires_grad:
                if kind == "weight":
                    _fill_computed_with(name, parameter, self._place, read)
            elif kind == "step":
                self._stepped.set_step(parameter, float(read(name, (), ())))
            else:
                weight = kind == "weight"
                stepped = self._stepped.tensor(parameter) if weight else self._stepped.new_state(parameter, kind)
                own, start = self._stepped.piece(parameter, stepped)
                self._place.fill(own, name, parameter, start, read)
                if weight and self._stage in (1, 2):  # else whole parameters would be gathered from all masters
                    self._place.fill(parameter.view(-1), name, parameter, 0, read)
        if kind == "weight":
            self._stepped.update_parameters()

    @torch.no_grad()
    def write_frozen(self, read: ReadRegion) -> None:
        """Overwrites the frozen parameters; ``read`` knows parameters by the engine's names."""
        for parameter in self._engine.module.parameters():
            if not parameter.requires_grad:
                _fill_computed_with(self._engine.param_names[parameter], parameter, self._place, read)

    def local(self, kind: TensorKind) -> Iterator[Shard]:
        """Yields this rank's own pieces, and its copies of parameters that ZeRO-3 leaves whole to compute with."""
        for name, parameter in named_parameters(self._engine.module):
            if kind == "weight" and _is_left_whole(parameter):
                yield Shard(name, self._place.part(parameter) + "full", parameter.detach())
            if parameter.requires_grad:
                own = self._own_weight(parameter) if kind == "weight" else self._own_gradient(parameter)
            else:
                own = _own_computed_with(parameter, self._place) if kind == "weight" else None
            if own:
                yield Shard(name, self._place.part(parameter) + own[0], own[1].detach())

    def mark_cut_gradients(self) -> None:
        """Marks the gradients of tensor-parallel parameters as parts.

        At ZeRO-0 in half precision, DeepSpeed's norm looks for this mark on the gradient and not on the parameter.
        """
        for parameter in self._engine.module.parameters():
            if cut_of(parameter) and parameter.grad is not None:
                parameter.grad.tensor_model_parallel = True

    def _weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if self._stage == 0:
            return self._stepped.tensor(parameter)
        full: torch.Tensor = safe_get_full_fp32_param(parameter)
        return full

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad if self._stage == 0 else safe_get_full_grad(parameter)
        assert gradient is not None, "no gradient: this is not between a step's last backward and its update"
        return self._unscaled(gradient.detach())

    def _own_weight(self, parameter: torch.nn.Parameter) -> tuple[str, torch.Tensor]:
        """Returns (region, tensor) of this rank's copy of the compute weight.

        At ZeRO-3 it is a piece of the float32 master, since most full weights are freed between steps.
        """
        if self._stage == 3:
            own = self._place.unpadded(parameter, safe_get_local_fp32_param(parameter))
            return f"piece {self._place.zero_rank}", own
        return "full", parameter

    def _own_gradient(self, parameter: torch.nn.Parameter) -> tuple[str, torch.Tensor] | None:
        """Returns (region, tensor) of the piece of the gradient that this rank owns; None if it owns nothing of it."""
        if self._stage == 0:
            return "full", self._gradient(parameter)
        if self._stage == 3:
            own = self._place.unpadded(parameter, safe_get_local_grad(parameter))
            return f"piece {self._place.zero_rank}", self._unscaled(own)
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        piece, index = mapping.lp_fragment_address, getattr(parameter, "_index_in_param_group", None)
        gradient: torch.Tensor = mapping.get_lp_grad_fragment(index).flatten()
        if gradient.numel() == parameter.numel():  # ZeRO-1 in bf16 sums the whole gradient on every rank
            gradient = gradient.narrow(0, piece.start, piece.numel)
        return f"{piece.start}:{piece.start + piece.numel}", self._unscaled(gradient)

    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient in torch's default dtype (exact tier: float64), without a loss scale."""
        scale = getattr(self._engine.optimizer, "loss_scale", 1.0)
        return gradient.to(torch.get_default_dtype()) / scale


class FrozenTensors:
    """Reads and writes the weights of a model without an optimizer; they are the weights that it computes with."""

    def __init__(self, model: torch.nn.Module, place: RankPlace) -> None:
        self._model, self._place = model, place

    def named(self, kind: TensorKind) -> NamedTensors:
        """Yields full weights in float32 (float64 in the exact tier), one at a time."""
        assert kind == "weight", "a frozen model has no gradients"
        for name, parameter in named_parameters(self._model):
            yield name, self._place.whole(parameter, _computed_with(parameter))

    @torch.no_grad()
    def write(self, kind: WrittenKind, read: ReadRegion) -> None:
        assert kind == "weight", "a frozen model has no optimizer"
        for name, parameter in named_parameters(self._model):
            _fill_computed_with(name, parameter, self._place, read)

    def local(self, kind: TensorKind) -> Iterator[Shard]:
        """Yields this rank's own pieces."""
        assert kind == "weight", "a frozen model has no gradients"
        for name, parameter in named_parameters(self._model):
            region, own = _own_computed_with(parameter, self._place)
            yield Shard(name, self._place.part(parameter) + region, own.detach())


def _is_left_whole(parameter: Any) -> bool:
    """Returns whether ZeRO-3 keeps this parameter whole between passes."""
    return getattr(parameter, "ds_persist", False) and parameter.ds_status is ZeroParamStatus.AVAILABLE


def _computed_with(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Gathers the full compute weight (of this rank's tensor-parallel part), in torch's default dtype.

    Collective at ZeRO-3.
    """
    with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().to(torch.get_default_dtype(), copy=True)


def _fill_computed_with(name: str, parameter: Any, place: RankPlace, read: ReadRegion) -> None:
    """Sets this rank's piece of the compute weight."""
    if hasattr(parameter, "ds_id"):
        parameter.partition()  # a parameter left whole, as small ones are after a pass, would keep its numbers
        parameter.ds_secondary_tensor = None  # a second copy (hpZ) would keep them, too
    _, own = _own_computed_with(parameter, place)
    place.fill(own.view(-1), name, parameter, place.start(parameter), read)


def _own_computed_with(parameter: Any, place: RankPlace) -> tuple[str, torch.Tensor]:
    """Returns (region, tensor) of this rank's piece of the compute weight."""
    if not hasattr(parameter, "ds_id"):
        return "full", parameter
    return f"piece {place.zero_rank}", place.unpadded(parameter, parameter.ds_tensor)
