"""Serves a model with transformers: the sampler of ``parity train``, and forward passes that score tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from conformance.backends.engines import Decoding, EngineInfo, NotSupported
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import ADAPTER, FILE_PREFIX, WEIGHTS_FILE, is_adapter
from impl.models.loading import load_model
from impl.models.lora import load_adapter, named_parameters
from impl.train.generation import HfEngine, Sampling

BUCKET = 2**20
AT_ONCE = 64  # prompts
Response = tuple[list[int], list[float]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Says where a packed tensor lies. start: in bytes."""

    bucket: int
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class TransformersEngine:
    """Implements conformance.backends.engines.Engine. faults: what may be planted in the functions of ``seams``."""

    faults = "impl.faults.served:ENGINE_FAULTS"
    seams: ClassVar[dict[str, str]] = {
        "copy_tensors": f"{__name__}:copy_tensors",
        "serve_folder": f"{__name__}:HfEngine",
        "next_token": f"{__name__}:TransformersEngine.next_token",
    }

    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(
            name="transformers",
            packages=("torch", "transformers"),
            reports={"processed": {}},
            precisions=("fp32", "bf16", "fp16"),
            ways={
                "folder": "load the Hugging Face folder again",
                "tensors": "copy named tensors into the parameters, as parity train does",
                "packed buckets": f"the same, packed into flat buckets of {BUCKET} bytes",
                "adapter": "copy the tensors of a LoRA adapter into those of peft",
            },
            adapter_ways=("adapter",),
            variants={"chunked prefill (8 tokens)": {"chunk": 8}, "continuous batching": {"continuous": True}},
            experts={},
            interrupts=("tensors", "packed buckets", "folder"),
        )

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        self._dtype, self._chunk = PRECISIONS[precision].compute.dtype, settings.get("chunk")
        self._device, self._continuous = settings.get("device", "cpu"), settings.get("continuous", False)
        self._load(folder)

    def _load(self, folder: Path) -> None:
        sampling = Sampling(temperature=1.0, max_new_tokens=1, end=(), prompts=AT_ONCE)
        engine = HfEngine(folder, self._dtype, sampling, self._device)
        if (folder / ADAPTER).is_dir():
            load_adapter(engine.model, folder / ADAPTER)
            engine.model.requires_grad_(False).to(self._device)
        self._engine = engine

    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        logits = self._logits(requests)
        found: list[Sequence[float]] = []
        for row, tokens in zip(logits, requests, strict=True):
            logprobs = row[: len(tokens) - 1].float().log_softmax(-1)
            targets = torch.tensor(tokens[1:], device=self._device)[:, None]
            found.append(logprobs.gather(-1, targets)[:, 0].tolist())
        return found

    def next_token(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> Tensor:
        logits, rows = self._logits(prompts), []
        for row, tokens in zip(logits, prompts, strict=True):
            scores = row[None, len(tokens) - 1].float()
            for process in _processors(decoding):
                scores = process(torch.tensor([list(tokens)], device=self._device), scores)
            rows.append(scores[0].log_softmax(-1))
        return torch.stack(rows).cpu()

    @torch.no_grad()
    def _logits(self, requests: Sequence[Sequence[int]]) -> Tensor:
        """Returns the logits of a batch that is padded on the right, (requests, longest, V)."""
        longest = max(map(len, requests))
        tokens = torch.tensor([[*one, *([0] * (longest - len(one)))] for one in requests], device=self._device)
        mask = (torch.arange(longest) < torch.tensor([[len(one)] for one in requests])).long().to(self._device)
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

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding) -> list[Response]:
        self._engine.sampling = Sampling(
            temperature=1.0,
            max_new_tokens=decoding.max_new_tokens,
            end=decoding.stop,
            prompts=AT_ONCE if decoding.repetition_penalty == 1 else 1,  # padding tokens would be penalized
            processors=_processors(decoding),
        )
        greedy = decoding.temperature == 0
        if self._continuous:
            return self._batched(prompts, seeds[0], decoding)
        found = self._engine.generate(prompts, [[seed] for seed in seeds], greedy=greedy)
        return [(list(one.tokens), list(one.logprobs)) for (one,) in found]

    def _batched(self, prompts: Sequence[Sequence[int]], seed: int, decoding: Decoding) -> list[Response]:
        """Samples by transformers' continuous batching, from one generator for all requests."""
        settings = asdict(decoding)
        longest, stop = settings.pop("max_new_tokens"), list(settings.pop("stop"))
        sampling = {k: v for k, v in settings.items() if v != getattr(Decoding(), k)} if decoding.temperature else {}
        torch.manual_seed(seed)
        found = self._engine.model.generate_batch(
            [list(one) for one in prompts],
            transformers.GenerationConfig(
                max_new_tokens=longest,
                do_sample=decoding.temperature > 0,
                eos_token_id=stop or -1,
                pad_token_id=0,
                **{"top_k": 0, **sampling},
            ),
            transformers.ContinuousBatchingConfig(
                return_logprobs=True, num_blocks=64, max_batch_tokens=256, use_cuda_graph=False
            ),
            warmup=False,
        )
        ordered = sorted(found.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
        if failed := next((one.error for one in ordered if one.error), None):
            raise RuntimeError(failed)
        return [(list(one.generated_tokens), list(one.logprobs)) for one in ordered]

    def experts(self, requests: Sequence[Sequence[int]]) -> list[Any]:
        chosen: list[Tensor] = []
        routers = [m for m in self._engine.model.modules() if type(m).__name__.lower().endswith("topkrouter")]
        handles = [one.register_forward_hook(lambda _, __, found: chosen.append(found[2])) for one in routers]
        self._logits(requests)
        for handle in handles:
            handle.remove()
        rows = torch.stack(chosen, dim=1).unflatten(0, (len(requests), -1))
        return [row[: len(one)].tolist() for row, one in zip(rows, requests, strict=True)]

    def interrupted(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        decoding: Decoding,
        after: int,
        way: str,
        folder: Path,
    ) -> list[tuple[list[int], list[float], int]]:
        """Stops all requests for the update, and goes on with keys and values of the new weights."""
        first = self.generate(prompts, seeds, replace(decoding, max_new_tokens=after))
        self.update(way, folder)
        longer = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, first, strict=True)]
        left = replace(decoding, max_new_tokens=decoding.max_new_tokens - after)
        rest = self.generate(longer, [seed + len(seeds) for seed in seeds], left)
        return [(x + tokens, y + logprobs, after) for (x, y), (tokens, logprobs) in zip(first, rest, strict=True)]

    def update(self, way: str, folder: Path) -> None:
        if way == "folder":
            self._load(folder)
            return
        if way == "adapter":
            new = load_file(folder / ADAPTER / WEIGHTS_FILE)
            parameters = named_parameters(self._engine.model)
            expected = {FILE_PREFIX + name: parameter.shape for name, parameter in parameters if is_adapter(name)}
            if (given := {name: tensor.shape for name, tensor in new.items()}) != expected:
                wrong = sorted(name for name in {*given, *expected} if given.get(name) != expected.get(name))
                raise ValueError(f"the adapter does not fit: {', '.join(wrong[:4])}")
        else:  # the model is whole before the first number is copied, so an update that fails leaves the old one
            whole = load_model(folder, dtype=self._dtype, attention=None)
            new = {name: parameter.detach() for name, parameter in whole.named_parameters()}
            new = unpacked(*packed(new)) if way == "packed buckets" else new
        copy_tensors(self._engine.model, new)


@torch.no_grad()
def copy_tensors(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors into the parameters of a model. An adapter's are named as in its file."""
    own = dict(named_parameters(model))
    for name, tensor in tensors.items():
        own[name.removeprefix(FILE_PREFIX)].copy_(tensor)


def packed(tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Place]]:
    """Packs tensors into flat buckets of bytes; returns the buckets, and where each tensor lies."""
    buckets: list[list[Tensor]] = [[]]
    places, size = {}, 0
    for name, tensor in tensors.items():
        flat = tensor.contiguous().flatten().view(torch.uint8)
        if size and size + len(flat) > BUCKET:
            buckets.append([])
            size = 0
        places[name] = Place(bucket=len(buckets) - 1, start=size, dtype=tensor.dtype, shape=tuple(tensor.shape))
        buckets[-1].append(flat)
        size += len(flat)
    return [torch.cat(parts) for parts in buckets], places


def unpacked(buckets: Sequence[Tensor], places: Mapping[str, Place]) -> dict[str, Tensor]:
    found = {}
    for name, place in places.items():
        size = math.prod(place.shape) * place.dtype.itemsize
        flat = buckets[place.bucket][place.start : place.start + size]
        found[name] = flat.clone().view(place.dtype).view(place.shape)  # a clone is aligned
    return found


def _processors(decoding: Decoding) -> tuple[transformers.LogitsProcessor, ...]:
    """Returns the processors that transformers' ``generate`` makes of these settings, in its order."""
    if decoding.presence_penalty or decoding.frequency_penalty:
        raise NotSupported("transformers has no presence_penalty and no frequency_penalty")
    made = (
        (decoding.repetition_penalty != 1, transformers.RepetitionPenaltyLogitsProcessor, decoding.repetition_penalty),
        (decoding.temperature not in (0, 1), transformers.TemperatureLogitsWarper, decoding.temperature),
        (decoding.top_k > 0, transformers.TopKLogitsWarper, decoding.top_k),
        (decoding.top_p < 1, transformers.TopPLogitsWarper, decoding.top_p),
        (decoding.min_p > 0, transformers.MinPLogitsWarper, decoding.min_p),
    )
    return tuple(kind(value) for used, kind, value in made if used)
