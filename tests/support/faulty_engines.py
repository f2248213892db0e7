"""Engines with one mistake each, for the judgement of engines: transformers' engine, spoilt."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from conformance.backends.engines import Decoding, EngineInfo
from conformance.spec.precision import PrecisionName
from impl.engines.transformers_engine import TransformersEngine

WAY = "tensors"
Response = tuple[list[int], list[float]]


class OneWay(TransformersEngine):
    """Has one way of updating and no variant, so that a test is short."""

    way = WAY

    @classmethod
    def describe(cls) -> EngineInfo:
        adapter_ways = (cls.way,) if cls.way == "adapter" else ()
        return EngineInfo(name="faulty", reports="processed", ways={cls.way: "only"}, adapter_ways=adapter_ways)


def with_way(way: str) -> OneWay:
    made: OneWay = type("WithWay", (OneWay,), {"way": way})()
    return made


class HeadInBf16(OneWay):
    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        super().start(folder, precision, settings)
        head = self._engine.model.lm_head
        head.forward = lambda x: (x.bfloat16() @ head.weight.bfloat16().T).float()


class Sampling(OneWay):
    """Spoils responses by ``change(temperature, responses)``."""

    change: Callable[[list[Response]], list[Response]]

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[Response]:
        found = super().generate(prompts, decoding)
        return found if decoding.temperature == 0 else type(self).change(found)


class ForNeighbour(Sampling):
    change = staticmethod(lambda found: [*found[1:], found[0]])


class Shifted(Sampling):
    change = staticmethod(lambda found: [(tokens, [0.0, *logprobs[:-1]]) for tokens, logprobs in found])


class ShiftedScores(OneWay):
    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        return [[-1.0, *one[:-1]] for one in super().score(requests)]


class Rescored(OneWay):
    """Reports log-probs of its sampled tokens at another temperature than it says."""

    power = 0

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[Response]:
        found = super().generate(prompts, decoding)
        if decoding.temperature == 0:
            return found
        whole = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, found, strict=True)]
        logits = self._logits(whole) / decoding.temperature**self.power
        logprobs = logits.float().log_softmax(-1)
        scored = []
        for row, prompt, one in zip(logprobs, prompts, whole, strict=True):
            places = torch.arange(len(prompt) - 1, len(one) - 1)
            scored.append((one[len(prompt) :], row[places, torch.tensor(one[len(prompt) :])].tolist()))
        return scored


class Raw(Rescored):
    """Gives raw log-probs as processed ones."""


class Twice(Rescored):
    power = 2


class ProcessedAsRaw(OneWay):
    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(name="faulty", reports="raw", ways={WAY: "copy named tensors"})


class NoNumbers(OneWay):
    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        return [[float("nan")] * len(one) for one in super().score(requests)]


class TooFew(OneWay):
    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        return [one[1:] for one in super().score(requests)]


class Dies:
    """Dies while it scores."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(name="dies", reports="raw", ways={})

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        """Starts nothing."""

    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        import os
        import sys

        print("OutOfMemoryError: 3 GiB are missing", file=sys.stderr, flush=True)
        os._exit(7)

    next_token = generate = update = score


class Hangs(Dies):
    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        import time

        time.sleep(1000)
        raise AssertionError

    next_token = generate = update = score
