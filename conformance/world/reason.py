"""Reason: the words in which a failed task is told to its user (claim 8): which rank, what, when, and where to look.

First the cause, in one line that stands alone; then the other ranks; then the end of the log.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FailureKind = Literal["", "killed", "exited", "raised", "hung", "stopped", "out of memory"]

_TAIL_LINES = 20
# How an error reads on a rank whose peer has gone (gloo, NCCL): the peer is the cause, not this rank.
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
    """What went wrong, and on which rank; None: on no single one.

    ``what`` is a sentence such as "rank 1 raised", ``detail`` what else is known, in one line.
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
    """The failure that explains the others: one of no single rank, else the first that is no echo of a lost peer.

    A death outranks an exception seen just before it: a dying rank's peers may hear of it before the controller does.
    """

    def order(failure: Failure) -> tuple[bool, bool, bool]:
        is_echo = failure.kind == "raised" and any(echo in failure.detail.lower() for echo in _ECHOES)
        return failure.rank is not None, is_echo, failure.kind in ("raised", "out of memory")

    return min(failures, key=order)


def exit_words(status: int) -> str:
    """Say how a process ended; a negative status is the signal that killed it."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
    return f"was killed by {name}" + (" (the out-of-memory killer, or somebody)" if -status == signal.SIGKILL else "")


def tail(file: Path) -> str:
    """The last lines of a log, indented; says so when there is nothing."""
    try:
        lines = file.read_bytes()[-16384:].decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except FileNotFoundError:
        lines = []
    return indent("\n".join(lines) or "(empty)")


def indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a rank's main thread is, out of its stacks file."""

    text: str
    in_collective: bool


def is_whole(stacks: Path) -> bool:
    """Whether faulthandler has written to the end: the main thread comes last, its outermost frame (or "...") too.

    A rank is started by ``python -m``, so that frame is runpy's.
    """
    try:
        text = stacks.read_text(errors="replace")
    except FileNotFoundError:
        return False
    return text.endswith((" in _run_module_as_main\n", "  ...\n"))


def read_location(stacks: Path) -> Location | None:
    """Read what faulthandler wrote; None when the rank wrote nothing (it is dead, or stuck in the kernel)."""
    try:
        main_thread = stacks.read_text(errors="replace").rstrip().rpartition("\n\n")[2]
    except FileNotFoundError:
        return None
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', main_thread)
    if not frames:
        return None
    in_collective = any(Path(file).name in _COLLECTIVES for file, _, _ in frames[:3])
    # torch's own frames say little; the line of the backend that called it does.
    file, line, function = next((f for f in frames if "/torch/" not in f[0]), frames[0])
    where = f"{function} ({Path(file).name}:{line})"
    return Location(
        text=f"in a collective called from {where}" if in_collective else f"in {where}", in_collective=in_collective
    )
