"""Scores given tokens with the oracle's models, and defines how logits become the distribution that is sampled from."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conformance.backends.engines import Decoding
from conformance.models.components import Architecture
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.feed_forward import Routing
from conformance.oracle.primitives import HONEST, NO_TAP, Policy, Tap, Variant, Weights
from conformance.oracle.role_model import decoder_of
from conformance.oracle.run import POLICIES
from conformance.spec.precision import FLOAT64
from conformance.spec.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Holds the log-probs of one request of T tokens, in float64.

    chosen: of each token after the first (T-1,). best: of the likeliest token at the same places. last: of every token
    that may follow (V,). response: the logits of which each token after the prompt was chosen, and those of the next
    token, in the precision of the run (n+1, V). tokens, start: the request, and where its response starts.
    """

    chosen: Tensor
    best: Tensor
    last: Tensor
    response: Tensor
    tokens: tuple[int, ...]
    start: int

    def processed(self, decoding: Decoding) -> Tensor:
        """Returns the log-probs of all tokens at the places of ``response``, in float64 (n+1, V)."""
        places = range(self.start, len(self.tokens) + 1)
        rows = zip(self.response, places, strict=True)
        return torch.stack([processed(row, self.tokens[:at], self.start, decoding) for row, at in rows]).double()


def processed(logits: Tensor, before: Sequence[int], start: int, decoding: Decoding) -> Tensor:
    """Returns the log-probs of the distribution that a token is sampled from (V,).

    logits: of the model, after the tokens ``before``, of which the response begins at ``start``. Each setting acts on
    what those before it have left, in this order: the repetition penalty of all tokens (Keskar et al., arXiv
    1909.05858), frequency and presence penalties of the response, temperature, min-p (arXiv 2407.01082), top-k, top-p
    (Holtzman et al., arXiv 1904.09751).
    """
    x, none = logits.clone(), -torch.inf
    repeated = torch.tensor(sorted({*before}))
    x[repeated] = torch.where(
        x[repeated] > 0, x[repeated] / decoding.repetition_penalty, x[repeated] * decoding.repetition_penalty
    )
    counts = torch.bincount(torch.tensor(before[start:], dtype=torch.int64), minlength=len(x))
    x -= decoding.frequency_penalty * counts + decoding.presence_penalty * (counts > 0)
    x = (x / (decoding.temperature or 1.0)).log_softmax(-1)
    if decoding.min_p:
        x = x.masked_fill(x < x.max() + math.log(decoding.min_p), none)
    if decoding.top_k:
        x = x.masked_fill(x < x.topk(decoding.top_k).values[-1], none)
    if decoding.top_p < 1:
        ordered, tokens = x.log_softmax(-1).sort(descending=True)
        dropped = ordered.exp().cumsum(-1) - ordered.exp() >= decoding.top_p  # what came before it is enough
        x = x.masked_fill(torch.zeros_like(dropped).scatter(-1, tokens, dropped), none)
    return x.log_softmax(-1)


Change = Callable[[Architecture], Architecture]


class Changed(Variant):
    """Computes another architecture than the configuration describes."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def architecture(self, a: Architecture) -> Architecture:
        return self._change(a)


class Reference:
    """Runs the model of a scenario, in float64 or in the precision of a noise run (conformance.oracle.run.POLICIES)."""

    def __init__(self, scenario: Scenario, folder: Path, device: str = "cpu") -> None:
        decoder, self._device = decoder_of(scenario, folder), device
        self._decoder = decoder.adapted(scenario.lora) if scenario.lora else decoder

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    @property
    def architecture(self) -> Architecture | None:
        """Returns the architecture of a model that is computed from the papers, None for one of transformers."""
        return getattr(self._decoder, "architecture", None)

    def merged(self, weights: Weights) -> Weights:
        """Merges adapters into the weights."""
        return self._decoder.merged(weights)

    def weights(self, folder: Path, run: str = FLOAT64) -> Weights:
        """Reads the weights of a folder by their Hugging Face names. Raises UsageError if they do not fit."""
        with self._tier(POLICIES[run]):
            return self._decoder.load(folder, POLICIES[run].stable, HONEST, trained=True, devices=[self._device])

    @property
    def routers(self) -> tuple[int, int]:
        """Returns the number of routers, and of experts that each chooses for a token; zeros without routers."""
        routers = self._decoder.routers
        return (len(routers), routers[0].chosen) if routers else (0, 0)

    @torch.no_grad()
    def experts(self, weights: Weights, requests: Sequence[Sequence[int]], run: str = FLOAT64) -> list[Tensor]:
        """Returns the experts that each token of each request is sent to, (tokens, routers, K)."""
        policy, found = POLICIES[run], []
        with self._tier(policy):
            for request in requests:
                tokens, routing = torch.tensor(list(request), device=self._device), Routing()
                self._decoder.forward(tokens, weights, policy, HONEST, NO_TAP, routing)
                found.append(torch.stack(routing.weights, dim=1).topk(self.routers[1], dim=-1).indices.cpu())
        return found

    @torch.no_grad()
    def scores(
        self,
        weights: Weights,
        requests: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
        *,
        run: str = FLOAT64,
        tap: Tap = NO_TAP,
        change: Change | None = None,
        softmax: torch.dtype | None = None,
    ) -> list[Scores]:
        """Scores requests.

        starts: where the response of each begins; by default at its end. change: makes another architecture of the
        model's. softmax: the dtype of the softmax, if it is not that of the run.
        """
        policy, variant = POLICIES[run], Changed(change) if change else HONEST
        begins = [len(one) for one in requests] if starts is None else starts
        with self._tier(policy):
            return [
                self._of(weights, one, start, policy, tap, variant, softmax or policy.stable)
                for one, start in zip(requests, begins, strict=True)
            ]

    def _of(
        self,
        weights: Weights,
        request: Sequence[int],
        start: int,
        policy: Policy,
        tap: Tap,
        variant: Variant,
        softmax: torch.dtype,
    ) -> Scores:
        tokens = torch.tensor(list(request), device=self._device)
        decoder = self._decoder.varied(variant)
        logits = decoder.forward(tokens, weights, policy, variant, tap).to(softmax)
        logprobs, targets = logits.log_softmax(-1), tokens[1:, None]
        return Scores(
            chosen=logprobs[:-1].gather(-1, targets)[:, 0].double().cpu(),
            best=logprobs[:-1].amax(-1).double().cpu(),
            last=logprobs[-1].double().cpu(),
            response=logits[start - 1 :].clone().cpu(),
            tokens=tuple(request),
            start=start,
        )

    @contextlib.contextmanager
    def _tier(self, policy: Policy) -> Iterator[None]:
        """Enters the device, and the exact tier for float64 if transformers, which rounds to float32 in places, is the
        oracle."""
        needed = self._decoder.second_class and policy.compute == torch.float64
        # On the CPU, which is the default, the context would only call Python for each operation.
        place = torch.device(self._device) if self._device != "cpu" else contextlib.nullcontext()
        with place, exact_tier() if needed else contextlib.nullcontext():
            yield
