"""Reproduces each known defect and each convention of a library as a variant of the oracle.

conformance.spec.known_defects and conformance.spec.conventions describe them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from conformance.models.components import Architecture
from conformance.oracle.float8 import WithFloat8Products
from conformance.oracle.optimizer import clip, global_norm
from conformance.oracle.primitives import UNNAMED, BalancedPart, Variant, Weights, in_order
from conformance.spec.batch import Batch, Row
from conformance.spec.conventions import (
    AdvantageEpsilon,
    BiasedWhitening,
    CountEpsilon,
    DecaysAll,
    EntropyByMicroBatch,
    Float8Products,
    GenerationDenominator,
    MetricsByMicroBatch,
    MuonEpsilon,
    RoundedMasters,
    RouterLossByMicroBatch,
    RouterLossSoFar,
    SchedulePerRollout,
    TrainedPaddingToken,
)
from conformance.spec.known_defects import (
    AdvantagesOfAll,
    ClippedBeforeReduction,
    CountsByLastTokens,
    Defect,
    DividedGradients,
    DividedLoss,
    L2Decay,
    LostDecay,
    LostEmbeddingGradient,
    LostMicroBatches,
    MeanOfMeans,
    OrthogonalizedShares,
    PaddedSoftmax,
    ResummedHeadNorms,
    TrainedPrompts,
    WindowPerBlock,
)
from conformance.spec.precision import PRECISIONS


class WithDividedGradients(Variant):
    """Averages gradients over ranks that hold parts of a sequence and should be summed.

    docs/findings/deepspeed-ulysses-scale.md; with the loss, docs/findings/trl-gkd-world-size.md.
    """

    def __init__(self, defect: DividedGradients) -> None:
        self._by, self._loss = defect.by, defect.loss

    def numbers(self, values: dict[str, float]) -> dict[str, float]:
        return {name: v / self._by if self._loss and name == "loss" else v for name, v in values.items()}

    def reduced(self, gradients: Weights) -> Weights:
        return {name: gradient / self._by for name, gradient in gradients.items()}


HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


class WithResummedHeadNorms(Variant):
    """Sums accumulated gradients of head norms over tensor-parallel ranks again after each micro-batch.

    After micro-batch i, the gradient is ranks x (the accumulated gradient) + (that of micro-batch i), although the
    accumulated gradient has been summed over all ranks before. docs/findings/hf-head-norm-accumulation.md.
    """

    def __init__(self, defect: ResummedHeadNorms) -> None:
        self._defect = defect

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        """Merges micro-batch i of all data-parallel ranks into one."""
        count, ranks = self._defect.micro_batches, self._defect.data_ranks
        of_ranks = [batch.micro_batches(dp_rank=rank, dp_size=ranks, accumulation=count) for rank in range(ranks)]
        return [[row for rows in at_once for row in rows] for at_once in zip(*of_ranks, strict=True)]

    def carried(self, gradients: Weights) -> Weights:
        return {n: self._defect.ranks * g if n.endswith(HEAD_NORMS) else g for n, g in gradients.items()}


EMBEDDING = "model.embed_tokens.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")  # endings of the names of input embeddings


class WithLostEmbeddingGradient(Variant):
    """Loses the gradient of the embedding. docs/findings/compiled-collective-inputs.md."""

    def reduced(self, gradients: Weights) -> Weights:
        return gradients | {EMBEDDING: torch.zeros_like(gradients[EMBEDDING])}


class _ByMicroBatch(Variant):
    """Tells the gradients of parts of a step apart, for each role; a subclass keeps of them what it trains on."""

    def __init__(self) -> None:
        self._role = ""
        self._kept: dict[str, Weights] = {}

    def runs(self, role: str) -> str:
        self._role = role
        return role

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        self._kept = {}
        return self.parts(batch)

    def looks_up_at_once(self, at_once: bool) -> bool:
        return False

    def parts(self, batch: Batch) -> Sequence[Sequence[Row]]:
        """Returns the rows of each part."""
        raise NotImplementedError


class WithClippedBeforeReduction(_ByMicroBatch):
    """Clips the gradients of each data-parallel rank by itself."""

    def __init__(self, defect: ClippedBeforeReduction) -> None:
        super().__init__()
        self._ranks, self._max_norm = defect.ranks, defect.max_norm
        self._factor = defect.ranks if defect.averaged else 1

    def parts(self, batch: Batch) -> Sequence[Sequence[Row]]:
        return _micro_batches(batch, ranks=self._ranks, count=1)

    def carried(self, gradients: Weights) -> Weights:
        self._add(gradients)
        return {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}

    def reduced(self, gradients: Weights) -> Weights:
        self._add(gradients)
        return self._kept[self._role]

    def _add(self, gradients: Weights) -> None:
        """Adds the clipped gradients of a rank to those of the ranks before."""
        own = {name: self._factor * gradient for name, gradient in gradients.items()}
        clipped = clip(own, global_norm(own), self._max_norm)
        before = self._kept.get(self._role, {})
        self._kept[self._role] = {n: before.get(n, 0) + gradient / self._factor for n, gradient in clipped.items()}


class WithLostMicroBatches(_ByMicroBatch):
    """Leaves micro-batches out."""

    def __init__(self, defect: LostMicroBatches) -> None:
        super().__init__()
        self._defect, self._tokens = defect, 0

    def trained(self, batch: Batch) -> Batch:
        self._tokens = batch.target_count
        if self._defect.of == "gradients":
            return batch
        lost = {row.index for row in self.parts(batch)[-1]}
        rows = tuple(_targeting(row, lambda _: False) if row.index in lost else row for row in batch.rows)
        return replace(batch, rows=rows)

    def divisor(self, tokens: float, row: Row, batch: Batch) -> float:
        return self._tokens if self._defect.of == "gradients and loss" else tokens

    def numbers(self, values: dict[str, float]) -> dict[str, float]:
        return values | ({"token_count": self._tokens} if self._defect.of == "gradients and loss" else {})

    def parts(self, batch: Batch) -> Sequence[Sequence[Row]]:
        count = self._defect.micro_batches
        every = _micro_batches(batch, ranks=self._defect.data_ranks, count=count)
        return [[row for rows in every[i::count] for row in rows] for i in range(count)]

    def carried(self, gradients: Weights) -> Weights:
        self._kept[self._role] = {name: gradient.clone() for name, gradient in gradients.items()}
        is_begun_anew = self._defect.lost == "all micro-batches but the last"
        return {n: torch.zeros_like(g) for n, g in gradients.items()} if is_begun_anew else gradients

    def reduced(self, gradients: Weights) -> Weights:
        if self._defect.of != "gradients" or self._defect.lost != "the last micro-batch":
            return gradients
        before = self._kept[self._role]  # without those that only the last micro-batch reaches
        return {name: before.get(name, torch.zeros_like(gradient)) for name, gradient in gradients.items()}


class WithTrainedPrompts(Variant):
    """Trains on every token that has one before it."""

    def trained(self, batch: Batch) -> Batch:
        return replace(batch, rows=tuple(_targeting(row, lambda place: place > 0) for row in batch.rows))


def _targeting(row: Row, is_target: Callable[[int], bool]) -> Row:
    """Returns the row with the targets of every document at other places."""
    documents = [replace(d, targets=tuple(map(is_target, range(len(d.tokens))))) for d in row.documents]
    return replace(row, documents=tuple(documents))


class WithAdvantagesOfAll(Variant):
    """Normalises a response by all responses of the rollout."""

    def __init__(self, defect: AdvantagesOfAll) -> None:
        self._centred = defect.centred

    def compared(self, groups: tuple[Tensor, Tensor], scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores if self._centred else groups[0], scores


class WithPaddedSoftmax(Variant):
    """Includes the zero rows that pad the vocabulary in the softmax.

    The probability of such a row is not zero. The rows get gradients and move away from zero, these gradients count for
    clipping, and log-probs are those of a model with a larger vocabulary. docs/findings/megatron-padded-vocabulary.md.
    """

    def __init__(self, defect: PaddedSoftmax) -> None:
        self._multiple = defect.multiple

    def loaded(self, weights: Weights, a: Architecture | None, *, trained: bool) -> Weights:
        assert a is not None, "no backend with padded rows runs a model that the oracle does not know"
        rows = -a.vocab_size % self._multiple
        if a.value_head or not rows:
            return weights
        name = "model.embed_tokens.weight" if a.tied else "lm_head.weight"
        return {**weights, UNNAMED + name: weights[name].new_zeros(rows, a.hidden_size)}

    def head(self, matrix: Tensor, weights: Weights) -> Tensor:
        return torch.cat([matrix, *(w for name, w in weights.items() if name.startswith(UNNAMED))])


class WithTrainedPaddingToken(Variant):
    """Trains the embedding of the padding token. docs/findings/megatron-padding-token.md."""

    def architecture(self, a: Architecture) -> Architecture:
        return replace(a, padding_token=None)


class WithWindowPerBlock(Variant):
    """Applies a sliding window within each block of ring attention, without the positions of the blocks.

    The kernel aligns a window to the ends of the given queries and keys. In a ring, rank r holds piece r of a document,
    and the query at index i of its piece also sees the indices i - window + 1 to i of every earlier piece. In zigzag of
    two ranks, rank 0 holds pieces 0 and 3, rank 1 pieces 1 and 2. A rank's own block is right only as far as its pieces
    are neighbours, and queries that see no key of an earlier block have output 0.
    docs/findings/ring-attention-window.md.
    """

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
        visible = own & _within(at, at, window)
        # Rank 0's second piece sees both of rank 1's, rank 1 sees rank 0's first piece: aligned to their ends.
        visible |= (piece[:, None] == 3) & (rank == 1) & _within(place + length, at, window)
        visible |= (piece[:, None] == 2) & (piece == 0) & _within(place, place, window)
        blind = piece == 1
        return ~visible | blind[:, None]


def _within(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Returns (T, T), True where the key's index is the query's or less than ``window`` before it."""
    back = query[:, None] - key
    return (back >= 0) & (back < window)


class WithRoundedMasters(Variant):
    """Copies float32 masters from weights that were rounded to half precision.

    docs/findings/deepspeed-rounded-masters.md, docs/findings/megatron-rounded-masters.md.
    """

    def __init__(self, defect: RoundedMasters) -> None:
        self._dtype = PRECISIONS[defect.precision].compute.dtype

    def loaded(self, weights: Weights, a: Architecture | None, *, trained: bool) -> Weights:
        return {name: w.to(self._dtype).to(w.dtype) if trained else w for name, w in weights.items()}


class WithDecayOfAll(Variant):
    """Decays norms and biases as well."""

    def decays(self, decays: bool, name: str) -> bool:
        return True


class WithL2Decay(Variant):
    """Lets decay go through the moments."""

    def __init__(self, defect: L2Decay) -> None:
        self._everything = defect.everything

    def decays(self, decays: bool, name: str) -> bool:
        return decays or self._everything

    def decay(self, parts: tuple[Tensor, float], weight: Tensor) -> tuple[Tensor, float]:
        gradient, decay = parts
        return gradient + decay * weight, 0.0


class WithLostDecay(Variant):
    """Decays some parameters not."""

    def __init__(self, defect: LostDecay) -> None:
        names = {"the embedding": EMBEDDINGS, "the embedding and the output head": (*EMBEDDINGS, "lm_head.weight")}
        self._lost = names.get(defect.of, ("",))

    def decays(self, decays: bool, name: str) -> bool:
        return decays and not name.endswith(self._lost)


class WithMuonEpsilon(Variant):
    """Adds the epsilon to the norm of Muon's momentum."""

    def momentum_divisor(self, norm: Tensor, epsilon: float) -> Tensor:
        return norm + epsilon


class WithOrthogonalizedShares(Variant):
    """Orthogonalizes the share of each rank by itself. docs/findings/megatron-muon-parts.md."""

    def __init__(self, defect: OrthogonalizedShares) -> None:
        self._ranks = defect.ranks

    def muon_blocks(self, blocks: Sequence[Tensor], matrix: str) -> Sequence[Tensor]:
        if matrix.endswith(("o_proj.weight", "down_proj.weight")):
            return [share for block in blocks for share in block.chunk(self._ranks, dim=1)]
        parts = 2 if "gate_up_proj" in matrix else 1  # each is cut, and a rank's shares of both are one matrix
        return [share for block in blocks for share in _shares(block, parts, self._ranks)]


def _shares(block: Tensor, parts: int, ranks: int) -> Sequence[Tensor]:
    """Returns the rows of each rank: its share of each of the ``parts`` of a block."""
    rows: Sequence[Tensor] = block.unflatten(0, (parts, ranks, -1)).transpose(0, 1).flatten(1, 2).unbind()
    return rows


class WithAdvantageEpsilon(Variant):
    """Divides by the standard deviation plus another epsilon."""

    def __init__(self, convention: AdvantageEpsilon) -> None:
        self._value = convention.value

    def advantage_epsilon(self, epsilon: float) -> float:
        return self._value


class WithBiasedWhitening(Variant):
    """Whitens as OpenRLHF does."""

    def whitening_variance(self, variance: Tensor, numbers: Tensor) -> Tensor:
        return numbers.var(correction=0).clamp(min=1e-8)


class WithCountEpsilon(Variant):
    """Divides by the number of tokens plus an epsilon: V1 of docs/explanations/objectives.md."""

    def __init__(self, convention: CountEpsilon) -> None:
        self._value, self._whitens = convention.value, convention.whitening

    def mean_count(self, count: float) -> float:
        return count + self._value

    def whitening_mean(self, mean: Tensor, numbers: Tensor) -> Tensor:
        return numbers.sum() / self.mean_count(len(numbers)) if self._whitens else mean

    def whitening_variance(self, variance: Tensor, numbers: Tensor) -> Tensor:
        if not self._whitens:
            return variance
        squares = (numbers - self.whitening_mean(numbers.mean(), numbers)).square().sum()
        return squares / self.mean_count(len(numbers)) * len(numbers) / (len(numbers) - 1) + 1e-8


class WithSchedulePerRollout(Variant):
    """Counts rollouts instead of updates."""

    def schedule_step(self, updates: int, updates_per_rollout: int) -> int:
        return updates // updates_per_rollout


class WithGenerationDenominator(Variant):
    """Gives each token of a rollout the same weight in the policy loss, whatever mini-batch it is in."""

    def rollout(self, batches: list[Batch]) -> list[Batch]:
        tokens = sum(batch.target_count for batch in batches)
        return [_with_column(batch, "token_weight", lambda _: len(batches) / tokens) for batch in batches]


class WithDividedLoss(Variant):
    """Divides the weight of each token. docs/findings/swift-divided-loss.md."""

    def __init__(self, defect: DividedLoss) -> None:
        self._by = defect.by

    def rollout(self, batches: list[Batch]) -> list[Batch]:
        return [_with_column(batch, "token_weight", self._weights(batch).__getitem__) for batch in batches]

    def _weights(self, batch: Batch) -> dict[int, float]:
        """Returns the weight of a token by the index of its row; a convention may have set it before."""
        weights = dict.fromkeys((row.index for row in batch.rows), 1 / batch.target_count)
        for row in batch.rows:
            if isinstance(given := row.documents[0].columns.get("token_weight"), float):
                weights[row.index] = given
        return {index: weight / self._by for index, weight in weights.items()}


class WithMeanOfMeans(Variant):
    """Takes the mean over tokens as the mean of the means of parts."""

    def __init__(self, defect: MeanOfMeans) -> None:
        self._defect = defect

    def divisor(self, tokens: float, row: Row, batch: Batch) -> float:
        return self._defect.sizes([one.target_count for one in batch.rows])[row.index]


class WithMeansOfMicroBatches(Variant):
    """Gives each micro-batch the same weight in some means, however many tokens it has."""

    def __init__(self, convention: EntropyByMicroBatch | MetricsByMicroBatch, column: str) -> None:
        self._ranks, self._count, self._column = convention.data_ranks, convention.micro_batches, column
        self._epsilon = convention.epsilon if isinstance(convention, MetricsByMicroBatch) else 0.0

    def rollout(self, batches: list[Batch]) -> list[Batch]:
        return [_with_column(batch, self._column, self._weights(batch).__getitem__) for batch in batches]

    def _weights(self, batch: Batch) -> dict[int, float]:
        """Returns the weight of a token by the index of its row."""
        parts = _micro_batches(batch, ranks=self._ranks, count=self._count)
        # A micro-batch without tokens has mean 0 and counts.
        counts = [max(1, sum(row.target_count for row in part)) + self._epsilon for part in parts]
        return {row.index: 1 / (len(parts) * n) for part, n in zip(parts, counts, strict=True) for row in part}


def _micro_batches(batch: Batch, *, ranks: int, count: int) -> list[Sequence[Row]]:
    """Returns the micro-batches of all data ranks."""
    return [
        part for rank in range(ranks) for part in batch.micro_batches(dp_rank=rank, dp_size=ranks, accumulation=count)
    ]


class WithRouterLossByMicroBatch(Variant):
    """Balances the load of each router in each micro-batch."""

    def __init__(self, convention: RouterLossByMicroBatch) -> None:
        self._ranks, self._count = convention.data_ranks, convention.micro_batches

    def balanced(self, parts: Sequence[BalancedPart], batch: Batch) -> Sequence[BalancedPart]:
        own = _micro_batches(batch, ranks=self._ranks, count=self._count)
        return [BalancedPart(rows=rows, counted=rows, weight=1 / len(own)) for rows in own]


class WithRouterLossSoFar(Variant):
    """Balances the load of each router in each micro-batch of all ranks, by the counts of the micro-batches so far."""

    def __init__(self, convention: RouterLossSoFar) -> None:
        self._ranks, self._count = convention.data_ranks, convention.micro_batches

    def balanced(self, parts: Sequence[BalancedPart], batch: Batch) -> Sequence[BalancedPart]:
        own = _micro_batches(batch, ranks=self._ranks, count=self._count)  # those of the first rank, of the second, ...
        together = [[row for rows in own[i :: self._count] for row in rows] for i in range(self._count)]
        so_far = list(accumulate(together))
        weight = 1 / (self._count * self._ranks)
        return [
            BalancedPart(rows=rows, counted=counted, weight=weight)
            for rows, counted in zip(together, so_far, strict=True)
        ]


class WithCountsByLastTokens(Variant):
    """Divides the counts of several micro-batches by the tokens of the last one, times their number."""

    def balanced(self, parts: Sequence[BalancedPart], batch: Batch) -> Sequence[BalancedPart]:
        factors = [_tokens(part.counted) / (i * _tokens(part.rows)) for i, part in enumerate(parts, start=1)]
        return [replace(part, weight=part.weight * by) for part, by in zip(parts, factors, strict=True)]


def _tokens(rows: Sequence[Row]) -> int:
    return sum(len(document.tokens) for row in rows for document in row.documents)


def _with_column(batch: Batch, name: str, of_row: Callable[[int], float]) -> Batch:
    """Adds a column with one number for each document, by the index of its row."""
    rows = [
        replace(row, documents=tuple(replace(d, columns={**d.columns, name: of_row(row.index)}) for d in row.documents))
        for row in batch.rows
    ]
    return replace(batch, rows=tuple(rows))


VARIANTS: dict[type[Any], Callable[[Any], Variant]] = {
    RoundedMasters: WithRoundedMasters,
    PaddedSoftmax: WithPaddedSoftmax,
    TrainedPaddingToken: lambda _: WithTrainedPaddingToken(),
    ResummedHeadNorms: WithResummedHeadNorms,
    DividedGradients: WithDividedGradients,
    DividedLoss: WithDividedLoss,
    ClippedBeforeReduction: WithClippedBeforeReduction,
    LostMicroBatches: WithLostMicroBatches,
    TrainedPrompts: lambda _: WithTrainedPrompts(),
    AdvantagesOfAll: WithAdvantagesOfAll,
    L2Decay: WithL2Decay,
    LostDecay: WithLostDecay,
    WindowPerBlock: WithWindowPerBlock,
    LostEmbeddingGradient: lambda _: WithLostEmbeddingGradient(),
    OrthogonalizedShares: WithOrthogonalizedShares,
    DecaysAll: lambda _: WithDecayOfAll(),
    MuonEpsilon: lambda _: WithMuonEpsilon(),
    AdvantageEpsilon: WithAdvantageEpsilon,
    BiasedWhitening: lambda _: WithBiasedWhitening(),
    CountEpsilon: WithCountEpsilon,
    SchedulePerRollout: lambda _: WithSchedulePerRollout(),
    MeanOfMeans: WithMeanOfMeans,
    GenerationDenominator: lambda _: WithGenerationDenominator(),
    EntropyByMicroBatch: lambda one: WithMeansOfMicroBatches(one, "entropy_weight"),
    MetricsByMicroBatch: lambda one: WithMeansOfMicroBatches(one, "metric_weight"),
    RouterLossByMicroBatch: WithRouterLossByMicroBatch,
    RouterLossSoFar: WithRouterLossSoFar,
    CountsByLastTokens: lambda _: WithCountsByLastTokens(),
    Float8Products: WithFloat8Products,
}


def variant_of(defects: Sequence[Defect]) -> Variant:
    """Returns the oracle's variant with these defects; without any, the correct oracle."""
    return in_order([VARIANTS[type(defect)](defect) for defect in defects])
