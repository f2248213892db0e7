"""Loads openPangu's published modeling file unchanged: stand-ins for what only Ascend or older transformers have.

The file imports ``torch_npu`` and asks it for the device, to choose a kernel for inference; it was written for a
transformers with other names. While such a model is loaded, and no longer, there are

* ``torch_npu`` and ``torch.npu``, if they are not installed: a machine without such a device;
* ``LossKwargs``, which is ``TransformersKwargs`` now;
* ``create_causal_mask`` with the arguments of old (``input_embeds``, ``cache_position``);
* the default rotary frequencies in ``ROPE_INIT_FUNCTIONS`` (arXiv 2104.09864, section 3.2.2).

What the file has bound on import stays bound in it, and in nothing else.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import masking_utils, modeling_rope_utils
from transformers.utils import import_utils

from conformance.inputs.folder import SHIPPED_CODE, folder_code

NEEDS = ("torch_npu", "LossKwargs")  # a Python file of the folder has one of these words


@contextlib.contextmanager
def older_names(folder: Path, *, runs_code: bool) -> Iterator[bool]:
    """Stand-ins around loading the model in ``folder``, if Python code of it is run and needs any; whether it does."""
    if not runs_code or not _needs_stand_ins(folder):
        yield False
        return
    import_utils.is_torch_npu_available()  # the answer is kept, and has to be that of the machine
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("torch_npu") is None:
            stack.enter_context(mock.patch.dict(sys.modules, _npu()))
            stack.enter_context(mock.patch.object(torch, "npu", _Device, create=True))
        current = transformers.utils.TransformersKwargs
        stack.enter_context(mock.patch.object(transformers.utils, "LossKwargs", current, create=True))
        stack.enter_context(mock.patch.object(masking_utils, "create_causal_mask", _create_causal_mask))
        stack.enter_context(mock.patch.dict(modeling_rope_utils.ROPE_INIT_FUNCTIONS, {"default": default_frequencies}))
        yield True


def _needs_stand_ins(folder: Path) -> bool:
    if folder_code(folder) == SHIPPED_CODE:
        return False
    return any(word in file.read_text(encoding="utf-8") for file in folder.glob("*.py") for word in NEEDS)


def fill_rotary_tables(model: torch.nn.Module) -> None:
    """Compute frequencies that transformers leaves as they lie in memory: it loads a model without any memory first,
    and afterwards asks ``_init_weights`` for what is in no file, which older code has only for weights."""
    for module in model.modules():
        if (make := getattr(module, "rope_init_fn", None)) is not None:
            rotary: Any = module
            frequencies, rotary.attention_scaling = make(rotary.config, None)
            rotary.inv_freq.copy_(frequencies)
            rotary.original_inv_freq = rotary.inv_freq


def default_frequencies(config: Any, device: Any = None, seq_len: int | None = None) -> tuple[Tensor, float]:
    """theta^(-2i / E) for each pair of a head (E / 2,), and the factor 1 of cos and sin."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or config.rope_theta
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / size
    return 1.0 / theta**exponents, 1.0


class _Device:
    """``torch.npu`` of a machine that has none."""

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return ""


def _npu() -> dict[str, ModuleType]:
    names = ("torch_npu", "torch_npu.contrib", "torch_npu.contrib.transfer_to_npu")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    return modules


_today = masking_utils.create_causal_mask


def _create_causal_mask(
    config: Any, *, input_embeds: Tensor | None = None, cache_position: Tensor | None = None, **arguments: Any
) -> Any:
    if input_embeds is not None:
        arguments["inputs_embeds"] = input_embeds
    return _today(config=config, **arguments)
