"""Runs as one rank: joins its process group once, then runs the controller's tasks until it closes the socket.

A forkserver forks the rank. For backends whose import starts a thread or initialises CUDA, which do not survive a fork,
it starts the rank with ``python -m conformance.runtime.worker_main SPEC``. The output of a task goes to its own log,
its stacks can be requested while it hangs, and its end is always reported.
"""

import contextlib
import faulthandler
import json
import os
import re
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, Store, TCPStore

from conformance.core import packages
from conformance.core.process import listening_store
from conformance.core.timeline import own
from conformance.runtime import messages
from conformance.runtime.cleanup import Cleaner, freeze
from conformance.runtime.failure import FlightRecorder
from conformance.runtime.messages import Heartbeats, Message, RankContext, Wire, beat

# The watchdog ends a task that hangs, and shows stacks. A timeout of the collective would hide which rank it waits for.
COLLECTIVE_TIMEOUT = timedelta(days=1)
MEETING_TIMEOUT = timedelta(minutes=2)  # for ranks of other hosts to reach rank 0


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Holds everything that a rank needs to start, as plain JSON values. The three file descriptors are inherited.

    first, local_size: the first rank of this host, and the number of its ranks. gpu, host: see
    conformance.runtime.worker_groups.Slot. store: the address of the store of ranks on several hosts; None for ranks of
    one host, whose store is a file.
    """

    local_rank: int
    first: int
    size: int
    local_size: int
    gpu: int
    host: str
    store: tuple[str, int] | None
    device: str
    port: int
    preload: tuple[str, ...]
    gpu_backend: str
    memory_limit_bytes: int | None
    socket_fd: int
    beats_fd: int
    store_fd: int

    @property
    def rank(self) -> int:
        return self.first + self.local_rank


def serve(spec: RankSpec) -> None:
    """Runs tasks until the controller closes the socket.

    The controller sends a task, and requests the clean-up when all ranks are done with it. A rank that destroyed a
    process group earlier would disconnect peers that still use the group.
    """
    _limit_memory(spec.memory_limit_bytes)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # between tasks there is no file for stacks
    messages.attach(Heartbeats(spec.beats_fd, size=spec.local_size), spec.local_rank)
    device = "cpu" if spec.device == "cpu" else f"cuda:{spec.gpu}"
    context = RankContext(rank=spec.rank, world_size=spec.size, device=device, beat=beat)
    wire = Wire(socket.socket(fileno=spec.socket_fd))
    cleaner, recorder = Cleaner(device), FlightRecorder(spec.rank, device=spec.device)
    while True:
        message, held = wire.receive()
        if message is None:
            return
        folder = Path(message["log_dir"])
        recorder.write_into(folder)
        with _logs(folder, spec.rank):
            wire.send(_run_task(spec, context, message, wire))
            if wire.receive()[0] is None:
                return
            beat("clean-up")
            leaks = cleaner.clean_up()
        for fd in held:  # keep the lease until now, even if the controller has died meanwhile
            os.close(fd)
        ended = {"spans": own.drain(), "clock": time.monotonic()}
        wire.send({"type": "clean", "leaks": leaks, "kept": cleaner.kept_memory(), **ended})


def _run_task(spec: RankSpec, context: RankContext, message: Message, wire: Wire) -> Message:
    try:
        if not dist.is_initialized():
            _join(spec)
        wire.send({"type": "started"})
        beat("task")
        module_name, _, function = message["task"].partition(":")
        result = getattr(import_module(module_name), function)(context, **message["kwargs"])
        return {"type": "done", "result": _as_json(result)}
    except BaseException as error:  # a task that calls sys.exit() has failed, too
        _limit_memory(None)  # the report needs memory
        own_frame = error.__traceback__
        text = "".join(traceback.format_exception(error.with_traceback(own_frame and own_frame.tb_next)))
        print(text, file=sys.stderr)
        return {
            "type": "raised",
            "error": " ".join(f"{type(error).__name__}: {error}".split()),
            "traceback": text,
            "out_of_memory": _is_out_of_memory(error),
        }


def _join(spec: RankSpec) -> None:
    """Initialises torch.distributed, and sets the environment variables that torchrun sets.

    ``LOCAL_RANK`` is the number of the rank's GPU, because libraries use it as such.
    """
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.gpu),
        WORLD_SIZE=str(spec.size),
        LOCAL_WORLD_SIZE=str(spec.local_size),
        MASTER_ADDR=spec.store[0] if spec.store else "127.0.0.1",
        MASTER_PORT=str(spec.port),
    )
    if spec.host:
        os.environ["NCCL_HOSTID"] = spec.host  # NCCL reads it once, with its first communicator
    own.switch("import")
    for module in spec.preload:  # no work for a forked rank: its forkserver has imported them
        import_module(module)
    if spec.device == "cuda":
        own.switch("context")
        torch.cuda.set_device(spec.gpu)
        torch.cuda.synchronize()  # creates the context
    own.switch("groups")
    _share_gloo_device()
    dist.init_process_group(
        "gloo" if spec.device == "cpu" else spec.gpu_backend,
        store=_store(spec),
        rank=spec.rank,
        world_size=spec.size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _share_gloo_device() -> None:
    """Lets all gloo groups of this rank use one device: a port, and a thread that serves it.

    By default each group makes its own. Such a thread wakes up a hundred times a second, also while the rank waits for
    its next task, and Megatron makes 17 groups. The first group makes its device as torch does, at the interfaces that
    GLOO_SOCKET_IFNAME names.
    """
    gloo: Any = ProcessGroupGloo
    make, devices = gloo.__init__, list[Any]()

    @wraps(make)
    def make_on_device(self: Any, *given: Any, **named: Any) -> None:
        if "timeout" not in named:  # only torch's own groups, without options, name it
            make(self, *given, **named)
        elif devices:
            options = gloo._Options()
            options._devices, options._timeout = devices, named.pop("timeout")
            options._threads = 2 * len(devices)  # as torch has
            make(self, *given, **named, options=options)
        else:
            make(self, *given, **named)
            devices.extend(self.options._devices)

    gloo.__init__ = make_on_device


def _store(spec: RankSpec) -> Store:
    if spec.store is None:  # a file in memory: no race for a port, and nothing left on disk
        return FileStore(f"/proc/self/fd/{spec.store_fd}", spec.size)
    host, port = spec.store
    if spec.rank == 0:
        return listening_store(host, port, ranks=spec.size, timeout=MEETING_TIMEOUT)
    return TCPStore(host, port, spec.size, timeout=MEETING_TIMEOUT, wait_for_workers=False)


@contextlib.contextmanager
def _logs(folder: Path, rank: int) -> Iterator[None]:
    """Sends stdout and stderr, also those of C++ code, to rank-N.log; SIGUSR1 writes all stacks into rank-N.stacks."""
    stacks = folder / f"rank-{rank}.stacks"
    log_fd = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    stacks_fd = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    before = os.dup(1), os.dup(2)
    _redirect(log_fd, log_fd)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        if stacks.stat().st_size == 0:
            stacks.unlink()
        _redirect(*before)
        for fd in (log_fd, stacks_fd, *before):
            os.close(fd)


def _redirect(stdout_fd: int, stderr_fd: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)


def _as_json(result: Any) -> Any:
    try:
        json.dumps(result)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a task has to return JSON values, so that the controller can read them: {error}") from None
    return result


# Texts of RuntimeErrors for a lack of memory that has no exception class: from CUDA while it creates a context, Triton,
# NCCL, cuDNN and cuBLAS. The last one then also fails to initialise.
_NO_MEMORY = re.compile(r"out of memory|_STATUS_ALLOC_FAILED|Failed to CUDA calloc|NOT_INITIALIZED.*cublasCreate")


def _is_out_of_memory(error: BaseException) -> bool:
    message = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "can't allocate memory" in message
        or (isinstance(error, RuntimeError) and _NO_MEMORY.search(message) is not None)
    )


def _limit_memory(limit: int | None) -> None:
    """Limits the address space to ``limit`` bytes more than is mapped now. None: to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    if limit is not None:
        soft = limit + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    packages.prefer()
    values = json.loads(sys.argv[1])
    freeze()
    serve(RankSpec(**values))
    os._exit(0)
