"""Tasks that the tests of conformance.world run in ranks: good ones, and one for each way to go wrong."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from conformance.world import RankContext, beat


def add(context: RankContext, *, value: float) -> list[float]:
    """Sum over ranks of value + rank."""
    total = torch.tensor(value + context.rank)
    dist.all_reduce(total)
    return [context.rank, total.item()]


def pids(context: RankContext) -> int:
    return os.getpid()


def environment(context: RankContext) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names}


def say(context: RankContext, *, text: str) -> None:
    print(f"{text} from Python")
    subprocess.run(["echo", f"{text} from a child"], check=True)
    print(f"{text} on stderr", file=sys.stderr)


def exact(context: RankContext) -> str:
    """Change the default dtype, as the exact tier does; returns what it was."""
    before = str(torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    return before


def two_meshes(context: RankContext) -> float:
    """Build two device meshes and never release them; sum a DTensor over one, as a tensor-parallel cell does."""
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2, context.world_size // 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (context.world_size,))
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh["dp"].get_group())
    ones = distribute_tensor(torch.ones(4, 4), other, [Replicate()])
    summed = type(ones).from_local(ones.to_local(), other, [Partial()]).redistribute(other, [Replicate()])
    return float(total.item() + (summed @ ones).to_local().sum().item())


def leak(context: RankContext) -> None:
    for _ in range(40):
        os.open("/dev/null", os.O_RDONLY)


def _in_step(context: RankContext, step: int) -> None:
    context.beat(f"step {step}")
    dist.all_reduce(torch.ones(1))


def kill_one(context: RankContext, *, rank: int, number: int = signal.SIGKILL) -> None:
    """The others go on into a collective, which breaks when their peer dies."""
    _in_step(context, 1)
    context.beat("step 2")
    if context.rank == rank:
        os.kill(os.getpid(), number)
    dist.all_reduce(torch.ones(1))


def exit_one(context: RankContext, *, rank: int) -> None:
    _in_step(context, 1)
    if context.rank == rank:
        print("about to leave")
        os._exit(3)
    _in_step(context, 2)


def raise_one(context: RankContext, *, rank: int) -> None:
    _in_step(context, 1)
    if context.rank == rank:
        raise ArithmeticError("the loss is not a number")
    _in_step(context, 2)


def raise_when_peer_dies(context: RankContext) -> None:
    """Rank 0 hears of rank 1's death from gloo, at once, and says so; it is not the cause."""
    _in_step(context, 1)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("Connection reset by peer")


def hang_one(context: RankContext, *, rank: int) -> None:
    """One rank never enters the collective that the others wait in; all are in the same phase."""
    context.beat("step 1")
    if context.rank == rank:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))


def lag_one(context: RankContext, *, rank: int) -> None:
    """One rank stays a phase behind, in a collective too."""
    context.beat("step 1")
    if context.rank != rank:
        context.beat("step 2")
        dist.barrier()
    else:
        dist.recv(torch.ones(1), src=(rank + 1) % context.world_size)


def hang_with_children(context: RankContext, *, pid_dir: str) -> None:
    """Each rank has a child that ignores SIGTERM, and one that ran away into a session of its own."""
    code = "import os, signal, time, pathlib, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    code += "pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(1000)"
    children = [subprocess.Popen([sys.executable, "-c", code, pid_dir])]
    beat(f"waits for {len(children)} children")
    time.sleep(1000)


def eat_memory(context: RankContext, *, rank: int) -> None:
    beat("eats")
    eaten: list[Any] = []
    while context.rank == rank:
        eaten.append(torch.ones(8 << 20))
    dist.all_reduce(torch.ones(1))


def _controller_socket() -> int:
    """The rank's Unix socket; gloo's are of another family."""
    for entry in Path("/proc/self/fd").iterdir():
        fd = int(entry.name)
        if entry.exists() or "socket:" in os.readlink(entry):
            try:
                probe = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue
            if probe.family == socket.AF_UNIX:
                probe.close()
                return fd
            probe.close()
    raise AssertionError("no socket to the controller")


def cut_off(context: RankContext, *, rank: int) -> None:
    beat("cuts")
    if context.rank == rank:
        os.close(_controller_socket())
    time.sleep(1000)


def babble(context: RankContext, *, rank: int) -> None:
    beat("babbles")
    if context.rank == rank:
        os.write(_controller_socket(), b"this is no message\n")
    time.sleep(1000)


def not_json(context: RankContext) -> object:
    return object()
