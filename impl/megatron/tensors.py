"""Weights, gradients and optimizer state of a trained model by Hugging Face name: read whole or in pieces, and written.

A rank holds some layers (pipeline), a part of each parameter (tensor parallelism), and with the distributed optimizer a
flat stretch of that part's gradient, master and optimizer state. Everything goes one parameter at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from conformance.backend import NamedTensors, Shard, TensorKind
from conformance.validation import UsageError
from impl.files import SliceReader
from impl.megatron.convert import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Part,
    Rank,
    all_parameters,
    is_cut,
    layer_parameters,
    parts,
    put,
    take,
)
from impl.megatron.shape import ModelShape
from impl.megatron.stages import Stages
from impl.training_state import WrittenKind

Read = Callable[[str, int, int, int], torch.Tensor]


def layer_numbers(chunk: Any) -> list[int]:
    """Numbers in the whole model, from 0, of the layers of a part of it."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]


def parameter_names(chunk: Any) -> dict[str, str]:
    """Name of each parameter of a GPTModel -> the same with the layer's number in the whole model."""
    numbers = layer_numbers(chunk)
    names = {}
    for name, _ in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            local, _, kind = name.removeprefix("decoder.layers.").partition(".")
            names[name] = f"decoder.layers.{numbers[int(local)]}.{kind}"
        else:
            names[name] = name
    return names


def tensor_rank() -> Rank:
    return Rank(
        rank=parallel_state.get_tensor_model_parallel_rank(),
        size=parallel_state.get_tensor_model_parallel_world_size(),
    )


def refuse_foreign(optimizer: Any) -> None:
    """Raises UsageError for optimizers of TransformerEngine and Apex, whose state is laid out in another way."""
    kind = type(optimizer)
    if not issubclass(kind, (torch.optim.AdamW, torch.optim.SGD)):
        raise UsageError(
            f"megatron-core has taken {kind.__module__}.{kind.__name__}, whose state cannot be written or read here, "
            f"only that of torch's AdamW and SGD; uninstall transformer-engine and apex"
        )


def fill(own: torch.Tensor, name: str, shape: ModelShape, read: Read) -> None:
    """Read one parameter's slices; padding is zero."""
    own.zero_()
    for part in parts(name, shape, tensor_rank()):
        put(part, own, read)


@dataclass(frozen=True, kw_only=True)
class OwnParameter:
    """A parameter of this rank. ``name``: Megatron's, with the layer's number in the whole model."""

    name: str
    parameter: Any  # a torch.nn.Parameter with megatron-core's attributes


class ModelTensors:
    """``chunks``: this rank's GPTModels. ``optimizer``: the one of megatron-core's that trains them, or None.

    ``trained``: the parameters of the whole model that have gradients, in Megatron's names.
    """

    def __init__(
        self, chunks: list[Any], optimizer: Any, shape: ModelShape, stages: Stages, *, trained: Sequence[str]
    ) -> None:
        self.chunks, self._optimizer, self._shape, self._stages = chunks, optimizer, shape, stages
        self.trained = trained
        self._cut = hasattr(optimizer, "model_param_gbuf_map")  # by the distributed optimizer
        self._tp = tensor_rank()
        self._pp_rank = parallel_state.get_pipeline_model_parallel_rank()

    def own_parameters(self) -> Iterator[OwnParameter]:
        """This rank's parameters; a tied head on another stage than the embedding is one of its own."""
        for number, chunk in enumerate(self.chunks):
            layers = self._stages.chunks[number * self._stages.pp + self._pp_rank]
            found = dict(chunk.named_parameters())
            for name in (EMBEDDING, FINAL_NORM, HEAD):
                if name in found:
                    yield OwnParameter(name=name, parameter=found[name])
            for local, layer in enumerate(layers):
                for kind in layer_parameters(self._shape):
                    parameter = found[f"decoder.layers.{local}.{kind}"]
                    yield OwnParameter(name=f"decoder.layers.{layer}.{kind}", parameter=parameter)

    def named(self, kind: TensorKind) -> NamedTensors:
        """Full weights (masters), gradients or optimizer state, on every rank; collective."""
        if kind == "weight":
            return self._named(all_parameters(self._shape), self._master)
        if kind == "gradient":
            return self._named(self.trained, self._gradient)
        refuse_foreign(self._optimizer.optimizer)
        return self._steps() if kind == "step" else self._moments(kind)

    def local(self, kind: TensorKind) -> Iterator[Shard]:
        """This rank's own pieces: what it computes with, and the gradients that it is to know."""
        for own in self.own_parameters():
            if kind == "gradient" and not own.parameter.requires_grad:
                continue
            place = f"tp{self._tp.rank}" if is_cut(own.name, self._shape) else "full"
            if kind == "gradient" and self._cut:
                stretch = self._stretch(own.parameter)
                if stretch:
                    start, end = stretch
                    piece = own.parameter.main_grad.flatten()[start:end]
                    yield Shard(self._label(own.name), f"{place} {start}:{end}", self._unscaled(piece))
                continue
            tensor = own.parameter if kind == "weight" else self._unscaled(own.parameter.main_grad)
            for part in parts(own.name, self._shape, self._tp):
                yield Shard(part.name, place, _piece(part, tensor.detach()))

    def write_masters(self, read: Read) -> None:
        """Set the masters, and the model's parameters by them, from whole tensors."""
        for own in self.own_parameters():
            full = torch.empty_like(own.parameter, dtype=torch.get_default_dtype())
            fill(full, own.name, self._shape, read)
            own.parameter.data.copy_(full)
            main = getattr(own.parameter, "main_param", None)
            if main is not None:
                main.copy_(self._part_of(own.parameter, full))

    def write_optimizer_state(self, kind: WrittenKind, read: SliceReader) -> None:
        """Set one state of the optimizer from whole tensors."""
        refuse_foreign(self._optimizer.optimizer)
        for own in self.own_parameters():
            inner = self._inner(own.parameter) if own.parameter.requires_grad else None
            if inner is None:
                continue
            if kind == "step":
                state = self._read_step(own.name, read)
            else:
                full = torch.empty_like(own.parameter, dtype=inner.dtype)
                fill(full, own.name, self._shape, read)
                state = self._part_of(own.parameter, full).clone()
            self._optimizer.optimizer.state[inner][kind] = state

    def _read_step(self, name: str, read: SliceReader) -> torch.Tensor:
        """A tensor of its own for each parameter: AdamW counts in place."""
        names = [part.name for part in parts(name, self._shape, self._tp)]
        first, *others = (read.whole(part) for part in names)
        if any(other != first for other in others):
            raise UsageError(
                f"{', '.join(names)} are one parameter in Megatron, and their optimizer has counted other numbers of "
                f"updates for each; go on with another backend"
            )
        return first.to(torch.get_default_dtype(), copy=True)

    def _moments(self, key: str) -> NamedTensors:
        """One state of the optimizer in full, by its name in torch; nothing where no rank has it."""
        found: list[bool] = [False] * dist.get_world_size()  # a rank may own no optimizer state
        dist.all_gather_object(found, any(key in state for state in self._optimizer.optimizer.state.values()))
        if any(found):
            yield from self._named(self.trained, lambda own: self._whole(own, self._state(own).get(key)))

    def _steps(self) -> NamedTensors:
        """How many updates AdamW has counted for each parameter; NaN where ranks do not agree."""
        states = ((own.name, self._state(own.parameter)) for own in self.own_parameters())
        counted = {name: float(state["step"]) for name, state in states if "step" in state}
        of_all: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_all, counted)
        for name in self.trained:
            steps = {of_one[name] for of_one in of_all if name in of_one}
            if steps:
                step = torch.tensor(steps.pop() if len(steps) == 1 else torch.nan, dtype=torch.float64)
                yield from ((part.name, step) for part in parts(name, self._shape, self._tp))

    def _named(self, names: Sequence[str], of: Callable[[Any], torch.Tensor]) -> NamedTensors:
        mine = {own.name: own.parameter for own in self.own_parameters()}
        for name in names:
            stage = self._stage(name)
            pieces = self._gather(name, of(mine[name]).detach()) if stage == self._pp_rank else None
            for position, part in enumerate(parts(name, self._shape, self._tp)):
                device = next(iter(mine.values())).device
                full = torch.empty(part.shape, dtype=torch.get_default_dtype(), device=device)
                if pieces is not None:
                    for rank, piece in enumerate(pieces):
                        holder = Rank(rank=rank, size=self._tp.size)
                        take(parts(name, self._shape, holder)[position], piece, full)
                yield part.name, self._from_stage(stage, full)

    def _stage(self, name: str) -> int:
        """The first pipeline rank that holds a parameter."""
        if name.startswith("decoder.layers."):
            return self._stages.owner(int(name.split(".")[2]))[0]
        return 0 if name == EMBEDDING else self._stages.pp - 1

    def _gather(self, name: str, own: torch.Tensor) -> list[torch.Tensor]:
        """All tensor-parallel ranks' parts of a parameter; only the own one if it is whole everywhere."""
        if self._tp.size == 1 or not is_cut(name, self._shape):
            return [own]
        pieces = [torch.empty_like(own) for _ in range(self._tp.size)]
        dist.all_gather(pieces, own.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return pieces

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
        gradient = parameter.main_grad
        if self._cut:
            stretch = self._stretch(parameter)
            gradient = self._whole(parameter, gradient.flatten()[slice(*stretch)] if stretch else None)
        return self._unscaled(gradient)

    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """Without the loss scale of fp16, in float32 (float64 in the exact tier)."""
        scaler = getattr(self._optimizer, "grad_scaler", None)
        gradient = gradient.to(torch.get_default_dtype())
        return gradient / scaler.scale if scaler else gradient

    def _stretch(self, parameter: Any) -> tuple[int, int] | None:
        """Which flat stretch of a parameter this rank owns; None where it owns nothing of it."""
        if not self._cut:
            return 0, parameter.numel()
        if parameter not in self._optimizer.model_param_gbuf_map:
            return None
        stretch = self._optimizer._get_model_param_range_map(parameter)["param"]
        return stretch.start, stretch.end

    def _part_of(self, parameter: Any, full: torch.Tensor) -> torch.Tensor:
        """What this rank owns of a tensor that is like ``parameter``."""
        return full.flatten()[slice(*(self._stretch(parameter) or (0, 0)))] if self._cut else full

    def _whole(self, parameter: Any, own: torch.Tensor | None) -> torch.Tensor:
        """A tensor like ``parameter`` from the stretches that data ranks own of it; collective over these."""
        if not self._cut:
            assert own is not None
            return own
        full = torch.zeros(parameter.numel(), dtype=torch.get_default_dtype(), device=parameter.device)
        if own is not None and (stretch := self._stretch(parameter)):
            full[slice(*stretch)] = own
        # Added up as bits, because -0.0 and 0.0 are 0.0.
        bits = full.view(torch.int64 if full.dtype == torch.float64 else torch.int32)
        dist.all_reduce(bits, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return full.view_as(parameter)

    def _inner(self, parameter: Any) -> torch.Tensor | None:
        """The tensor that torch's optimizer knows the parameter by; None where this rank owns nothing of it."""
        if not self._cut:
            inner: torch.Tensor = getattr(parameter, "main_param", parameter)
            return inner
        if parameter not in self._optimizer.model_param_group_index_map:
            return None
        group, position = self._optimizer.model_param_group_index_map[parameter]
        stretch: torch.Tensor = self._optimizer.optimizer.param_groups[group]["params"][position]
        return stretch

    def _state(self, parameter: Any) -> dict[str, Any]:
        """The state that this rank's optimizer has for a parameter; empty where it has none, yet or at all."""
        inner = self._inner(parameter) if parameter.requires_grad else None
        return {} if inner is None else self._optimizer.optimizer.state.get(inner, {})

    def _label(self, name: str) -> str:
        """A Hugging Face name for a parameter; for a fused one, of which a stretch holds anything, Megatron's."""
        names = [part.name for part in parts(name, self._shape, self._tp)]
        return names[0] if len(names) == 1 else name


def _piece(part: Part, own: torch.Tensor) -> torch.Tensor:
    """What a rank's parameter holds of one part."""
    if not part.spans:
        return own
    return torch.cat([own.narrow(part.dim, start, length) for _, start, length in part.spans], dim=part.dim)
