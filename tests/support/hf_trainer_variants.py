"""Defines broken variants of the example adapter for tests/backends/test_hf_trainer.py, loaded by name in the ranks."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from parity_hf_trainer import HFTrainerBackend

from conformance.backends.protocol import BackendInfo
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario


class LocalTokenMean(HFTrainerBackend):
    """Each rank divides by the target tokens that it has, then the ranks are averaged."""

    @classmethod
    def describe(cls) -> BackendInfo:
        return dataclasses.replace(super().describe(), name="local-token-mean")

    def setup(self, scenario: Scenario, layout: Layout, weights: Mapping[str, Path], device: str) -> dict[str, Any]:
        resolved = super().setup(scenario, layout, weights, device)
        get = self.trainer.get_batch_samples

        def local(epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
            samples, _ = get(epoch_iterator, num_batches, device)
            own = sum(int((sample["labels"] != -100).sum()) for sample in samples)
            return samples, torch.tensor(max(1, own) * layout.dp)

        self.trainer.get_batch_samples = local
        return resolved
