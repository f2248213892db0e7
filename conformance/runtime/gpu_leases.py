"""Leases GPUs between all runs and workers of a host, and measures for how much of a run each GPU was leased.

Only the process that holds the lease of a GPU may use this GPU. Nothing here queries CUDA: a lease is on a name.

Each GPU has a file, and the process that holds a lock on it (flock) has the GPU. The kernel releases the lock when the
last process with the descriptor has ended, however it ended. Ranks also hold the descriptor while they run a task. So
the GPUs of a killed controller become free when its ranks have ended, and not before.

Each waiting task has a ticket in a queue, a file with a number. The first ticket gets the first free block of GPUs, or
reserves the block that is nearest to being free; later tickets get GPUs that are not reserved. So a task of eight GPUs
waits for eight tasks of one GPU and not for ever, and small tasks use GPUs that no earlier ticket can use.

A GPU is a name here; slots of several hosts are leased in the same way
(conformance.runtime.multihost.controller).

The lease of a share of a GPU (conformance.runtime.gpu_inventory) locks the file of the share exclusively, and the file
of the GPU as a shared lock. So a GPU is leased as a whole, or by shares, whatever the number of shares in different
runs. A run with large models divides the memory of its GPUs, so no other run may have shares there: its leases hold the
lock of the GPU exclusively, all of them by one descriptor. Neither it nor another run leases a share of a GPU that an
earlier ticket of the other one waits for.

Blocks of N GPUs begin at multiples of N among the visible ones. So there are few different blocks, their live worker
groups are used again, and blocks of 1, 2, 4 and 8 never leave a GPU between them that no block contains. The same holds
for shares if each rank of a block has 1, 2 or 4 shares of its GPU, because the first one is at a multiple, too.
"""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

from conformance.core.errors import UsageError
from conformance.core.io import lock
from conformance.runtime.gpu_inventory import VISIBLE, gpu_of, gpus_of, memory_of_gpus
from conformance.runtime.worker_groups import Block, Lease


class Busy:
    """Counts seconds of leases by GPU since its creation. Threads share it. ``gpus``: reported even if idle."""

    def __init__(self, gpus: Iterable[str] = ()) -> None:
        self._seconds = defaultdict[str, float](float, dict.fromkeys(gpus, 0.0))
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def add(self, gpus: Iterable[str], seconds: float) -> None:
        with self._lock:
            for gpu in gpus:
                self._seconds[gpu] += seconds

    def shares(self) -> dict[str, float]:
        """Returns the fraction of the time since the creation for which each GPU was leased; for a shared GPU, the
        mean over its slots. Empty as long as nothing was leased."""
        passed, of_gpus = max(time.monotonic() - self._began, 1e-9), defaultdict[str, list[float]](list)
        with self._lock:
            for slot, seconds in self._seconds.items():
                of_gpus[gpu_of(slot)].append(seconds / passed)
        means = {gpu: round(fmean(shares), 3) for gpu, shares in of_gpus.items()}
        return means if any(means.values()) else {}


NONE: Mapping[str, int] = MappingProxyType({})
_NAMED = 2  # slots of one process that are named; more are counted
_LONGEST_TICKET = 1 << 16
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # follows no link, waits for no pipe


def lease_folder() -> Path:
    """Returns the folder of this host's locks; ``PARITY_LEASES`` names another one, for containers that share GPUs."""
    # Not tempfile.gettempdir(): jobs with a TMPDIR of their own would not see each other's leases.
    return Path(os.environ.get("PARITY_LEASES") or "/tmp/backend-parity-gpus")


def blocks(gpus: Sequence[str], size: int, each: int = 1) -> list[Block]:
    """Divides ``gpus`` into blocks of ``size`` GPUs, or of ``size`` ranks with ``each`` shares of one GPU; a remainder
    is left out. The first ``size`` shares of a block are one of each rank, round by round as in ``shares_of``."""
    width = len(gpus_of(tuple(gpus))) if each > 1 else max(1, len(gpus))  # of a round
    rounds = range(0, len(gpus) - (each - 1) * width, each * width)
    firsts = [at + number for at in rounds for number in range(width)]
    starts = [firsts[at : at + size] for at in range(0, len(firsts) - size + 1, size)]
    return [tuple(gpus[first + more * width] for more in range(each) for first in start) for start in starts]


def is_leased(gpu: str, folder: Path) -> bool:
    """Returns whether a GPU or a share of it is leased, even by another container. Raises UsageError as Ticket does."""
    _make_folder(folder)
    with _queue_lock(folder):
        return not _is_free(gpu, folder)


def holders(gpus: Sequence[str], folder: Path) -> str:
    """Describes which processes have leased which of the GPUs, or how many; empty if none is leased."""
    leases = leases_by_process(gpus, folder).items()
    return ", ".join(sorted(f"{_named(sorted(names))} by process {process}" for process, names in leases))


def leases_by_process(gpus: Sequence[str], folder: Path) -> dict[int, set[str]]:
    """Returns the leased GPUs of ``gpus`` by process id. The kernel does not show locks of other containers."""
    files = {name: _lock_of(name, folder) for gpu in gpus for name in (gpu, gpu_of(gpu))}
    inodes = {path.stat().st_ino: name for name, path in files.items() if path.is_file()}
    leases: dict[int, set[str]] = {}
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        fields = line.split()  # proc_locks(5): number, FLOCK, ADVISORY, WRITE, pid, device:inode, 0, EOF
        if fields[1] != "FLOCK" or (name := inodes.get(int(fields[5].rpartition(":")[2]))) is None:
            continue
        if name in gpus or fields[3] == "WRITE":  # the lease of one share does not block another share
            leases.setdefault(int(fields[4]), set()).add(name)
    return leases


def _named(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) <= _NAMED else f"{len(names)} of them"


class Ticket:
    """Waits in the queue for ``size`` of ``gpus``. Each thread needs its own ticket."""

    def __init__(self, gpus: Sequence[str], size: int, *, folder: Path, run: str = "", holds: bool = False) -> None:
        """``run``: identifies the run. ``holds``: no other run may have shares of the same GPUs."""
        if not blocks(gpus, size):
            raise ValueError(f"a lease of {size} GPUs, and there are {len(gpus)}")
        self._gpus, self._size, self._folder, self._run, self._holds = tuple(gpus), size, folder, run, holds
        _make_folder(folder)
        with _queue_lock(folder):
            # Above all existing numbers, including files that this process cannot remove.
            self._number = max((_number(path) for path in folder.glob("*.ticket")), default=0) + 1
            self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
            os.fchmod(self._fd, 0o644)
            os.write(self._fd, json.dumps({"gpus": self._gpus, "size": size, "run": run, "holds": holds}).encode())
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._number:012d}.{os.getuid()}.ticket"

    def serve(self, *, prefer: Collection[Block] = (), own: Mapping[str, int] = NONE) -> Lease | None:
        """Returns the lease and uses up the ticket, if it is this ticket's turn. ``prefer``: the blocks that are tried
        before others. ``own``: descriptors of the GPUs that the run holds. Does not wait."""
        with _queue_lock(self._folder):
            reserved: set[str] = set()
            for number, request in _tickets(self._folder):
                if number >= self._number:
                    break
                block = _reserved_for(request, reserved, self._folder, own)
                reserved.update(block)
                if (self._holds or request.holds) and request.run != self._run:
                    reserved.update(map(gpu_of, block))
            found = [block for block in blocks(self._gpus, self._size) if not _clash(block, reserved)]
            for block in sorted(found, key=lambda block: block not in prefer):
                if (fds := _locked(block, self._folder, own, holds=self._holds)) is not None:
                    self._close()
                    return Lease(block=block, fds=fds)
        return None

    def withdraw(self) -> None:
        """Leaves the queue without a lease."""
        with _queue_lock(self._folder):
            self._close()

    def _close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


@dataclass(frozen=True, kw_only=True)
class _Request:
    gpus: Block
    size: int
    run: str
    holds: bool


def _reserved_for(request: _Request, reserved: set[str], folder: Path, own: Mapping[str, int]) -> Block:
    """Returns the block that an earlier ticket will get: a free one, or the one with the most free GPUs."""
    possible = [block for block in blocks(request.gpus, request.size) if not _clash(block, reserved)]
    return max(possible, key=lambda block: sum(_is_free(gpu, folder, own) for gpu in block), default=())


def _clash(block: Block, reserved: Collection[str]) -> bool:
    """Returns whether any member of a block is reserved: itself, its GPU, or a share of it."""
    return any(gpu in reserved or gpu_of(gpu) in reserved or gpu in map(gpu_of, reserved) for gpu in block)


def _is_free(gpu: str, folder: Path, own: Mapping[str, int] = NONE) -> bool:
    fds = _locked((gpu,), folder, own)
    for fd in fds or ():
        os.close(fd)
    return fds is not None


def _lock_of(gpu: str, folder: Path) -> Path:
    return folder / f"{gpu.replace('/', '_')}.gpu"


def _shared(block: Block) -> Block:
    """Returns the GPUs of a block's shares."""
    return tuple(dict.fromkeys(gpu_of(gpu) for gpu in block if gpu_of(gpu) != gpu))


def held_gpus(leases: Iterable[Lease]) -> dict[str, int]:
    """Returns a descriptor with the lock of each GPU of which one of these leases has shares."""
    return {gpu: fd for lease in leases for gpu, fd in zip(_shared(lease.block), lease.fds, strict=False)}


def _locked(
    block: Block, folder: Path, own: Mapping[str, int] = NONE, *, holds: bool = False
) -> tuple[int, ...] | None:
    """Returns descriptors that hold the locks of all members of a block, after those of the GPUs of its shares; None if
    another lease has one of them. ``own``: descriptors with locks of GPUs. ``holds``: locks GPUs exclusively."""
    kind_of_gpu = fcntl.LOCK_EX if holds else fcntl.LOCK_SH
    locks = [*((gpu, kind_of_gpu) for gpu in _shared(block)), *((gpu, fcntl.LOCK_EX) for gpu in block)]
    with contextlib.ExitStack() as stack:
        fds = []
        for name, kind in locks:
            fd = os.dup(own[name]) if name in own else _open(_lock_of(name, folder))
            stack.callback(os.close, fd)
            if name in own:
                fds.append(fd)
                continue
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            fds.append(fd)
        stack.pop_all()
    return tuple(fds)


def _number(ticket: Path) -> int:
    text = ticket.name.partition(".")[0]
    return int(text) if text.isdecimal() else 0


def _tickets(folder: Path) -> Iterator[tuple[int, _Request]]:
    """Yields the queue in order, and removes tickets whose owner has ended. Call it in ``_queue_lock``."""
    for path in sorted(folder.glob("*.ticket")):
        with contextlib.ExitStack() as stack:
            try:
                fd = os.open(path, _FLAGS)
            except OSError:  # used up; or a link, which is not a ticket
                continue
            stack.callback(os.close, fd)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(OSError):  # another user's, in a folder where only owners remove files
                    path.unlink()
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):
                ticket = json.loads(os.read(fd, _LONGEST_TICKET))
                gpus, size = tuple(map(str, ticket["gpus"])), max(1, int(ticket["size"]))
                run, holds = str(ticket.get("run", "")), bool(ticket.get("holds"))
                yield _number(path), _Request(gpus=gpus, size=size, run=run, holds=holds)


_LOCK_S = 60.0  # others hold the lock for milliseconds


@contextlib.contextmanager
def _queue_lock(folder: Path) -> Iterator[None]:
    """Excludes all other processes from the queue and the locks."""
    fd = _open(path := folder / "queue.lock")
    try:
        lock(fd, path, limit_s=_LOCK_S)
        yield
    finally:
        os.close(fd)


def _make_folder(folder: Path) -> None:
    """Creates the folder for all users of the host. Raises UsageError if this process cannot write to it."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
    if folder.is_symlink() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{folder}, where leases of GPUs are kept, cannot be written to; PARITY_LEASES names another")


def _open(path: Path) -> int:
    """Opens a file for a lock, and creates it if it is missing. Processes of other users lock it, too."""
    try:
        return os.open(path, _FLAGS)  # without O_CREAT, which the kernel may deny for other users' files in /tmp
    except FileNotFoundError:
        fd = os.open(path, _FLAGS | os.O_CREAT, 0o644)
        with contextlib.suppress(OSError):  # another user was faster
            os.fchmod(fd, 0o644)
        return fd


MOST = 0.1  # of a GPU's memory; a few CUDA contexts explain less
GIB = 2**30


def unleased_use(slots: Block) -> list[str]:
    """Writes a sentence about each GPU of these slots of which more than MOST is used although no run has leased it.

    GPUs whose memory NVML does not report, and parts of GPUs (MIG), are left out.
    """
    found = []
    for gpu, (used, whole) in memory_of_gpus().items():
        if gpu in gpus_of(slots) and used > MOST * whole and not is_leased(gpu, lease_folder()):
            found.append(
                f"{used / GIB:.1f} of the {whole / GIB:.1f} GiB of {gpu} are taken without a lease, by other programs "
                f"or by idle worker groups of another run; cells that lack memory there are reported as out of memory: "
                f"end these programs (nvidia-smi), or leave the GPU out of {VISIBLE}"
            )
    return found
