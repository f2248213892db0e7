"""DeepSpeed's dynamic loss scale: it grows when that is due, after an update, and what overflowed is forgotten.

``scaler`` is the object of an engine's optimizer that holds the loss scale of fp16; its class depends on the ZeRO
stage, the attributes do not.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

NEVER_GROWS = 2**62  # updates


def good_steps(scaler: Any) -> int:
    """The updates since the last overflow. They are counted on when the scale grows, at multiples of the window."""
    return int(scaler.cur_iter - scaler.last_overflow_iter - 1)


@contextlib.contextmanager
def growth_afterwards(scaler: Any) -> Iterator[None]:
    """Keep the loss scale from growing inside, and let it grow on exit if that is due.

    By itself it grows one update late, and before the gradients of that update are divided by it: they are halved
    (docs/findings/deepspeed-loss-scale-window.md).
    """
    window, scaler.scale_window = scaler.scale_window, NEVER_GROWS
    try:
        yield
    finally:
        scaler.scale_window = window
    if (good := good_steps(scaler)) and good % window == 0:
        scaler.cur_scale *= scaler.scale_factor


def forget_overflow(optimizer: Any) -> None:
    """Clear the buffers of ZeRO-1 or 2 after an update that was skipped. With an offloaded optimizer the library leaves
    them, and adds the next gradients to what overflowed (docs/findings/deepspeed-offload-overflow.md)."""
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        gradients.update(dict.fromkeys(gradients))
