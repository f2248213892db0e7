"""Engines with one mistake each, for the judgement of engines: transformers' engine, spoilt."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.backends.engines import Decoding, EngineInfo
from conformance.spec.precision import PrecisionName
from impl.engines.transformers_engine import TransformersEngine

WAY = "tensors"
SPECIAL = 1  # a special token of the small models
Response = tuple[list[int], list[float]]


class OneWay(TransformersEngine):
    """Has one way of updating and no variant, so that a test is short."""

    way = WAY

    @classmethod
    def describe(cls) -> EngineInfo:
        adapter_ways = (cls.way,) if cls.way == "adapter" else ()
        return EngineInfo(name="faulty", reports={"processed": {}}, ways={cls.way: "only"}, adapter_ways=adapter_ways)


def with_way(way: str) -> OneWay:
    made: OneWay = type("WithWay", (OneWay,), {"way": way})()
    return made


class HeadInBf16(OneWay):
    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        super().start(folder, precision, settings)
        head = self._engine.model.lm_head
        head.forward = lambda x: (x.bfloat16() @ head.weight.bfloat16().T).float()


class Sampling(OneWay):
    """Spoils sampled responses by ``change(responses)``."""

    change: Callable[[list[Response]], list[Response]]

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding) -> list[Response]:
        found = super().generate(prompts, seeds, decoding)
        return found if decoding.temperature == 0 else type(self).change(found)


class ForNeighbour(Sampling):
    change = staticmethod(lambda found: [*found[1:], found[0]])


class Shifted(Sampling):
    change = staticmethod(lambda found: [(tokens, [0.0, *logprobs[:-1]]) for tokens, logprobs in found])


class ShiftedScores(OneWay):
    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        return [[-1.0, *one[:-1]] for one in super().score(requests)]


class SpecialsDropped(OneWay):
    """Samples a special token as the second one, and loses it in a text."""

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding) -> list[Response]:
        if decoding.temperature == 0 or decoding.max_new_tokens == 1:
            return super().generate(prompts, seeds, decoding)
        first = super().generate(prompts, seeds, replace(decoding, max_new_tokens=1))
        longer = [[*prompt, *tokens, SPECIAL] for prompt, (tokens, _) in zip(prompts, first, strict=True)]
        rest = super().generate(longer, seeds, decoding)
        return [(x + tokens, y + logprobs) for (x, y), (tokens, logprobs) in zip(first, rest, strict=True)]


class Rescored(OneWay):
    """Reports log-probs of its sampled tokens that are those of another decoding."""

    other = staticmethod(lambda decoding: Decoding())

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding) -> list[Response]:
        found = super().generate(prompts, seeds, decoding)
        if decoding.temperature == 0:
            return found
        scored = []
        for prompt, (tokens, _) in zip(prompts, found, strict=True):
            before = [[*prompt, *tokens[:count]] for count in range(len(tokens))]
            rows = self.next_token(before, type(self).other(decoding))
            scored.append((tokens, rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()))
        return scored


def rescored(other: Callable[[Decoding], Decoding]) -> type[Rescored]:
    return type("Other", (Rescored,), {"other": staticmethod(other)})


def decoding_as(other: Callable[[Decoding], Decoding]) -> type[OneWay]:
    """Samples by another decoding than it is asked for, and reports that one's log-probs."""

    class Other(OneWay):
        def generate(
            self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding
        ) -> list[Response]:
            return super().generate(prompts, seeds, decoding if decoding.temperature == 0 else other(decoding))

        def next_token(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> Tensor:
            return super().next_token(prompts, other(decoding))

    return Other


class GoesOn(OneWay):
    """Does not stop at a stop token."""

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding) -> list[Response]:
        return super().generate(prompts, seeds, replace(decoding, stop=()))


class StopDropped(OneWay):
    """Leaves the stop token out of its responses."""

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding) -> list[Response]:
        found = super().generate(prompts, seeds, decoding)
        return [(t[:-1], x[:-1]) if t[-1] in decoding.stop and len(t) > 1 else (t, x) for t, x in found]


class ProcessedAsRaw(OneWay):
    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(name="faulty", reports={"raw": {}}, ways={WAY: "copy named tensors"})


class SoftmaxInBf16(OneWay):
    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        rows = self._logits(requests).bfloat16().log_softmax(-1)
        targets = [torch.tensor(one[1:])[:, None] for one in requests]
        return [row[: len(t)].gather(-1, t)[:, 0].tolist() for row, t in zip(rows, targets, strict=True)]


class SamplesOld(OneWay):
    """Scores with the new weights, and goes on to sample with the old ones."""

    def update(self, way: str, folder: Path) -> None:
        self._old = deepcopy(self._engine)
        super().update(way, folder)

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding) -> list[Response]:
        new, self._engine = self._engine, getattr(self, "_old", self._engine)
        try:
            return super().generate(prompts, seeds, decoding)
        finally:
            self._engine = new


class KeepsKeys(OneWay):
    """Goes on after an update with the keys and values of the old weights."""

    @torch.no_grad()
    def interrupted(
        self, prompts: Sequence[Sequence[int]], seeds: Any, decoding: Decoding, after: int, way: str, folder: Path
    ) -> Any:
        first, found = self.generate(prompts, seeds, replace(decoding, max_new_tokens=after)), []
        given = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, first, strict=True)]
        caches = [self._engine.model(torch.tensor([one[:-1]]), use_cache=True).past_key_values for one in given]
        self.update(way, folder)
        for cache, one, (tokens, logprobs) in zip(caches, given, first, strict=True):
            token = one[-1]
            for _ in range(decoding.max_new_tokens - after):
                row = self._engine.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1].log_softmax(-1)
                token = int(row.argmax())
                tokens, logprobs = [*tokens, token], [*logprobs, float(row[token])]
            found.append((tokens, logprobs, after))
        return found


class FailsInChunks(OneWay):
    """Cannot sample while prompts are prefilled in chunks."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return replace(super().describe(), variants={"chunks": {"chunk": 8}, "no chunks": {}})

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding) -> list[Response]:
        if self._chunk:
            raise RuntimeError("no offset")
        return super().generate(prompts, seeds, decoding)


class NoNumbers(OneWay):
    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        return [[float("nan")] * len(one) for one in super().score(requests)]


class TooFew(OneWay):
    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        return [one[1:] for one in super().score(requests)]
