"""Clean-up between two tasks of a world, and the count of what they leave behind (claim 8: no cell harms the next).

Device meshes and Megatron's parallel state never destroy their process groups, and each keeps threads and sockets; so
every group but WORLD goes. What still grows beyond an allowance makes the world retire.

Three things outlive a destroyed group, and were seen to harm the next task of a world: DTensor's caches answer with an
equal mesh of an earlier task; the meshes in them hold its groups, and so their threads; and a group that gets the name
of an earlier one finds the addresses of the earlier one in the store.
"""

import gc
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from conformance.world.process import thread_count


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What a rank holds after a clean-up."""

    groups: int
    fds: int
    threads: int


# Growth since the first clean-up that is not a leak yet: libraries open some things at first use (a device, a thread
# pool, a log). Real leaks are far above it: Megatron's parallel state left 17 groups, 75 descriptors, 51 threads each.
ALLOWANCE = Holdings(groups=0, fds=16, threads=8)
SETTLE_S = 2.0  # the threads of a destroyed group end a little later, on a loaded machine much later
_TICK_S = 0.01
# A second of imports together, so they are left to those who use DTensor; for others there is no cache to clear.
_DTENSOR, _CACHES = "torch.distributed.tensor", "torch.distributed.tensor.debug"


def freeze() -> None:
    """Exempt what is imported by now from garbage collection: it is fast then, and forked ranks share the memory."""
    if _DTENSOR in sys.modules:
        import_module(_CACHES)  # once here, or in every rank's first clean-up
    gc.collect()
    gc.freeze()


class Cleaner:
    """Cleans up one rank, the same number of times on all ranks of a world."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._store: Any = None
        self._count = 0
        self._first: Holdings | None = None

    def clean_up(self) -> str:
        """Free what the task left; returns what grew all the same since the first time, "" when nothing did."""
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        world = dist.distributed_c10d._world
        everybody = dist.distributed_c10d._get_default_group()
        for group in list(world.pg_map):
            if group is not everybody:
                dist.destroy_process_group(group)
        if self._store is None:
            self._store = dist.distributed_c10d._get_default_store()
        self._count += 1
        backend, _ = world.pg_map[everybody]
        world.pg_map[everybody] = backend, PrefixStore(f"after-{self._count}", self._store)
        _forget_meshes(self._device)
        gc.collect()
        deadline = time.monotonic() + SETTLE_S
        if self._first is None:  # torch's CUDA builds start a pool of threads at the first backward, on the CPU, too
            torch.zeros(1, device=self._device, requires_grad=True).sum().backward()
        now = _current_holdings()
        self._first = self._first or now
        while growth(self._first, now) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            now = _current_holdings()
        return growth(self._first, now)


def _current_holdings() -> Holdings:
    return Holdings(
        groups=len(dist.distributed_c10d._world.pg_map),
        fds=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        threads=thread_count(),
    )


def growth(first: Holdings, now: Holdings) -> str:
    """What grew beyond the allowance, for a log line; "" when nothing did."""
    names = {"groups": "process groups", "fds": "open file descriptors", "threads": "threads"}
    return ", ".join(
        f"{text} {getattr(first, name)} -> {getattr(now, name)}"
        for name, text in names.items()
        if getattr(now, name) > getattr(first, name) + getattr(ALLOWANCE, name)
    )


def _forget_meshes(device: str) -> None:
    """Take their groups from meshes of the task, and clear DTensor's caches.

    The caches are per thread, and backward has a thread of its own on a GPU (none on the CPU).
    """
    for mesh in [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()  # older meshes hold names only
    if _DTENSOR not in sys.modules:
        return
    import_module(_CACHES)._clear_sharding_prop_cache()
    _ClearInBackward.apply(torch.zeros(1, device=device, requires_grad=True)).backward()  # type: ignore[no-untyped-call]


class _ClearInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        import_module(_CACHES)._clear_sharding_prop_cache()
        return gradient
