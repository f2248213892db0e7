"""Strips: where in the batch the tokens of a step are off, small enough to be kept with a verdict.

Rows are judged as one vector, and a report reads no tensors, so the judge keeps what a picture of them needs: the
tokens in the order of the batch, in at most BINS bins, and the largest error of each bin.

One token has no bound of its own. The worst one is given the error of the whole observable, and the others are in
proportion to it: so a strip has a token outside of its tolerance if and only if the observable is outside of it.
"""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch

from conformance.observable import Observable
from conformance.record.verdict import BINS, Strip


def strip_of(observable: Observable, step: int, off: torch.Tensor, lengths: Mapping[int, int], *, norm: float) -> Strip:
    """off: the absolute difference of each token, row after row. lengths: of each row, by its index. norm: what the
    error of the observable is relative to.
    """
    count = len(off)
    edges = [count * i // min(BINS, count) for i in range(min(BINS, count) + 1)]
    largest = torch.stack([off[start:end].max() for start, end in pairwise(edges)]).tolist()
    numbers = off[off.isfinite()]
    error, top = numbers.norm().item() / norm, numbers.max().item() if len(numbers) else 0.0
    ends, rows = list(accumulate(lengths.values())), list(lengths)

    def place(token: int) -> tuple[int, int]:
        row = bisect_right(ends, token)
        return rows[row], token - (ends[row - 1] if row else 0)

    row, target = place(int(off.argmax()))
    return Strip(
        stage=observable.stage,
        tensor=observable.key,
        step=step,
        tokens=count,
        starts=tuple(place(edge) for edge in edges[:-1]),
        errors=tuple(_rounded(value / (top or 1.0) * error, error) for value in largest),
        max_abs=off.max().item(),
        where=f"row {row}, target {target}",
    )


def _rounded(value: float, most: float) -> float:
    """Three significant digits; never across the error of the observable, which is kept as it is judged."""
    return value if value == most else min(float(f"{value:.2e}"), most) if value < most else value
