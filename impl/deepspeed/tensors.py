"""Weights and gradients by Hugging Face name, whole and in pieces, at every ZeRO stage.

``named`` is collective. Gradients can be asked for after the last backward of a step and before its update, and at no
other time: in between, the ranks that own a piece raise and the others wait for them.
"""

from collections.abc import Iterator

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)

from conformance.backend import Kind, NamedTensors, Shard


class EngineTensors:
    """Reads an engine's weights and gradients, and writes its weights.

    Weights are the float32 masters, which in bf16 and fp16 are not what the ranks compute with. Gradients are unclipped
    and free of the loss scale.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine, self._stage = engine, engine.zero_optimization_stage()
        # Below ZeRO-1 a half-precision model has its masters in the optimizer's wrapper, else it is its own master.
        wrapper = engine.optimizer
        self._masters: dict[torch.nn.Parameter, torch.Tensor] = {}
        if self._stage == 0 and hasattr(wrapper, "fp32_groups"):
            for half, full in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                self._masters |= dict(zip(half, full, strict=True))

    def named(self, kind: Kind) -> NamedTensors:
        """Full tensors, one at a time."""
        for name, parameter in self._engine.module.named_parameters():
            tensor = self._full_weight(parameter) if kind == "weight" else self._full_gradient(parameter)
            yield name, tensor.detach()

    def local(self, kind: Kind, *, rank: int) -> Iterator[Shard]:
        """This rank's own pieces; ``rank`` is its place among the data-parallel ranks."""
        for name, parameter in self._engine.module.named_parameters():
            if kind == "weight":
                yield self._local_weight(name, parameter, rank)
            elif self._stage == 0:
                yield Shard(name, "full", self._full_gradient(parameter))
            elif self._stage == 3:
                yield Shard(name, f"piece {rank}", self._unscaled(safe_get_local_grad(parameter)))
            elif parameter._hp_mapping is not None:
                piece = parameter._hp_mapping.lp_fragment_address
                gradient = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
                if gradient.numel() == parameter.numel():  # ZeRO-1 in bf16 adds up all of it on every rank
                    gradient = gradient.narrow(0, piece.start, piece.numel)
                yield Shard(name, f"{piece.start}:{piece.start + piece.numel}", self._unscaled(gradient))

    def set_weights(self, weights: dict[str, torch.Tensor], *, rank: int, size: int) -> None:
        """Overwrite the masters with full float32 tensors by name; ``rank`` of ``size`` data-parallel ranks."""
        for name, parameter in self._engine.module.named_parameters():
            if self._stage == 0:
                self._masters[parameter].data.copy_(weights[name])
            elif self._stage < 3:
                safe_set_full_fp32_param(parameter, weights[name])
            else:  # its own function for full tensors forgets the padding of the last rank's piece
                numel = parameter.ds_tensor.numel()
                flat = torch.nn.functional.pad(weights[name].flatten(), (0, numel * size - weights[name].numel()))
                safe_set_local_fp32_param(parameter, flat.narrow(0, numel * rank, numel))

    def _full_weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if self._stage == 0:
            return self._masters.get(parameter, parameter)
        full: torch.Tensor = safe_get_full_fp32_param(parameter)
        return full

    def _full_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad if self._stage == 0 else safe_get_full_grad(parameter)
        assert gradient is not None, "no gradient: this is not between a step's last backward and its update"
        return self._unscaled(gradient.detach().to(self._dtype))

    @property
    def _dtype(self) -> torch.dtype:
        """float64 in the exact tier, which is the default then."""
        return torch.get_default_dtype()

    def _local_weight(self, name: str, parameter: torch.nn.Parameter, rank: int) -> Shard:
        """What the rank computes with, as far as it holds that between steps."""
        if self._stage == 3:
            return Shard(name, f"piece {rank}", safe_get_local_fp32_param(parameter))
        return Shard(name, "full", parameter.detach())

    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        scale = getattr(self._engine.optimizer, "loss_scale", 1.0)
        return gradient if scale == 1.0 else gradient / scale
