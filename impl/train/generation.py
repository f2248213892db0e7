"""Samples responses, by transformers' ``generate`` on a replica of the policy, or by vLLM.

The trained policy is sharded in a different way by each layout, for example into Megatron's stages. As verl does with
its engines, the weights are streamed into a replica of the whole model before each rollout, under the names in the
Hugging Face folder. This is the same for all backends and layouts, and costs each rank a copy of the model.

Samples must not depend on rank or layout. ``generate`` draws from one global generator for a whole batch, so here it
only computes logits: each token of a response has its own random number, which follows from the response's seed, and is
the token at that point of the cumulative distribution (inverse transform sampling). Prompts of a batch are padded on
the left. ``share_of`` makes the same batches for every number of ranks, so the rounding of a response is the same, too.

The vLLM engine runs on one GPU in every rank, beside the policy. It is not tested here. It is written for vLLM 0.11,
from its documentation. Responses follow from their seeds, but vLLM chooses its batches, so their last digits depend on
the other samples; the log-prob gap in the training's log measures this.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from conformance.backends.protocol import NamedTensors
from conformance.core.errors import UsageError
from conformance.spec.scenario import Scenario
from impl.models.loading import load_model
from impl.train.config import Engine


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
    """

    temperature: float
    max_new_tokens: int
    end: tuple[int, ...]
    prompts: int


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


def make_engine(kind: Engine, model: Path, scenario: Scenario, sampling: Sampling, device: str) -> RolloutEngine:
    """Makes the engine for the policy's Hugging Face folder. Raises UsageError if its package is missing."""
    if kind == "vllm":
        return VllmEngine(model, scenario, sampling)
    dtype, trusted = scenario.tier.compute.dtype, scenario.trust_remote_code
    return HfEngine(model, dtype, sampling, device, trusted=trusted)


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
        drawn = None if greedy else torch.stack([uniforms(seed, limit) for _, seed in rows]).to(self.device)
        chosen = Choose(drawn, self.sampling.temperature)
        longest = max(len(prompt) for prompt, _ in rows)
        padding = [longest - len(prompt) for prompt, _ in rows]
        padded = [[end[0]] * left + [*prompt] for left, (prompt, _) in zip(padding, rows, strict=True)]
        tokens = torch.tensor(padded, device=self.device)
        found = self.model.generate(
            tokens,  # from the mask, ``generate`` also makes the position of each token
            attention_mask=(torch.arange(longest) >= torch.tensor(padding)[:, None]).long().to(self.device),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=limit, do_sample=False, eos_token_id=list(end), pad_token_id=end[0], use_cache=True
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

    def __init__(self, drawn: Tensor | None, temperature: float) -> None:
        self.drawn, self.temperature = drawn, temperature
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (rows, so far), (rows, vocabulary)
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


MEMORY = 0.3  # share of the GPU's memory for weights and cache


class VllmEngine:
    """Implements RolloutEngine with vLLM. Raises UsageError if vLLM is missing or does not support the precision."""

    def __init__(self, model: Path, scenario: Scenario, sampling: Sampling) -> None:
        try:
            import vllm
        except ImportError:
            raise UsageError(
                "the rollout engine vllm needs vLLM; run: pip install 'backend-parity[vllm]', or use the engine hf"
            ) from None
        if scenario.tier.is_exact:
            raise UsageError("vLLM does not compute in float64; use the engine hf, or another precision than exact")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are loaded in this process
        self._vllm: Any = vllm
        self.sampling = sampling
        self._engine: Any = vllm.LLM(
            model=str(model),
            dtype=scenario.tier.compute.name,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=1,
            gpu_memory_utilization=MEMORY,
            logprobs_mode="processed_logprobs",  # at the temperature
            trust_remote_code=scenario.trust_remote_code,
            seed=scenario.seed,
        )

    def load(self, weights: NamedTensors) -> None:
        model = self._engine.llm_engine.model_executor.driver_worker.model_runner.model
        for name, weight in weights:
            model.load_weights([(name, weight)])
        self._engine.reset_prefix_cache()

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], *, greedy: bool
    ) -> list[list[Response]]:
        requests = [(list(prompt), seed) for prompt, own in zip(prompts, seeds, strict=True) for seed in own]
        outputs = self._engine.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [
                self._vllm.SamplingParams(
                    temperature=0.0 if greedy else self.sampling.temperature,
                    seed=seed,
                    max_tokens=self.sampling.max_new_tokens,
                    stop_token_ids=list(self.sampling.end),
                    logprobs=0,
                )
                for _, seed in requests
            ],
            use_tqdm=False,
        )
        responses = iter([self._response(each.outputs[0]) for each in outputs])
        return [[next(responses) for _ in own] for own in seeds]

    def _response(self, output: Any) -> Response:
        tokens = tuple(output.token_ids)
        logprobs = tuple(at[token].logprob for token, at in zip(tokens, output.logprobs, strict=True))
        return Response(tokens, logprobs, ended=tokens[-1] in self.sampling.end)
