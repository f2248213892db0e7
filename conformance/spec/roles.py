"""Role: the purpose of one model of a cell: policy, critic or reference."""

from dataclasses import dataclass
from typing import Literal

Head = Literal["causal", "value"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """The role of one model. ``head``: ``causal`` gives logits over the vocabulary, ``value`` one number per token.

    A model that is not ``trained`` is frozen.
    """

    name: str
    head: Head = "causal"
    trained: bool = True

    @property
    def prefix(self) -> str:
        """The prefix of the keys of this model's observables; empty for the policy."""
        return "" if self == POLICY else self.name


POLICY = Role(name="policy")
CRITIC = Role(name="critic", head="value")
REFERENCE = Role(name="reference", trained=False)
