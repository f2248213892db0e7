"""Worlds: groups of live ranks with torch.distributed initialised, in which tasks run one after another.

Importing torch and building a process group cost more than a tiny cell, so ranks are kept. Serves claim 8: a rank that
dies, hangs, raises or runs out of memory ends its task with a reason, a log and a stack, and never takes another task
with it. Linux only: it rests on fork, /proc, memfd_create and PR_SET_PDEATHSIG.

    pool.py       what callers use: one live world per backend and size
    watch.py      the watchdog over one task
    reason.py     the words of a failure
    launch.py     the controller's handles of a zygote and a world
    zygote.py     the process that imports once, forks ranks, reaps them
    rank.py       what a rank does
    cleanup.py    what a rank does between tasks, so that nothing leaks
    heartbeat.py  the phase that each rank is in, in shared memory
    process.py    Linux: parent death, process state, groups
    wire.py       messages between these processes

This package does not import torch before a rank or a zygote does.
"""

from conformance.world.heartbeat import RankContext, beat
from conformance.world.pool import Device, Outcome, Pool, WorldConfig

__all__ = ["Device", "Outcome", "Pool", "RankContext", "WorldConfig", "beat"]
