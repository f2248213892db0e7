"""Pauses a framework's own training loop, such as ``fit`` or ``train``, at each optimizer step."""

from collections.abc import Callable
from typing import Any

import torch

try:
    from greenlet import getcurrent, greenlet
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "parity.Paused needs the package greenlet; run: python -m pip install greenlet", name="greenlet"
    ) from missing


class Paused:
    """Runs a loop that owns its steps, whole and in this thread, and pauses it where a hook calls ``pause``.

    ``resume`` runs the loop up to its next pause, so each ``train_step`` of an adapter resumes it once::

        loop = Paused(lambda pause: trainer.fit())  # nothing runs yet; a hook of the trainer calls pause(metrics)
        metrics = loop.resume()
        result = loop.finish()  # after the last step

    Pause after the optimizer's step or in its hook, not in a gradient hook, which runs in another thread on GPUs. The
    loop has its own grad mode and autocast. Close an unfinished loop in ``teardown``, because nothing else frees it.
    """

    def __init__(self, body: Callable[[Callable[[Any], Any]], Any]) -> None:
        self.pauses = 0
        self._greenlet = greenlet(lambda _: body(self.pause))

    @property
    def running(self) -> bool:
        """Tells whether the loop has begun and not ended."""
        return bool(self._greenlet)

    def pause(self, value: Any = None) -> Any:
        """Gives ``value`` to the caller of ``resume``. Returns, inside the loop, the value of the next ``resume``.

        Raises RuntimeError if the loop itself does not call it, in its own thread.
        """
        if getcurrent() is not self._greenlet:
            raise RuntimeError(
                "pause was called outside of the paused loop, or in another thread of it (gradient hooks run in one on "
                "GPUs); call it in a hook of the optimizer, the trainer or the loader"
            )
        self.pauses += 1
        assert self._greenlet.parent is not None
        return _kept_modes(self._greenlet.parent.switch, value)

    def resume(self, value: Any = None) -> Any:
        """Runs the loop up to its next pause, and returns the pause's value. An exception of the loop comes out here.

        Raises RuntimeError if the loop ends, or has ended, before that pause.
        """
        before = self.pauses
        if not self._greenlet.dead:
            self._run(value)
        if self.pauses == before:
            raise RuntimeError(
                f"the loop ended after {self.pauses} pauses, and pause {self.pauses + 1} was asked for; it makes fewer "
                f"optimizer steps than the batches that it was given: check its epochs, its number of steps and what "
                f"its loader drops"
            )
        return self._value

    def finish(self, value: Any = None) -> Any:
        """Runs the loop from its last pause to its end, and returns its result. Raises RuntimeError if it pauses."""
        before = self.pauses
        if not self._greenlet.dead:
            self._run(value)
        if self.pauses != before:
            raise RuntimeError(
                f"the loop paused again, at pause {self.pauses}, where it should have ended; it makes more optimizer "
                f"steps than the batches that it was given: check its epochs, its number of steps and its accumulation"
            )
        return self._value

    def close(self) -> None:
        """Ends an unfinished loop where it is paused: its ``finally`` blocks run. Otherwise does nothing."""
        if self.running:
            self._greenlet.parent = getcurrent()
            _kept_modes(self._greenlet.throw)
            assert self._greenlet.dead, "the loop caught the exception that ends it, and paused again"

    def _run(self, value: Any) -> None:
        self._greenlet.parent = getcurrent()
        self._value = _kept_modes(self._greenlet.switch, value)


def _kept_modes(switch: Callable[..., Any], *value: Any) -> Any:
    """Switches to the other side, and restores grad mode and autocast of this side when it goes on."""
    grad = torch.is_grad_enabled()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        given = switch(*value)
    finally:
        torch.set_grad_enabled(grad)
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
    return given
