"""Busy: for how much of a run each of its GPUs was leased, so that idle GPUs are seen."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from conformance.gpus.shares import gpu_of


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
        """By GPU, the part of the time since the beginning in which it was leased."""
        passed = max(time.monotonic() - self._began, 1e-9)
        with self._lock:
            return {gpu: seconds / passed for gpu, seconds in self._seconds.items()}

    def __str__(self) -> str:
        """In words; of a GPU that ranks may share, the mean over its places."""
        passed, of_gpus = time.monotonic() - self._began, defaultdict[str, list[float]](list)
        for place, share in self.shares().items():
            of_gpus[gpu_of(place)].append(share)
        return ", ".join(f"{gpu} {fmean(shares):.0%}" for gpu, shares in of_gpus.items()) + f" of {passed:.0f} s"
