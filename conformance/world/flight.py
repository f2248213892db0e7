"""Flight: the last collectives of a rank, as torch's flight recorder has them, while the rank hangs in one (claim 8).

A stack says where a rank waits, and not for whom. The recorder counts the collectives of each process group, so of
ranks that hang together the one with the lowest count is the one that the others wait for.
"""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ASK = signal.SIGUSR2
_EVERYBODY, _UNDESCRIBED = "default_pg", "undefined"  # what torch says of a group beside its name
ENTRIES = 200  # that a rank remembers; TORCH_FR_BUFFER_SIZE


class FlightRecorder(threading.Thread):
    """In a rank: writes ``rank-N.flight.json`` when the rank is asked to, whatever its main thread does."""

    def __init__(self, rank: int, *, device: str) -> None:
        super().__init__(daemon=True, name="flight recorder")
        self._rank, self._device = rank, device
        self._folder: Path | None = None
        self._since = 0  # when the task began, in nanoseconds of the system clock, as the recorder's entries have it
        signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})  # threads that start later inherit it
        self.start()

    def write_into(self, folder: Path) -> None:
        """The folder of the task that begins."""
        self._folder, self._since = folder, time.time_ns()
        flight_file(folder, self._rank).unlink(missing_ok=True)

    def run(self) -> None:
        while True:
            signal.sigwait({ASK})
            if (folder := self._folder) is not None:
                unfinished = folder / f"rank-{self._rank}.flight.unfinished"
                with contextlib.suppress(OSError, RuntimeError, ValueError):  # groups may change meanwhile
                    told = {"since": self._since, "groups": _groups(), "entries": _recorded(self._device)}
                    unfinished.write_text(json.dumps(told))
                    unfinished.rename(flight_file(folder, self._rank))


def flight_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.flight.json"


def behind_and_ahead(folder: Path, ranks: Iterable[int]) -> tuple[set[int], set[int]]:
    """The ranks that others wait for in collectives, and those that wait for others, from what they wrote. Of a process
    group, the ranks wait that have entered more collectives than others. Who waits in one group is not behind."""
    behind: set[int] = set()
    ahead: set[int] = set()
    for of_ranks in _parted(folder, ranks).values():
        fewest = min(count for count, _ in of_ranks.values())
        for rank, (count, _) in of_ranks.items():
            (behind if count == fewest else ahead).add(rank)
    return behind - ahead, ahead


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
        if file.is_file() and not _told(file)["entries"]:
            file.unlink()


def _parted(folder: Path, ranks: Iterable[int]) -> dict[str, dict[int, tuple[int, str]]]:
    """The process groups whose ranks have not entered the same collectives: of each rank that answered, how many it has
    entered and the name of the last one."""
    told = {rank: _told(file) for rank in ranks if (file := flight_file(folder, rank)).is_file()}
    groups: dict[str, dict[int, tuple[int, str]]] = {}
    for rank, of_rank in told.items():
        for entry in of_rank["entries"]:
            name = " ".join(part for part in entry["process_group"] if part != _UNDESCRIBED)
            if not entry["is_p2p"] and entry["time_created_ns"] >= _since(of_rank, name):
                last = int(entry["collective_seq_id"]), str(entry["profiling_name"])
                groups.setdefault(name, {})[rank] = last
    for name, of_ranks in groups.items():
        for rank in told.keys() - of_ranks:
            if name.partition(" ")[0] in told[rank]["groups"] and _remembers_all(told[rank], name):
                of_ranks[rank] = 0, "none"
    return {name: ranks for name, ranks in groups.items() if len({count for count, _ in ranks.values()}) > 1}


def _since(of_rank: dict[str, Any], name: str) -> int:
    """From when on entries are of this group: a group of an earlier task may have had the same name, but for that of
    all ranks, which stays."""
    return 0 if _EVERYBODY in name else int(of_rank["since"])


def _remembers_all(of_rank: dict[str, Any], name: str) -> bool:
    """Whether a rank without an entry of a group has entered none of its collectives, and has not just forgotten it."""
    entries = of_rank["entries"]
    return not entries or entries[0]["record_id"] == 0 or entries[0]["time_created_ns"] < _since(of_rank, name)


def _told(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(file.read_bytes()))
    return {"since": 0, "groups": [], "entries": []}


def _groups() -> list[str]:
    """The names of the process groups that this rank is in."""
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_names.values())


def _recorded(device: str) -> list[dict[str, Any]]:
    """The last collectives, the newest last. NCCL has a recorder of its own; an older torch may have none for gloo."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace_json" if device == "cuda" else "_dump_fr_trace_json", None)
    return list(json.loads(dump()).get("entries", [])) if dump is not None else []
