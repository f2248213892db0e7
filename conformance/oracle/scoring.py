"""Scores given tokens with the oracle's models, for the judgement of rollout engines."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conformance.models.components import Architecture
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.primitives import HONEST, NO_TAP, Policy, Tap, Variant, Weights
from conformance.oracle.role_model import decoder_of
from conformance.oracle.run import POLICIES
from conformance.records.header_checks import FLOAT64
from conformance.spec.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Holds the log-probs of one request of T tokens, in float64.

    chosen: of each token after the first (T-1,). processed: the same by temperature. best: of the likeliest token at
    the same places. last: of every token that may follow (V,).
    """

    chosen: Tensor
    processed: Mapping[float, Tensor]
    best: Tensor
    last: Tensor


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

    @torch.no_grad()
    def scores(
        self,
        weights: Weights,
        requests: Sequence[Sequence[int]],
        *,
        run: str = FLOAT64,
        temperatures: Sequence[float] = (),
        tap: Tap = NO_TAP,
        change: Change | None = None,
    ) -> list[Scores]:
        """Scores requests. change: makes another architecture of the model's."""
        policy, variant = POLICIES[run], Changed(change) if change else HONEST
        with self._tier(policy):
            return [self._of(weights, one, policy, temperatures, tap, variant) for one in requests]

    def _of(
        self,
        weights: Weights,
        request: Sequence[int],
        policy: Policy,
        temperatures: Sequence[float],
        tap: Tap,
        variant: Variant,
    ) -> Scores:
        tokens = torch.tensor(list(request), device=self._device)
        decoder = self._decoder.varied(variant)
        logits = decoder.forward(tokens, weights, policy, variant, tap).to(policy.stable)
        logprobs, targets = logits.log_softmax(-1), tokens[1:, None]

        def at(temperature: float) -> Tensor:
            return (logits[:-1] / temperature).log_softmax(-1).gather(-1, targets)[:, 0].double().cpu()

        return Scores(
            chosen=logprobs[:-1].gather(-1, targets)[:, 0].double().cpu(),
            processed={temperature: at(temperature) for temperature in temperatures},
            best=logprobs[:-1].amax(-1).double().cpu(),
            last=logprobs[-1].double().cpu(),
        )

    @contextlib.contextmanager
    def _tier(self, policy: Policy) -> Iterator[None]:
        """Enters the exact tier for float64 if transformers, which rounds to float32 in places, is the oracle."""
        needed = self._decoder.second_class and policy.compute == torch.float64
        with exact_tier() if needed else contextlib.nullcontext():
            yield
