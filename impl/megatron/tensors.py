"""Reads and writes a model's weights, gradients and optimizer state by Hugging Face name, whole or in pieces.

A rank holds some layers (pipeline) and a share of each parameter (tensor parallelism). With the distributed optimizer
it owns only a flat *stretch* of each share's gradient, master and optimizer state. All functions handle one parameter
at a time.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from conformance.backends.protocol import NamedTensors, Shard, TensorKind
from conformance.core.errors import UsageError
from impl.engine.optimizers import update_count
from impl.interface.sharded_safetensors import SliceReader
from impl.interface.trainable import WrittenKind
from impl.megatron.hf_mapping import (
    CORRECTION,
    EMBEDDING,
    FINAL_NORM,
    FUSED,
    HEAD,
    all_parameters,
    grouped_by_tensors,
    is_cut,
    is_of_experts,
    layer_parameters,
    parts,
)
from impl.megatron.model_config import ModelShape, Stages
from impl.megatron.spans import Part, Rank, copy_to_full, load_part, reader

REMAINDER = "master_param"  # TransformerEngine's name of masters, or of their lower halves
_UNFUSED = {fused: name for name, fused in FUSED.items()}
_LOCAL_EXPERT = re.compile(r"(?<=mlp\.experts\.local_experts\.)\d+")


def layer_numbers(chunk: Any) -> list[int]:
    """Returns the global numbers, from 0, of the layers in a chunk."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]


def weight_tensors(chunk: Any) -> dict[str, Any]:
    """Returns the parameters of a chunk (a GPTModel), and the buffers that are weights of the model."""
    return {**dict(chunk.named_parameters()), **{n: b for n, b in chunk.named_buffers() if n.endswith(CORRECTION)}}


def parameter_names(chunk: Any) -> dict[str, str]:
    """Maps names in ``weight_tensors`` to those of impl.megatron.hf_mapping, with global layer and expert numbers."""
    numbers = layer_numbers(chunk)
    names = {}
    for name in weight_tensors(chunk):
        if name.startswith("decoder.layers."):
            local, _, kind = name.removeprefix("decoder.layers.").partition(".")
            kind = _LOCAL_EXPERT.sub(lambda found: str(first_expert(chunk) + int(found[0])), kind)
            names[name] = f"decoder.layers.{numbers[int(local)]}.{_UNFUSED.get(kind, kind)}"
        elif name.startswith("mtp.layers."):
            local, _, kind = name.removeprefix("mtp.layers.").partition(".")
            kind = kind.removeprefix("transformer_layer.")
            kind = _LOCAL_EXPERT.sub(lambda found: str(first_expert(chunk) + int(found[0])), kind)
            names[name] = f"decoder.layers.{chunk.config.num_layers + int(local)}.{kind}"
        else:
            names[name] = name
    return names


def first_expert(chunk: Any) -> int:
    """Returns the number of the first expert of each layer that this rank holds."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return int(parallel_state.get_expert_model_parallel_rank() * (chunk.config.num_moe_experts // ranks))


def tensor_rank() -> Rank:
    return Rank(
        rank=parallel_state.get_tensor_model_parallel_rank(),
        size=parallel_state.get_tensor_model_parallel_world_size(),
    )


def refuse_foreign(optimizer: Any) -> None:
    """Raises UsageError for optimizers of TransformerEngine and Apex, whose state has another layout."""
    kind = type(optimizer)
    if getattr(optimizer, "store_param_remainders", False):
        return  # RemainderTensors reads it
    if not issubclass(kind, (torch.optim.AdamW, torch.optim.SGD)) and kind.__name__ != "TensorParallelMuon":
        raise UsageError(
            f"megatron-core uses {kind.__module__}.{kind.__name__}, whose state cannot be written or read here (only "
            f"that of torch's AdamW and SGD and of its own Muon can); call impl.megatron.adapter.begin before "
            f"transformer_engine and apex are imported"
        )


def load_parameter(own: torch.Tensor, name: str, shape: ModelShape, files: SliceReader) -> None:
    """Sets this rank's parameter ``own`` from slices of Hugging Face tensors; vocabulary padding becomes zero."""
    own.zero_()
    for part in parts(name, shape, tensor_rank()):
        load_part(part, own, reader(files))


@dataclass(frozen=True, kw_only=True)
class OwnParameter:
    """Pairs a parameter of this rank with Megatron's ``name``, with global numbers of layer and expert."""

    name: str
    parameter: Any  # a torch.nn.Parameter with megatron-core's attributes


class Piece(NamedTuple):
    """Holds one rank's share of the parameter ``name``."""

    name: str
    rank: Rank
    tensor: torch.Tensor


class ModelTensors:
    """Reads and writes the tensors of a model.

    chunks: this rank's GPTModels. optimizers: their megatron-core optimizers, none if the model is frozen; under expert
    parallelism, the last one is for the experts. trained: Megatron's names of the trained parameters of the whole
    model.
    """

    def __init__(
        self, chunks: list[Any], optimizers: Sequence[Any], shape: ModelShape, stages: Stages, *, trained: Sequence[str]
    ) -> None:
        self.chunks, self._optimizers, self._shape, self._stages = chunks, optimizers, shape, stages
        self.trained = trained
        self._is_distributed = any(hasattr(one, "model_param_gbuf_map") for one in optimizers)
        self._tp = tensor_rank()
        self._pp_rank = parallel_state.get_pipeline_model_parallel_rank()

    def own_parameters(self) -> Iterator[OwnParameter]:
        """Yields this rank's parameters, including a tied head if the embedding is on another stage."""
        for number, chunk in enumerate(self.chunks):
            index = number * self._stages.pp + self._pp_rank
            layers = [*self._stages.chunks[index]]
            if index == len(self._stages.chunks) - 1:
                layers += range(self._shape.layers, self._shape.layers + self._shape.mtp)
            found = self._weights(chunk)
            for name in (EMBEDDING, FINAL_NORM, HEAD):
                if name in found:
                    yield OwnParameter(name=name, parameter=found[name])
            names = {name: local for local, name in parameter_names(chunk).items()}
            for layer in layers:
                for kind in layer_parameters(self._shape, layer):
                    name = f"decoder.layers.{layer}.{kind}"
                    if name in names:  # not the experts of other ranks
                        yield OwnParameter(name=name, parameter=found[names[name]])

    def _weights(self, chunk: Any) -> dict[str, Any]:
        return weight_tensors(chunk)

    def named(self, kind: TensorKind) -> NamedTensors:
        """Yields full weights (masters), gradients or optimizer state on every rank; collective."""
        if kind == "weight":
            return self._named(all_parameters(self._shape), self._master)
        if kind == "gradient":
            return self._named(self.trained, self._gradient)
        self._refuse_foreign()
        return self._steps() if kind == "step" else self._moments(kind)

    def local(self, kind: TensorKind) -> Iterator[Shard]:
        """Yields this rank's own shards: the weights that it computes with, and the gradients that it owns."""
        for own in self.own_parameters():
            if kind == "gradient" and not own.parameter.requires_grad:
                continue
            place = self._place(own.name)
            if kind == "gradient" and self._is_distributed:
                stretch, gradient = self._stretch(own.parameter), self._gradient_part(own.parameter)
                if stretch and gradient is not None:
                    start, end = stretch
                    yield Shard(self._label(own.name), f"{place} {start}:{end}", self._unscaled(gradient))
                continue
            tensor = own.parameter if kind == "weight" else self._unscaled(own.parameter.main_grad)
            for part in parts(own.name, self._shape, self._tp):
                yield Shard(part.name, place, piece(part, tensor.detach()))

    def write_masters(self, read: SliceReader) -> None:
        """Sets the masters and the model's parameters from whole tensors."""
        for own in self.own_parameters():
            full = torch.empty_like(own.parameter, dtype=torch.get_default_dtype())
            load_parameter(full, own.name, self._shape, read)
            self._set_master(own.parameter, full)

    def _set_master(self, parameter: Any, full: torch.Tensor) -> None:
        parameter.data.copy_(full)
        main = getattr(parameter, "main_param", None)
        if main is not None:
            main.copy_(self._part_of(parameter, full))

    def write_optimizer_state(self, kind: WrittenKind, read: SliceReader) -> None:
        """Sets one state of the optimizer from whole tensors."""
        self._refuse_foreign()
        for own in self.own_parameters():
            inner = self._inner(own.parameter) if own.parameter.requires_grad else None
            if inner is None or not self._keeps(own.parameter, kind):
                continue
            optimizer = self._optimizer(own.parameter).optimizer
            if kind == "step":
                state = update_count(self._read_step(own.name, read), optimizer, inner)
            else:
                full = torch.empty_like(own.parameter, dtype=torch.get_default_dtype())
                load_parameter(full, own.name, self._shape, read)
                state = self._part_of(own.parameter, full).clone()
            optimizer.state[inner][kind] = self._as_state(inner, state)

    def _as_state(self, inner: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return state

    def _read_step(self, name: str, read: SliceReader) -> torch.Tensor:
        """Reads the number of updates of a parameter. Raises UsageError if the numbers of its parts differ."""
        names = [part.name for part in parts(name, self._shape, self._tp)]
        first, *rest = (read.whole(part) for part in names)
        if any(step != first for step in rest):
            raise UsageError(
                f"{', '.join(names)} are one parameter in Megatron, but the optimizer state counts different "
                f"numbers of updates for them; resume with another backend"
            )
        return first

    def _moments(self, key: str) -> NamedTensors:
        """Yields the full tensors of one optimizer state; nothing if no rank has it. ``key``: its name in torch."""
        of_all: list[list[str]] = [[]] * dist.get_world_size()  # a rank may own no optimizer state
        dist.all_gather_object(of_all, [o.name for o in self.own_parameters() if key in self._state(o.parameter)])
        names = {name for of_one in of_all for name in of_one}
        found = [name for name in self.trained if name in names]
        yield from self._named(found, lambda own: self._whole(own, self._state(own).get(key)))

    def _steps(self) -> NamedTensors:
        """Yields the number of updates that AdamW has counted for each parameter; NaN if the ranks do not agree."""
        states = ((own.name, self._state(own.parameter)) for own in self.own_parameters())
        counted = {name: float(state["step"]) for name, state in states if "step" in state}
        of_all: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_all, counted)
        for names in grouped_by_tensors(self.trained):
            steps = {of_one[name] for name in names for of_one in of_all if name in of_one}
            if steps:
                step = torch.tensor(steps.pop() if len(steps) == 1 else torch.nan, dtype=torch.float64)
                yield from ((part.name, step) for part in parts(names[0], self._shape, self._tp))

    def _named(self, names: Sequence[str], of: Callable[[Any], torch.Tensor]) -> NamedTensors:
        """Yields full tensors of the parameters ``names``; ``of(parameter)`` gives this rank's share. Collective."""
        local = {own.name: own.parameter for own in self.own_parameters()}
        device = next(iter(local.values())).device
        for group in grouped_by_tensors(names):
            stage = self._stage(group[0])
            shares = [of(local[name]).detach() for name in group if name in local] if stage == self._pp_rank else []
            pieces = self._gather(group, shares) if shares else []
            del shares  # frees memory where _gather has stacked them
            for position, part in enumerate(of_one := parts(group[0], self._shape, self._tp)):
                full = self._filled(part, position, pieces, device)
                if position == len(of_one) - 1:
                    del pieces  # frees memory before the caller writes the last tensor
                yield part.name, self._from_stage(stage, full)
                del full

    def _filled(self, part: Part, position: int, pieces: Sequence[Piece], device: torch.device) -> torch.Tensor:
        """Assembles one Hugging Face tensor of a parameter from the ranks' pieces; uninitialised without pieces."""
        full = torch.empty(part.shape, dtype=torch.get_default_dtype(), device=device)
        for piece in pieces:
            copy_to_full(parts(piece.name, self._shape, piece.rank)[position], piece.tensor, full)
        return full

    def _stage(self, name: str) -> int:
        """Returns the first pipeline rank that holds a parameter."""
        if name.startswith("decoder.layers."):
            return self._stages.owner(int(name.split(".")[2]))[0]
        return 0 if name == EMBEDDING else self._stages.pp - 1

    def _gather(self, names: Sequence[str], shares: Sequence[torch.Tensor]) -> list[Piece]:
        """Gathers the shares of all tensor-parallel ranks, for experts also of all expert-parallel ranks.

        A parameter that is whole on every rank is not gathered. ``shares``: this rank's, of the parameters ``names``.
        """
        if is_of_experts(names[0]):
            group = parallel_state.get_expert_tensor_and_model_parallel_group()
        elif is_cut(names[0], self._shape):
            group = parallel_state.get_tensor_model_parallel_group()
        else:
            return [Piece(names[0], self._tp, shares[0])]
        own = torch.stack([*shares])
        stacks = [torch.empty_like(own) for _ in range(group.size())] if group.size() > 1 else [own]
        if group.size() > 1:
            dist.all_gather(stacks, own, group=group)
        found = []
        # Ranks that share a tensor are neighbours in the group; for experts, tensor parallelism may have another size.
        size = parallel_state.get_expert_tensor_parallel_world_size() if is_of_experts(names[0]) else self._tp.size
        for rank, stack in enumerate(stacks):
            first = rank // size * len(shares)
            tp = Rank(rank=rank % size, size=size)
            found += [Piece(names[first + at], tp, tensor) for at, tensor in enumerate(stack)]
        return found

    def _from_stage(self, stage: int, full: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_pipeline_model_parallel_group()
        if self._stages.pp > 1:
            dist.broadcast(full, src=dist.get_global_rank(group, stage), group=group)
        return full

    def _master(self, parameter: Any) -> torch.Tensor:
        if getattr(parameter, "main_param", None) is None and not getattr(parameter, "main_param_sharded", False):
            own: torch.Tensor = parameter  # its own master
            return own
        return self._whole(parameter, getattr(parameter, "main_param", None))

    def _gradient(self, parameter: Any) -> torch.Tensor:
        own = self._gradient_part(parameter)
        return self._unscaled(self._whole(parameter, own))

    def _gradient_part(self, parameter: Any) -> torch.Tensor | None:
        """Returns the stretch of a gradient that this rank owns, or without the distributed optimizer the gradient."""
        gradient: torch.Tensor = parameter.main_grad
        if not self._is_distributed:
            return gradient
        stretch = self._stretch(parameter)
        return gradient.flatten()[slice(*stretch)] if stretch else None

    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient without loss scale, in torch's default dtype (exact tier: float64, else float32)."""
        scaler = next((one.grad_scaler for one in self._optimizers if hasattr(one, "grad_scaler")), None)
        gradient = gradient.to(torch.get_default_dtype())
        return gradient / scaler.scale if scaler else gradient

    def _stretch(self, parameter: Any) -> tuple[int, int] | None:
        """Returns (start, end) of the flat stretch of a parameter that this rank owns; None if it owns no part."""
        if not self._is_distributed:
            return 0, parameter.numel()
        optimizer = self._optimizer(parameter)
        if parameter not in optimizer.model_param_gbuf_map:
            return None
        stretch = optimizer._get_model_param_range_map(parameter)["param"]
        return stretch.start, stretch.end

    def _part_of(self, parameter: Any, full: torch.Tensor) -> torch.Tensor:
        """Returns the stretch that this rank owns of ``full``, a tensor with the shape of ``parameter``."""
        return full.flatten()[slice(*(self._stretch(parameter) or (0, 0)))] if self._is_distributed else full

    def _whole(self, parameter: Any, own: torch.Tensor | None) -> torch.Tensor:
        """Assembles a tensor with the shape of ``parameter`` from the stretches of all data ranks; collective."""
        if not self._is_distributed:
            assert own is not None
            return own
        full = torch.zeros(parameter.numel(), dtype=torch.get_default_dtype(), device=parameter.device)
        if own is not None and (stretch := self._stretch(parameter)):
            full[slice(*stretch)] = own
        # Integers with the same bits are added, because -0.0 + 0.0 would be 0.0.
        bits = full.view(torch.int64 if full.dtype == torch.float64 else torch.int32)
        dist.all_reduce(bits, group=_replica_group(parameter))
        return full.view_as(parameter)

    def _inner(self, parameter: Any) -> torch.Tensor | None:
        """Returns the tensor that torch's optimizer has for the parameter; None if this rank owns no part of it."""
        if not self._is_distributed:
            inner: torch.Tensor = getattr(parameter, "main_param", parameter)
            return inner
        optimizer = self._optimizer(parameter)
        if parameter not in optimizer.model_param_group_index_map:
            return None
        group, position = optimizer.model_param_group_index_map[parameter]
        stretch: torch.Tensor = optimizer.optimizer.param_groups[group]["params"][position]
        return stretch

    def _state(self, parameter: Any) -> dict[str, Any]:
        """Returns the state that this rank's optimizer has for a parameter; empty if it has none."""
        inner = self._inner(parameter) if parameter.requires_grad else None
        return {} if inner is None else self._optimizer(parameter).optimizer.state.get(inner, {})

    def _keeps(self, parameter: Any, kind: WrittenKind) -> bool:
        """Returns whether the optimizer of a parameter has this state."""
        return True

    def _optimizer(self, parameter: Any) -> Any:
        """Returns the megatron-core optimizer that updates the parameter."""
        return self._optimizers[-1 if _is_expert_parallel(parameter) else 0]

    def _refuse_foreign(self) -> None:
        for one in self._optimizers:
            refuse_foreign(one.optimizer)

    def _place(self, name: str) -> str:
        """Names the part of the parameter that this rank holds, such as ``tp1`` or ``expert3.full``."""
        tp = f"tp{self._tp.rank}" if is_cut(name, self._shape) else "full"
        return f"expert{number[0]}.{tp}" if (number := _LOCAL_EXPERT.search(name)) else tp

    def _label(self, name: str) -> str:
        """Returns the Hugging Face name of a parameter, or Megatron's if it is fused: a stretch may cross its parts."""
        names = [part.name for part in parts(name, self._shape, self._tp)]
        return names[0] if len(names) == 1 else name


def _is_expert_parallel(parameter: Any) -> bool:
    """Whether the parameter belongs to an expert under expert parallelism; its gradient is reduced over fewer ranks."""
    return not getattr(parameter, "allreduce", True)


def _replica_group(parameter: Any) -> Any:
    """Returns the group of data-parallel ranks that hold the same parameter."""
    if _is_expert_parallel(parameter):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def piece(part: Part, own: torch.Tensor) -> torch.Tensor:
    """Returns the rows or columns of one part in a rank's parameter ``own``."""
    if not part.spans:
        return own
    return torch.cat([own.narrow(part.dim, span.own, span.length) for span in part.spans], dim=part.dim)


def release_trained(chunks: Iterable[torch.nn.Module]) -> None:
    """Replaces trained parameters, which are uninitialised, by expanded scalars, which need no memory.

    With the distributed optimizer, DistributedDataParallel allocates a buffer for the parameters and copies each of
    them there. Without this function, two copies of the model would exist for a moment.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.new_zeros(()).expand(parameter.shape)


def read_weights(chunks: Iterable[torch.nn.Module], shape: ModelShape, files: list[Path], *, device: str) -> None:
    """Reads this rank's part of the model, and nothing else, from ``files``."""
    with SliceReader(files, device=device) as read, torch.no_grad():
        for chunk in chunks:
            names = parameter_names(chunk)
            for name, parameter in weight_tensors(chunk).items():
                load_parameter(parameter, names[name], shape, read)
