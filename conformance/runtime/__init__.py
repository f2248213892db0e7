"""Keeps groups of live ranks with torch.distributed initialised, in which tasks run one after another.

Importing torch and building a process group takes longer than a tiny cell, so ranks are reused. A rank that dies,
hangs, raises or runs out of memory ends its task with a reason, a log and a stack, and does no harm to another task.
Linux only, because it uses fork, /proc, memfd_create and PR_SET_PDEATHSIG.

    config.py             which worlds a task wants
    pool.py               the interface for callers: on this host, or on leased slots
    slots.py              live worlds on one block of slots, one for each backend and size
    gpu_*.py              GPUs of this host, their leases, and slots on them
    watchdog.py           the watchdog of one task, and when it calls a task hung
    failure.py            the text of a failure, and the last collectives of each rank while it hangs
    worker_groups.py      the controller's handles of worlds, and of the processes that start them
    forkserver_client.py  the controller's handles of zygotes
    preload_server.py     the process that imports what all zygotes share, and forks them
    forkserver.py         the process that imports a backend once, forks ranks and reaps them
    worker_main.py        the main loop of a rank
    cleanup.py            what a rank does between tasks, so that nothing leaks
    heartbeat.py          the current phase of each rank, in shared memory
    messages.py           messages between these processes

This package does not import torch before a rank or a zygote does.
"""

from conformance.runtime.config import Device, WorldConfig
from conformance.runtime.heartbeat import RankContext, beat, mark
from conformance.runtime.pool import Pool
from conformance.runtime.slots import Outcome

__all__ = ["Device", "Outcome", "Pool", "RankContext", "WorldConfig", "beat", "mark"]
