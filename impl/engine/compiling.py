"""The layout option ``compile``: the layers of a Hugging Face model, compiled by torch.compile.

Each layer is compiled by itself, so that layers of one kind share their code. What shards or recomputes a layer stays
outside of it, and so do its hooks, which torch would compile anew for each layer of a DeepSpeed engine. Embedding, last
norm and head run as they are written.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def layers_of(model: transformers.PreTrainedModel) -> list[torch.nn.Module]:
    """The layers of a model, which its class names: those that no device may split."""
    kinds = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in kinds]


def compile_layers(model: transformers.PreTrainedModel, *, alike: bool, shipped: bool) -> None:
    """Let each layer be compiled at its first call, and again for other lengths; after tensor parallelism, and before
    anything wraps the layers.

    alike: several ranks compute the same numbers, as with tensor parallelism, so they take the same kernels instead of
    the fastest by each rank's clock (docs/findings/inductor-ranks-choose.md). shipped: the embedding gets no gradient
    where ranks add its output up.
    """
    compiled = torch.compile(_forward, options={"deterministic": True} if alike else None)
    layers = layers_of(model)
    kinds = {kind: _with_compiled_forward(kind, compiled) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    if not shipped:
        model.get_input_embeddings().register_forward_hook(_arrived)


def _with_compiled_forward(kind: type[torch.nn.Module], compiled: Callable[..., Any]) -> type[torch.nn.Module]:
    """A subclass of the layers' class ``kind``: transformers recomputes what a subclass runs, compiled or not."""

    def forward(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return compiled(kind.forward, layer, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _forward(function: Callable[..., Any], layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(layer, *args, **kwargs)


def _arrived(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    # docs/findings/compiled-collective-inputs.md: a copy waits for the collective, and keeps the way of the gradient.
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def forget_compiled() -> None:
    """Drop what was compiled in this process. Else it would count for the next model of the same code, until torch
    refuses to compile the code once more (``torch._dynamo.config.recompile_limit``) and runs it as it is written."""
    torch._dynamo.reset()
