"""Role: one model of a cell, and what it is there for."""

from dataclasses import dataclass
from typing import Literal

Head = Literal["causal", "value"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """One model of a cell. ``head``: logits over the vocabulary, or one value per token. Frozen unless ``trained``."""

    name: str
    head: Head = "causal"
    trained: bool = True

    @property
    def prefix(self) -> str:
        """In front of the keys of its observables; the policy's have none."""
        return "" if self == POLICY else self.name


POLICY = Role(name="policy")
CRITIC = Role(name="critic", head="value")
REFERENCE = Role(name="reference", trained=False)
