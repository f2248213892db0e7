"""Imports megatron-core without torch's compiler.

megatron-core decorates functions by ``torch.compile``, which imports the compiler at once: two thirds of the time of
the whole import, in every process, for functions that few models call. Here they are compiled when they are first
called. Import this module before anything of megatron-core.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, compiled by ``torch.compile`` when it is first called."""
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


with mock.patch.object(torch, "compile", at_first_call):
    import megatron.core.jit  # noqa: F401 (it takes the function by which all of megatron-core decorates)
