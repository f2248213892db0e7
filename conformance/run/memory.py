"""Memory: the most memory that a rank held during one leg."""

import contextlib
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


class PeakMemory:
    """The peak since this object was made: of the GPU's memory as torch allocated it; on CPUs, of the resident set.

    Worlds are kept alive, so the peak of the process would be that of another cell; Linux and torch can both begin
    anew. What the suite itself gathers is included, which is most on rank 0.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._known = self._on_gpu
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):  # not Linux, or a container that does not allow it
                (_PROCESS / "clear_refs").write_text("5")  # "VmHWM" begins anew: proc_pid_clear_refs(5)
                self._known = True

    def read(self) -> int:
        """In bytes; 0 if it cannot be known."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        if not self._known:
            return 0
        status = (_PROCESS / "status").read_text(encoding="ascii", errors="replace")
        return 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
