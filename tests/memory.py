"""How much memory a process and all that it started hold, as the kernel tells it."""

from pathlib import Path


def memory_of_tree(pid: int) -> int:
    """Bytes of anonymous memory, shared ones divided by those who share them (proc(5), smaps_rollup)."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
        children = [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended meanwhile
        return total
    return total + sum(memory_of_tree(int(child)) for child in children)
