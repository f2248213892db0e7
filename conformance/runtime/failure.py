"""Explains a failed task to the user: the rank that caused the failure, what it did, and where to look.

A stack shows where a rank hangs, but not which rank it waits for. torch's flight recorder counts the collectives of
each process group, so among ranks that hang together the others wait for the one with the lowest count.
"""

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ASK = signal.SIGUSR2
_ALL_RANKS, _UNDESCRIBED = "default_pg", "undefined"  # torch's descriptions of groups
ENTRIES = 200  # number of collectives that a rank remembers; TORCH_FR_BUFFER_SIZE


class StartError(Exception):
    """A forkserver or a worker group could not be started. The message is for the user."""


class FlightRecorder(threading.Thread):
    """Writes ``rank-N.flight.json`` when this rank receives the signal ASK, whatever its main thread does."""

    def __init__(self, rank: int, *, device: str) -> None:
        super().__init__(daemon=True, name="flight recorder")
        self._rank, self._device = rank, device
        self._folder: Path | None = None
        self._since = 0  # start of the task in nanoseconds of the system clock, the unit of the recorder's entries
        signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})  # threads that start later inherit it
        self.start()

    def write_into(self, folder: Path) -> None:
        """Sets the folder of the task that begins now."""
        self._folder, self._since = folder, time.time_ns()
        flight_file(folder, self._rank).unlink(missing_ok=True)

    def run(self) -> None:
        while True:
            signal.sigwait({ASK})
            if (folder := self._folder) is not None:
                unfinished = folder / f"rank-{self._rank}.flight.unfinished"
                with contextlib.suppress(OSError, RuntimeError, ValueError):  # groups may change meanwhile
                    recorded = {"since": self._since, "groups": _groups(), "entries": _entries(self._device)}
                    unfinished.write_text(json.dumps(recorded))
                    unfinished.rename(flight_file(folder, self._rank))


def flight_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.flight.json"


def behind_and_ahead(folder: Path, ranks: Iterable[int]) -> tuple[set[int], set[int]]:
    """Returns the ranks that others wait for in collectives, and the ranks that wait, from the files of all ranks.

    In a process group, the ranks that have entered more collectives wait for the others. A rank that waits in one group
    does not count as behind in another.
    """
    behind: set[int] = set()
    ahead: set[int] = set()
    for of_ranks in _uneven_groups(folder, ranks).values():
        fewest = min(count for count, _ in of_ranks.values())
        for rank, (count, _) in of_ranks.items():
            (behind if count == fewest else ahead).add(rank)
    return behind - ahead, ahead


def uneven_collectives(folder: Path, ranks: Iterable[int]) -> list[str]:
    """Returns a line for each process group whose ranks have entered different numbers of collectives."""
    return [
        f"  collectives of group {name}: "
        + ", ".join(f"rank {rank} at {count} ({last})" for rank, (count, last) in sorted(of_ranks.items()))
        for name, of_ranks in _uneven_groups(folder, ranks).items()
    ]


def remove_empty(folder: Path, ranks: Iterable[int]) -> None:
    """Removes the files without entries."""
    for file in (flight_file(folder, rank) for rank in ranks):
        if file.is_file() and not _read(file)["entries"]:
            file.unlink()


def _uneven_groups(folder: Path, ranks: Iterable[int]) -> dict[str, dict[int, tuple[int, str]]]:
    """Returns the process groups whose ranks have entered different numbers of collectives: by rank that has a file,
    the number and the name of the last one."""
    recorded = {rank: _read(file) for rank in ranks if (file := flight_file(folder, rank)).is_file()}
    groups: dict[str, dict[int, tuple[int, str]]] = {}
    for rank, of_rank in recorded.items():
        for entry in of_rank["entries"]:
            name = " ".join(part for part in entry["process_group"] if part != _UNDESCRIBED)
            if not entry["is_p2p"] and entry["time_created_ns"] >= _since(of_rank, name):
                last = int(entry["collective_seq_id"]), str(entry["profiling_name"])
                groups.setdefault(name, {})[rank] = last
    for name, of_ranks in groups.items():
        for rank in recorded.keys() - of_ranks:
            if name.partition(" ")[0] in recorded[rank]["groups"] and _remembers_all(recorded[rank], name):
                of_ranks[rank] = 0, "none"
    return {name: ranks for name, ranks in groups.items() if len({count for count, _ in ranks.values()}) > 1}


def _since(of_rank: dict[str, Any], name: str) -> int:
    """Returns the time from which entries belong to this group. A group of an earlier task may have had the same name;
    only the group of all ranks stays."""
    return 0 if _ALL_RANKS in name else int(of_rank["since"])


def _remembers_all(of_rank: dict[str, Any], name: str) -> bool:
    """Returns whether a missing entry proves that the rank entered no collective of the group: its buffer has not
    overwritten entries of this task."""
    entries = of_rank["entries"]
    return not entries or entries[0]["record_id"] == 0 or entries[0]["time_created_ns"] < _since(of_rank, name)


def _read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(file.read_bytes()))
    return {"since": 0, "groups": [], "entries": []}


def _groups() -> list[str]:
    """Returns the names of the process groups of this rank."""
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_names.values())


def _entries(device: str) -> list[dict[str, Any]]:
    """Returns the last collectives, in order. NCCL has its own recorder; an older torch may have none for gloo."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace_json" if device == "cuda" else "_dump_fr_trace_json", None)
    return list(json.loads(dump()).get("entries", [])) if dump is not None else []


# "MPS": of a task, whatever its ranks did, if the daemon that they share has failed.
FailureKind = Literal["", "killed", "exited", "raised", "hung", "stopped", "out of memory", "MPS"]

_TAIL_LINES = 25
# Messages of gloo and NCCL on a rank whose peer has died: the peer is the cause, not this rank.
_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
)
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Describes a failure of one rank, or of no single rank (None).

    what: a sentence such as "rank 1 raised". phase: what the rank was doing. detail: more information in one line.
    """

    rank: int | None
    kind: FailureKind
    what: str
    phase: str = ""
    detail: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        return (
            self.what + (f" during {self.phase!r}" if self.phase else "") + (f": {self.detail}" if self.detail else "")
        )


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that explains the others: one that concerns no single rank, or else the first that is not
    merely the report of a lost peer.

    The death of a rank precedes an exception, even one that was reported earlier, because peers may notice the death
    before the controller does.
    """

    def order(failure: Failure) -> tuple[bool, bool, bool]:
        is_echo = failure.kind == "raised" and any(echo in failure.detail.lower() for echo in _ECHOES)
        return failure.rank is not None, is_echo, failure.kind in ("raised", "out of memory")

    return min(failures, key=order)


def exit_words(status: int) -> str:
    """Describes how a process ended; status -N means killed by signal N."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
    return f"was killed by {name}" + (" (the out-of-memory killer, or somebody)" if -status == signal.SIGKILL else "")


def tail(file: Path) -> str:
    """Returns the last lines of a log, indented; ``(empty)`` if there are none."""
    try:
        lines = file.read_bytes()[-16384:].decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except FileNotFoundError:
        lines = []
    return indent("\n".join(lines) or "(empty)")


def indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


@dataclass(frozen=True, kw_only=True)
class Location:
    """Names the function that a rank's main thread is in, from its stacks file."""

    text: str
    in_collective: bool


def is_whole(stacks: Path) -> bool:
    """Returns whether faulthandler has finished: the file ends with the outermost frame of the main thread, or "...".

    A rank is started by ``python -m``, so this outermost frame belongs to runpy.
    """
    try:
        text = stacks.read_text(errors="replace")
    except FileNotFoundError:
        return False
    return text.endswith((" in _run_module_as_main\n", "  ...\n"))


def read_location(stacks: Path) -> Location | None:
    """Reads a stacks file of faulthandler; None if the rank wrote nothing (it is dead, or hangs in the kernel)."""
    try:
        main_thread = stacks.read_text(errors="replace").rstrip().rpartition("\n\n")[2]
    except FileNotFoundError:
        return None
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', main_thread)
    return location_of(frames) if frames else None


def location_of(frames: Sequence[tuple[str, int | str, str]]) -> Location:
    """Returns the location of a stack: file, line and function of each frame, the innermost first."""
    in_collective = any(Path(file).name in _COLLECTIVES for file, _, _ in frames[:3])
    # The innermost frame outside torch is the one that tells a user the most.
    file, line, function = next((f for f in frames if "/torch/" not in f[0]), frames[0])
    where = f"{function} ({Path(file).name}:{line})"
    return Location(
        text=f"in a collective called from {where}" if in_collective else f"in {where}", in_collective=in_collective
    )
