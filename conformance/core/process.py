"""Calls Linux functions for processes that Python lacks, and turns SIGINT and SIGTERM into the end of a run.

No process is left behind, and a stopped run still reports what it judged. Supervisors signal before they kill, some
more than once: GitHub's runner sends SIGINT, then SIGTERM, then SIGKILL.
"""

import contextlib
import ctypes
import fcntl
import gc
import ipaddress
import os
import pickle
import re
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
STORE_TIMEOUT = timedelta(minutes=5)  # torch's default
_PR_SET_PDEATHSIG = 1
_PIDFD_SIGNAL_PROCESS_GROUP = 4
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_SLAVE = 0x20000, 0x1000, 0x4000, 0x80000
_BYTES_PER_S = 10 * 2**20
START_LIMIT_S = 120.0  # in which a process that starts has to compute or read something
_SLOW_START = 12  # times its limit: most time of a start, however much the process computes
_START_SHARE = 0.01  # of a processor that counts as computing; a loaded machine may give a process no more
_MARK = 2**40  # microseconds of real-time scheduling, which no process here uses; the limit is only carried


def signal_at_death_of(parent: int, number: int) -> None:
    """Makes the kernel send signal ``number`` to this process when ``parent`` dies. Exits if it is already dead."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def signal_at_hang_up(pipe: int) -> None:
    """Makes the kernel end this process when the other end of ``pipe`` closes, whatever this process is doing.

    Unlike ``signal_at_death_of``, it does not depend on the thread of the parent that started this process.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if not os.read(pipe, 1):  # it has closed already
            os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent dies, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def mark_descendants(number: int) -> None:
    """Marks this process and all its later descendants, also those that change their session and their parent.

    The mark is a resource limit that limits nothing: children inherit limits, and every process can read them.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set: the process stays without a mark
        resource.setrlimit(resource.RLIMIT_RTTIME, (_MARK + number, hard))


def mark_of(pid: int) -> int:
    """Returns the number of ``mark_descendants``; -1 for a process without a mark, or that has ended."""
    with contextlib.suppress(OSError):
        return max(-1, resource.prlimit(pid, resource.RLIMIT_RTTIME)[0] - _MARK)
    return -1


def mount_privately(folder: Path, at: Path) -> bool:
    """Shows ``folder`` at the path ``at`` to this process and its descendants alone. Needs a process of one thread.

    Returns False where this is not allowed, as in most containers, and nothing has then changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not at.is_dir() or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    # As a slave, so that the host's later mounts still appear here, and this mount does not appear there.
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None) != 0:
        return False
    return bool(libc.mount(str(folder).encode(), str(at).encode(), None, _MS_BIND, None) == 0)


def map_in_forks(function: Callable[[_Item], _Result], items: Sequence[_Item], *, most: int) -> list[_Result]:
    """Returns ``function`` of each item, computed in up to ``most`` forks of this process, one per processor.

    The items are dealt out in turn, so give long ones first. Results and exceptions have to be picklable, but not
    ``function``. With fewer than two forks, this process computes all. No other thread may hold a lock.
    """
    forks = min(most, len(items), len(os.sched_getaffinity(0)))
    if forks < 2:
        return list(map(function, items))
    found: list[Any] = [None] * len(items)
    begun: list[tuple[int, int]] = []  # a fork and the end of a pipe
    try:
        for first in range(forks):
            begun.append(_begin_fork(function, items[first::forks]))
        for first, (_, answers) in enumerate(begun):
            with os.fdopen(answers, "rb", closefd=False) as file:
                answer = file.read()
            own = pickle.loads(answer) if answer else RuntimeError("a fork was killed, perhaps for want of memory")
            if isinstance(own, BaseException):
                raise own
            found[first::forks] = own
    finally:
        for pid, answers in begun:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(answers)
    return found


def _begin_fork(function: Callable[[Any], Any], items: Sequence[Any]) -> tuple[int, int]:
    """Computes the items in a fork. Returns its id, and the pipe that gets its pickled results, or its exception."""
    parent, (answers, given) = os.getpid(), os.pipe()
    if pid := os.fork():
        os.close(given)
        return pid, answers
    try:
        signal_at_death_of(parent, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which kills its forks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            answer = pickle.dumps([function(item) for item in items])
        except Exception as error:
            answer = _pickled(error)
        with os.fdopen(given, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)


def _pickled(error: Exception) -> bytes:
    """Pickles an exception, or its text if it cannot be pickled or read again."""
    try:
        pickle.loads(answer := pickle.dumps(error))
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return answer


def process_state(pid: int) -> str:
    """Returns the kernel's one-letter state (R, S, D, T: stopped, Z: zombie), or "" if there is no such process."""
    return next(iter(_stat(pid)), "")


def processor_seconds(pid: int) -> float:
    """Returns the processor time of all threads of a process, user and kernel mode, in seconds; 0 without process."""
    return sum(map(int, _stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Returns the fields of proc(5) from the third on; none without process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def effort(pid: int) -> float:
    """Returns a number that grows while a process or a descendant computes or reads files: the seconds of processor
    time, and one more for each 10 MiB that were read. 0 without process."""
    read = 0
    with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
        read = int(Path(f"/proc/{pid}/io").read_text().split()[1])
    return seconds_of_tree(pid, below=False) + read / _BYTES_PER_S + sum(map(effort, _below(pid)))


def seconds_of_tree(pid: int, *, below: bool = True) -> float:
    """Returns the processor time of a process, of the children that it has reaped, and of its descendants."""
    own = sum(map(int, _stat(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(seconds_of_tree, _below(pid))) if below else own


def _below(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for f in Path(f"/proc/{pid}/task").glob("*/children") for p in f.read_text().split()]
    return []


class StartPatience:
    """Decides when a process hangs that starts, for example one that imports torch. Wall time alone proves nothing: a
    loaded machine or a slow disk may take minutes for the imports.

    work: ``effort`` of the process. limit_s: seconds without effort.
    """

    def __init__(self, work: Callable[[], float], *, limit_s: float | None = None) -> None:
        self._work, self._limit_s = work, START_LIMIT_S if limit_s is None else limit_s
        self._begun = self._marked = time.monotonic()
        self._done = work()

    def why_over(self) -> str:
        """Returns the reason why the process counts as hung, for the end of a message; empty while it does not."""
        now = time.monotonic()
        if now - self._begun > (most := most_start_s(self._limit_s)):
            return f"it is not done after {most:.3g} s, although it computes or reads files"
        if (without := now - self._marked) <= self._limit_s:
            return ""
        if (done := self._work()) - self._done < _START_SHARE * without:
            return f"for {without:.3g} s it has neither computed nor read files"
        self._marked, self._done = now, done
        return ""


def most_start_s(limit_s: float = START_LIMIT_S) -> float:
    """Returns the most seconds that a start may take, even of a process that computes."""
    return _SLOW_START * limit_s


def children() -> list[int]:
    """Returns the pids of the children of this (single-threaded) process, zombies included."""
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def thread_count() -> int:
    """Returns the number of threads of this process, including threads that Python did not start."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def open_files() -> Counter[str]:
    """Counts what the descriptors of this process are open on: file paths, and kinds such as ``socket``."""
    links = map(_link, Path("/proc/self/fd").iterdir())
    return Counter(re.sub(r"^anon_inode:\[?(\w+)\]?$|^(\w+):\[\d+\]$", r"\1\2", link) for link in links if link)


def threads_called(name: str) -> int:
    """Returns the number of threads of this process with this name."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += (task / "comm").read_text().strip() == name
    return found


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Lets this block import without garbage collection, which takes a fifth of the time of large imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_uncollected(name: str) -> ModuleType:
    """Imports a module as in ``uncollected``, if it is not imported yet."""
    with contextlib.nullcontext() if name in sys.modules else uncollected():
        return import_module(name)


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group. Returns False if the group has no member left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def signal_group_of(leader: int, group: int, number: int) -> None:
    """Sends a signal to the process group ``group`` of its leader, a pidfd, and never to a later group of this number.

    Before Linux 6.9, a group whose leader has ended and was reaped gets no signal.
    """
    try:
        signal.pidfd_send_signal(leader, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)
    except ProcessLookupError:
        return
    except OSError:  # an older kernel: the number is the leader's as long as it has not been reaped
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(leader, 0)
            os.killpg(group, number)


def signal_process(pid: int, number: int) -> None:
    """Sends a signal to a process, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _link(descriptor: Path) -> str:
    """Returns what a descriptor is open on; "" if it was closed, such as the one that listed the folder."""
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def listening_store(
    host: str, port: int, *, ranks: int | None = None, timeout: timedelta = STORE_TIMEOUT
) -> "TCPStore":
    """Starts torch's store for ranks to meet, which listens at the address of ``host`` only, without authentication.

    torch's own listener takes connections at every address of the machine. Says so of an address that other machines
    reach. port: 0 lets the system choose. ranks: how many will use the store; None if unknown. Raises OSError if the
    port is taken or the address is not of this machine.
    """
    from torch.distributed import TCPStore  # slow, and few processes start a store

    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        if not ipaddress.ip_address(address[0]).is_loopback:
            notice = f"parity: listening at {host}, port {port}, without authentication, for ranks of other hosts"
            print(notice, file=sys.stderr, flush=True)
        own = listener.detach()  # the store closes it
    return TCPStore(host, port, ranks, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=own)


class Stopped(KeyboardInterrupt):
    """Signals that signal ``number`` ended the run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_code(by: KeyboardInterrupt) -> int:
    """Returns the exit code of a process that a signal stopped, as a shell reports it."""
    return 128 + (by.number if isinstance(by, Stopped) else signal.SIGINT)


@contextlib.contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Lets Ctrl-C end this process at once inside the ``with`` statement, which only imports libraries.

    torch loses exceptions that are raised in its imports, and the run would go on.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"parity: interrupted\n")
        os._exit(128 + number)

    if (before := signal.getsignal(signal.SIGINT)) is not signal.default_int_handler:  # ignored, or the user's own
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def not_ignored(*signals: signal.Signals) -> tuple[signal.Signals, ...]:
    """Returns the signals that this process does not ignore.

    A background process of a shell script is started to ignore SIGINT, and keeps ignoring it.
    """
    return tuple(number for number in signals if signal.getsignal(number) is not signal.SIG_IGN)


class Stop:
    """Raises Stopped in the main thread at the first of the signals inside the ``with`` statement.

    ``number`` is then the number of that signal, otherwise 0. After the first signal, SIGTERM is ignored, so that
    reports can be written, and another SIGINT interrupts them. Ignored signals stay ignored.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.number = 0
        self._signals = not_ignored(*signals)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in self._signals}
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for other in self._signals:
            signal.signal(other, signal.SIG_IGN if other == signal.SIGTERM else signal.default_int_handler)
        raise Stopped(number)

    def check(self) -> None:
        """Raises Stopped again: an exception that a signal raises inside a destructor or a callback is lost."""
        if self.number:
            raise Stopped(self.number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
