"""Window per block: a ring hands a sliding window to a kernel that knows nothing of the places of blocks.

The kernel aligns a window to the ends of the queries and of the keys that it is given. In a ring, rank r holds piece r
of a document, and the queries at place i of their piece see the places i - window + 1 to i of every earlier piece, too.
In zigzag of two ranks, rank 0 holds pieces 0 and 3, rank 1 pieces 1 and 2; a rank's own block is right only as far as
its pieces are neighbours, and queries that see no key of an earlier block lose all that they saw.
docs/findings/ring-attention-window.md.
"""

import torch
from torch import Tensor

from conformance.defect import WindowPerBlock
from conformance.oracle.variant import Variant


class WithWindowPerBlock(Variant):
    def __init__(self, defect: WindowPerBlock) -> None:
        assert not defect.zigzag or defect.ranks == 2, "zigzag of more than two ranks gives NaN"
        self._ranks, self._zigzag = defect.ranks, defect.zigzag

    def hidden_keys(self, hidden: Tensor, window: int | None) -> Tensor:
        if window is None:
            return hidden
        tokens = len(hidden)
        pieces = 2 * self._ranks if self._zigzag else self._ranks
        length = -(-tokens // pieces)  # of a piece; the last ones are padded
        piece, place = torch.arange(tokens) // length, torch.arange(tokens) % length
        if not self._zigzag:
            return ~_within(place, place, window) | (piece[:, None] < piece)
        rank = torch.where((piece == 0) | (piece == 3), 0, 1)
        second = piece >= 2  # of the rank's two
        own = rank[:, None] == rank
        at = place + length * second
        seen = own & _within(at, at, window)
        # Rank 0's second piece sees both of rank 1's, rank 1 sees rank 0's first piece: aligned to their ends.
        seen |= (piece[:, None] == 3) & (rank == 1) & _within(place + length, at, window)
        seen |= (piece[:, None] == 2) & (piece == 0) & _within(place, place, window)
        blind = piece == 1
        return ~seen | blind[:, None]


def _within(query: Tensor, key: Tensor, window: int) -> Tensor:
    """(T, T): whether a key's place is the query's, or less than ``window`` before it."""
    back = query[:, None] - key
    return (back >= 0) & (back < window)
