"""Records of anybody's training loop, per parameter and step, which ``parity diff`` compares across frameworks.

``parity.record`` for a loop of one's own, ``parity.TrainerRecord`` for transformers' Trainer. What a record holds and
what it can show: docs/guides/recording.md. Nothing but this file is imported before one of the two is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.hf_trainer import TrainerRecord
    from parity.recorder import record

__all__ = ["TrainerRecord", "record"]

_MODULES = {"record": "parity.recorder", "TrainerRecord": "parity.hf_trainer"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'parity' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
