"""Names of parameters: what wrappers put in front of them or between is taken away, and what one side lacks is told.

Names are compared as Hugging Face writes them, because every framework either keeps these names or converts to them.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")  # anywhere in a name
PREFIX = re.compile(r"^(?:module\.|base_model\.model\.)+")  # torch's DDP, Megatron, DeepSpeed; PEFT

Rows = Mapping[str, slice]
"""What a fused parameter consists of: the rows of each part, under its canonical name."""

Names = Callable[[str], "str | Rows"]


def canonical(name: str) -> str:
    """The name of a parameter without the prefixes of wrappers (torch.compile, FSDP, DDP, checkpointing, PEFT)."""
    kept = [part for part in name.split(".") if part not in WRAPPERS]
    return PREFIX.sub("", ".".join(kept))


def nearest(name: str, others: Iterable[str]) -> str:
    """The name among ``others`` that is most like ``name``; empty where none is."""
    return next(iter(difflib.get_close_matches(name, list(others), n=1, cutoff=0.75)), "")
