"""What a rank holds of a parameter: a part of it where tensor parallelism has cut it, and of that ZeRO's piece."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

# The part of a whole tensor, by its name, that begins at some indices and has some shape.
Region = Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """What a rank holds: piece ``zero_rank`` of ``zero_size`` of what ZeRO cuts, and a part within ``tensor_group``."""

    zero_rank: int
    zero_size: int
    tensor_group: dist.ProcessGroup | None

    def start(self, parameter: Any) -> int:
        """Where in its part of a parameter, flattened, this rank's piece starts, if ZeRO-3 has cut it; else 0."""
        return self.zero_rank * int(parameter.ds_tensor.numel()) if hasattr(parameter, "ds_id") else 0

    def unpadded(self, parameter: Any, piece: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a parameter that ZeRO-3 cut, flat, without the padding that makes all pieces equally
        long: nobody ever writes the padding, so it differs between ranks that hold the same numbers."""
        flat = piece.view(-1)
        return flat[: max(0, parameter.ds_numel - self.start(parameter))]

    def part(self, parameter: torch.nn.Parameter) -> str:
        """Which tensor-parallel part of a parameter this rank holds, as the beginning of a region."""
        return f"tp{dist.get_rank(self.tensor_group)} " if cut_of(parameter) else ""

    def whole(self, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """Put the tensor-parallel parts of a parameter together; collective over their ranks."""
        cut = cut_of(parameter)
        if not cut:
            return tensor
        assert len(set(cut["partition_sizes"])) == 1, "parts of different sizes"
        parts = [torch.empty_like(tensor) for _ in cut["partition_sizes"]]
        dist.all_gather(parts, tensor.contiguous(), group=self.tensor_group)
        return torch.cat(parts, dim=cut["partition_dim"])

    def fill(self, own: torch.Tensor, name: str, parameter: torch.nn.Parameter, start: int, region: Region) -> None:
        """Set ``own``, flat, to the numbers from ``start`` on of this rank's part of a parameter, of which only the
        rows that have them are read."""
        if not own.numel():
            return
        shape = getattr(parameter, "ds_shape", parameter.shape)  # a parameter that ZeRO-3 cut has lost its own
        origin = [0] * len(shape)
        if cut := cut_of(parameter):
            origin[cut["partition_dim"]] = sum(cut["partition_sizes"][: dist.get_rank(self.tensor_group)])
        row = math.prod(shape[1:])
        first, last = start // row, -(-(start + own.numel()) // row)
        rows = region(name, (origin[0] + first, *origin[1:]), (last - first, *shape[1:]))
        own.copy_(rows.flatten().narrow(0, start - first * row, own.numel()))


def cut_of(parameter: torch.nn.Parameter) -> dict[str, Any] | None:
    """What AutoTP noted of a parameter that it cut; None if it is whole on every rank."""
    note: dict[str, Any] | None = getattr(parameter, DS_AUTOTP_UC_META, None)
    return None if note is None or note["replicated"] else note


def cut_count(model: torch.nn.Module) -> int:
    """How many parameters tensor parallelism has cut."""
    return sum(cut_of(parameter) is not None for parameter in model.parameters())
