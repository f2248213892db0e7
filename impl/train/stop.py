"""A clean stop: Ctrl-C and SIGTERM are noted, and the training ends itself where it can be resumed."""

import signal
from types import FrameType
from typing import Any

from conformance.stopping import heeded

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Inside the ``with`` statement, the first of SIGNALS sets ``asked``, and another one does what it always does. One
    that was ignored before stays ignored."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        self._before = {number: signal.signal(number, self._note) for number in heeded(*SIGNALS)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def __exit__(self, *_: object) -> None:
        self._restore()
