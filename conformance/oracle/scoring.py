"""Scores given tokens with the oracle's models, for the judgement of rollout engines."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.primitives import HONEST, NO_TAP, Policy, Tap, Weights
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


class Reference:
    """Runs the model of a scenario, in float64 or in the precision of a noise run (conformance.oracle.run.POLICIES)."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._decoder = decoder_of(scenario, folder)

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    def weights(self, folder: Path, run: str = FLOAT64) -> Weights:
        """Reads the weights of a folder by their Hugging Face names. Raises UsageError if they do not fit."""
        with self._tier(POLICIES[run]):
            return self._decoder.load(folder, POLICIES[run].stable, HONEST, trained=True, devices=["cpu"])

    @torch.no_grad()
    def scores(
        self,
        weights: Weights,
        requests: Sequence[Sequence[int]],
        *,
        run: str = FLOAT64,
        temperatures: Sequence[float] = (),
        tap: Tap = NO_TAP,
    ) -> list[Scores]:
        policy = POLICIES[run]
        with self._tier(policy):
            return [self._of(weights, one, policy, temperatures, tap) for one in requests]

    def _of(
        self, weights: Weights, request: Sequence[int], policy: Policy, temperatures: Sequence[float], tap: Tap
    ) -> Scores:
        tokens = torch.tensor(list(request))
        logits = self._decoder.forward(tokens, weights, policy, HONEST, tap).to(policy.stable)
        logprobs, targets = logits.log_softmax(-1), tokens[1:, None]

        def at(temperature: float) -> Tensor:
            return (logits[:-1] / temperature).log_softmax(-1).gather(-1, targets)[:, 0].double()

        return Scores(
            chosen=logprobs[:-1].gather(-1, targets)[:, 0].double(),
            processed={temperature: at(temperature) for temperature in temperatures},
            best=logprobs[:-1].amax(-1).double(),
            last=logprobs[-1].double(),
        )

    @contextlib.contextmanager
    def _tier(self, policy: Policy) -> Iterator[None]:
        """Enters the exact tier for float64 if transformers, which rounds to float32 in places, is the oracle."""
        needed = self._decoder.second_class and policy.compute == torch.float64
        with exact_tier() if needed else contextlib.nullcontext():
            yield
