"""Roll-out engine: who samples responses. Here the embedded one, transformers' ``generate`` on a replica of the policy.

The trained policy is cut over ranks in as many ways as there are layouts, Megatron's stages among them. So, as verl
does with its engines, its weights are streamed into a replica of the whole model before each roll-out, under the names
that they have in the Hugging Face folder. This is the same for all backends and layouts, and costs each rank a copy of
the model.

What is sampled must not depend on rank or layout. ``generate`` draws from one global generator for a whole batch, so
here it only computes: a response has a random number of its own for each of its tokens, which follow from its seed, and
takes the token at that place of the cumulative distribution (inverse transform sampling). A batch is the responses to
one prompt, whoever computes it: without padding, always of the same shape, and so with the same rounding.

vLLM as a roll-out engine: an engine of one GPU in every rank, beside the policy. Not tested here: it needs vLLM.

Written for vLLM 0.11, by its documentation. Responses follow from their seeds, but vLLM batches as it likes, so that
their last digits depend on what else is sampled; the log-prob gap in the training's log says by how much.
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
    """``tokens`` with the end-of-sequence token, where it is not cut. ``logprobs``: the engine's, of each token, at the
    temperature. ``ended``: whether the policy has ended it itself."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: bool


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """max_new_tokens: a response is cut there. end: the tokens that end one."""

    temperature: float
    max_new_tokens: int
    end: tuple[int, ...]


class RolloutEngine(Protocol):
    def load(self, weights: NamedTensors) -> None:
        """Set all weights, from whole tensors under Hugging Face names; every rank gets them."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], *, greedy: bool
    ) -> list[list[Response]]:
        """Responses to each prompt: as many as it has ``seeds``, each of which decides one. ``greedy``: always the
        likeliest token. No rank waits for another here."""
        ...


def make_engine(kind: Engine, model: Path, scenario: Scenario, sampling: Sampling, device: str) -> RolloutEngine:
    """The engine of a configuration, for the policy's Hugging Face folder. Raises UsageError where it is missing."""
    if kind == "vllm":
        return VllmEngine(model, scenario, sampling)
    return HfEngine(model, scenario, sampling, device)


def seed_of(seed: int, rollout: int, prompt: int, sample: int) -> int:
    """The seed of one response, by the training's, the roll-out's number, and the places of prompt and response."""
    digest = hashlib.sha256(f"{seed} {rollout} {prompt} {sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # generators take 63 bits


class HfEngine:
    """A replica of the policy on this rank's device, in the dtype that the policy computes in."""

    def __init__(self, model: Path, scenario: Scenario, sampling: Sampling, device: str) -> None:
        self.sampling, self.device = sampling, device
        self.model: Any = load_model(
            model,
            dtype=scenario.tier.compute.dtype,
            attention=None,
            trusted=scenario.trust_remote_code,
        )
        self.model.eval().requires_grad_(False).to(device)
        # Settings of the folder, such as a repetition penalty, would sample from what the policy is not.
        self.model.generation_config = transformers.GenerationConfig()

    def load(self, weights: NamedTensors) -> None:
        own = dict(self.model.named_parameters())  # of two tied ones, the first
        for name, weight in weights:
            if name in own:
                own.pop(name).copy_(weight)
        assert not own, f"the policy has no weights {', '.join(own)}"

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], *, greedy: bool
    ) -> list[list[Response]]:
        return [self._group(prompt, own, greedy) for prompt, own in zip(prompts, seeds, strict=True)]

    def _group(self, prompt: Sequence[int], seeds: Sequence[int], greedy: bool) -> list[Response]:
        most, end = self.sampling.max_new_tokens, self.sampling.end
        drawn = None if greedy else torch.stack([uniforms(seed, most) for seed in seeds]).to(self.device)
        chosen = Choose(drawn, self.sampling.temperature)
        tokens = torch.tensor([prompt] * len(seeds), device=self.device)
        found = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=most, do_sample=False, eos_token_id=list(end), pad_token_id=end[0], use_cache=True
            ),
            logits_processor=[chosen],
        )
        logprobs = torch.stack(chosen.logprobs, dim=1).tolist()
        given = found[:, len(prompt) :].tolist()
        return [_cut(*each, end) for each in zip(given, logprobs, strict=True)]


def uniforms(seed: int, count: int) -> Tensor:
    """(count,) float64 in [0, 1), drawn on the CPU, so that they are the same for every device."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Choose(transformers.LogitsProcessor):  # type: ignore[misc]
    """Leaves ``generate`` one token to choose for each row, and notes its log-prob in ``logprobs``, each (rows,).

    drawn: (rows, length), the random number of each token; None for the likeliest ones.
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
            place = self.drawn[:, len(self.logprobs), None] * below[:, -1:]  # of a sum that is 1 but for rounding
            tokens = torch.searchsorted(below, place, right=True).clamp(max=scores.shape[-1] - 1)
        self.logprobs.append(logprobs.gather(-1, tokens)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)


def _cut(tokens: list[int], logprobs: list[float], end: tuple[int, ...]) -> Response:
    """Up to the first token that ends a response; ``generate`` goes on as long as another one of the batch does."""
    length = next((place + 1 for place, token in enumerate(tokens) if token in end), len(tokens))
    return Response(tuple(tokens[:length]), tuple(logprobs[:length]), ended=tokens[length - 1] in end)


MEMORY = 0.3  # share of the GPU's, for weights and cache


class VllmEngine:
    """See impl.train.generation.RolloutEngine. Raises UsageError where vLLM is missing, or cannot do what is asked."""

    def __init__(self, model: Path, scenario: Scenario, sampling: Sampling) -> None:
        try:
            import vllm
        except ImportError:
            raise UsageError(
                "the roll-out engine vllm needs vLLM; run: pip install 'backend-parity[vllm]', or use the engine hf"
            ) from None
        if scenario.tier.is_exact:
            raise UsageError("vLLM does not compute in float64; use the engine hf, or another precision than exact")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are given to it in this process
        self._vllm: Any = vllm
        self._sampling = sampling
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
        held = self._engine.llm_engine.model_executor.driver_worker.model_runner.model
        for name, weight in weights:
            held.load_weights([(name, weight)])
        self._engine.reset_prefix_cache()

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], *, greedy: bool
    ) -> list[list[Response]]:
        asked = [(list(prompt), seed) for prompt, own in zip(prompts, seeds, strict=True) for seed in own]
        given = self._engine.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in asked],
            [
                self._vllm.SamplingParams(
                    temperature=0.0 if greedy else self._sampling.temperature,
                    seed=seed,
                    max_tokens=self._sampling.max_new_tokens,
                    stop_token_ids=list(self._sampling.end),
                    logprobs=0,
                )
                for _, seed in asked
            ],
            use_tqdm=False,
        )
        responses = iter([self._response(each.outputs[0]) for each in given])
        return [[next(responses) for _ in own] for own in seeds]

    def _response(self, output: Any) -> Response:
        tokens = tuple(output.token_ids)
        logprobs = tuple(at[token].logprob for token, at in zip(tokens, output.logprobs, strict=True))
        return Response(tokens, logprobs, ended=tokens[-1] in self._sampling.end)
