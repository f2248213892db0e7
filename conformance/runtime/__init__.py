"""Runs tasks in worker groups: live ranks with torch.distributed initialised, reused from task to task.

Importing torch and building a process group takes longer than a tiny cell, so ranks are reused. A rank that dies,
hangs, raises or runs out of memory ends its task with a reason, a log and a stack, and does no harm to another task.
Linux only, because it uses fork, /proc, memfd_create and PR_SET_PDEATHSIG.

    pool.py               the interface for callers; live worker groups, on this host or on leased slots
    watchdog.py           watches one task, and decides when it hangs
    failure.py            the text of a failure, and the last collectives of each rank while it hangs
    worker_groups.py      which worker group a task wants; handles of worker groups, what starts them, and slots
    preload_server.py     the process that imports what all forkservers share, and forks them
    forkserver.py         the process that imports a backend once, forks ranks and reaps them
    forkserver_client.py  the controller's handles of forkservers
    worker_main.py        the main loop of a rank
    cleanup.py            what a rank does between tasks, so that nothing leaks
    messages.py           messages between these processes; the current phase of each rank, in shared memory
    gpu_inventory.py      the GPUs of this host, by NVML, and shares of them
    gpu_leases.py         leases of GPUs between runs
    leased_slots.py       what worker groups lease: GPUs, shares, or slots of several hosts
    mps.py                ranks of several processes on a GPU at the same time
    multihost/            ranks on several hosts, by torchrun or Ray

This package does not import torch before a rank or a forkserver does.
"""

from conformance.runtime.messages import Device, RankContext, beat, mark
from conformance.runtime.pool import Outcome, Pool
from conformance.runtime.worker_groups import WorkerGroupConfig

__all__ = ["Device", "Outcome", "Pool", "RankContext", "WorkerGroupConfig", "beat", "mark"]
