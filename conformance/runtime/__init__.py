"""Worlds: groups of live ranks with torch.distributed initialised, in which tasks run one after another.

Importing torch and building a process group takes longer than a tiny cell, so ranks are reused. Serves claim 8: a rank
that dies, hangs, raises or runs out of memory ends its task with a reason, a log and a stack, and does no harm to
another task. Linux only, because it uses fork, /proc, memfd_create and PR_SET_PDEATHSIG.

    config.py     which world a task wants
    pool.py       the interface for callers: here, or on leased places
    places.py     what is leased
    lane.py       live worlds at one place, one per backend and size
    watch.py      the watchdog of one task
    patience.py   when it calls a task hung
    reason.py     the text of a failure
    launch.py     the controller's handles of a world, and of the process that starts it
    zygotes.py    the controller's handles of zygotes
    nursery.py    the process that imports what all zygotes share, and forks them
    zygote.py     the process that imports a backend once, forks ranks and reaps them
    rank.py       the main loop of a rank
    cleanup.py    what a rank does between tasks, so that nothing leaks
    heartbeat.py  the current phase of each rank, in shared memory
    flight.py     the last collectives of each rank, while it hangs
    process.py    Linux system calls: death of the parent, process state, process groups
    wire.py       messages between these processes

This package does not import torch before a rank or a zygote does.
"""

from conformance.runtime.config import Device, WorldConfig
from conformance.runtime.heartbeat import RankContext, beat, mark
from conformance.runtime.pool import Pool
from conformance.runtime.slots import Outcome

__all__ = ["Device", "Outcome", "Pool", "RankContext", "WorldConfig", "beat", "mark"]
