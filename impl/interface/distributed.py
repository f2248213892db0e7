"""Runs work on all ranks and raises an error of one rank on all of them; reduces, gathers and copies to the device.

A rank that cannot write its file, or finds a damaged one, would otherwise leave the others waiting at the next
collective. A rank of a training that waits too long for another reason ends, and says who waits for what.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from conformance.core.errors import UsageError, one_line
from conformance.runtime.failure import Location, location_of

T = TypeVar("T")
Group = dist.ProcessGroup | None


class FileFailure(OSError):
    """Signals that a rank could not read or write a file, which is neither a bug nor wrong usage."""


@dataclass(frozen=True)
class _Failure:
    message: str
    kind: type[Exception] | None  # that all ranks raise; None: only the rank that failed


def on_all_ranks(doing: str, action: Callable[[], T], *, group: Group = None) -> list[T]:
    """Runs ``action`` on every rank and returns the picklable results of all ranks, by rank; collective.

    If ``action`` fails on a rank, all ranks raise: that rank its own error, the others an error with its rank and
    message. ``doing`` describes the work in a few words, for the message. ``group`` contains all ranks; it is the
    default group, or another one for a thread that runs beside the training. The action makes no collective calls,
    except such as cannot fail on one rank alone.
    """
    try:
        result = action()
    except Exception as error:  # any error must reach the other ranks
        return agree(doing, error, group=group)
    return agree(doing, None, result, group=group)


def agree(doing: str, error: Exception | None, result: Any = None, *, group: Group = None) -> list[Any]:
    """Exchanges errors and results as ``on_all_ranks`` does, for work that cannot be put into a function."""
    if isinstance(error, OSError):
        error = FileFailure(f"{doing}: {one_line(error)}")
    kinds = (kind for kind in (UsageError, FileFailure) if isinstance(error, kind))
    outcome = _Failure(one_line(error), next(kinds, None)) if error else result
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=group)
    if error:
        raise error
    for rank, other in enumerate(outcomes):
        if isinstance(other, _Failure) and other.kind:
            raise other.kind(other.message)
        if isinstance(other, _Failure):
            raise RuntimeError(f"rank {rank} failed: {doing}: {other.message}")
    return outcomes


def on_first(doing: str, action: Callable[[], T], *, group: Group = None) -> T:
    """Runs ``action`` on the first rank and returns its result on every rank; collective."""
    results: list[Any] = on_all_ranks(doing, lambda: action() if dist.get_rank() == 0 else None, group=group)
    result: T = results[0]
    return result


def all_reduce_number(value: float, *, groups: Iterable[dist.ProcessGroup], device: str) -> float:
    """Sums ``value`` in float64 over the ranks of all ``groups``, which are the axes of a mesh."""
    return all_reduce_over(torch.tensor(value, dtype=torch.float64, device=device), groups=groups).item()


def all_reduce_over(tensor: torch.Tensor, *, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """Returns the sum of ``tensor`` over the ranks of all ``groups``."""
    total = tensor.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


def all_gather_value(value: Any) -> list[Any]:
    """Returns the picklable values of all ranks in the worker group, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns ``tensor`` on ``device``; the same tensor if it is there already.

    A copy from the CPU to a GPU goes through pinned memory. From unpinned memory, the host would wait until the GPU has
    finished all earlier work. All other copies are complete when this function returns.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        # Expanded tensors, whose elements share memory, cannot be pinned.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Reading:
    """Copies numbers from the device so that the host can read them later.

    The host waits only for device work that was queued before this object was made. It can queue more in the meantime,
    such as an update.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Begins the copy of ``tensor``, which has one dimension and is not written to any more."""
        self._numbers = tensor.detach().to("cpu", non_blocking=True)  # of a GPU: into pinned memory
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        if self._copied:
            self._copied.record()

    def numbers(self) -> list[float]:
        """Waits for the copy and returns the numbers."""
        if self._copied and not self._copied.query():
            self._copied.synchronize()
        return list(self._numbers.tolist())


_POLL_S = 5.0
_CPU_LIMIT = timedelta(days=1)  # of a group on the CPU. It would not say who waits for what; WaitLimit comes first.


class WaitLimit(threading.Thread):
    """Ends this process when one of its threads has waited ``limit_s`` seconds for other ranks.

    A wait is one call of torch.distributed that does not return; computing and writing have no limit, but others wait
    for the rank that does so. Each rank tells the others what it is doing, by the store at which they have met, so the
    first one whose limit is over can print who waits for what.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(daemon=True, name="wait limit")
        self._limit_s, self._poll_s = limit_s, min(_POLL_S, limit_s / 4)
        self._store: dist.Store | None = None
        self._asked = False

    def run(self) -> None:
        waits: dict[int, tuple[FrameType, int, float]] = {}  # a frame that is kept cannot be taken for a later one
        while True:
            time.sleep(self._poll_s)
            before, waits, now = waits, {}, time.monotonic()
            for thread, frame in sys._current_frames().items():
                if _location(frame).in_collective:
                    frame_before, at, since = before.get(thread, (None, 0, now))
                    is_same = frame is frame_before and frame.f_lasti == at
                    waits[thread] = frame, frame.f_lasti, since if is_same else now
            longest = min(waits.values(), key=lambda wait: wait[2], default=None)
            with contextlib.suppress(RuntimeError):  # the store is not there yet, or no longer
                self._answer(longest and longest[0])
            if longest and now - longest[2] >= self._limit_s:
                self._end(longest[0])

    def _answer(self, waiting: FrameType | None) -> None:
        """Tells the other ranks once what this one does, if a rank has asked."""
        if self._store is None:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
        if not self._asked and self._store.check(["parity/asked"]):
            self._asked = True
            frame = waiting or sys._current_frames()[threading.main_thread().ident or 0]
            self._store.set(f"parity/rank-{os.environ['RANK']}", _location(frame).text)

    def _end(self, waiting: FrameType) -> NoReturn:
        """Asks the other ranks, prints all answers unless another rank does, and ends this process."""
        answers = {int(os.environ["RANK"]): _location(waiting).text}
        with contextlib.suppress(RuntimeError):
            assert self._store
            is_first = self._store.add("parity/asked", 1) == 1
            self._answer(waiting)
            time.sleep(2 * self._poll_s)
            if not is_first:
                time.sleep(2 * self._poll_s)
                os._exit(1)
            for rank in range(int(os.environ["WORLD_SIZE"])):
                key = f"parity/rank-{rank}"
                answers[rank] = self._store.get(key).decode() if self._store.check([key]) else "says nothing"
        lines = [f"error: no answer of other ranks for {self._limit_s:g} s (--ddp-timeout)"]
        for text in dict.fromkeys(answers.values()):
            ranks = [str(rank) for rank, own in sorted(answers.items()) if own == text]
            lines.append(f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {text}")
        print("\n".join(lines), file=sys.stderr, flush=True)
        os._exit(1)


def _location(frame: FrameType) -> Location:
    """Returns what a thread does: where it is, and during which work if it waits for other ranks to agree."""
    stack = list(traceback.walk_stack(frame))
    located = location_of([(each.f_code.co_filename, line, each.f_code.co_name) for each, line in stack])
    doing = next((each.f_locals["doing"] for each, _ in stack if "doing" in each.f_locals), None)
    return Location(text=f"{doing}, {located.text}" if doing else located.text, in_collective=located.in_collective)


@contextlib.contextmanager
def limited_waits(limit_s: float, *, device: str) -> Iterator[None]:
    """Makes the process group of torchrun's environment variables, in which a rank waits ``limit_s`` s for others."""
    WaitLimit(limit_s).start()
    timeout = _CPU_LIMIT if device == "cpu" else timedelta(seconds=limit_s + 60)  # NCCL ends what no frame shows
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timeout)
    yield
    dist.destroy_process_group()
