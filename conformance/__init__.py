"""Conformance suite for LLM training backends: do they compute the same thing, and if not, where do they diverge?"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.results.dataframes import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``conformance.load`` imports pandas, which takes a while, when it is asked for."""
    if name == "load":
        from conformance.results.dataframes import load as load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
