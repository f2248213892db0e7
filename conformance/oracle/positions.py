"""Rotary positions: frequencies and their scalings, each from its paper, and the rotation."""

import math

import torch
from torch import Tensor

from conformance.oracle.parts import Linear, Llama3, Rotary, Yarn

Table = tuple[Tensor, Tensor]  # cos and sin, (T, 1, dims / 2) each


def rotary_table(tokens: int, rotary: Rotary, *, compute: torch.dtype, stable: torch.dtype) -> Table:
    """cos and sin of position * frequency (arXiv 2104.09864 section 3.2.2), computed in ``stable``."""
    angles = torch.arange(tokens, dtype=stable)[:, None, None] * frequencies(rotary, stable)
    size = rotary.scaling.attention_factor if isinstance(rotary.scaling, Yarn) else 1.0
    return (angles.cos() * size).to(compute), (angles.sin() * size).to(compute)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Turn each pair (x_i, x_{i+R/2}) of a head's first R numbers by its angle, and leave the others as they are.

    ``x``: (T, H, E). The pairing is that of the published Hugging Face weights.
    """
    cos, sin = table
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def frequencies(rotary: Rotary, dtype: torch.dtype) -> Tensor:
    """The angle by which each pair turns from one position to the next, (dims / 2,)."""
    exponents = torch.arange(0, rotary.dims, 2, dtype=dtype) / rotary.dims
    plain = 1.0 / rotary.theta**exponents
    match rotary.scaling:
        case None:
            return plain
        case Linear(factor):
            return plain / factor  # arXiv 2306.15595 equation 4
        case Llama3() as scaling:
            return _llama3(plain, scaling)
        case Yarn() as scaling:
            return _yarn(plain, rotary, scaling)


def _llama3(plain: Tensor, s: Llama3) -> Tensor:
    """Llama 3.1 (arXiv 2407.21783 section 3.4.2 has the longer context, Meta's `apply_scaling` the formula).

    A pair that turns ``turns`` times within the original positions keeps its frequency from high_freq_factor turns on,
    has it divided by the factor up to low_freq_factor turns, and goes over linearly in the turns between the two.
    """
    turns = s.original_positions * plain / (2 * math.pi)
    kept = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - kept) * plain / s.factor + kept * plain


def _yarn(plain: Tensor, rotary: Rotary, s: Yarn) -> Tensor:
    """YaRN (arXiv 2309.00071 section 3.2, "NTK-by-parts"), with the ramp in pairs of numbers, as in the authors' code.

    The pair that turns b times within L positions is number dims * ln(L / (2 pi b)) / (2 ln theta). Pairs before that
    of beta_fast turns keep their frequency, pairs after that of beta_slow turns have it divided by the factor.
    """

    def pair_of(turns: float) -> float:
        return rotary.dims * math.log(s.original_positions / (2 * math.pi * turns)) / (2 * math.log(rotary.theta))

    first, last = pair_of(s.beta_fast), pair_of(s.beta_slow)
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dims - 1)
    if first == last:
        last += 0.001  # the authors' code: no division by zero
    slow = ((torch.arange(len(plain), dtype=plain.dtype) - first) / (last - first)).clamp(0.0, 1.0)
    return slow * plain / s.factor + (1 - slow) * plain
