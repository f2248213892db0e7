"""Clean-up between two tasks of a world, and the count of what they leave behind (claim 8: no cell harms the next).

Device meshes and Megatron's parallel state never destroy their process groups; each keeps threads and sockets. Every
group but WORLD goes. What still grows beyond an allowance makes the world retire.
"""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

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


def clean_up() -> Holdings:
    """Destroy all groups but WORLD, collect garbage, reset the default dtype; returns what the rank still holds."""
    torch.set_default_dtype(torch.float32)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
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
