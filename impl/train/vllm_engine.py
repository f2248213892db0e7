"""vLLM as a roll-out engine: an engine of one GPU in every rank, beside the policy. Not tested here: it needs vLLM.

Written for vLLM 0.11, by its documentation. Responses follow from their seeds, but vLLM batches as it likes, so that
their last digits depend on what else is sampled; the log-prob gap in the training's log says by how much.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.backend import NamedTensors
from conformance.scenario import Scenario
from conformance.validation import UsageError
from impl.dtypes import COMPUTE_DTYPES
from impl.train.rollout import Response, Sampling

MEMORY = 0.3  # share of the GPU's, for weights and cache


class VllmEngine:
    """See impl.train.rollout.RolloutEngine. Raises UsageError where vLLM is missing, or cannot do what is asked."""

    def __init__(self, model: Path, scenario: Scenario, sampling: Sampling) -> None:
        try:
            import vllm
        except ImportError:
            raise UsageError(
                "the roll-out engine vllm needs vLLM; run: pip install 'backend-parity[vllm]', or use the engine hf"
            ) from None
        if scenario.precision == "exact":
            raise UsageError("vLLM does not compute in float64; use the engine hf, or another precision than exact")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are given to it in this process
        self._vllm: Any = vllm
        self._sampling = sampling
        self._engine: Any = vllm.LLM(
            model=str(model),
            dtype=str(COMPUTE_DTYPES[scenario.precision]).removeprefix("torch."),
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
