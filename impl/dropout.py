"""Dropout, which objectives that compare log-probs do without: a ratio is of two policies, not of two random draws.

Serves claim 1 for models whose configuration has dropout: the ratio at the first update of a roll-out is 1.
"""

import torch


def switch_off_dropout(model: torch.nn.Module) -> None:
    """Leave no dropout in ``model``, in whatever mode it runs: neither a module's nor the number that attention reads.

    Updates stay in training mode, because transformers recomputes layers in no other.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
