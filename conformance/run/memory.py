"""Memory: the most memory that a rank held during one leg, of its GPU and of its host."""

import contextlib
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


class PeakMemory:
    """The peaks since this object was made: of the resident set, and of the GPU's memory as torch allocated it.

    Worlds are kept alive, so the peak of the process would be that of another cell; Linux and torch can both begin
    anew. What the suite itself gathers is included, which is most on rank 0.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._host_known = False
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):  # not Linux, or a container that does not allow it
            (_PROCESS / "clear_refs").write_text("5")  # "VmHWM" begins anew: proc_pid_clear_refs(5)
            self._host_known = True

    def read(self) -> int:
        """The peak of the rank's device in bytes; 0 if it cannot be known."""
        return torch.cuda.max_memory_allocated() if self._on_gpu else self.read_host()

    def read_host(self) -> int:
        """The peak of the resident set in bytes, files that are mapped included; 0 if it cannot be known."""
        if not self._host_known:
            return 0
        status = (_PROCESS / "status").read_text(encoding="ascii", errors="replace")
        return 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
