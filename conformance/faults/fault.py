"""What a planted fault is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted bug. ``needs`` says in words when it changes anything (an equivalent mutant otherwise)."""

    name: str
    summary: str
    source: str
    seam: str
    stage: str
    loss_blind: bool
    needs: str
    wrap: Callable[[Function], Function]


def not_called(function: Function) -> Function:
    """A fault's ``wrap`` for what has no result: it is left out."""

    def faulty(*args: Any, **kwargs: Any) -> None:
        return None

    return faulty
