"""What DeepSpeed keeps in the process beside an engine: set before the first, undone after each.

A rank runs one cell after another. What an engine leaves in DeepSpeed, torch and transformers decides how the next one
behaves, whoever's it is; docs/findings/deepspeed-global-state.md lists what that is and does.
"""

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.module_inject import set_autotp_mode
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.utils import groups
from transformers.integrations import deepspeed as hf

_LINEAR = torch.nn.functional.linear


def enter(device: str) -> None:
    """Make DeepSpeed use the initialised default process group, on ``device``."""
    # Two lines per collective otherwise: torch 2.13 deprecates names that DeepSpeed calls.
    deprecated = r".*\b(all_gather_into_tensor|reduce_scatter_tensor)\b.*"
    warnings.filterwarnings("ignore", category=FutureWarning, message=deprecated)
    deepspeed.logger.setLevel(logging.WARNING)
    if device == "cpu":
        set_accelerator(CPU_Accelerator())
        # No op is compatible, so none is compiled: the first, shared-memory inference, would take half a minute.
        deepspeed.ops.__compatible_ops__ = {}
    else:
        # For ops that are compiled at first use. Its builder cannot read "9.0a" in this variable (DeepSpeed#8619).
        os.environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
    accelerator = get_accelerator()
    assert accelerator.device_name() == torch.device(device).type
    # ZeRO-0 reduces gradients of the listed dtypes only, and float64 is not among them.
    accelerator.supported_dtypes = lambda: [*type(accelerator).supported_dtypes(accelerator), torch.float64]
    deepspeed.init_distributed(dist_backend=dist.get_backend())


@contextlib.contextmanager
def any_dtype() -> Iterator[None]:
    """Let ZeRO-3 cut parameters of any dtype.

    It asserts that they are float16, bfloat16 or float32, but uses the dtype only to decide which buffers of a model in
    half precision stay in float32. On a CPU without float16 a slip in its precedence hides the assertion.
    """
    checked = partition_parameters.InsertPostInitMethodToModuleSubClasses
    original = checked._set_dtype

    def as_float32(self: Any, settings: Any, dtype: Any) -> None:
        self.dtype = torch.float32

    checked._set_dtype = as_float32
    try:
        yield
    finally:
        checked._set_dtype = original


@contextlib.contextmanager
def cut_while_loading(settings: dict[str, Any]) -> Iterator[None]:
    """Have transformers build models under ``zero.Init``, a weight at a time."""
    held = hf.HfDeepSpeedConfig(settings)  # transformers keeps a weak reference to it
    try:
        with _restored(torch.Tensor), _restored(torch.nn.Module):
            yield
    finally:
        hf.unset_hf_deepspeed_config()
        del held


@contextlib.contextmanager
def _restored(owner: type) -> Iterator[None]:
    """Undo what was set on a class: zero.Init leaves its copies of what it patched, and patches for what it copied."""
    before = dict(vars(owner))
    try:
        yield
    finally:
        for name, value in dict(vars(owner)).items():
            if name not in before:
                delattr(owner, name)
            elif value is not before[name]:
                setattr(owner, name, before[name])


def leave() -> None:
    """Undo what engines left."""
    groups._release_process_group_references()  # the suite destroys the groups themselves
    set_autotp_mode(training=False)
    parameter_offload.FWD_MODULE_STACK.clear()
    torch.nn.functional.linear = _LINEAR  # zero.Init puts its own there
    gc.collect()
