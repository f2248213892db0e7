"""Samples responses, by transformers' ``generate`` on a replica of the policy, or by an engine in another process.

The trained policy is sharded in a different way by each layout, for example into Megatron's stages. As verl does with
its engines, the weights are streamed into a replica of the whole model before each rollout, under the names in the
Hugging Face folder. This is the same for all backends and layouts, and costs each rank a copy of the model.

Samples must not depend on rank or layout. ``generate`` draws from one global generator for a whole batch, so here it
only computes logits: each token of a response has its own random number, which follows from the response's seed, and is
the token at that point of the cumulative distribution (inverse transform sampling). Prompts of a batch are padded on
the left. ``share_of`` makes the same batches for every number of ranks, so the rounding of a response is the same, too.

Other engines are those that ``parity engine`` judges. Responses follow from their seeds, but an engine may choose its
batches, so their last digits depend on the other samples; the log-prob gap in the training's log measures this.
"""

import contextlib
import hashlib
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from conformance.backends.engines import Decoding, EngineFailed, EngineProcess, NotSupported, ServedEngine
from conformance.backends.protocol import NamedTensors
from conformance.core.errors import UsageError
from conformance.spec.scenario import Scenario
from impl.models.export import write_folder
from impl.models.loading import load_model


@dataclass(frozen=True)
class Response:
    """Holds a sampled response.

    tokens: with the end-of-sequence token, if the response has ended.
    logprobs: the engine's log-prob of each token, at the temperature.
    ended: whether the policy has ended it; else it was cut.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Configures sampling.

    max_new_tokens: the length at which a response is cut.
    end: the tokens that end a response.
    prompts: the number of prompts whose responses are sampled at once.
    processors: change the logits before the temperature.
    """

    temperature: float
    max_new_tokens: int
    end: tuple[int, ...]
    prompts: int
    processors: tuple[transformers.LogitsProcessor, ...] = ()


class RolloutEngine(Protocol):
    sampling: Sampling

    def load(self, weights: NamedTensors) -> None:
        """Sets all weights from whole tensors under Hugging Face names; every rank gets them."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], *, greedy: bool
    ) -> list[list[Response]]:
        """Returns one response to each prompt for each of its ``seeds``; ``greedy`` takes the likeliest token.

        Ranks do not wait for each other here.
        """
        ...


def share_of(prompts: Sequence[Sequence[int]], at_once: int, *, rank: int, ranks: int) -> list[int]:
    """Returns the indices of a rank's prompts: whole batches of ``at_once`` prompts of similar lengths.

    Only the last batch of all is smaller, so an engine that cuts the result into batches has the same on any number of
    ranks.
    """
    ordered = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    batches = [ordered[start : start + at_once] for start in range(0, len(ordered), at_once)]
    return [index for batch in batches[rank::ranks] for index in batch]


def make_engine(
    kind: str, model: Path, scenario: Scenario, sampling: Sampling, device: str, *, python: str = ""
) -> RolloutEngine:
    """Makes the engine for the policy's Hugging Face folder. python: of the environment of an engine other than ``hf``.

    Raises UsageError if the engine's package is missing.
    """
    if kind == "hf":
        dtype, trusted = scenario.tier.compute.dtype, scenario.trust_remote_code
        return HfEngine(model, dtype, sampling, device, trusted=trusted)
    try:
        return ServedRollouts(EngineProcess(kind, python=python, limit_s=LIMIT_S), model, scenario, sampling)
    except (NotSupported, EngineFailed) as error:
        raise UsageError(f"the rollout engine {kind}: {error}") from None


def seed_of(seed: int, rollout: int, prompt: int, sample: int) -> int:
    """Derives the seed of a response from the training's seed and the indices of rollout, prompt and sample."""
    digest = hashlib.sha256(f"{seed} {rollout} {prompt} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # generators take 63 bits


class HfEngine:
    """Samples with a replica of the policy on this rank's device, in the dtype that the policy computes in."""

    def __init__(
        self, model: Path, dtype: torch.dtype, sampling: Sampling, device: str, *, trusted: bool = False
    ) -> None:
        self.sampling, self.device = sampling, device
        self.model: Any = load_model(model, dtype=dtype, attention=None, trusted=trusted)
        self.model.eval().requires_grad_(False).to(device)
        # Settings of the folder, such as a repetition penalty, would sample from another distribution than the policy.
        self.model.generation_config = transformers.GenerationConfig()
        if hasattr(config := self.model.config.get_text_config(), "output_router_logits"):
            config.output_router_logits = False  # the balancing loss cannot be computed with padding, nor is it wanted

    def load(self, weights: NamedTensors) -> None:
        own = dict(self.model.named_parameters())  # of two tied parameters, the first
        for name, weight in weights:
            if name in own:
                own.pop(name).copy_(weight)
        assert not own, f"the policy has no weights {', '.join(own)}"

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], *, greedy: bool
    ) -> list[list[Response]]:
        found = []
        for start in range(0, len(prompts), self.sampling.prompts):
            batch = list(zip(prompts, seeds, strict=True))[start : start + self.sampling.prompts]
            responses = iter(self._batch([(prompt, seed) for prompt, own in batch for seed in own], greedy))
            found += [[next(responses) for _ in own] for _, own in batch]
        return found

    def _batch(self, rows: Sequence[tuple[Sequence[int], int]], greedy: bool) -> list[Response]:
        """Samples the responses to some prompts, each with its seed, at once."""
        limit, end = self.sampling.max_new_tokens, self.sampling.end
        padded_by = end[0] if end else 0
        drawn = None if greedy else torch.stack([uniforms(seed, limit) for _, seed in rows]).to(self.device)
        chosen = Choose(drawn, self.sampling.temperature, self.sampling.processors)
        longest = max(len(prompt) for prompt, _ in rows)
        padding = [longest - len(prompt) for prompt, _ in rows]
        padded = [[padded_by] * left + [*prompt] for left, (prompt, _) in zip(padding, rows, strict=True)]
        tokens = torch.tensor(padded, device=self.device)
        found = self.model.generate(
            tokens,  # from the mask, ``generate`` also makes the position of each token
            attention_mask=(torch.arange(longest) >= torch.tensor(padding)[:, None]).long().to(self.device),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=list(end) or None,
                pad_token_id=padded_by,
                use_cache=True,
            ),
            logits_processor=[chosen],
        )
        logprobs = torch.stack(chosen.logprobs, dim=1).tolist()
        responses = found[:, longest:].tolist()
        return [_cut(*each, end) for each in zip(responses, logprobs, strict=True)]


def uniforms(seed: int, count: int) -> Tensor:
    """Draws (count,) float64 in [0, 1) on the CPU, so that they are the same for every device."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Choose(transformers.LogitsProcessor):  # type: ignore[misc]
    """Leaves ``generate`` one token per row, and appends its log-prob to ``logprobs``, each (rows,).

    drawn: (rows, length), the random number of each token; None selects the likeliest tokens.
    """

    def __init__(
        self, drawn: Tensor | None, temperature: float, processors: Sequence[transformers.LogitsProcessor] = ()
    ) -> None:
        self.drawn, self.temperature, self.processors = drawn, temperature, processors
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (rows, so far), (rows, vocabulary)
        for process in self.processors:
            scores = process(input_ids, scores)
        logprobs = (scores / self.temperature).log_softmax(dim=-1)
        if self.drawn is None:
            tokens = logprobs.argmax(dim=-1, keepdim=True)
        else:
            below = logprobs.double().exp().cumsum(dim=-1)
            target = self.drawn[:, len(self.logprobs), None] * below[:, -1:]  # the sum is 1 but for rounding
            tokens = torch.searchsorted(below, target, right=True).clamp(max=scores.shape[-1] - 1)
        self.logprobs.append(logprobs.gather(-1, tokens)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)


def _cut(tokens: list[int], logprobs: list[float], end: tuple[int, ...]) -> Response:
    """Cuts a response after its end token; ``generate`` continues until all responses of the batch have ended."""
    length = next((index + 1 for index, token in enumerate(tokens) if token in end), len(tokens))
    return Response(tuple(tokens[:length]), tuple(logprobs[:length]), ended=tokens[length - 1] in end)


LIMIT_S = 1800.0  # for one answer of an engine's process


class ServedRollouts:
    """Implements RolloutEngine by an engine of conformance.backends.engines, in a process beside each rank.

    Weights travel as a Hugging Face folder. Raises UsageError if the engine cannot serve the policy.
    """

    def __init__(self, engine: ServedEngine, model: Path, scenario: Scenario, sampling: Sampling) -> None:
        self.sampling, self._engine, self._source = sampling, engine, model
        stack = contextlib.ExitStack()
        stack.enter_context(engine)
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-rollouts-")))
        weakref.finalize(self, stack.close)
        reports = engine.info.reports
        if "processed" not in reports and sampling.temperature != 1:
            raise UsageError(f"the engine {engine.info.name} gives no log-probs at a temperature; use --temperature 1")
        try:
            engine.start(model, scenario.precision, reports.get("processed", {}))
        except NotSupported as error:
            raise UsageError(f"the rollout engine {engine.info.name}: {error}") from None

    def load(self, weights: NamedTensors) -> None:
        folder = self._folder / "policy"
        write_folder(folder, source=self._source, weights=weights, dtype="masters")
        self._engine.update(next(iter(self._engine.info.ways)), folder)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], *, greedy: bool
    ) -> list[list[Response]]:
        sampling = self.sampling
        decoding = Decoding(
            max_new_tokens=sampling.max_new_tokens,
            temperature=0.0 if greedy else sampling.temperature,
            stop=sampling.end,
        )
        requests = [prompt for prompt, own in zip(prompts, seeds, strict=True) for _ in own]
        found = self._engine.generate(requests, decoding, list(chain.from_iterable(seeds))) if requests else []
        responses = iter(
            Response(one.tokens, tuple(one.logprobs.tolist()), ended=one.tokens[-1] in sampling.end) for one in found
        )
        return [[next(responses) for _ in own] for own in seeds]
