"""Shards optimizer state, gradients and weights over data-parallel ranks with Megatron-FSDP (``use_megatron_fsdp``).

Megatron-FSDP lays the parameters of a unit (a transformer layer, or what lies outside of them) end to end in a flat
buffer, and each rank owns a stretch of it. Modules compute with the *raw* parameters, whose memory exists only while a
unit is gathered in ZeRO-3. The optimizer updates one DTensor a parameter, a view of the rank's stretch.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, FullyShardedDataParallel
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.optimizer import ChainedOptimizer
from torch.distributed.tensor import DTensor

from conformance.backends.on_cpu import replaced
from conformance.backends.protocol import Shard, TensorKind
from impl.interface.sharded_safetensors import SliceReader
from impl.megatron.hf_mapping import parts
from impl.megatron.model_config import ModelShape, Stages
from impl.megatron.tensors import ModelTensors, OwnParameter, load_parameter, piece


class _NoModule:
    """Stands for TransformerEngine's linear layer, where it is not installed."""


def wrap(chunks: Sequence[Any], model_config: Any, settings: DistributedDataParallelConfig, device: str) -> list[Any]:
    """Wraps the chunks, whose weights have been read. Each rank keeps its stretches of them."""
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    with contextlib.ExitStack() as stack:
        if device == "cpu":  # the library puts the device into a string
            stack.enter_context(replaced(torch.cuda, {"current_device": lambda: 0}))
        if not isinstance(getattr(mcore_fsdp_adapter, "TELinear", type), type):  # which modules are of this class?
            stack.enter_context(replaced(mcore_fsdp_adapter, {"TELinear": _NoModule}))
        return [FullyShardedDataParallel(model_config, settings, chunk, device=place) for chunk in chunks]


def unhook(wrapped: Any) -> None:
    """Removes the hooks of a chunk's parameters: Python does not see the cycle through the autograd graph."""
    for hook in wrapped.module.grad_acc_hooks.values():
        hook.remove()


def finish_gathers(wrapped: Sequence[Any]) -> None:
    """Waits for the weights that are gathered ahead after an update; weights are read before the next forward pass."""
    for one in wrapped:
        pipeline = one.module.all_gather_pipeline
        for bucket, backward in list(pipeline.param_gather_event_map):
            pipeline.wait_bucket_ready(bucket, backward)


def chained(optimizer: Any) -> Any:
    """Returns a chain of one optimizer: with Megatron-FSDP, megatron-core makes no chain."""
    return optimizer if isinstance(optimizer, ChainedOptimizer) else ChainedOptimizer([optimizer])


class ShardedTensors(ModelTensors):
    """Reads and writes the tensors of a model that Megatron-FSDP shards.

    wrapped: this rank's chunks as ``wrap`` returned them. The other parameters are those of ModelTensors.
    """

    def __init__(
        self,
        chunks: list[Any],
        optimizers: Sequence[Any],
        shape: ModelShape,
        stages: Stages,
        *,
        trained: Sequence[str],
        wrapped: Sequence[Any],
    ) -> None:
        super().__init__(chunks, optimizers, shape, stages, trained=trained)
        self._is_distributed = True
        self._wrapped = wrapped
        self._inner_of = {
            inner.orig_param: inner
            for one in wrapped
            for _, inner in one.param_and_grad_buffer.optimizer_named_parameters
        }

    def _weights(self, chunk: Any) -> dict[str, Any]:
        """Returns the raw parameters; those that modules hold alternate with the optimizer's."""
        one = self._wrapped[next(index for index, known in enumerate(self.chunks) if known is chunk)]
        names = {raw: name for name, raw in one.module.raw_param.items()}
        prefix = "module." if any(name.startswith("module.") for name in names.values()) else ""  # of Float16Module
        return {name.removeprefix(prefix): raw for raw, name in names.items()}

    def _group(self, parameter: Any) -> tuple[Any, int]:
        """Returns the group of buffers that holds a raw parameter, and the parameter's number in it."""
        for one in self._wrapped:
            buffer = one.param_and_grad_buffer
            if parameter in buffer.param_to_param_group:
                group = buffer.parameter_groups[buffer.param_to_param_group[parameter]]
                return group, group.model_weight_buffer.param_idx[parameter]
        raise AssertionError("a parameter that Megatron-FSDP does not hold")

    def _stretch(self, parameter: Any) -> tuple[int, int] | None:
        group, number = self._group(parameter)
        start, end = group.model_weight_buffer._get_item_slice_in_shard(number)
        return (start, end) if start < end else None

    def _master(self, parameter: Any) -> torch.Tensor:
        return self._whole(parameter, _local(self._inner_of[parameter]).flatten())

    def _gradient_part(self, parameter: Any) -> torch.Tensor | None:
        group, number = self._group(parameter)
        own: torch.Tensor = group.main_grad_buffer.get_item(number, only_shard=True)
        return own if own.numel() else None

    def _inner(self, parameter: Any) -> torch.Tensor | None:
        return self._inner_of[parameter] if self._stretch(parameter) else None

    def _state(self, parameter: Any) -> dict[str, Any]:
        return {
            key: _local(value).flatten() if value.ndim else value for key, value in super()._state(parameter).items()
        }

    def _as_state(self, inner: Any, state: torch.Tensor) -> torch.Tensor:
        """Returns a new state of the optimizer, a DTensor as the parameter ``inner`` is."""
        if not state.ndim:
            return state
        found = torch.empty_like(inner, dtype=state.dtype)
        _local(found).copy_(state.view_as(_local(found)))
        return found

    def _optimizer(self, parameter: Any) -> Any:
        return self._optimizers[0]  # experts have no optimizer of their own

    def local(self, kind: TensorKind) -> Iterator[Shard]:
        if kind == "gradient":
            yield from super().local(kind)
            return
        for own in self.own_parameters():
            yield from self._local_weights(own)

    def _local_weights(self, own: OwnParameter) -> Iterator[Shard]:
        """Yields the weights that a rank keeps between steps: a stretch in ZeRO-3, else all of them."""
        group, number = self._group(own.parameter)
        weights, place = group.model_weight_buffer, self._place(own.name)
        kept = weights.get_item(number)
        if weights.is_data_distributed:
            if stretch := self._stretch(own.parameter):
                yield Shard(self._label(own.name), f"{place} {stretch[0]}:{stretch[1]}", kept)
            return
        for part in parts(own.name, self._shape, self._tp):
            yield Shard(part.name, place, piece(part, kept.view(own.parameter.shape)))

    def write_masters(self, read: SliceReader) -> None:
        for own in self.own_parameters():
            full = torch.empty(own.parameter.shape, dtype=torch.get_default_dtype(), device=own.parameter.device)
            load_parameter(full, own.name, self._shape, read)
            group, number = self._group(own.parameter)
            for buffer in (group.model_weight_buffer, group.main_weight_buffer):
                if buffer is not None:
                    buffer.set_item(number, full)


def _local(tensor: Any) -> torch.Tensor:
    """Returns this rank's part of a DTensor."""
    own: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return own
