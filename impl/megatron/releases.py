"""Imports megatron-core in the same way everywhere, and hides what its releases 0.16 to 0.19 do in different ways.

Import this module before megatron-core. megatron-core decorates functions by ``torch.compile``, which imports the
compiler at once. That takes two thirds of the import time, in every process, for functions that few models call. Here
these functions are compiled at their first call.

Where TransformerEngine or Apex are installed, megatron-core uses their optimizers, norms and layers. These do not
support float64, and their states have another layout. So both are hidden in this process, unless impl.megatron.adapter
has admitted TransformerEngine before.
"""

import functools
import inspect
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

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import serialization  # noqa: E402
from megatron.core.dist_checkpointing.strategies import common  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402

# From 0.17 on, the default of an asynchronous save is another package, nvidia-resiliency-ext.
_PARAMETERS = inspect.signature(dist_checkpointing.save).parameters
SAVE_OPTIONS = {"async_strategy": "mcore"} if "async_strategy" in _PARAMETERS else {}


def writer_of_common_state() -> tuple[Any, str] | None:
    """Returns where megatron-core looks up its function that writes ``common.pt``: an object and the attribute's name.

    Returns None from 0.19 on, which has no such file: the common state is in the files of the tensors.
    """
    if hasattr(common, "TorchCommonSaveStrategy"):  # 0.16
        return common.TorchCommonSaveStrategy, "save_common"
    return (serialization, "save_common") if hasattr(serialization, "save_common") else None


def submodules(spec: Any) -> Any:
    """Returns the submodules of a spec: a ModuleSpec, or from 0.18 on for mixtures a ``functools.partial``."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def dtypes_of_buffers(masters: torch.dtype | None, gradients: torch.dtype | None) -> dict[str, Any]:
    """Returns Megatron-FSDP's settings of the dtypes of masters (float32, or None if weights are their own masters) and
    of gradients (None for that of weights). 0.16 has float32 gradients where ``grad_reduce_in_fp32`` is set; later
    releases do not read that."""
    if hasattr(DistributedDataParallelConfig, "preserve_fp32_weights"):  # 0.16
        return {"preserve_fp32_weights": masters is not None}
    return {"megatron_fsdp_main_params_dtype": masters, "megatron_fsdp_main_grads_dtype": gradients}
