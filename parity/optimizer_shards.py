"""Finds the elements of each parameter in the tensors that the optimizers of a rank step.

Optimizers of torch step the parameters themselves. DeepSpeed, Megatron and FSDP1 let one step other tensors: masters in
float32, or flat buffers with the shards of several parameters. Their gradient is complete, unscaled and clipped when
that step begins. Each library has one reader here, which says where a parameter's elements lie; what follows
(parity/summaries.py) knows no library.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from conformance.core.errors import UsageError
from parity.differences import canonical


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A tensor-parallel cut: the dimension, this rank's place among ``count`` ranks, and the runs of each shard.

    A shard of several runs (stride 2: gate and up projections in one) holds a part of each.
    """

    dim: int
    index: int
    count: int
    stride: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """What a rank holds of one parameter: elements ``begin`` to ``end`` of its shard, from ``start`` on in ``stepped``.

    name: without wrappers. shape: of the shard before it is flattened; of the whole where there is no ``cut``.
    stepped: the tensor that an optimizer steps, with the gradient. group: its place where the parameter itself is in
    no optimizer. chunk: the number of its model, of those of a pipeline stage.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    stepped: Tensor
    start: int
    begin: int
    end: int
    group: str | None = None
    cut: Cut | None = None
    chunk: int = 0


def torch_optimizers(optimizer: Any) -> tuple[tuple[Any, Optimizer], ...]:
    """Take the optimizers of torch out of wrappers, each with the wrapper around it (or itself).

    Wrappers have a ``step`` of their own: Accelerate's, DeepSpeed's, Megatron's. Raises UsageError for other objects.
    """
    if isinstance(optimizer, Sequence):
        return tuple(found for one in optimizer for found in torch_optimizers(one))
    if hasattr(optimizer, "chained_optimizers"):
        return torch_optimizers(optimizer.chained_optimizers)
    if getattr(optimizer, "is_stub_optimizer", False):  # of a Megatron rank without parameters of its kind
        return ()
    wrapped = getattr(optimizer, "optimizer", None) if hasattr(optimizer, "zero_grad") else None
    if wrapped is not None:
        found = torch_optimizers(wrapped)
        return tuple((optimizer if outer is inner else outer, inner) for outer, inner in found)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; give the ones that it steps, as a list"
        )
    return ((optimizer, optimizer),)


def held_parameters(models: Sequence[nn.Module], optimizers: Sequence[tuple[Any, Optimizer]]) -> list[Held]:
    """List what this rank holds of every parameter, tied ones once, in the order in which the models define them.

    Raises UsageError for shards whose place in the whole parameter cannot be known.
    """
    read: dict[int, Held] = {}
    for number, (outer, inner) in enumerate(optimizers):
        for reader in (_zero3, _linked, _masters, _distributed):
            read |= {id(held.parameter): held for held in reader(outer, inner, number)}
    found: dict[tuple[int, int], Held] = {}
    for number, model in enumerate(models):
        flat = _flat_parameters(model)
        layers = {
            f"{name}.": f"{_layer(name, module)}." for name, module in model.named_modules() if _layer(name, module)
        }
        for raw, parameter in model.named_parameters():
            if (id(parameter), 0) in found:
                continue
            for key, held in enumerate(flat.get(id(parameter)) or [_whole(parameter)]):
                prefix = next((prefix for prefix in reversed(layers) if raw.startswith(prefix)), "")
                name = held.name or layers.get(prefix, "") + raw.removeprefix(prefix)
                own = read.get(id(parameter), held)
                found[id(parameter), key] = replace(own, name=canonical(name), cut=_cut(raw, parameter), chunk=number)
    return list(found.values())


def _whole(parameter: nn.Parameter) -> Held:
    """Give a parameter that lies in itself, or, where ZeRO-3 has frozen it, in its flat shard."""
    if (shard := getattr(parameter, "ds_tensor", None)) is not None:
        return _of_zero3(parameter, shard.data, 0)
    return _held(parameter, parameter, 0, 0, parameter.numel())


def _held(parameter: nn.Parameter, stepped: Tensor, start: int, begin: int, end: int, group: str | None = None) -> Held:
    return Held(
        name="", parameter=parameter, shape=tuple(parameter.shape), stepped=stepped, start=start, begin=begin, end=end,
        group=group,
    )  # fmt: skip


def _of_zero3(parameter: Any, stepped: Tensor, start: int, group: str | None = None) -> Held:
    size = parameter.ds_tensor.ds_numel  # of each rank's shard, with padding
    begin = min(dist.get_rank(group=parameter.ds_process_group) * size, parameter.ds_numel)
    held = _held(parameter, stepped, start, begin, min(begin + size, parameter.ds_numel), group)
    return replace(held, shape=tuple(parameter.ds_shape))


def _zero3(outer: Any, inner: Optimizer, number: int) -> Iterator[Held]:
    """Yield the shards of DeepSpeed's stage 3: the shards of a group follow each other in a flat master."""
    for place, flat in enumerate(getattr(outer, "fp32_partitioned_groups_flat", ())):
        start = 0
        for parameter in outer.fp16_groups[place]:
            yield _of_zero3(parameter, flat, start, f"{number}.{outer.sub_group_to_group_id[place]}")
            start += parameter.ds_tensor.ds_numel


def _linked(outer: Any, inner: Optimizer, number: int) -> Iterator[Held]:
    """Yield the shards of DeepSpeed's stages 1 and 2, and of its bf16 optimizer: a range of a flat group."""
    masters = getattr(outer, "single_partition_of_fp32_groups", None) or getattr(
        outer, "fp32_groups_flat_partition", []
    )
    groups = getattr(outer, "bit16_groups", None) or getattr(outer, "bf16_groups", [])
    for place, (flat, group) in enumerate(zip(masters, groups, strict=True)):
        for parameter in group:
            if (link := parameter._hp_mapping) is None:  # other ranks hold all of it
                yield _held(parameter, parameter, 0, 0, 0, f"{number}.{place}")
            else:
                here, there = link.hp_fragment_address, link.lp_fragment_address
                end = there.start + here.numel
                yield _held(parameter, flat, here.start, there.start, end, f"{number}.{place}")


def _masters(outer: Any, inner: Optimizer, number: int) -> Iterator[Held]:
    """Yield whole masters: Megatron's of 16-bit parameters, and DeepSpeed's without ZeRO, flat or one by one."""
    models: Any = getattr(outer, "float16_groups", None) or getattr(outer, "fp16_groups", ())
    masters: Any = getattr(outer, "fp32_from_float16_groups", None) or getattr(outer, "fp32_groups", None)
    flats: Any = getattr(outer, "fp32_groups_flat", None)
    for place, parameters in enumerate(models if masters or flats else ()):
        start = 0
        for i, parameter in enumerate(parameters):
            stepped = flats[place] if flats else masters[place][i]
            yield _held(parameter, stepped, start, 0, parameter.numel(), f"{number}.{place}")
            start += parameter.numel() if flats else 0


def _distributed(outer: Any, inner: Optimizer, number: int) -> Iterator[Held]:
    """Yield the shards of Megatron's distributed optimizer, each a tensor of its own."""
    owned = getattr(outer, "model_param_group_index_map", None)
    buffers = outer.buffers if owned is not None else ()
    for parameter in (parameter for buffer in buffers for parameter in buffer.params):
        if owned and parameter in owned:
            group, place = owned[parameter]
            span = outer._get_model_param_range_map(parameter)["param"]
            stepped = inner.param_groups[group]["params"][place]
            yield _held(parameter, stepped, 0, span.start, span.end, f"{number}.{group}")
        else:
            yield _held(parameter, parameter, 0, 0, 0)


def _flat_parameters(model: nn.Module) -> dict[int, list[Held]]:
    """Give the shards of FSDP1: of the flat parameters, or of the original ones that are views of them."""
    found: dict[int, list[Held]] = {}
    for prefix, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            continue
        originals = flat._params or [flat] * flat._num_params
        for parameter, name, shape, info in zip(
            originals, flat._fqns, flat._shapes, flat._shard_param_infos, strict=True
        ):
            begin, end = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
            start = info.offset_in_shard or 0 if parameter is flat else 0
            held = replace(_held(parameter, parameter, start, begin, end), shape=tuple(shape))
            found.setdefault(id(parameter), []).append(replace(held, name=f"{prefix}.{name}".removeprefix(".")))
    return found


def _layer(name: str, module: nn.Module) -> str:
    """Give the name of a Megatron layer by its number in all pipeline stages; empty for what is not one."""
    number, (parent, _, last) = getattr(module, "layer_number", None), name.rpartition(".")
    megatron = any(comes_from(kind, "megatron") for kind in type(module).__mro__)
    return f"{parent}.{number - 1}" if megatron and isinstance(number, int) and last.isdigit() else ""


def _cut(name: str, parameter: Any) -> Cut | None:
    """Give the tensor-parallel cut of a parameter of Megatron. Raises UsageError where it cannot be known."""
    if hasattr(parameter, "ds_autotp_universal_checkpoint_meta"):
        raise UsageError(f"{name} is cut by DeepSpeed's AutoTP, which no record reads; record with autotp_size 1")
    state: Any = sys.modules.get("megatron.core.parallel_state")
    known = state is not None and state.model_parallel_is_initialized()
    expert = not getattr(parameter, "allreduce", True)
    if expert and known and state.get_expert_model_parallel_world_size() > 1:
        raise UsageError(f"{name} is one of the experts of this rank; record with expert parallel size 1")
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    if not known:
        raise UsageError(f"{name} is cut by tensor parallelism outside of megatron.core, which no record reads")
    kind = "expert_tensor_parallel" if expert else "tensor_model_parallel"
    index, count = (getattr(state, f"get_{kind}_{what}")() for what in ("rank", "world_size"))
    return Cut(dim=parameter.partition_dim, index=index, count=count, stride=parameter.partition_stride)


def comes_from(kind: type, package: str) -> bool:
    return f"{kind.__module__}.".startswith(f"{package}.")


@dataclass(frozen=True, kw_only=True)
class Box:
    """The part of a whole tensor that a rank holds: offsets and sizes in every dimension (at least one)."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def whole(shape: tuple[int, ...]) -> Box:
    """Give the box of a tensor that is not sharded."""
    shape = shape or (1,)
    return Box(shape=shape, offsets=(0,) * len(shape), sizes=shape)


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A box of a parameter: the slices ``take`` of ``sizes`` elements, from ``start`` on in the stepped tensor."""

    start: int
    sizes: tuple[int, ...]
    take: tuple[slice, ...]
    box: Box

    def values(self, tensor: Tensor) -> Tensor:
        """Read the box's elements from the stepped tensor, or its gradient, without a copy where it is contiguous."""
        count = math.prod(self.sizes)
        if tensor.numel() < self.start + count:
            raise UsageError("an optimizer keeps its weights on NVMe, where no record reads them; offload to the CPU")
        run = (
            tensor.detach() if tensor.numel() == count else tensor.detach().reshape(-1)[self.start : self.start + count]
        )
        return run.reshape(self.sizes)[self.take]

    def within(self, dim: int, low: int, high: int, *, to: int, length: int) -> Iterator["Fragment"]:
        """Yield the part that lies between ``low`` and ``high`` of a dimension, which move to ``to``, of ``length``."""
        first, count = self.box.offsets[dim], self.box.sizes[dim]
        begin, end = max(low, first), min(high, first + count)
        if begin < end:
            box, take, at = self.box, list(self.take), self.take[dim].start
            take[dim] = slice(at + begin - first, at + end - first)
            yield replace(
                self,
                take=tuple(take),
                box=Box(
                    shape=_put(box.shape, dim, length),
                    offsets=_put(box.offsets, dim, to + begin - low),
                    sizes=_put(box.sizes, dim, end - begin),
                ),
            )


def _put(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])


def fragments_of(held: Held) -> list[Fragment]:
    """List the boxes of the whole parameter that this rank holds."""
    if isinstance(held.parameter, DTensor):
        (chunk,) = held.parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
        box = replace(whole(held.shape), offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes))
        return [_fragment(0, box)] if math.prod(box.sizes) else []
    shape = whole(held.shape).shape
    found = [
        _fragment(held.start + first - held.begin, Box(shape=shape, offsets=offsets, sizes=sizes))
        for first, offsets, sizes in _boxes(shape, held.begin, held.end)
    ]
    if (cut := held.cut) is None:
        return found
    run = shape[cut.dim] // cut.stride
    return [
        part
        for fragment in found
        for i in range(cut.stride)
        for part in fragment.within(
            cut.dim, i * run, (i + 1) * run, to=(i * cut.count + cut.index) * run, length=shape[cut.dim] * cut.count
        )
    ]


def whole_shape(held: Held) -> tuple[int, ...]:
    """Give the shape of the whole parameter, with at least one dimension."""
    shape, cut = whole(held.shape).shape, held.cut
    return shape if cut is None else _put(shape, cut.dim, shape[cut.dim] * cut.count)


def _fragment(start: int, box: Box) -> Fragment:
    return Fragment(start=start, sizes=box.sizes, take=tuple(slice(0, size) for size in box.sizes), box=box)


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut elements ``begin`` to ``end`` of a row-major tensor into boxes: first element, offsets and sizes of each."""
    row, at = math.prod(shape[1:]), begin
    while at < end:
        index, inside = divmod(at, row)
        if len(shape) == 1 or (inside == 0 and end - at >= row):
            count = (end - at) // row
            yield at, (index, *(0 for _ in shape[1:])), (count, *shape[1:])
            at += count * row
        else:
            stop = min(end, (index + 1) * row)
            for first, offsets, sizes in _boxes(shape[1:], inside, stop - index * row):
                yield index * row + first, (index, *offsets), (1, *sizes)
            at = stop
