"""Begins with Megatron in a process: decides whether megatron-core finds TransformerEngine.

megatron-core looks for TransformerEngine once, when it is imported, and takes optimizers, norms and layers of it. The
layout option ``te`` wants the layers and their attention, and other layouts none of it (impl.megatron.global_state).
So a process is for one of the two.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from conformance.core.errors import UsageError
from conformance.spec.layout import Layout
from impl.interface.protocol import ContextConfig

if TYPE_CHECKING:
    from impl.megatron.context import MegatronContext

ENGINE = "transformer_engine.pytorch"
_TF32 = "NVIDIA_TF32_OVERRIDE"
_admitted = False  # whether this process is for layouts with ``te``


def megatron_context(config: ContextConfig) -> "MegatronContext":
    """A new context. Raises UsageError as ``begin`` does."""
    begin(config.layout)
    return import_module("impl.megatron.context").MegatronContext(config)  # type: ignore[no-any-return]


def begin(layout: Layout) -> None:
    """Let megatron-core find TransformerEngine where the layout has ``te``, before anything of it is imported.

    Raises UsageError if this process has begun with a layout of the other kind, and if TransformerEngine cannot run
    here.
    """
    wanted = "te" in layout.options
    if "megatron.core" in sys.modules and wanted != _admitted:
        had = "with" if _admitted else "without"
        raise UsageError(
            f"this process has imported megatron-core {had} TransformerEngine, and {layout} needs the contrary; "
            f"begin in a new process"
        )
    if wanted and not _admitted:
        _admit_engine()


def _admit_engine() -> None:
    global _admitted
    if not torch.cuda.is_available():
        raise UsageError("TransformerEngine's layers need a GPU (--device cuda); leave the layout's option te out")
    # Its products in float32 would be in TF32, whatever torch is told (docs/findings/transformer-engine-tf32.md).
    os.environ.setdefault(_TF32, "0")
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
    _admitted = True
