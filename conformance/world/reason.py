"""Reason: the text that explains a failed task to the user (claim 8): which rank, what, when, and where to look.

The first line states the cause and can stand alone. The other ranks and the end of the log follow.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FailureKind = Literal["", "killed", "exited", "raised", "hung", "stopped", "out of memory"]

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
    """What went wrong, and on which rank (None: not on a single one).

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
    """The failure that explains the others: one that concerns no single rank, or else the first that is not merely the
    report of a lost peer.

    The death of a rank comes before an exception, even if the exception was seen earlier, because peers may notice the
    death before the controller does.
    """

    def order(failure: Failure) -> tuple[bool, bool, bool]:
        is_echo = failure.kind == "raised" and any(echo in failure.detail.lower() for echo in _ECHOES)
        return failure.rank is not None, is_echo, failure.kind in ("raised", "out of memory")

    return min(failures, key=order)


def exit_words(status: int) -> str:
    """How a process ended, in words; status -N means killed by signal N."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
    return f"was killed by {name}" + (" (the out-of-memory killer, or somebody)" if -status == signal.SIGKILL else "")


def tail(file: Path) -> str:
    """The last lines of a log, indented; ``(empty)`` if there are none."""
    try:
        lines = file.read_bytes()[-16384:].decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except FileNotFoundError:
        lines = []
    return indent("\n".join(lines) or "(empty)")


def indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a rank's main thread is, from its stacks file."""

    text: str
    in_collective: bool


def is_whole(stacks: Path) -> bool:
    """Whether faulthandler has finished writing: the file ends with the outermost frame of the main thread, or "...".

    A rank is started by ``python -m``, so this outermost frame belongs to runpy.
    """
    try:
        text = stacks.read_text(errors="replace")
    except FileNotFoundError:
        return False
    return text.endswith((" in _run_module_as_main\n", "  ...\n"))


def read_location(stacks: Path) -> Location | None:
    """Read a stacks file of faulthandler; None if the rank wrote nothing (it is dead, or hangs in the kernel)."""
    try:
        main_thread = stacks.read_text(errors="replace").rstrip().rpartition("\n\n")[2]
    except FileNotFoundError:
        return None
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', main_thread)
    if not frames:
        return None
    in_collective = any(Path(file).name in _COLLECTIVES for file, _, _ in frames[:3])
    # Frames inside torch say little, so the innermost frame outside torch is shown.
    file, line, function = next((f for f in frames if "/torch/" not in f[0]), frames[0])
    where = f"{function} ({Path(file).name}:{line})"
    return Location(
        text=f"in a collective called from {where}" if in_collective else f"in {where}", in_collective=in_collective
    )
