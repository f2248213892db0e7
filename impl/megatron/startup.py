"""Decides whether megatron-core finds TransformerEngine in this process.

megatron-core looks for TransformerEngine once, when it is imported, and uses its optimizers, norms and layers. The
layout option ``te`` needs the layers and their attention; other layouts need none of it (impl.megatron.global_state).
So a process runs either layouts with ``te`` or layouts without.
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
_admitted = False  # whether this process runs layouts with ``te``


def megatron_context(config: ContextConfig) -> "MegatronContext":
    """Creates a context. Raises UsageError as ``begin`` does."""
    begin(config.layout)
    return import_module("impl.megatron.context").MegatronContext(config)  # type: ignore[no-any-return]


def begin(layout: Layout) -> None:
    """Lets megatron-core find TransformerEngine if the layout has ``te``; call it before megatron-core is imported.

    Raises UsageError if this process has begun with a layout of the other kind, or if TransformerEngine cannot run.
    """
    wanted = "te" in layout.options
    if "megatron.core" in sys.modules and wanted != _admitted:
        state, needed = ("with", "without") if _admitted else ("without", "with")
        raise UsageError(
            f"this process has imported megatron-core {state} TransformerEngine, but {layout} needs it {needed}; "
            f"start a new process"
        )
    if wanted and not _admitted:
        _admit_engine()


def _admit_engine() -> None:
    global _admitted
    if not torch.cuda.is_available():
        raise UsageError("TransformerEngine's layers need a GPU (--device cuda); leave the layout's option te out")
    # TransformerEngine would use TF32 whatever torch's flags say (docs/findings/transformer-engine-tf32.md).
    os.environ.setdefault(_TF32, "0")
    try:
        import_module(ENGINE)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise UsageError(
            f"TransformerEngine cannot be imported: {error}; run: pip install --no-build-isolation "
            f"'transformer-engine[pytorch]', or leave the layout's option te out"
        ) from error
    # Without TransformerEngine's optimizers megatron-core uses torch's, whose states impl.megatron.tensors can read and
    # write. TransformerEngine's kernels that clip gradients and copy masters stay.
    optimizers = import_module(f"{ENGINE}.optimizers")
    del optimizers.FusedAdam, optimizers.FusedSGD
    _admitted = True
