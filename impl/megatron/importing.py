"""Imports megatron-core alike everywhere: without torch's compiler, and without Apex and, mostly, TransformerEngine.

megatron-core decorates functions by ``torch.compile``, which imports the compiler at once: two thirds of the time of
the whole import, in every process, for functions that few models call. Here they are compiled when they are first
called.

Where TransformerEngine or Apex are installed, megatron-core takes optimizers, norms and layers of theirs. These know no
float64 and have state of another layout, so this process does as if they were not installed, unless impl.megatron.start
has admitted TransformerEngine before. Import this module before anything of megatron-core.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

FOREIGN = (
    *("transformer_engine", "transformer_engine_torch"),
    *("apex", "amp_C", "fused_weight_gradient_mlp_cuda", "fused_layer_norm_cuda"),
)


def at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, compiled by ``torch.compile`` when it is first called."""
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


_modules: Any = sys.modules
for _name in FOREIGN:
    _modules.setdefault(_name, None)  # with None, importing raises ModuleNotFoundError

with mock.patch.object(torch, "compile", at_first_call):
    import megatron.core.jit  # noqa: F401 (it takes the function by which all of megatron-core decorates)
