"""Serves a model with transformers: the sampler of ``parity train``, and forward passes that score tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from conformance.backends.engines import Decoding, EngineInfo
from conformance.backends.protocol import NamedTensors
from conformance.models.folders import weight_files
from conformance.spec.precision import PRECISIONS, PrecisionName
from impl.models.loading import read_config
from impl.train.generation import HfEngine, Sampling


class TransformersEngine:
    """Implements conformance.backends.engines.Engine."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(
            name="transformers",
            packages=("torch", "transformers"),
            reports="processed",
            precisions=("fp32", "bf16", "fp16"),
            ways={
                "folder": "load the Hugging Face folder again",
                "tensors": "copy named tensors into the parameters, as parity train does",
            },
            variants={"chunked prefill (8 tokens)": {"chunk": 8}},
        )

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        self._precision, self._chunk = precision, settings.get("chunk")
        self._end = _end_tokens(folder)
        self._load(folder)

    def _load(self, folder: Path) -> None:
        sampling = Sampling(temperature=1.0, max_new_tokens=1, end=self._end, prompts=64)
        self._engine = HfEngine(folder, PRECISIONS[self._precision].compute.dtype, sampling, "cpu")

    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        logits = self._logits(requests)
        found: list[Sequence[float]] = []
        for row, tokens in zip(logits, requests, strict=True):
            logprobs = row[: len(tokens) - 1].float().log_softmax(-1)
            found.append(logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())
        return found

    def next_token(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        logits = self._logits(prompts)
        last = [row[len(tokens) - 1] for row, tokens in zip(logits, prompts, strict=True)]
        return torch.stack(last).float().log_softmax(-1)

    @torch.no_grad()
    def _logits(self, requests: Sequence[Sequence[int]]) -> Tensor:
        """Returns the logits of a batch that is padded on the right, (requests, longest, V)."""
        longest = max(map(len, requests))
        tokens = torch.tensor([[*one, *([self._end[0]] * (longest - len(one)))] for one in requests])
        mask = (torch.arange(longest) < torch.tensor([[len(one)] for one in requests])).long()
        if self._chunk is None:
            return self._engine.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits  # type: ignore[no-any-return]
        parts, cache = [], None
        for start in range(0, longest, self._chunk):
            end = min(start + self._chunk, longest)
            out = self._engine.model(
                input_ids=tokens[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
            )
            parts.append(out.logits)
            cache = out.past_key_values
        return torch.cat(parts, dim=1)

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[tuple[list[int], list[float]]]:
        greedy = decoding.temperature == 0
        self._engine.sampling = Sampling(
            temperature=1.0 if greedy else decoding.temperature,
            max_new_tokens=decoding.max_new_tokens,
            end=self._end,
            prompts=64,
        )
        seeds = [[decoding.seed + number] for number in range(len(prompts))]
        found = self._engine.generate(prompts, seeds, greedy=greedy)
        return [(list(one.tokens), list(one.logprobs)) for (one,) in found]

    def update(self, way: str, folder: Path) -> None:
        if way == "folder":
            self._load(folder)
        else:
            with torch.no_grad():
                self._engine.load(named_tensors(folder))


def named_tensors(folder: Path) -> NamedTensors:
    """Yields the tensors of a Hugging Face folder by their names."""
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118


def _end_tokens(folder: Path) -> tuple[int, ...]:
    end = getattr(read_config(folder).get_text_config(), "eos_token_id", None)
    return tuple(end) if isinstance(end, list) else (end or 0,)
