"""Calls Linux functions for processes that Python does not have, so that no process is left behind.

Stopping: SIGINT and SIGTERM end a run where it is, so that what it judged is still reported.

Supervisors ask before they kill, some of them more than once: GitHub's runner sends SIGINT, then SIGTERM, then SIGKILL.
"""

import contextlib
import ctypes
import os
import re
import signal
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Self

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_at_death_of(parent: int, number: int) -> None:
    """Ask the kernel to send signal ``number`` to this process when ``parent`` dies. Exits if it is dead already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that this process can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def process_state(pid: int) -> str:
    """The kernel's one-letter state (R, S, D, T: stopped, Z: zombie), or "" if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def processor_seconds(pid: int) -> float:
    """Processor time of all threads of a process, in user and kernel mode; 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = stat.rpartition(")")[2].split()  # from the third field of proc(5); utime and stime are the 14th and 15th
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children() -> list[int]:
    """The pids of the children of this (single-threaded) process, zombies included."""
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def thread_count() -> int:
    """The number of threads of this process, including threads that Python did not start."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def open_files() -> Counter[str]:
    """What the descriptors of this process are open on: paths of files, and kinds such as ``socket`` or ``eventfd``."""
    links = map(_link, Path("/proc/self/fd").iterdir())
    return Counter(re.sub(r"^anon_inode:\[?(\w+)\]?$|^(\w+):\[\d+\]$", r"\1\2", link) for link in links if link)


def threads_called(name: str) -> int:
    """The number of threads of this process that have given themselves this name."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += (task / "comm").read_text().strip() == name
    return found


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group. Returns False if the group has no member left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _link(descriptor: Path) -> str:
    """What a descriptor is open on; "" if it has been closed, as that of the folder which is read."""
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


class Stopped(KeyboardInterrupt):
    """A signal ended the run. ``number``: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_code(by: KeyboardInterrupt) -> int:
    """The exit code of a process that a signal stopped, as a shell reports it."""
    return 128 + (by.number if isinstance(by, Stopped) else signal.SIGINT)


def heeded(*signals: signal.Signals) -> tuple[signal.Signals, ...]:
    """Those that this process did not begin by ignoring. One that it was started to ignore, as SIGINT is in the
    background of a shell's script, stays ignored."""
    return tuple(number for number in signals if signal.getsignal(number) is not signal.SIG_IGN)


class Stop:
    """Inside the ``with`` statement, the first of the signals raises Stopped in the main thread. ``number`` is then its
    number, or else 0.

    After the first, SIGTERM is ignored, so that reports can be written, and another SIGINT interrupts them. Only
    signals that are heeded stop.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.number = 0
        self._signals = heeded(*signals)
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
        """Raise Stopped again: an exception that a signal raises inside a destructor or a callback is lost."""
        if self.number:
            raise Stopped(self.number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
