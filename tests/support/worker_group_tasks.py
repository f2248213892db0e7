"""Defines tasks that run in ranks: successful ones, and one for each kind of failure."""

import ctypes
import gc
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.core.process import open_files
from conformance.runtime import RankContext, beat, cleanup, mark
from conformance.runtime.failure import ENTRIES
from conformance.runtime.forkserver import PRIVATE

_remembered: list[str] = []
_pools: set[str] = set()
_kept: list[dist.ProcessGroup | bytearray] = []


def nothing(context: RankContext) -> None:
    pass


def pids(context: RankContext) -> dict[str, int]:
    return {"rank": os.getpid(), "forkserver": os.getppid()}


def processor_seconds(context: RankContext) -> float:
    """What this rank has used since it was forked."""
    return time.process_time()


def add(context: RankContext, *, value: float) -> dict[str, float]:
    """Sum over ranks of value + rank."""
    total = torch.tensor(value + context.rank)
    dist.all_reduce(total)
    return {"rank": context.rank, "sum": total.item()}


def echo(context: RankContext, *, text: str) -> str:
    return text


def remember(context: RankContext, *, text: str) -> list[str]:
    """What this process has been told in all tasks so far."""
    _remembered.append(text)
    return _remembered


def imported(context: RankContext, *, modules: list[str]) -> list[str]:
    """Those of ``modules`` that this rank found imported."""
    return [name for name in modules if name in sys.modules]


def environment(context: RankContext) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names}


def surroundings(context: RankContext) -> dict[str, Any]:
    """What this rank has from the process that it is forked from."""
    print("written at once", end="")
    libc, server = ctypes.CDLL(None), _parent(os.getppid())
    libc.mallinfo.restype = type("mallinfo", (ctypes.Structure,), {"_fields_": [("of", ctypes.c_int * 10)]})
    blocks = libc.mallinfo().of[3]
    kept = torch.ones(8 * 2**20, dtype=torch.uint8)
    return {
        "main": getattr(sys.modules["__main__"].__spec__, "name", None),
        "files": open_files().total(),
        "threads": torch.get_num_threads(),
        "blocks that malloc maps": libc.mallinfo().of[3] - blocks if len(kept) else None,
        "collector": [*gc.get_threshold(), gc.isenabled()],
        "session": os.getsid(server),
        "server": server,
    }


def say(context: RankContext, *, text: str) -> None:
    """Speak from Python, from a child process and on stderr."""
    print(f"{text} 1 {context.rank}")
    subprocess.run(["echo", f"{text} 2 {context.rank}"], check=True)
    print(f"{text} 3 {context.rank}", file=sys.stderr)


def change_default_dtype(context: RankContext) -> str:
    """Do as the exact tier does; returns what the dtype was before."""
    before = str(torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    return before


def leak_files(context: RankContext) -> None:
    cleanup.SETTLE_S = 0.1  # nobody closes them, so there is nothing to wait for
    for _ in range(40):
        os.open("/dev/null", os.O_RDONLY)


def start_threads(context: RankContext, *, count: int, name: str) -> None:
    """Threads that never end: a pool if ``name`` is that of an earlier task, which has started it, else a leak."""
    if name not in _pools:
        _pools.add(name)
        for _ in range(count):
            threading.Thread(target=threading.Event().wait, daemon=True).start()


def keep_a_group(context: RankContext) -> None:
    """What a model in a cycle through its graph does: its group outlives the clean-up, in which it is destroyed."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    _kept.append(group)


def keep_memory(context: RankContext, *, rank: int, mib: int) -> None:
    """What a library's cache does: memory of one rank that no clean-up gives back."""
    if context.rank == rank:
        _kept.append(bytearray(b"1" * mib * 2**20))


def signal_self(context: RankContext, *, rank: int, number: int) -> None:
    """One rank gets a signal in step 2; the others go on into a collective that needs it."""
    _step(context, 1)
    context.beat("step 2")
    if context.rank == rank:
        print("before the signal")
        os.kill(os.getpid(), number)
        time.sleep(1000)  # a stopped rank tells its place when it runs again: it is still here
    dist.all_reduce(torch.ones(1, device=context.device))


def hear_of_a_death_first(context: RankContext) -> None:
    """Rank 0 says that its peer is gone well before rank 1 dies: the controller hears the echo first."""
    _step(context, 1)
    if context.rank == 0:
        raise RuntimeError("Connection reset by peer")
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_forkserver(context: RankContext) -> None:
    if context.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def leave(context: RankContext, *, rank: int, status: int) -> None:
    _step(context, 1)
    if context.rank == rank:
        print("about to leave", flush=True)
        os._exit(status)
    _step(context, 2)


def fail(context: RankContext, *, rank: int, said: str = "") -> None:
    _step(context, 1)
    if context.rank == rank:
        raise RuntimeError(said) if said else ArithmeticError("the loss is not a number")
    _step(context, 2)


def never_enter(context: RankContext, *, rank: int) -> None:
    """One rank never enters the collective that the others wait in; all are in the same phase."""
    context.beat("step 1")
    if context.rank == rank:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1, device=context.device))


def never_arrive(context: RankContext, *, rank: int, alone: bool = False) -> None:
    """As ``never_enter``, after a collective of all ranks; the others wait for the result outside of the collective,
    as a host does that reads a number of its GPU. ``alone``: this collective is the first one of a group."""
    dist.all_reduce(torch.ones(1, device=context.device))
    group = _named_by_its_ranks(context) if alone else dist.group.WORLD
    context.beat("step 1")
    if context.rank == rank:
        time.sleep(1000)
    _ask_until_done(dist.all_reduce(torch.ones(1, device=context.device), group=group, async_op=True))


def speak_in_a_group(context: RankContext) -> None:
    group = _named_by_its_ranks(context)
    for _ in range(5):
        dist.all_reduce(torch.ones(1), group=group)


def forget_a_group(context: RankContext, *, rank: int) -> None:
    """As ``never_arrive``, when all but this rank have just forgotten that they had spoken in another group."""
    ones = torch.ones(1)
    dist.all_reduce(ones, group=dist.new_group(list(range(context.world_size))))
    for _ in range(ENTRIES - 1):
        dist.all_reduce(ones)
    context.beat("step 1")
    if context.rank == rank:
        time.sleep(1000)
    _ask_until_done(dist.all_reduce(ones, async_op=True))


def _named_by_its_ranks(context: RankContext) -> Any:
    """A group of all ranks whose name is the same in every task."""
    return dist.new_group(list(range(context.world_size)), use_local_synchronization=True)


def _ask_until_done(work: Any) -> None:
    while not work.is_completed():
        time.sleep(0.01)


def wait_in_a_chain(context: RankContext) -> None:
    """Rank 0 waits for rank 1 in a group of theirs, and rank 1 for rank 2 in another; rank 2 waits for nobody."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    ones = torch.ones(1, device=context.device)
    for group in groups[max(context.rank - 1, 0) : context.rank + 1]:
        dist.all_reduce(ones, group=group)
    context.beat("step 1")
    if context.rank < 2:
        _ask_until_done(dist.all_reduce(ones, group=groups[context.rank], async_op=True))
    time.sleep(1000)


def fall_apart(context: RankContext) -> None:
    """Each rank enters one collective less than the rank before it, and waits for none of them inside of it."""
    begun = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(context.world_size - context.rank)]
    context.beat("step 1")
    _ask_until_done(begun[-1])
    time.sleep(1000)


def hang_before_sending(context: RankContext) -> None:
    """A pipeline of two stages of two ranks each. Rank 1 hangs, so rank 3 waits for its message; their peers wait for
    them in collectives of their stages."""
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ones, stage = torch.ones(1), stages[context.rank // 2]
    dist.all_reduce(ones, group=stage)
    context.beat("step 1")
    if context.rank == 1:
        time.sleep(1000)
    if context.rank == 0:
        dist.send(ones, 2)
    else:
        dist.recv(ones, context.rank - 2)
    dist.all_reduce(ones, group=stage)


def send_nothing(context: RankContext) -> None:
    """Rank 0 waits for rank 1, outside of their collective, and rank 1 for a message of rank 2, which hangs."""
    ones, pair = torch.ones(1), dist.new_group([0, 1])
    if context.rank < 2:
        dist.all_reduce(ones, group=pair)
    context.beat("step 1")
    if context.rank == 0:
        _ask_until_done(dist.all_reduce(ones, group=pair, async_op=True))
    if context.rank == 1:
        dist.recv(ones, 2)
    time.sleep(1000)


def lag_behind(context: RankContext, *, rank: int) -> None:
    """All ranks wait in a collective, one of them a phase behind."""
    context.beat("step 1")
    if context.rank == rank:
        dist.recv(torch.ones(1), src=(rank + 1) % context.world_size)
    context.beat("step 2")
    dist.barrier()


def hang_with_child(context: RankContext, *, pid_dir: str, new_session: bool) -> None:
    """Hang, and leave a child that ignores SIGTERM behind."""
    command = ["sh", "-c", "trap '' TERM; exec sleep 1000"]
    child = subprocess.Popen(command, start_new_session=new_session)
    for pid in (os.getpid(), os.getppid(), child.pid):
        Path(pid_dir, str(pid)).touch()
    beat("hangs")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def get_on(context: RankContext, *, seconds: float) -> str:
    """Rank 1 works slowly, without using the processor, and says so; the others wait for it."""
    context.beat("step 1")
    context.beat("step 2")
    deadline = time.monotonic() + seconds
    while context.rank == 1 and time.monotonic() < deadline:
        time.sleep(0.05)
        mark()
    dist.barrier()
    return "done"


def compute(context: RankContext, *, seconds: float) -> str:
    """Rank 1 computes without a word; the others wait for it."""
    context.beat("step 1")
    deadline = time.monotonic() + seconds
    while context.rank == 1 and time.monotonic() < deadline:
        pass
    dist.barrier()
    return "done"


def slow_then_hang(context: RankContext, *, seconds: float) -> None:
    time.sleep(seconds / 2)
    context.beat("step 1")
    time.sleep(seconds)
    context.beat("step 2")
    time.sleep(1000)


def eat_memory(context: RankContext, *, rank: int) -> None:
    beat("eats")
    eaten = [torch.empty(8 << 20) for _ in range(1000 if context.rank == rank else 1)]
    dist.all_reduce(eaten[0][:1])


def eat_gpu_memory(context: RankContext, *, rank: int) -> None:
    beat("eats")
    eaten = torch.empty(1 << (50 if context.rank == rank else 10), dtype=torch.uint8, device=context.device)
    dist.all_reduce(eaten[:1])


def cut_connection(context: RankContext, *, rank: int) -> None:
    beat("cuts")
    if context.rank == rank:
        os.close(_controller_socket())
    time.sleep(1000)


def send_garbage(context: RankContext, *, rank: int) -> None:
    beat("babbles")
    if context.rank == rank:
        os.write(_controller_socket(), b"this is no message")
    time.sleep(1000)


def return_an_object(context: RankContext) -> object:
    return object()


def _step(context: RankContext, number: int) -> None:
    context.beat(f"step {number}")
    dist.all_reduce(torch.ones(1, device=context.device))


def _controller_socket() -> int:
    """The rank's one Unix socket; gloo's sockets are of another family."""
    for fd in sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir()):
        if Path(f"/proc/self/fd/{fd}").exists() and stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as probe:
                if probe.family == socket.AF_UNIX:
                    return fd
    raise AssertionError("no socket to the controller")


def visible(context: RankContext) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def network(context: RankContext) -> tuple[str | None, str | None]:
    return os.environ.get("NCCL_NET"), os.environ.get("NCCL_SOCKET_IFNAME")


def slot(context: RankContext) -> tuple[str, str, str]:
    """The GPUs that this rank sees, which of them is its own, and the host that it says it is on."""
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "NCCL_HOSTID")
    visible, own, host = (os.environ.get(name, "") for name in names)
    return visible, own, host


def meet(context: RankContext, *, of: int, folder: str) -> tuple[str, int]:
    """Wait until ``of`` processes are here, which write their numbers into ``folder``."""
    Path(folder).mkdir(exist_ok=True)
    Path(folder, str(os.getpid())).touch()
    while len(list(Path(folder).iterdir())) < of:
        time.sleep(0.01)
    return os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.getpid()


def kill_host_process(context: RankContext, *, rank: int) -> None:
    """Let a rank kill the process of its host, the grandparent of its forkserver, while all ranks wait."""
    if context.rank == rank:
        preload_server = _parent(os.getppid())
        os.kill(_parent(preload_server), signal.SIGKILL)
    dist.barrier()
    time.sleep(60)


def leave_a_daemon(context: RankContext) -> dict[str, Any]:
    """Leave a process in a session of its own, whose parent is dead, and files in the temporary folders."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        if (daemon := os.fork()) == 0:
            time.sleep(1000)
        os.write(write, str(daemon).encode())
        os._exit(0)
    os.waitpid(child, 0)
    files = [Path(folder, "left-by-a-task") for folder in (tempfile.gettempdir(), "/dev/shm")]
    for file in files:
        file.touch()
    return {
        "daemon": int(os.read(read, 20)),
        "temporary": str(files[0]),
        "seen": [file.exists() for file in files],
        "private": PRIVATE in os.environ,
    }


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
