"""Engines that die or hang while they score. Nothing here imports transformers, so that their processes start soon."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.backends.engines import EngineInfo, NotSupported
from conformance.spec.precision import PrecisionName


class Dies:
    """Dies while it scores."""

    @classmethod
    def describe(cls) -> EngineInfo:
        return EngineInfo(name="dies", reports={"raw": {}}, ways={})

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        if precision != "fp32":
            raise NotSupported("has no kernels for bf16")

    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        print("OutOfMemoryError: 3 GiB are missing", file=sys.stderr, flush=True)
        os._exit(7)

    next_token = generate = update = score


class Hangs(Dies):
    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        time.sleep(1000)
        raise AssertionError

    next_token = generate = update = score
