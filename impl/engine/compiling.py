"""Compiles the layers of a Hugging Face model with torch.compile (layout option ``compile``).

Each layer is compiled separately, so layers of one kind share their code. Sharding, recomputation and hooks stay
outside of the compiled code; torch would compile hooks again for each layer of a DeepSpeed engine. Embedding, last norm
and head run uncompiled.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def layers_of(model: transformers.PreTrainedModel) -> list[torch.nn.Module]:
    """Returns the layers of a model: the modules that its class lists in ``_no_split_modules``."""
    kinds = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in kinds]


def compile_layers(model: transformers.PreTrainedModel, *, deterministic: bool, shipped: bool) -> None:
    """Marks each layer to be compiled at its first call, and again for other lengths.

    Call this function after tensor parallelism, and before anything wraps the layers.

    deterministic: several ranks compute the same numbers, as with tensor parallelism, so all take the same kernels, not
        the fastest by each rank's clock (docs/findings/inductor-ranks-choose.md).
    shipped: upstream behaviour: the embedding gets no gradient if ranks sum its output.
    """
    compiled = torch.compile(_forward, options={"deterministic": True} if deterministic else None)
    layers = layers_of(model)
    kinds = {kind: _with_compiled_forward(kind, compiled) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    if not shipped:
        model.get_input_embeddings().register_forward_hook(_wait_for_collective)


def _with_compiled_forward(kind: type[torch.nn.Module], compiled: Callable[..., Any]) -> type[torch.nn.Module]:
    """Returns a subclass of the layers' class ``kind``; transformers recomputes a subclass in any case."""

    def forward(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return compiled(kind.forward, layer, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _forward(function: Callable[..., Any], layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(layer, *args, **kwargs)


def _wait_for_collective(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    # docs/findings/compiled-collective-inputs.md: a copy waits for the collective and stays in the autograd graph.
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def forget_compiled() -> None:
    """Drops the code that was compiled in this process.

    Otherwise it would count for the next model of the same code, until torch stops compiling that code
    (``torch._dynamo.config.recompile_limit``) and runs it uncompiled.
    """
    torch._dynamo.reset()
