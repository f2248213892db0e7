"""Hides what megatron-core 0.16 to 0.19 do in different ways, so that callers need not ask for the version."""

import functools
import inspect
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common
from megatron.core.distributed import DistributedDataParallelConfig

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
