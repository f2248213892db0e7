"""Imports megatron-core in the same way everywhere: without torch's compiler and without Apex.

Import this module before megatron-core. megatron-core decorates functions by ``torch.compile``, which imports the
compiler at once. That takes two thirds of the import time, in every process, for functions that few models call. Here
these functions are compiled at their first call.

Where TransformerEngine or Apex are installed, megatron-core uses their optimizers, norms and layers. These do not
support float64, and their states have another layout. So both are hidden in this process, unless impl.megatron.adapter
has admitted TransformerEngine before.
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


def on_gpus_at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``function`` so that ``torch.compile`` compiles it at its first call with a tensor on a GPU."""
    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*args, *kwargs.values()))
        return (compiled() if on_gpu else function)(*args, **kwargs)

    return call


_modules: Any = sys.modules
for _name in FOREIGN:
    _modules.setdefault(_name, None)  # with None, importing raises ModuleNotFoundError

with mock.patch.object(torch, "compile", on_gpus_at_first_call):
    import megatron.core.jit  # noqa: F401 (it keeps the decorator that all of megatron-core uses)
