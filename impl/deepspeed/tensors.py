"""Reads and writes weights, gradients and optimizer state by Hugging Face name, at every ZeRO stage.

``named`` is collective. Gradients can only be read after the last backward pass of a step and before its update; at any
other time, the ranks that own a piece raise while the others wait for them.

A rank holds a tensor-parallel *part* of a parameter, and of this part the *piece* that ZeRO assigns to it. A parameter
that tensor parallelism does not shard has one part, the whole.

The optimizer updates *stepped tensors* instead of a model's parameters. At ZeRO-0, the stepped tensor of a parameter is
the parameter itself or, in half precision, its float32 master in the optimizer's wrapper. At ZeRO 1 to 3, it is a flat
tensor with this rank's pieces of many parameters; the piece of a parameter may be empty.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
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
from impl.engine.optimizers import update_count
from impl.interface.sharded_safetensors import fill_flat
from impl.interface.trainable import WrittenKind
from impl.models.lora import named_parameters

# (name, start indices, shape) -> this region of the whole tensor with this name
ReadRegion = Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Describes the position of a rank: number ``zero_rank`` of the ``zero_size`` ranks that ZeRO partitions over.

    tensor_group: the process group of its tensor parallelism; None without it.
    """

    zero_rank: int
    zero_size: int
    tensor_group: dist.ProcessGroup | None

    def start(self, parameter: Any) -> int:
        """Returns the index in the flattened part where this rank's piece starts; 0 if ZeRO-3 does not partition it."""
        return self.zero_rank * int(parameter.ds_tensor.numel()) if hasattr(parameter, "ds_id") else 0

    def unpadded(self, parameter: Any, piece: torch.Tensor) -> torch.Tensor:
        """Returns this rank's ZeRO-3 piece of a parameter, flat and without padding.

        ZeRO-3 pads all pieces to the same length. It never writes the padding, which therefore differs between ranks
        that hold the same numbers.
        """
        flat = piece.view(-1)
        return flat[: max(0, parameter.ds_numel - self.start(parameter))]

    def part(self, parameter: torch.nn.Parameter) -> str:
        """Returns the name of this rank's tensor-parallel part, the prefix of a shard's region; empty for the whole."""
        return f"tp{dist.get_rank(self.tensor_group)} " if cut_of(parameter) else ""

    def whole(self, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the tensor-parallel parts of a parameter; collective over the tensor-parallel ranks."""
        cut = cut_of(parameter)
        if not cut:
            return tensor
        dim, sizes = cut["partition_dim"], cut["partition_sizes"]
        shape = list(tensor.shape)
        shape[dim] = max(sizes)  # gloo cannot gather parts of different sizes
        own = tensor.new_zeros(shape)
        own.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own, group=self.tensor_group)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim=dim)

    def fill(self, own: torch.Tensor, name: str, parameter: torch.nn.Parameter, start: int, read: ReadRegion) -> None:
        """Sets ``own``, flat, to elements of this rank's part of a parameter.

        The elements begin at the flat index ``start`` of the part.
        """
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties a parameter, so its shape is lost
        origin = [0] * len(shape)
        if cut := cut_of(parameter):
            origin[cut["partition_dim"]] = sum(cut["partition_sizes"][: dist.get_rank(self.tensor_group)])
        fill_flat(own, name, start, origin=origin, shape=shape, region=read)


def cut_of(parameter: torch.nn.Parameter) -> dict[str, Any] | None:
    """Returns AutoTP's note on a parameter that it has sharded; None if the parameter is whole on every rank."""
    note: dict[str, Any] | None = getattr(parameter, DS_AUTOTP_UC_META, None)
    return None if note is None or note["replicated"] else note


def cut_count(model: torch.nn.Module) -> int:
    """Returns the number of parameters that tensor parallelism has sharded."""
    return sum(cut_of(parameter) is not None for parameter in model.parameters())


class SteppedTensors:
    """Finds the stepped tensors of an engine, for every class of optimizer wrapper that DeepSpeed has."""

    def __init__(self, engine: DeepSpeedEngine, place: RankPlace) -> None:
        self._stage, self._place = engine.zero_optimization_stage(), place
        self._wrapper, self._optimizer = engine.optimizer, engine.basic_optimizer
        self._stepped: dict[torch.nn.Parameter, torch.Tensor] = {}
        if self._stage == 0:
            if hasattr(self._wrapper, "fp32_groups"):
                for half, full in zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True):
                    self._stepped |= dict(zip(half, full, strict=True))
        else:
            for group, flat in zip(*self._flat_groups(), strict=True):
                self._stepped |= dict.fromkeys(group, flat)

    def _flat_groups(self) -> tuple[list[list[torch.nn.Parameter]], list[torch.Tensor]]:
        """Returns (groups of parameters, the stepped tensor of each group), which wrapper classes name differently."""
        wrapper = self._wrapper
        if self._stage == 3:
            return wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat
        if hasattr(wrapper, "bf16_groups"):  # ZeRO-1 in bf16
            return wrapper.bf16_groups, wrapper.fp32_groups_flat_partition
        return wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups

    def tensor(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns the stepped tensor of a parameter."""
        return self._stepped.get(parameter, parameter)

    def state(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """Returns the optimizer state of a parameter's stepped tensor; empty before the first step."""
        state: dict[str, Any] = self._optimizer.state.get(self.tensor(parameter), {})
        return state

    def new_state(self, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
        """Returns the state ``key`` of a parameter's stepped tensor; creates it with zeros if there is none yet."""
        stepped = self.tensor(parameter)
        state: dict[str, torch.Tensor] = self._optimizer.state[stepped]
        if key not in state:
            state[key] = torch.zeros_like(stepped)
        return state[key]

    def keeps(self, parameter: Any, kind: WrittenKind) -> bool:
        """Returns whether the optimizer has such a state of a parameter: Muon has a momentum of matrices only."""
        return not hasattr(parameter, "use_muon") or (kind == "momentum_buffer") == parameter.use_muon

    def momentum_of_matrix(self, parameter: Any) -> torch.Tensor | None:
        """Returns this rank's momentum of a matrix that Muon updates, flat, with zeros if there is none yet, at ZeRO-1
        and 2; None for other parameters.

        There, every rank keeps the whole momentum of each matrix of which it has a part, one after another, where
        DeepSpeed's functions look for a piece of it. It is empty if the rank has no part.
        """
        if self._stage not in (1, 2) or not getattr(parameter, "use_muon", False):
            return None
        stepped, key = self.tensor(parameter), "momentum_buffer"
        flats, state = self._wrapper.single_partition_of_fp32_groups, self._optimizer.state[stepped]
        group = self._wrapper.params_in_partition[next(i for i, flat in enumerate(flats) if flat is stepped)]
        if key not in state:
            state[key] = stepped.new_zeros(sum(matrix.numel() for matrix in group))
        buffer: torch.Tensor = state[key]
        at = 0
        for matrix in group:
            if matrix is parameter:
                return buffer.narrow(0, at, matrix.numel())
            at += matrix.numel()
        return buffer[:0]

    def set_step(self, parameter: torch.nn.Parameter, count: float) -> None:
        """Sets the update count of a parameter's stepped tensor; the parameters of a flat tensor share one count."""
        stepped = self.tensor(parameter)
        # torch's AdamW counts in place in a tensor, DeepSpeed's own optimizers count in a Python number.
        adamw = getattr(self._optimizer, "aux_optimizer", self._optimizer)  # beside Muon
        counts_in_tensor = isinstance(adamw, torch.optim.AdamW)
        step = update_count(torch.tensor(count), adamw, stepped) if counts_in_tensor else int(count)
        self._optimizer.state[stepped]["step"] = step

    def piece(self, parameter: Any, stepped: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns (this rank's flat, unpadded piece of a parameter, its start index in the flattened parameter).

        ``stepped``: the stepped tensor of the parameter, or another tensor with its layout, such as a state.
        """
        flat = stepped.view(-1)
        if self._stage == 0:
            return flat, 0
        if self._stage == 3:
            _, at, numel = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)]
            return self._place.unpadded(parameter, flat.narrow(0, at, numel)), self._place.start(parameter)
        mapping = parameter._hp_mapping
        if mapping is None:
            return flat[:0], 0
        at = mapping.hp_fragment_address
        return flat.narrow(0, at.start, at.numel), mapping.lp_fragment_address.start

    def link_state(self) -> None:
        """Makes DeepSpeed's access functions find the state of all parameter groups.

        ZeRO-1 and 2 link parameters to their state when only the first group has been stepped, so the parameters of the
        other groups are linked to no state (docs/findings/deepspeed-optimizer-state.md).
        """
        if self._stage in (1, 2):
            self._wrapper._hp_optimizer_states_linked = False
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def update_parameters(self) -> None:
        """Copies the masters into the parameters that the model computes with, at ZeRO-0 and 3; collective.

        There, a rank has all of the masters, or parts of the same size as the parameters' parts.
        """
        if self._stage == 0:
            for parameter, master in self._stepped.items():
                parameter.data.copy_(master.data)
        elif self._stage == 3:
            self._wrapper.checkpoint_event_prologue()  # partitions parameters that a forward pass has left whole
            for number in range(len(self._wrapper.fp16_groups)):
                self._wrapper._reassign_or_swap_out_partitioned_parameters(number)
            self._wrapper.checkpoint_event_epilogue()


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
                elif (momentum := self._stepped.momentum_of_matrix(parameter)) is not None:
                    whole = torch.zeros_like(parameter)
                    own, start = self._stepped.piece(parameter, self._stepped.tensor(parameter))
                    region = slice(start, start + len(own))
                    if len(own):
                        whole.view(-1)[region] = momentum[region]
                    dist.all_reduce(whole, group=self._engine.optimizer.dp_process_group)
                    yield name, self._place.whole(parameter, whole)
                else:
                    full = state[kind] if self._stage == 0 else safe_get_full_optimizer_state(parameter, kind)
                    # ZeRO-1 and 2 gather bf16 in float32.
                    yield name, self._place.whole(parameter, full.detach().to(state[kind].dtype))

    @torch.no_grad()
    def write(self, kind: WrittenKind, read: ReadRegion) -> None:
        """Overwrites one state of the optimizer or, for ``weight``, masters and compute weights; collective."""
        for name, parameter in named_parameters(self._engine.module):
            if not parameter.requires_grad:
                if kind == "weight":
                    _fill_computed_with(name, parameter, self._place, read)
            elif kind != "weight" and not self._stepped.keeps(parameter, kind):
                continue
            elif kind == "step":
                self._stepped.set_step(parameter, float(read(name, (), ())))
            else:
                weight = kind == "weight"
                if not weight and (momentum := self._stepped.momentum_of_matrix(parameter)) is not None:
                    self._place.fill(momentum, name, parameter, 0, read)
                    continue
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
        return full.to(self._stepped.tensor(parameter).dtype)

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
