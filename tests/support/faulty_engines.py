"""Engines with one mistake each, for the judgement of engines: transformers' engine, spoilt."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from conformance.backends.engines import Decoding, EngineInfo
from conformance.spec.precision import PrecisionName
from impl.engines.transformers_engine import TransformersEngine

WAY = "tensors"
Mixed = Callable[[str, Tensor, Tensor], Tensor]  # name, new and old number: what is loaded
Response = tuple[list[int], list[float]]


class OneWay(TransformersEngine):
    """Has one way of updating and no variant, so that a test is short. ``mixed`` spoils an update."""

    mixed: Mixed = staticmethod(lambda name, new, old: new)

    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(name="faulty", reports="processed", ways={WAY: "copy named tensors"})

    def update(self, way: str, folder: Path) -> None:
        new = load_file(folder / "model.safetensors")
        parameters = dict(self._engine.model.named_parameters())
        with torch.no_grad():
            for name, tensor in new.items():
                if name in parameters:
                    parameters[name].copy_(self.mixed(name, tensor, parameters[name].clone()))


def updating(mixed: Mixed) -> type[OneWay]:
    return type("Updating", (OneWay,), {"mixed": staticmethod(mixed)})


def old_if(pattern: str) -> type[OneWay]:
    """Leaves the tensors old whose names match."""
    return updating(lambda name, new, old: old if re.search(pattern, name) else new)


def half_old(name: str, new: Tensor, old: Tensor) -> Tensor:
    """Leaves the rows, or columns, of the second of two ranks old."""
    dim = 1 if re.search("o_proj|down_proj", name) else 0
    if new.dim() < 2:
        return new
    return torch.cat((new.chunk(2, dim)[0], old.chunk(2, dim)[1]), dim)


class OldTiedHead(OneWay):
    """Keeps the old matrix for the logits of a model whose head is the embedding."""

    def update(self, way: str, folder: Path) -> None:
        head = self._engine.model.lm_head
        kept = head.weight.clone()
        super().update(way, folder)
        head.weight = torch.nn.Parameter(kept, requires_grad=False)


class Reordered(OneWay):
    """Loads the parts of a fused matrix in another order than they are read."""

    parts: tuple[str, ...] = ()
    order: tuple[str, ...] = ()

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        super().start(folder, precision, settings)
        named = dict(self._engine.model.named_parameters())
        with torch.no_grad():
            for first in [name for name in named if name.endswith(f"{self.parts[0]}_proj.weight")]:
                names = {part: first.replace(self.parts[0] + "_proj", part + "_proj") for part in self.parts}
                fused = torch.cat([named[names[part]].clone() for part in self.order])
                sizes = [len(named[names[part]]) for part in self.parts]
                for part, piece in zip(self.parts, fused.split(sizes), strict=True):
                    named[names[part]].copy_(piece)


def reordered(parts: Sequence[str], order: Sequence[str]) -> type[Reordered]:
    return type("InOrder", (Reordered,), {"parts": tuple(parts), "order": tuple(order)})


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


class KeepsCache(OneWay):
    """Answers a prompt that it has served before from its cache, also after an update."""

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        super().start(folder, precision, settings)
        self._cache: dict[tuple[int, ...], Tensor] = {}

    def next_token(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        rows = super().next_token(prompts)
        return torch.stack([self._cache.setdefault(tuple(one), row) for one, row in zip(prompts, rows, strict=True)])


class FailsHalfWay(OneWay):
    def update(self, way: str, folder: Path) -> None:
        self.mixed = lambda name, new, old: old if "layers.1" in name else new
        super().update(way, folder)
        raise RuntimeError("connection to the trainer is lost")


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
