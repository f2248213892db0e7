"""Leases GPUs between all runs and workers of a host, and measures for how much of a run each GPU was leased.

A process that holds the lease of a GPU may use this GPU, and no other process may. Nothing here asks CUDA: a GPU is a
name, and what is leased is the name.

Each GPU has a file, and whoever holds a lock on it (flock) has the GPU. The kernel gives the lock back when the last
process that holds the descriptor has ended, however it ended. So ranks hold it, too, while they run a task: a
controller that was killed gives up its GPUs when its ranks are gone, and not before.

Whoever waits has a ticket in a queue, a file with a number. The first in the queue gets the first block of GPUs that is
free, or has the block reserved that is nearest to being free; those behind it get what is not reserved. So a task of
eight GPUs waits for eight tasks of one GPU and not for ever, and small tasks use what no earlier ticket can use.

A GPU is a name here; slots of several hosts are leased in the same way
(conformance.runtime.multihost.controller).

Whoever leases a share of a GPU (conformance.runtime.gpu_inventory) has the file of the share for itself, and shares
the lock on the file of the GPU. So a GPU is leased as a whole, or by shares, whatever the number of shares in
different runs.

Blocks of N GPUs begin at multiples of N among the visible ones. So few different blocks exist, worlds that are alive on
them are used again, and blocks of 1, 2, 4 and 8 never leave a GPU between them that no block contains.

Filled: GPUs of which somebody without a lease has taken memory; who finds none there is told why (claim 8).
"""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from conformance.core.errors import UsageError
from conformance.runtime.gpu_inventory import VISIBLE, gpu_of, gpus_of, memory_of_gpus
from conformance.runtime.slots import Block, Lease


class Busy:
    """Counts seconds of leases by GPU, from when it is made. Threads share it. ``gpus``: to be told although idle."""

    def __init__(self, gpus: Iterable[str] = ()) -> None:
        self._seconds = defaultdict[str, float](float, dict.fromkeys(gpus, 0.0))
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def add(self, gpus: Iterable[str], seconds: float) -> None:
        with self._lock:
            for gpu in gpus:
                self._seconds[gpu] += seconds

    def shares(self) -> dict[str, float]:
        """By GPU, the part of the time since the beginning for which it was leased; of a GPU that ranks may share, the
        mean over its places. Empty as long as nothing was leased."""
        passed, of_gpus = max(time.monotonic() - self._began, 1e-9), defaultdict[str, list[float]](list)
        with self._lock:
            for place, seconds in self._seconds.items():
                of_gpus[gpu_of(place)].append(seconds / passed)
        means = {gpu: round(fmean(shares), 3) for gpu, shares in of_gpus.items()}
        return means if any(means.values()) else {}


_NAMED = 2  # places of one process that are named; more are counted
_LONGEST_TICKET = 1 << 16
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link, and no pipe that is waited for


def lease_folder() -> Path:
    """Where the locks of this host are; ``PARITY_LEASES`` names another folder, for containers that share GPUs."""
    # Not tempfile.gettempdir(): jobs with a TMPDIR of their own would not see each other's leases.
    return Path(os.environ.get("PARITY_LEASES") or "/tmp/backend-parity-gpus")


def blocks(gpus: Sequence[str], size: int) -> list[Block]:
    """The blocks of ``size`` GPUs that there are of ``gpus``."""
    return [tuple(gpus[at : at + size]) for at in range(0, len(gpus) - size + 1, size)]


def is_leased(gpu: str, folder: Path) -> bool:
    """Whether somebody has a GPU or a share of it, also in another container. Raises UsageError as Ticket does."""
    _make_folder(folder)
    with _alone(folder):
        return not _is_free(gpu, folder)


def holders(gpus: Sequence[str], folder: Path) -> str:
    """Who has which of the GPUs, or how many, in words; empty if nobody has any."""
    told = (f"{_named(sorted(names))} by process {process}" for process, names in held(gpus, folder).items())
    return ", ".join(sorted(told))


def held(gpus: Sequence[str], folder: Path) -> dict[int, set[str]]:
    """Those of the GPUs that are leased, by process. The kernel does not tell of other containers."""
    files = {name: _lock_of(name, folder) for gpu in gpus for name in (gpu, gpu_of(gpu))}
    inodes = {path.stat().st_ino: name for name, path in files.items() if path.is_file()}
    had: dict[int, set[str]] = {}
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        fields = line.split()  # proc_locks(5): number, FLOCK, ADVISORY, WRITE, pid, device:inode, 0, EOF
        if fields[1] != "FLOCK" or (name := inodes.get(int(fields[5].rpartition(":")[2]))) is None:
            continue
        if name in gpus or fields[3] == "WRITE":  # who shares a GPU is in nobody's way who wants a share of it
            had.setdefault(int(fields[4]), set()).add(name)
    return had


def _named(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) <= _NAMED else f"{len(names)} of them"


class Ticket:
    """A place in the queue for ``size`` of ``gpus``. Threads have tickets of their own."""

    def __init__(self, gpus: Sequence[str], size: int, *, folder: Path) -> None:
        if not blocks(gpus, size):
            raise ValueError(f"a lease of {size} GPUs, and there are {len(gpus)}")
        self._gpus, self._size, self._folder = tuple(gpus), size, folder
        _make_folder(folder)
        with _alone(folder):
            # Beyond all that are there, also what nobody can remove: another user's, or no ticket at all.
            self._number = max((_number(path) for path in folder.glob("*.ticket")), default=0) + 1
            self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
            os.fchmod(self._fd, 0o644)
            os.write(self._fd, json.dumps({"gpus": self._gpus, "size": size}).encode())
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._number:012d}.{os.getuid()}.ticket"

    def serve(self, *, prefer: Collection[Block] = ()) -> Lease | None:
        """The lease, if it is this ticket's turn; then the ticket is used up. ``prefer``: the blocks that are taken
        before others. Does not wait."""
        with _alone(self._folder):
            reserved: set[str] = set()
            for number, asked in _tickets(self._folder):
                if number >= self._number:
                    break
                reserved.update(_reserved_for(asked, reserved, self._folder))
            found = [block for block in blocks(self._gpus, self._size) if not _clash(block, reserved)]
            for block in sorted(found, key=lambda block: block not in prefer):
                if (fds := _locked(block, self._folder)) is not None:
                    self._close()
                    return Lease(block=block, fds=fds)
        return None

    def withdraw(self) -> None:
        """Leave the queue without a lease."""
        with _alone(self._folder):
            self._close()

    def _close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    gpus: Block
    size: int


def _reserved_for(asked: _Asked, reserved: set[str], folder: Path) -> Block:
    """The block that a ticket of somebody else will get: one that is free, or the one that has the most free GPUs."""
    possible = [block for block in blocks(asked.gpus, asked.size) if not _clash(block, reserved)]
    return max(possible, key=lambda block: sum(_is_free(gpu, folder) for gpu in block), default=())


def _clash(block: Block, reserved: Collection[str]) -> bool:
    """Whether something of a block is reserved: itself, the GPU that it is a share of, or a share of it."""
    return any(gpu in reserved or gpu_of(gpu) in reserved or gpu in map(gpu_of, reserved) for gpu in block)


def _is_free(gpu: str, folder: Path) -> bool:
    fds = _locked((gpu,), folder)
    for fd in fds or ():
        os.close(fd)
    return fds is not None


def _lock_of(gpu: str, folder: Path) -> Path:
    return folder / f"{gpu.replace('/', '_')}.gpu"


def _locked(block: Block, folder: Path) -> tuple[int, ...] | None:
    """Descriptors that hold the locks of all GPUs of a block, shared ones of those that it has a share of; None if one
    of them is somebody's."""
    shared = dict.fromkeys(gpu_of(gpu) for gpu in block if gpu_of(gpu) != gpu)
    locks = [*((gpu, fcntl.LOCK_SH) for gpu in shared), *((gpu, fcntl.LOCK_EX) for gpu in block)]
    with contextlib.ExitStack() as stack:
        fds = []
        for name, kind in locks:
            fd = _open(_lock_of(name, folder))
            stack.callback(os.close, fd)
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


def _tickets(folder: Path) -> Iterator[tuple[int, _Asked]]:
    """The queue, in order, without tickets whose owner has ended. Call it in ``_alone``."""
    for path in sorted(folder.glob("*.ticket")):
        with contextlib.ExitStack() as stack:
            try:
                fd = os.open(path, _FLAGS)
            except OSError:  # used up; or a link, which is none of ours
                continue
            stack.callback(os.close, fd)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(OSError):  # another user's, in a folder where only owners remove files
                    path.unlink()
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):
                asked = json.loads(os.read(fd, _LONGEST_TICKET))
                gpus, size = tuple(map(str, asked["gpus"])), max(1, int(asked["size"]))
                yield _number(path), _Asked(gpus=gpus, size=size)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else looks at queue and locks meanwhile."""
    fd = _open(folder / "queue.lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _make_folder(folder: Path) -> None:
    """Make it for all users of the host. Raises UsageError if it is no folder of ours to write to."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
    if folder.is_symlink() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{folder}, where leases of GPUs are kept, cannot be written to; PARITY_LEASES names another")


def _open(path: Path) -> int:
    """Open a file for a lock, and make it if it is not there; other users lock it, too."""
    try:
        return os.open(path, _FLAGS)  # without O_CREAT, which the kernel may deny for other users' files in /tmp
    except FileNotFoundError:
        fd = os.open(path, _FLAGS | os.O_CREAT, 0o644)
        with contextlib.suppress(OSError):  # another user was faster
            os.fchmod(fd, 0o644)
        return fd


MOST = 0.1  # of a GPU's memory: below, some contexts of CUDA are enough to explain it
GIB = 2**30


def filled(places: Block) -> list[str]:
    """Write a sentence about each GPU of these places that no run has leased although more than MOST of it is taken.

    GPUs whose memory NVML does not report, and parts of GPUs (MIG), are left out.
    """
    found = []
    for gpu, (used, whole) in memory_of_gpus().items():
        if gpu in gpus_of(places) and used > MOST * whole and not is_leased(gpu, lease_folder()):
            found.append(
                f"{used / GIB:.1f} of the {whole / GIB:.1f} GiB of {gpu} are taken without a lease, by other programs "
                f"or by worlds of another run that wait; cells that find too little there are told as out of memory: "
                f"end these programs (nvidia-smi), or leave the GPU out of {VISIBLE}"
            )
    return found
