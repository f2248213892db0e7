"""Stopping: SIGINT and SIGTERM end a run where it is, so that what it judged is still reported (claim 9).

Supervisors ask before they kill, some of them more than once: GitHub's runner sends SIGINT, then SIGTERM, then SIGKILL.
"""

import signal
from types import FrameType
from typing import Any, Self


class Stopped(KeyboardInterrupt):
    """A signal ended the run. ``number``: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def heeded(*signals: signal.Signals) -> tuple[signal.Signals, ...]:
    """Those that this process did not begin by ignoring. One that it was started to ignore, as SIGINT is in the
    background of a shell's script, stays ignored."""
    return tuple(number for number in signals if signal.getsignal(number) is not signal.SIG_IGN)


class Stop:
    """Inside the ``with`` statement, the first of the signals raises Stopped in the main thread. ``number`` is then its
    number, or else 0.

    After the first, SIGTERM is ignored, so that reports can be written, and another SIGINT interrupts them. Only
    signals that are heeded stop.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.number = 0
        self._signals = heeded(*signals)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in self._signals}
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for other in self._signals:
            signal.signal(other, signal.SIG_IGN if other == signal.SIGTERM else signal.default_int_handler)
        raise Stopped(number)

    def check(self) -> None:
        """Raise Stopped again: an exception that a signal raises inside a destructor or a callback is lost."""
        if self.number:
            raise Stopped(self.number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
