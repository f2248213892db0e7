"""Declares the roles that models have in a cell: policy, critic and reference."""

from dataclasses import dataclass
from typing import Literal

Head = Literal["causal", "value"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """Describes the role of one model.

    ``head``: ``causal`` gives logits over the vocabulary, ``value`` one number per token. A model that is not
    ``trained`` is frozen.
    """

    name: str
    head: Head = "causal"
    trained: bool = True

    @property
    def prefix(self) -> str:
        """Returns the prefix of the keys of this model's observables; empty for the policy."""
        return "" if self == POLICY else self.name


POLICY = Role(name="policy")
CRITIC = Role(name="critic", head="value")
REFERENCE = Role(name="reference", trained=False)
