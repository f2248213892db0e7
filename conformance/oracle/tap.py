"""Tap: where what goes into and comes out of the oracle's modules can be seen (`parity bisect`).

Serves claim 6: the names are those of the Hugging Face model, the values are the oracle's own. The base class changes
nothing and sees nothing.
"""

from collections.abc import Callable

from torch import Tensor

Function = Callable[[Tensor], Tensor]
Module = Callable[[str, Function, Tensor], Tensor]  # (name, what it computes, its input) -> its output


class Tap:
    """Is told of every document, and runs every module of the forward pass."""

    def begins(self, row: int, document: int) -> None:
        """The forward pass of a document begins; the numbers are those of the row in the step, and of the document in
        the row."""

    def module(self, name: str, function: Function, x: Tensor) -> Tensor:
        """Run the module ``name`` on ``x`` (T, ...)."""
        return function(x)

    def inside(self, prefix: str) -> Module:
        """``module`` for names that begin with ``prefix``."""
        return lambda name, function, x: self.module(prefix + name, function, x)


NO_TAP = Tap()
