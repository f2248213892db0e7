"""Observes and replays the routers of a Hugging Face mixture of experts, and computes their losses.

A router's module takes tokens (N, D) and returns logits, the weights of the chosen experts and their numbers. Its
forward function is wrapped, so hooks of FSDP2 and DeepSpeed stay around it. The routers' choices in a forward pass
travel with its outputs (``Outputs.routing``, ``Outputs.probabilities``), also under context parallelism. The model does
not keep them: a model that holds tensors of its own graph is in a reference cycle that is never freed, with its process
groups.

The load-balancing loss is that of the whole optimizer step (docs/explanations/mixture-of-experts.md): experts are
counted in separate forward passes before the first backward pass, because each micro-batch's gradient needs the counts
of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from conformance.spec.batch import EXPERTS, expert_column
from conformance.spec.observables import ROUTING
from impl.interface.micro_batches import Loss, MicroBatch, Outputs, RouterTerms
from impl.interface.trainable import Context, ContextConfig, Trainable
from impl.models.family_quirks import quirks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Holds the choices of one router for tokens (N,).

    weights: the experts' weights (N, X), 0 where not chosen.
    probabilities: (N, X), with a gradient.
    squares: (N,), with a gradient; their mean is the z-loss. None from a backend that does not report them.
    """

    weights: Tensor
    probabilities: Tensor
    squares: Tensor | None = None


class DataContext(Protocol):
    """Lists the part of impl.interface.trainable.Context that updates of biases need."""

    config: ContextConfig

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor: ...


class Routers:
    """Wraps the routers of a model, in the order of its layers. ``loss_factor``: 0 if they add nothing to the loss."""

    def __init__(self, model: "PreTrainedModel") -> None:
        config = model.config
        balanced = getattr(config, "output_router_logits", False)
        self.loss_factor = float(config.router_aux_loss_coef) if balanced else 0.0
        self._replayed: list[Tensor] = []
        self._observed: dict[int, Choice] = {}
        self._is_observing = False  # False while a backward pass recomputes activations
        gates = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        quirks = quirks_of(config.model_type)
        self._scores = router_sigmoids if quirks.router == "sigmoid" else router_probabilities
        self._normalises = quirks.router_normalises
        for number, gate in enumerate(gates):
            self._wrap(number, gate)
        self._slots = [int(gate.top_k) for gate in gates]
        self._gates = gates

    def _wrap(self, number: int, gate: Any) -> None:
        inner = gate.forward
        normalised = getattr(gate, "norm_topk_prob", self._normalises)
        factor = getattr(gate, "routed_scaling_factor", 1.0)

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, chosen = inner(hidden)
            probabilities = self._scores(logits)
            if self._replayed:
                chosen = self._replayed[number]
                weights = (factor * weights_of(probabilities, chosen, normalised=normalised)).to(weights.dtype)
            dense = torch.zeros_like(probabilities).scatter(-1, chosen, weights.detach().to(probabilities.dtype))
            squares = torch.logsumexp(logits.to(probabilities.dtype), dim=-1).square()
            # Also when activations are recomputed: torch's checkpointing needs the same saved tensors in this order.
            if self._is_observing:
                self._observed[number] = Choice(weights=dense, probabilities=probabilities, squares=squares)
            return logits, weights, chosen

        gate.forward = forward

    def begin(self, inputs: MicroBatch) -> None:
        """Prepares a forward pass over ``inputs``: choices in its columns replace the routers' own."""
        self._observed.clear()
        self._is_observing = True
        given = expert_column(0, 0) in inputs.columns
        self._replayed = [replayed_choice(inputs, n, count) for n, count in enumerate(self._slots)] if given else []

    def added(self, outputs: Outputs, inputs: MicroBatch) -> Outputs:
        """Returns the outputs of this forward pass with the routers' choices."""
        choices = [self._observed.pop(number) for number in range(len(self._slots))]
        self._is_observing = False
        shape = (*inputs.tokens.shape, len(choices), -1)
        weights, probabilities = (
            torch.stack(parts, dim=1).view(shape)
            for parts in ([choice.weights for choice in choices], [choice.probabilities for choice in choices])
        )
        squares = torch.stack([_reported(choice.squares) for choice in choices], dim=1).view(shape[:-1])
        return replace(outputs, routing=weights, probabilities=probabilities, squares=squares)

    @torch.no_grad()
    def move_biases(self, context: DataContext, inputs: Sequence[MicroBatch], found: Sequence[Outputs]) -> None:
        """Updates the biases by which experts are chosen, after all micro-batches of a step. Collective."""
        if rate := context.config.router_bias_rate:
            sums = [_chosen(*one).sum(dim=0) for one in zip(inputs, found, strict=True)]
            counts = torch.stack(sums).sum(dim=0).to(torch.get_default_dtype())  # (routers, X)
            biases = [gate.e_score_correction_bias for gate in self._gates]
            for bias, after in zip(biases, updated_bias(context, counts, torch.stack(biases), rate), strict=True):
                bias.copy_(after)


def updated_bias(context: DataContext, counts: Tensor, bias: Tensor, rate: float) -> Tensor:
    """Returns the biases of experts (routers, X) after a step in which this rank chose them ``counts`` times.

    Experts that all ranks chose less often than the mean are preferred more from now on (arXiv 2408.15664,
    algorithm 1). Collective over data ranks.
    """
    loads = context.all_reduce_tensor(counts)
    return bias + rate * torch.sign(loads.mean(dim=-1, keepdim=True) - loads)


def routers_of(model: "PreTrainedModel") -> Routers | None:
    """Wraps the routers of a model; returns None for a model without known routers."""
    return Routers(model) if quirks_of(model.config.model_type).has_routers else None


def router_probabilities(logits: Tensor) -> Tensor:
    """Returns the softmax over all experts, in float32 or wider."""
    return torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def router_sigmoids(logits: Tensor) -> Tensor:
    """Returns a sigmoid for each expert, in float32 or wider, as DeepSeek-V3 does."""
    return torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))


def weights_of(probabilities: Tensor, chosen: Tensor, *, normalised: bool) -> Tensor:
    """Returns the weights (N, K) of ``chosen`` experts, before a factor."""
    weights = probabilities.gather(-1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True) if normalised else weights


def choices_for(inputs: MicroBatch, key: str) -> MicroBatch:
    """Selects the choices for the forward pass that is recorded under ``key`` from the columns of a micro-batch.

    They get the names that ``Routers.begin`` reads; choices for other passes are dropped.
    """
    own, read = f"{EXPERTS}{key}.", f"{EXPERTS}{ROUTING}."
    columns = {name: column for name, column in inputs.columns.items() if not name.startswith(EXPERTS)}
    given = {name.removeprefix(own): column for name, column in inputs.columns.items() if name.startswith(own)}
    return replace(inputs, columns=columns | {read + place: column for place, column in given.items()})


def replayed_choice(inputs: MicroBatch, router: int, slots: int) -> Tensor:
    """Returns the given choices of a router: int64 (N, K). In padding they are expert 0."""
    columns = [inputs.columns[expert_column(router, slot)].flatten() for slot in range(slots)]
    return torch.stack(columns, dim=1).long()


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Holds sums over the tokens and routers of all data ranks and micro-batches of a step.

    The dtype is that of probabilities.

    counts: (X,), how often each expert was chosen.
    probabilities: (X,).
    choosers: the number of choices.
    """

    counts: Tensor
    probabilities: Tensor
    choosers: Tensor

    @property
    def loss(self) -> Tensor:
        """Returns X sum_x f_x P_x (arXiv 2101.03961, equation 4) of the whole step."""
        return self.share(self.probabilities)

    def share(self, probabilities: Tensor) -> Tensor:
        """Returns the part of the loss for these sums of probabilities (X,); the parts add up to ``loss``."""
        return len(self.counts) * (self.counts @ probabilities) / self.choosers**2


def balance_of(context: Context, inputs: Sequence[MicroBatch], found: Sequence[Outputs]) -> Balance:
    """Computes the balance from the outputs of all micro-batches of this rank; collective over data ranks."""
    sums = torch.stack([torch.cat(_sums(*one)) for one in zip(inputs, found, strict=True)]).sum(dim=0)
    total = context.all_reduce_tensor(sums)
    experts = (len(total) - 1) // 2
    return Balance(counts=total[:experts], probabilities=total[experts:-1], choosers=total[-1])


def _sums(inputs: MicroBatch, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor]:
    chosen = _chosen(inputs, outputs)
    probabilities = probability_sums(inputs, outputs).detach()
    counts = chosen.sum(dim=(0, 1)).to(probabilities.dtype)
    return counts, probabilities, counts.new_tensor([chosen.shape[0] * chosen.shape[1]])


def _chosen(inputs: MicroBatch, outputs: Outputs) -> Tensor:
    """Returns which experts real tokens have chosen, bool (tokens, routers, X)."""
    assert outputs.routing is not None
    return outputs.routing[inputs.real] > 0


def probability_sums(inputs: MicroBatch, outputs: Outputs) -> Tensor:
    """Sums the probabilities (X,) over all real tokens of a micro-batch and all routers."""
    assert outputs.probabilities is not None
    return outputs.probabilities[inputs.real].sum(dim=(0, 1))


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """Holds the terms that the routers of a model add to the loss of an optimizer step.

    factor, balance: of the load-balancing loss, with the counts of the step; None without this loss.
    z_factor: of the z-loss, 0 without it.
    tokens: the number of tokens of the step, see ``tokens_of``.
    """

    factor: float = 0.0
    balance: Balance | None = None
    z_factor: float = 0.0
    tokens: float = 0.0

    def of_micro_batch(self, inputs: MicroBatch, outputs: Outputs) -> Tensor:
        """Returns the routers' terms for a whole micro-batch, with a gradient."""
        assert outputs.routing is not None
        assert outputs.probabilities is not None
        weights, probabilities, squares = outputs.routing, outputs.probabilities, _reported(outputs.squares)
        return self.share(weights[inputs.real], probabilities[inputs.real], squares[inputs.real])

    def share(self, weights: Tensor, probabilities: Tensor, squares: Tensor) -> Tensor:
        """Returns the routers' terms for some real tokens, with a gradient.

        weights, probabilities: (N, routers, X); the probabilities have a gradient.
        squares: (N, routers), with a gradient.
        """
        added = probabilities.new_zeros([])
        if self.balance is not None:
            choices = weights.flatten(0, 1), probabilities.flatten(0, 1)
            added = added + router_loss(self.factor, self.balance, *choices)
        return added + z_loss(self.z_factor, self.tokens, squares) if self.z_factor else added


def router_terms(context: Context, trainable: Trainable, inputs: Sequence[MicroBatch]) -> RouterTerms | None:
    """Returns the terms of a step, before its first backward pass; None if the routers add nothing. Collective.

    The load-balancing loss needs the counts of the step, which come from separate forward passes.
    """
    factor, z_factor = trainable.router_loss_factor, context.config.router_z_loss
    if not factor and not z_factor:
        return None
    balance = None
    if factor:
        balance = balance_of(context, inputs, trainable.forward_backward(inputs, want=frozenset(), loss=None))
    tokens = tokens_of(context, inputs) if z_factor else 0.0
    return StepTerms(factor=factor, balance=balance, z_factor=z_factor, tokens=tokens)


def with_router_terms(loss: Loss | None, terms: RouterTerms | None, inputs: Sequence[MicroBatch]) -> Loss | None:
    """Returns the loss of micro-batches plus the routers' terms."""
    if loss is None or terms is None:
        return loss
    return lambda index, outputs: loss(index, outputs) + terms.of_micro_batch(inputs[index], outputs)


def router_loss(factor: float, balance: Balance, weights: Tensor, probabilities: Tensor) -> Tensor:
    """Returns the load-balancing term of some choices of a micro-batch: (N, X), of real tokens.

    The gradient goes through ``probabilities``.
    """
    return factor * balance.share(probabilities.sum(dim=0))


def square_sum(inputs: MicroBatch, outputs: Outputs) -> Tensor:
    """Returns the sum that the z-loss averages, over all real tokens of a micro-batch and all routers."""
    return _reported(outputs.squares)[inputs.real].sum()


def _reported(squares: Tensor | None) -> Tensor:
    assert squares is not None, "a backend that does not report the routers' squares does not support router_z_loss"
    return squares


def tokens_of(context: Context, inputs: Sequence[MicroBatch]) -> float:
    """Counts the real tokens of all data ranks and micro-batches of a step; collective over data ranks."""
    return context.all_reduce(float(sum(int((one.origin or one).real.sum()) for one in inputs)))


def z_loss_of(context: Context, inputs: Sequence[MicroBatch], found: Sequence[Outputs]) -> float | None:
    """Returns the z-loss of a step without its factor; None from a backend that does not report it. Collective."""
    if found[0].squares is None:
        return None
    pairs = zip(inputs, found, strict=True)
    own = torch.stack([square_sum(micro_batch, outputs).double() for micro_batch, outputs in pairs]).sum()
    return context.all_reduce(own.item()) / tokens_of(context, inputs)


def z_loss(factor: float, tokens: float, squares: Tensor) -> Tensor:
    """Returns the z-loss term of some tokens of a micro-batch (arXiv 2202.08906, equation 5).

    ``tokens``: of the step, see ``tokens_of``. ``squares``: (N, routers), of real tokens.
    """
    return factor * squares.sum() / tokens


def routing_rows(inputs: MicroBatch, outputs: Outputs, indices: Sequence[int]) -> dict[int, Tensor]:
    """Returns the experts' weights of all tokens of each row, by the row's index: (tokens x routers x X,), CPU."""
    assert outputs.routing is not None
    return {index: outputs.routing[r][inputs.real[r]].flatten().cpu() for r, index in enumerate(indices)}
