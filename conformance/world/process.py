"""What Linux knows of processes and Python does not wrap; "no process is left behind" (claim 8) rests on it."""

import contextlib
import ctypes
import os
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_at_death_of(parent: int, number: int) -> None:
    """Ask the kernel for a signal when ``parent`` dies; exits at once if it has died already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of grandchildren that lose theirs, so that they can be reaped here."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def process_state(pid: int) -> str:
    """The kernel's one-letter state (R, S, D, T: stopped, Z: zombie), or "" when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def children() -> list[int]:
    """Children of this (single-threaded) process, zombies included."""
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def thread_count() -> int:
    """Threads of this process, those that Python does not know included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def signal_group(group: int, number: int) -> bool:
    """Signal a whole process group; False when it has no member left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def signal_process(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
