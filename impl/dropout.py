"""Switches dropout off, for objectives that compare the log-probs of two forward passes.

With dropout, two passes of the same policy drop different activations, so their ratio would not be 1 at the first
update of a roll-out. Serves claim 1 for models whose configuration has dropout.
"""

import torch


def switch_off_dropout(model: torch.nn.Module) -> None:
    """Set all dropout probabilities in ``model`` to 0: those of Dropout modules and ``attention_dropout``.

    Evaluation mode would not do, because transformers recomputes layers (gradient checkpointing) only in training mode.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
