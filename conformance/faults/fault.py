"""What a planted fault is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A bug that can be planted.

    summary: what the bug does. source: a public report of such a bug. seam: the name of the function that it wraps.
    stage: the stage at which it is expected to be found first. loss_blind: whether the loss of step 0 is still exact.
    needs: in words, the conditions under which the fault changes anything at all.
    wrap: returns the faulty function, from the original one.
    """

    name: str
    summary: str
    source: str
    seam: str
    stage: str
    loss_blind: bool
    needs: str
    wrap: Callable[[Function], Function]


def not_called(function: Function) -> Function:
    """A ``wrap`` for functions without a result: the faulty function does nothing."""

    def faulty(*args: Any, **kwargs: Any) -> None:
        return None

    return faulty
