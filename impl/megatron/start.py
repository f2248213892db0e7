"""Begins a Megatron context: decides whether megatron-core finds TransformerEngine in this process.

megatron-core asks once, when it is imported, and takes optimizers, norms and layers of TransformerEngine if it finds
it. The layout option ``te`` wants the layers and their attention, and all other layouts want nothing of it
(impl.megatron.importing). So a process is for one of the two.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from conformance.validation import UsageError
from impl.strategy import ContextConfig

if TYPE_CHECKING:
    from impl.megatron.context import MegatronContext

ENGINE = "transformer_engine.pytorch"


def megatron_context(config: ContextConfig) -> "MegatronContext":
    """A new context. Raises UsageError if megatron-core is imported already, with TransformerEngine for a layout
    without ``te`` or without it for one with ``te``, and if TransformerEngine cannot run here."""
    wanted = "te" in config.layout.options
    if "megatron.core" in sys.modules and wanted != admitted():
        had = "with" if admitted() else "without"
        raise UsageError(
            f"this process has imported megatron-core {had} TransformerEngine, and {config.layout} needs the contrary; "
            f"begin in a new process"
        )
    if wanted and not admitted():
        _admit_engine()
    return import_module("impl.megatron.context").MegatronContext(config)  # type: ignore[no-any-return]


def admitted() -> bool:
    """Whether megatron-core finds TransformerEngine in this process."""
    return sys.modules.get(ENGINE) is not None


def _admit_engine() -> None:
    if not torch.cuda.is_available():
        raise UsageError("TransformerEngine's layers need a GPU (--device cuda); leave the layout's option te out")
    # Its products in float32 would be in TF32, whatever torch is told (docs/findings/transformer-engine-tf32.md).
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    try:
        import_module(ENGINE)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise UsageError(
            f"TransformerEngine cannot be imported: {error}; run: pip install --no-build-isolation "
            f"'transformer-engine[pytorch]', or leave the layout's option te out"
        ) from error
    # Its optimizers have states that are neither written nor read here (impl.megatron.tensors), so megatron-core is to
    # find torch's. What clips gradients and copies masters in one kernel stays.
    optimizers = import_module(f"{ENGINE}.optimizers")
    del optimizers.FusedAdam, optimizers.FusedSGD
