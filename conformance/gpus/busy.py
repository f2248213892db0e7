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
        """By GPU, the part of the time since the beginning for which it was leased; of a GPU that ranks may share, the
        mean over its places. Empty as long as nothing was leased."""
        passed, of_gpus = max(time.monotonic() - self._began, 1e-9), defaultdict[str, list[float]](list)
        with self._lock:
            for place, seconds in self._seconds.items():
                of_gpus[gpu_of(place)].append(seconds / passed)
        means = {gpu: round(fmean(shares), 3) for gpu, shares in of_gpus.items()}
        return means if any(means.values()) else {}
