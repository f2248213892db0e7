"""Rank: joins its process group once, then runs the tasks that the controller sends, until the controller closes.

On the CPU a zygote forks it; on GPUs it is started afresh, because CUDA does not survive a fork:
``python -m conformance.world.rank SPEC``. Serves claim 8: everything that a task says goes to its own log, its stacks
can be asked for while it hangs, and its end, whatever it is, is reported.
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from conformance.world import heartbeat
from conformance.world.cleanup import Cleaner, freeze
from conformance.world.heartbeat import Heartbeats, RankContext, beat
from conformance.world.wire import Message, Wire

# The watchdog ends a hang, with stacks; a collective that timed out first would hide which rank it waited for.
COLLECTIVE_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """All that a rank needs to begin; plain JSON values. The three descriptors are inherited."""

    rank: int
    size: int
    device: str
    port: int
    preload: tuple[str, ...]
    memory_limit_bytes: int | None
    socket_fd: int
    beats_fd: int
    store_fd: int


def serve(spec: RankSpec) -> None:
    """Run tasks until the controller closes the socket. It sends a task, then, when all ranks did it, asks to clean up:
    a rank that destroyed a group too early would cut off peers that still use it."""
    _limit_memory(spec.memory_limit_bytes)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # between tasks there is no file for stacks
    heartbeat.attach(Heartbeats(spec.beats_fd, size=spec.size), spec.rank)
    device = "cpu" if spec.device == "cpu" else f"cuda:{spec.rank}"
    context = RankContext(rank=spec.rank, world_size=spec.size, device=device, beat=beat)
    wire = Wire(socket.socket(fileno=spec.socket_fd))
    cleaner = Cleaner(device)
    while (message := wire.receive()[0]) is not None:
        with _logs(Path(message["log_dir"]), spec.rank):
            wire.send(_run_task(spec, context, message, wire))
            if wire.receive()[0] is None:
                return
            beat("clean-up")
            leaks = cleaner.clean_up()
        wire.send({"type": "clean", "leaks": leaks})


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
        _limit_memory(None)  # room to report
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
    """Initialise torch.distributed, and tell trainers that read the environment what torchrun would tell them."""
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.rank),
        WORLD_SIZE=str(spec.size),
        LOCAL_WORLD_SIZE=str(spec.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec.port),
    )
    for module in spec.preload:  # the zygote of a forked rank has done it
        import_module(module)
    if spec.device == "cuda":
        torch.cuda.set_device(spec.rank)
    dist.init_process_group(
        "gloo" if spec.device == "cpu" else "nccl",
        # A file in memory: no port to race for, and nothing on disk when the world is killed.
        store=FileStore(f"/proc/self/fd/{spec.store_fd}", spec.size),
        rank=spec.rank,
        world_size=spec.size,
        timeout=COLLECTIVE_TIMEOUT,
    )


@contextlib.contextmanager
def _logs(folder: Path, rank: int) -> Iterator[None]:
    """Send stdout and stderr, also those of C++ code, to rank-N.log; SIGUSR1 writes all stacks into rank-N.stacks."""
    stacks = folder / f"rank-{rank}.stacks"
    log_fd = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    stacks_fd = os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
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


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _limit_memory(limit: int | None) -> None:
    """Allow ``limit`` bytes of address space beyond what is mapped now; None: as much as the suite itself has."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    soft = most
    if limit is not None:
        soft = limit + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (soft, most))


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    freeze()
    serve(RankSpec(**values))
    os._exit(0)
