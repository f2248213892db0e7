"""Flight: the last collectives of a rank, as torch's flight recorder has them, while the rank hangs in one (claim 8).

A stack says where a rank waits, and not for whom. The recorder counts the collectives of each process group, so of
ranks that hang together the one with the lowest count is the one that the others wait for.
"""

import contextlib
import json
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ASK = signal.SIGUSR2
_EVERYBODY = "default_pg"
ENTRIES = 200  # that a rank remembers; TORCH_FR_BUFFER_SIZE


class FlightRecorder(threading.Thread):
    """In a rank: writes ``rank-N.flight.json`` when the rank is asked to, whatever its main thread does."""

    def __init__(self, rank: int, *, device: str) -> None:
        super().__init__(daemon=True, name="flight recorder")
        self._rank, self._device = rank, device
        self._folder: Path | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})  # threads that start later inherit it
        self.start()

    def write_into(self, folder: Path) -> None:
        """The folder of the task that begins."""
        self._folder = folder
        flight_file(folder, self._rank).unlink(missing_ok=True)

    def run(self) -> None:
        while True:
            signal.sigwait({ASK})
            if (folder := self._folder) is not None:
                unfinished = folder / f"rank-{self._rank}.flight.unfinished"
                with contextlib.suppress(OSError):
                    unfinished.write_bytes(_recorded(self._device))
                    unfinished.rename(flight_file(folder, self._rank))


def flight_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.flight.json"


def who_is_behind(folder: Path, ranks: Iterable[int]) -> set[int]:
    """The ranks that others wait for, from what they wrote: a process group has others that entered more collectives,
    and no group has others that entered fewer. A rank that is ahead in one group and behind in another waits itself."""
    behind: set[int] = set()
    ahead: set[int] = set()
    for of_ranks in _parted(folder, ranks).values():
        most = max(count for count, _ in of_ranks.values())
        for rank, (count, _) in of_ranks.items():
            (ahead if count == most else behind).add(rank)
    return behind - ahead


def where_they_part(folder: Path, ranks: Iterable[int]) -> list[str]:
    """A line for each process group whose ranks have not entered the same collectives, from what they wrote."""
    return [
        f"  collectives of group {name}: "
        + ", ".join(f"rank {rank} at {count} ({what})" for rank, (count, what) in sorted(of_ranks.items()))
        for name, of_ranks in _parted(folder, ranks).items()
    ]


def remove_empty(folder: Path, ranks: Iterable[int]) -> None:
    """Remove the files in which nothing was recorded."""
    for file in (flight_file(folder, rank) for rank in ranks):
        if file.is_file() and not _entries(file):
            file.unlink()


def _parted(folder: Path, ranks: Iterable[int]) -> dict[str, dict[int, tuple[int, str]]]:
    """The process groups whose ranks have not entered the same collectives: of each rank that answered, how many it has
    entered and the name of the last one."""
    groups: dict[str, dict[int, tuple[int, str]]] = {}
    answered = [rank for rank in ranks if flight_file(folder, rank).is_file()]
    for rank in answered:
        for entry in _entries(flight_file(folder, rank)):
            if not entry.get("is_p2p"):
                last = int(entry["collective_seq_id"]), str(entry["profiling_name"])
                groups.setdefault(" ".join(entry["process_group"]), {})[rank] = last
    for name, of_ranks in groups.items():
        if _EVERYBODY in name:
            of_ranks |= {rank: (0, "none") for rank in answered if rank not in of_ranks}
    return {name: ranks for name, ranks in groups.items() if len({count for count, _ in ranks.values()}) > 1}


def _entries(file: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        return list(json.loads(file.read_bytes()).get("entries", []))
    return []


def _recorded(device: str) -> bytes:
    """NCCL has a recorder of its own; an older torch may have none for gloo."""
    from torch._C import _distributed_c10d as c10d

    name = "_dump_nccl_trace_json" if device == "cuda" else "_dump_fr_trace_json"
    dump = getattr(c10d, name, None)
    return dump() if dump is not None else b""
