"""Routing: what the routers of a model choose for the tokens of a document, and the loss that balances their experts.

The load-balancing loss of an optimizer step, after the Switch Transformer (arXiv 2101.03961, equations 4-6):

    X sum_x f_x P_x,  f_x = choices of expert x / N,  P_x = sum of its probabilities / N

for X experts. Sums and N run over all tokens of the step, each once for every router: those of prompts and of documents
without targets as well, and no padding. So the loss does not depend on how a step is cut into ranks and micro-batches
(the global batch of arXiv 2501.11873, equation 3). transformers' ``load_balancing_loss_func`` is the same formula over
one forward pass, so it depends on that cut; where a whole step is one forward pass without padding, the two are equal.
f has no gradient, so each document's share of the gradient is that of P, once the choices of the step are counted.

The z-loss keeps the routers' logits x small (ST-MoE, arXiv 2202.08906, equation 5). Of an optimizer step of B tokens:

    sum over routers of 1/B sum over tokens of (log sum_x exp(x_x))^2
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conformance.batch import Document, expert_column


@dataclass
class Routing:
    """The routers of one document, in the order of the layers.

    replayed: the choices that take the place of the routers' own, (T, K) of each router; empty: their own are taken.
    weights: of each router (T, X), the factor of each expert's output, 0 where it is not chosen.
    counts: (X,), how often each expert was chosen by any router. probabilities: (X,), their sums, with a gradient.
    squares: of all tokens and routers, the sum that the z-loss is made of, with a gradient.
    """

    replayed: tuple[Tensor, ...] = ()
    weights: list[Tensor] = field(default_factory=list)
    counts: Tensor | None = None
    probabilities: Tensor | None = None
    squares: Tensor | None = None

    def choose(self, probabilities: Tensor, count: int) -> Tensor:
        """The experts of each token, (T, K). ``probabilities``: (T, X)."""
        if self.replayed:
            return self.replayed[len(self.weights)].to(probabilities.device)
        return probabilities.topk(count, dim=-1).indices

    def note(self, logits: Tensor, probabilities: Tensor, chosen: Tensor, gates: Tensor) -> None:
        """Keep what a router has done: its ``logits`` and ``probabilities`` (T, X), which experts it has ``chosen``,
        and the factors ``gates`` of their outputs (T, K).

        Layers may be on several devices; all is kept where the first one is.
        """
        home = self.weights[0].device if self.weights else probabilities.device
        probabilities, chosen, gates = probabilities.to(home), chosen.to(home), gates.to(home)
        self.weights.append(gates.new_zeros(probabilities.shape).scatter(-1, chosen, gates))
        counts = torch.bincount(chosen.flatten(), minlength=probabilities.shape[-1]).to(gates.dtype)
        sums, squares = probabilities.sum(dim=0), torch.logsumexp(logits, dim=-1).square().sum().to(home)
        self.counts = counts if self.counts is None else self.counts + counts
        self.probabilities = sums if self.probabilities is None else self.probabilities + sums
        self.squares = squares if self.squares is None else self.squares + squares

    @property
    def rows(self) -> Tensor:
        """(T, routers, X), as one vector."""
        return torch.stack(self.weights, dim=1).detach().flatten()


def routing_of(document: Document, routers: int, count: int, key: str) -> Routing:
    """For a document's forward pass that is recorded under ``key``: with the choices for it in the document's columns,
    if it has any."""
    columns: Mapping[str, object] = document.columns
    if expert_column(0, 0, key) not in columns:
        return Routing()
    layers = ([columns[expert_column(layer, slot, key)] for slot in range(count)] for layer in range(routers))
    return Routing(replayed=tuple(torch.tensor(slots).T.long() for slots in layers))


@dataclass
class Balance:
    """Sums over the documents of a step: ``counts`` and ``probabilities`` (X,), N, the ``choosers``, ``squares``."""

    counts: Tensor | None = None
    probabilities: Tensor | None = None
    choosers: int = 0
    squares: float = 0.0

    def add(self, routing: Routing) -> None:
        assert routing.counts is not None
        assert routing.probabilities is not None
        assert routing.squares is not None
        self.squares += routing.squares.item()
        found = routing.probabilities.detach()
        self.counts = routing.counts if self.counts is None else self.counts + routing.counts
        self.probabilities = found if self.probabilities is None else self.probabilities + found
        self.choosers += sum(len(weights) for weights in routing.weights)

    def loss(self, probabilities: Tensor) -> Tensor:
        """X sum_x f_x P_x with f of the whole step, and these sums of probabilities: those of the step, or a share."""
        assert self.counts is not None
        return len(self.counts) * (self.counts @ probabilities) / self.choosers**2

    def terms(self) -> Tensor:
        """What the loss is the sum of: (X + 1,), of each expert how far it is from being chosen as often as the others,
        times its probabilities, and of all together the rest. The errors of tokens are no terms to go by, because one
        matrix makes the logits of them all; and that probabilities of a token add up to 1 leaves no error in the rest.
        """
        assert self.counts is not None
        assert self.probabilities is not None
        mean = self.counts.mean(dtype=self.probabilities.dtype)
        apart = (self.counts - mean) * self.probabilities
        terms = torch.cat([apart, (mean * self.probabilities.sum())[None]])
        return len(self.counts) * terms / self.choosers**2
