"""Serves a model with SGLang where it is installed. This adapter follows SGLang's documentation; it was never run here.

Scores and weights go through ``sglang.Engine``, whose scheduler is a process of its own.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.backends.engines import Decoding, EngineInfo, NotSupported
from conformance.core.io import read_json
from conformance.models.folders import named_tensors
from conformance.spec.precision import PRECISIONS, PrecisionName


class SglangEngine:
    """Implements conformance.backends.engines.Engine."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(
            name="sglang",
            packages=("sglang", "torch", "transformers"),
            reports={"raw": {}},
            precisions=("fp32", "bf16", "fp16"),
            ways={"disk": "update_weights_from_disk", "tensors": "update_weights_from_tensor"},
            variants={
                "chunked prefill (16 tokens)": {"chunked_prefill_size": 16},
                "no radix cache": {"disable_radix_cache": True},
            },
        )

    def __init__(self) -> None:
        os.environ.setdefault("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")  # else divided by the temperature
        try:
            import sglang
        except ImportError as error:
            raise NotSupported(f"{error}; install it in an environment of its own, and add --python") from None
        self._sglang: Any = sglang
        self._engine: Any = None

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        if self._engine is not None:
            self._engine.shutdown()
        self._vocab_size = read_json(folder / "config.json")["vocab_size"]
        self._engine = self._sglang.Engine(
            **{
                "model_path": str(folder),
                "dtype": PRECISIONS[precision].compute.name,
                "skip_tokenizer_init": True,
                "disable_cuda_graph": True,
                "enable_deterministic_inference": True,  # else it has no seeds of requests
                "device": settings.get("device", "cpu"),
                **settings,
            }
        )

    def _asked(self, prompts: Sequence[Sequence[int]], sampling: Any, **options: Any) -> list[Any]:
        given = [list(prompt) for prompt in prompts]
        answers: list[Any] = self._engine.generate(
            input_ids=given, sampling_params=sampling, return_logprob=True, **options
        )
        return [one["meta_info"] for one in answers]

    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        found = self._asked(requests, {"max_new_tokens": 1}, logprob_start_len=0)
        return [[one[0] for one in info["input_token_logprobs"][1:]] for info in found]

    def next_token(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> Tensor:
        every = [[*range(self._vocab_size)]] * len(prompts)
        found = self._asked(prompts, {"max_new_tokens": 1}, token_ids_logprob=every)
        return torch.tensor([[one[0] for one in info["output_token_ids_logprobs"][0]] for info in found])

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding
    ) -> list[tuple[list[int], list[float]]]:
        values = asdict(decoding)
        stop = list(values.pop("stop"))
        values |= {"top_k": decoding.top_k or -1, "stop_token_ids": stop, "ignore_eos": True}
        found = self._asked(prompts, [values | {"sampling_seed": seed} for seed in seeds])
        pairs = [[(one[1], one[0]) for one in info["output_token_logprobs"]] for info in found]
        return [([token for token, _ in one], [logprob for _, logprob in one]) for one in pairs]

    def update(self, way: str, folder: Path) -> None:
        if way == "disk":
            succeeded, message, *_ = self._engine.update_weights_from_disk(str(folder))
        else:
            succeeded, message, *_ = self._engine.update_weights_from_tensor([*named_tensors(folder)])
        if not succeeded:
            raise RuntimeError(message)
        self._engine.flush_cache()
