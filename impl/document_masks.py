"""Masks that keep packed documents apart, for code in transformers that makes its masks without their positions.

``create_causal_mask`` tells documents apart by their positions, if it is given them. The code of gpt-oss, AFMoE, OPT,
Falcon and others does not hand them on (docs/findings/gpt-oss-packed-positions.md).
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import transformers

MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")
_positions: ContextVar[torch.Tensor | None] = ContextVar("positions", default=None)  # of a forward pass that is on


def keep_documents_apart(model: transformers.PreTrainedModel) -> None:
    """Let the masks that ``model`` makes be those of the ``position_ids`` that it is given.

    The functions that make masks are replaced where the model's code looks for them, for all models of this code; they
    do as before where they are given positions, or where the model is given none.
    """
    code = inspect.unwrap(type(model.base_model).forward).__globals__
    for name in MAKERS:
        if name in code and not hasattr(code[name], "knows_positions"):
            code[name] = _with_positions(code[name])
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)


def _begin(_: Any, __: Any, options: dict[str, Any]) -> None:
    _positions.set(options.get("position_ids"))


def _end(*_: Any) -> None:
    _positions.set(None)


def _with_positions(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, **options: Any) -> Any:
        if options.get("position_ids") is None:
            options["position_ids"] = _positions.get()
        return make(*arguments, **options)

    made.knows_positions = True  # type: ignore[attr-defined]
    return made
