"""Reads from the kernel how much memory processes hold."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # of mallopt(3)


def memory_of_tree(pid: int) -> int:
    """Bytes of anonymous memory of a process and all that it started, shared ones divided by those who share them
    (proc(5), smaps_rollup)."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
        children = [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended meanwhile
        return total
    return total + sum(memory_of_tree(int(child)) for child in children)


def give_back() -> None:
    """Have glibc give back at once what this process frees; it would keep up to 32 MiB of each, to be used again."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)


def peak_above(action: Callable[[], object]) -> int:
    """Bytes of memory that a process holds at most while it does something, beyond what it holds before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that of now; see proc(5)
    before = resident("VmHWM")
    action()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
