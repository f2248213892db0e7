"""Data position: which documents a training has consumed, so that it goes on with the next one on any number of ranks.

Every epoch has an order of its own, which follows from the seed. The position is a number of documents, counted over
all ranks: it knows neither ranks nor micro-batches. It is written into the manifest of a checkpoint (claim 5).
"""

import random
from dataclasses import replace
from functools import lru_cache

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from conformance.validation import STRICT, UsageError


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataPosition:
    """documents: how many the data set has. consumed: how many have been trained on, over all epochs."""

    seed: NonNegativeInt
    documents: PositiveInt
    consumed: NonNegativeInt = 0

    def take(self, count: int) -> tuple[list[int], "DataPosition"]:
        """The numbers of the next documents, and the position after them, in the next epochs if need be."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, at = divmod(self.consumed + len(taken), self.documents)
            taken += _order(self.seed, self.documents, epoch)[at : at + count - len(taken)]
        return taken, replace(self, consumed=self.consumed + count)

    def check_same_data(self, before: "DataPosition") -> None:
        """Raises UsageError where ``before``, of a checkpoint, is a position in other data or another order."""
        if (before.seed, before.documents) != (self.seed, self.documents):
            raise UsageError(
                f"the checkpoint stands in {before.documents} documents shuffled by seed {before.seed}, and this "
                f"training has {self.documents} by seed {self.seed}; give the same data and seed"
            )


@lru_cache(maxsize=2)  # whoever fills rows takes one document at a time
def _order(seed: int, documents: int, epoch: int) -> tuple[int, ...]:
    order = list(range(documents))
    random.Random(f"{seed} {epoch}").shuffle(order)  # apart from the process's own generator
    return tuple(order)
