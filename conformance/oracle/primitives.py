"""Provides the dtype policy, module hooks, linear layers, RMSNorm and rotary positions of the oracle's models.

``Variant`` has the points where the oracle can reproduce a known defect or a convention of a library. The base class
changes nothing, so it is the correct oracle. A defect overrides what it changes (defects.py); several act one after
another.
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from conformance.models.components import Architecture, Linear, Llama3, Norm, Rotary, Yarn
from conformance.spec.batch import Batch, Document, Row

Weights = dict[str, Tensor]
UNNAMED = "(unnamed) "  # prefix of trained tensors that are in no folder and in no record
UNNAMED_NORM = "unnamed_grad_norm"  # value of a step: the 2-norm of the gradients of unnamed tensors


@dataclass(frozen=True)
class Policy:
    """Sets the dtypes of mixed precision as transformers and the backends do.

    compute: matrix products and activations. stable: norms, softmax, rotary tables, the loss, master weights, gradients
    and optimizer. fused: use torch's attention kernel, which most backends run below the exact tier and which rounds
    differently from the plain formula. tokens: the least number of tokens in a product with a layer's matrix; missing
    tokens are filled with zeros (in_products_of). lookups: the number of micro-batches of a step, of all data-parallel
    ranks, each of which adds up the gradients of its embeddings at once (OneLookup); 0: each document does. stored: the
    dtype to which gradients and the results of an update are rounded, weights at random if ``stochastic``; None: they
    stay in ``stable``. flips: see ``flips_ties``; None: as ``fused`` says.
    """

    compute: torch.dtype
    stable: torch.dtype
    fused: bool = False
    tokens: int = 0
    lookups: int = 0
    stored: torch.dtype | None = None
    stochastic: bool = False
    flips: bool | None = None

    @property
    def joins(self) -> bool:
        """Tells whether several short documents go through a model together: in float64, where rounding hardly depends
        on the sizes of products. The noise of a precision is that of single documents."""
        return self.compute == torch.float64 and not self.lookups

    @property
    def before_updates(self) -> "Policy":
        """Returns the policy for the passes over a rollout before its first update: fused wherever rounding matters.

        At the first update all ratios are 1, and the errors of old and new log-probs cancel if both passes round
        alike. A backend may round differently in the two passes, because it computes them in different batches.
        """
        return self if self.compute == torch.float64 else replace(self, fused=True, flips=self.fused)

    @property
    def flips_ties(self) -> bool:
        """Tells whether operands in float8 that are near to a tie are rounded the other way: in updates by one of two
        noise runs, and in passes over a rollout by the other one, so that no errors cancel."""
        return self.compute != torch.float64 and (not self.fused if self.flips is None else self.flips)


Function = Callable[[Tensor], Tensor]
Module = Callable[[str, Function, Tensor], Tensor]  # (name, what it computes, its input) -> its output


class Tap:
    """Runs every module of the forward pass and hears of every document. Subclasses observe inputs and outputs.

    Modules have the names of the Hugging Face model.
    """

    def begins(self, documents: Sequence[tuple[int, int, Document]]) -> None:
        """Announces the forward pass of documents, end to end: the row's index in the step, the document's index in the
        row, and the document."""

    def module(self, name: str, function: Function, x: Tensor) -> Tensor:
        """Runs the module ``name`` on ``x`` (T, ...)."""
        return function(x)

    def inside(self, prefix: str) -> Module:
        """Returns ``module`` for names that begin with ``prefix``."""
        return lambda name, function, x: self.module(prefix + name, function, x)


NO_TAP = Tap()


class OneLookup(Tap):
    """Looks the tokens of each document up, and adds the gradients of all embeddings of a micro-batch up at once.

    On CPUs, torch adds them up in the compute dtype, token after token. In bf16 the sum for a token that occurs 256
    times hardly grows any more (docs/findings/torch-embedding-bf16.md).
    """

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._row = -1
        self._found: list[tuple[int, Tensor, Tensor]] = []  # row, tokens (T,), embeddings (T, D)
        self._function: Function = torch.clone

    def begins(self, documents: Sequence[tuple[int, int, Document]]) -> None:
        self._tap.begins(documents)
        self._row = documents[0][0]

    def module(self, name: str, function: Function, x: Tensor) -> Tensor:
        y = self._tap.module(name, function, x)
        if name != "model.embed_tokens" or not y.requires_grad:
            return y
        self._function, leaf = function, y.detach().requires_grad_()
        self._found.append((self._row, x, leaf))
        return leaf

    def finish(self, rows: Set[int]) -> None:
        """Adds the gradients of the embeddings of these rows to that of the matrix."""
        own = [(tokens, y.grad) for row, tokens, y in self._found if row in rows and y.grad is not None]
        if own:
            self._function(torch.cat([tokens for tokens, _ in own])).backward(torch.cat([grad for _, grad in own]))


def linear(x: Tensor, w: Weights, name: str, module: Module) -> Tensor:
    """Computes x W^T + b, without b if ``w``, the weights of a layer, has no bias of this name."""
    return module(name, partial(F.linear, weight=w[name + ".weight"], bias=w.get(name + ".bias")), x)


def in_products_of(tokens: int, module: Module, w: Weights) -> Module:
    """Returns ``module`` that zero-pads inputs to ``tokens`` wherever they are multiplied by a matrix in ``w``.

    Only the rounding of the result changes: a GPU library chooses its kernel by the size of a product, and kernels add
    in different orders. Stacked experts are not padded, and neither is the head, whose outputs would take gigabytes.
    """
    if not tokens:
        return module

    def run(name: str, function: Function, x: Tensor) -> Tensor:
        weight, count = w.get(f"{name}.weight"), len(x)
        if weight is None or weight.dim() != 2 or count >= tokens:
            return module(name, function, x)
        return module(name, lambda x: function(F.pad(x, (0, 0, 0, tokens - count)))[:count], x)

    return run


def rms_norm(x: Tensor, weight: Tensor, norm: Norm, policy: Policy) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467 equation 4).

    Llama rounds to the compute dtype before it multiplies by the weight, OLMo 2 and Gemma (weight: 1 + w) after it.
    """
    x = x.to(policy.stable)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    if not norm.rounds_last:
        assert not norm.plus_one
        return weight * x.to(policy.compute)
    weight = weight.to(policy.stable)
    return (x * (1 + weight if norm.plus_one else weight)).to(policy.compute)


Table = tuple[Tensor, Tensor]  # cos and sin, (T, 1, dims / 2) each


def rotary_table(tokens: int, rotary: Rotary, *, compute: torch.dtype, stable: torch.dtype) -> Table:
    """Computes cos and sin of position * frequency (arXiv 2104.09864 section 3.2.2) in ``stable``."""
    angles = torch.arange(tokens, dtype=stable)[:, None, None] * frequencies(rotary, stable)
    size = rotary.scaling.attention_factor if isinstance(rotary.scaling, Yarn) else 1.0
    return (angles.cos() * size).to(compute), (angles.sin() * size).to(compute)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Rotates each pair (x_i, x_{i+R/2}) of a head's first R numbers by its angle; the rest stays as it is.

    ``x``: (T, H, E). The pairing is that of the published Hugging Face weights.
    """
    cos, sin = table
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def frequencies(rotary: Rotary, dtype: torch.dtype) -> Tensor:
    """Returns the angle by which each pair turns from one position to the next, (dims / 2,)."""
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
    """Scales frequencies as Llama 3.1 does (context: arXiv 2407.21783 section 3.4.2; formula: Meta's `apply_scaling`).

    A pair with at least high_freq_factor turns within the original positions keeps its frequency. A pair with at most
    low_freq_factor turns has its frequency divided by the factor. Between the two, the frequency is interpolated.
    """
    turns = s.original_positions * plain / (2 * math.pi)
    weight = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - weight) * plain / s.factor + weight * plain


def _yarn(plain: Tensor, rotary: Rotary, s: Yarn) -> Tensor:
    """Scales frequencies by YaRN (arXiv 2309.00071 section 3.2, "NTK-by-parts"), with the authors' ramp over pairs.

    The pair that turns b times within L positions is number dims * ln(L / (2 pi b)) / (2 ln theta). Pairs before that
    of beta_fast turns keep their frequency. Pairs after that of beta_slow turns have it divided by the factor.
    """

    def pair_of(turns: float) -> float:
        return rotary.dims * math.log(s.original_positions / (2 * math.pi * turns)) / (2 * math.log(rotary.theta))

    first, last = pair_of(s.beta_fast), pair_of(s.beta_slow)
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dims - 1)
    if first == last:
        last += 0.001  # as in the authors' code, against division by zero
    slow = ((torch.arange(len(plain), dtype=plain.dtype) - first) / (last - first)).clamp(0.0, 1.0)
    return slow * plain / s.factor + (1 - slow) * plain


@dataclass(frozen=True, kw_only=True)
class BalancedPart:
    """Holds the rows whose load each router balances by itself, and the rows whose choices it counts for that.

    weight: the factor of this part's loss.
    """

    rows: Sequence[Row]
    counted: Sequence[Row]
    weight: float


class Variant:
    """Lets a defect replace intermediate values: each method receives a value and returns its replacement."""

    def architecture(self, a: Architecture) -> Architecture:
        """Returns the architecture that the configuration describes."""
        return a

    def loaded(self, weights: Weights, a: Architecture | None, *, trained: bool) -> Weights:
        """Returns the weights after loading. ``a``: None for a model that transformers runs."""
        return weights

    def head(self, matrix: Tensor, weights: Weights) -> Tensor:
        """Returns the matrix that produces the logits, (V, D)."""
        return matrix

    def hidden_keys(self, hidden: Tensor, window: int | None) -> Tensor:
        """Returns (T, T), True for keys (columns) that a query (row) must not see; without any, its output is 0."""
        return hidden

    def products(self, module: Module, weights: Weights, policy: Policy, *, layer: int, layers: int) -> Module:
        """Returns ``module``, which runs the modules of layer number ``layer`` with these weights."""
        return module

    def joins(self, joins: bool) -> bool:
        """Returns whether the documents of a micro-batch go through the model together, in one product."""
        return joins

    def runs(self, role: str) -> str:
        """Returns the role of the model whose passes follow."""
        return role

    def trained(self, batch: Batch) -> Batch:
        """Returns the rows of an optimizer step with the targets that it trains on."""
        return batch

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        """Returns the rows of an optimizer step, split into micro-batches."""
        return parts

    def balanced(self, parts: Sequence[BalancedPart], batch: Batch) -> Sequence[BalancedPart]:
        """Returns the parts of a step in which each router balances its load by itself; none if all do it together."""
        return parts

    def looks_up_at_once(self, at_once: bool) -> bool:
        """Returns whether OneLookup may add gradients of embeddings up at the end of the step."""
        return at_once

    def carried(self, gradients: Weights) -> Weights:
        """Returns the accumulated gradients at the beginning of a micro-batch."""
        return gradients

    def reduced(self, gradients: Weights) -> Weights:
        """Returns the gradients of the whole step."""
        return gradients

    def numbers(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the numbers of the whole step, by observable."""
        return values

    def divisor(self, tokens: float, row: Row, batch: Batch) -> float:
        """Returns the number that a mean over the ``tokens`` target tokens of the step divides the sum of a row by."""
        return tokens

    def rollout(self, batches: list[Batch]) -> list[Batch]:
        """Returns the mini-batches of a rollout with the columns that updates read."""
        return batches

    def momentum_divisor(self, norm: Tensor, epsilon: float) -> Tensor:
        """Returns the number that Muon divides a momentum of this norm by before it is orthogonalized."""
        return norm.clamp(min=epsilon)

    def muon_blocks(self, blocks: Sequence[Tensor], matrix: str) -> Sequence[Tensor]:
        """Returns the parts of a matrix of this name that Muon orthogonalizes each by itself."""
        return blocks

    def advantage_epsilon(self, epsilon: float) -> float:
        """Returns what is added to the standard deviation of a group's rewards."""
        return epsilon

    def whitening_variance(self, variance: Tensor, numbers: Tensor) -> Tensor:
        """Returns the variance by which ``numbers`` are whitened."""
        return variance

    def whitening_mean(self, mean: Tensor, numbers: Tensor) -> Tensor:
        """Returns the mean of ``numbers`` that whitening subtracts."""
        return mean

    def mean_count(self, count: float) -> float:
        """Returns the divisor of a mean over this number of tokens of a response."""
        return count

    def schedule_step(self, updates: int, updates_per_rollout: int) -> int:
        """Returns the step of the schedule after this number of updates."""
        return updates

    def compared(self, groups: tuple[Tensor, Tensor], scores: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rewards by whose mean, and by whose deviation, a response is normalised; ``scores``: of all."""
        return groups

    def decays(self, decays: bool, name: str) -> bool:
        """Returns whether the parameter of this name is decayed."""
        return decays

    def decay(self, parts: tuple[Tensor, float], weight: Tensor) -> tuple[Tensor, float]:
        """Returns the gradient that AdamW's moments get, and the decay that is decoupled from them."""
        return parts


def in_order(variants: Sequence[Variant]) -> Variant:
    """Returns a variant in which each method passes its value through all ``variants``, one after another."""

    def passed_on(name: str, value: Any, *args: Any, **options: Any) -> Any:
        for variant in variants:
            value = getattr(variant, name)(value, *args, **options)
        return value

    all_of_them = Variant()
    for name in (name for name in vars(Variant) if not name.startswith("_")):
        setattr(all_of_them, name, partial(passed_on, name))
    return all_of_them


HONEST = Variant()
