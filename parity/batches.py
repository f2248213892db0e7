"""Batches: a fingerprint of the rows of a step, whatever their order, their ranks and their micro-batches."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from conformance.validation import UsageError

WORDS = 4  # 32-bit words of a row's SHA-256 that are added up; in float64, exact for two million rows

Rows = Tensor | Iterable[Tensor | Sequence[int]]
"""Token ids: [rows, length], or rows of any lengths, without padding."""


def fingerprint(batch: Rows | None) -> list[float]:
    """How many rows, and the sums of the words of their hashes: 1 + WORDS numbers that add up over ranks."""
    total = np.zeros(1 + WORDS)
    for row in () if batch is None else batch:
        ids = torch.as_tensor(row)
        if ids.dim() != 1 or ids.is_floating_point():
            raise UsageError(
                f"batch= has to be rows of token ids; it has a row of shape {tuple(ids.shape)}, {ids.dtype}"
            )
        digest = hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).digest()
        total += [1, *np.frombuffer(digest, dtype="<u4", count=WORDS)]
    return [float(number) for number in total]


def hexadecimal(words: Sequence[float]) -> str:
    """The sums of WORDS words as they are written in a record."""
    return "".join(f"{int(word) % 2**32:08x}" for word in words)
