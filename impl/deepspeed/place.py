"""Which elements of a parameter a rank holds: its tensor-parallel *part*, and of this part the *piece* that is ZeRO's.

A parameter that tensor parallelism does not shard has one part, the whole.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

from impl.files import strips

# (name, start indices, shape) -> this region of the whole tensor with this name.
ReadRegion = Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The position of a rank: it is number ``zero_rank`` of the ``zero_size`` ranks that ZeRO partitions over.

    tensor_group: the process group of its tensor parallelism; None without it.
    """

    zero_rank: int
    zero_size: int
    tensor_group: dist.ProcessGroup | None

    def start(self, parameter: Any) -> int:
        """The index in the flattened part at which this rank's piece starts; 0 if ZeRO-3 does not partition it."""
        return self.zero_rank * int(parameter.ds_tensor.numel()) if hasattr(parameter, "ds_id") else 0

    def unpadded(self, parameter: Any, piece: torch.Tensor) -> torch.Tensor:
        """This rank's ZeRO-3 piece of a parameter, flat and without padding.

        ZeRO-3 pads all pieces to the same length. It never writes the padding, which therefore differs between ranks
        that hold the same numbers.
        """
        flat = piece.view(-1)
        return flat[: max(0, parameter.ds_numel - self.start(parameter))]

    def part(self, parameter: torch.nn.Parameter) -> str:
        """The name of this rank's tensor-parallel part, the prefix of a shard's region; empty for a whole parameter."""
        return f"tp{dist.get_rank(self.tensor_group)} " if cut_of(parameter) else ""

    def whole(self, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensor-parallel parts of a parameter; collective over the tensor-parallel ranks."""
        cut = cut_of(parameter)
        if not cut:
            return tensor
        dim, sizes = cut["partition_dim"], cut["partition_sizes"]
        shape = list(tensor.shape)
        shape[dim] = max(sizes)  # gloo gathers no parts that differ in size
        own = tensor.new_zeros(shape)
        own.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own, group=self.tensor_group)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim=dim)

    def fill(self, own: torch.Tensor, name: str, parameter: torch.nn.Parameter, start: int, read: ReadRegion) -> None:
        """Set ``own``, flat, to the elements of this rank's part of a parameter that begin at the flat index ``start``.

        Only the rows of the whole tensor that contain these elements are read, a strip of them at a time.
        """
        if not own.numel():
            return
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties a parameter, so its shape is lost
        origin = [0] * len(shape)
        if cut := cut_of(parameter):
            origin[cut["partition_dim"]] = sum(cut["partition_sizes"][: dist.get_rank(self.tensor_group)])
        row, end = math.prod(shape[1:]), start + own.numel()
        first, last = start // row, -(-end // row)
        at = first * row  # of a strip, in the flattened part
        for begin, size in strips([origin[0] + first, *origin[1:]], [last - first, *shape[1:]]):
            low, high = max(start, at), min(end, at + math.prod(size))
            if low < high:
                own[low - start : high - start].copy_(read(name, begin, size).flatten()[low - at : high - at])
            at += math.prod(size)


def cut_of(parameter: torch.nn.Parameter) -> dict[str, Any] | None:
    """AutoTP's note on a parameter that it has sharded; None if the parameter is whole on every rank."""
    note: dict[str, Any] | None = getattr(parameter, DS_AUTOTP_UC_META, None)
    return None if note is None or note["replicated"] else note


def cut_count(model: torch.nn.Module) -> int:
    """The number of parameters that tensor parallelism has sharded."""
    return sum(cut_of(parameter) is not None for parameter in model.parameters())
