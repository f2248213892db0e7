"""Trains a step in ranks and exports the policy as adapter and merged, and defines a backend without adapters."""

from pathlib import Path
from typing import Any

from conformance.backends.protocol import BackendEntry, BackendInfo, Support, Supported
from conformance.numerics.float64_tier import exact_tier
from conformance.runtime import RankContext
from conformance.spec.batch import read_batches
from conformance.spec.layout import Layout
from conformance.spec.observables import POLICY
from conformance.spec.scenario import Scenario, parse_scenario


def export(
    context: RankContext, *, target: str, scenario: dict[str, Any], layout: str, model: str, batches: str, out: str
) -> None:
    with exact_tier():
        backend: Any = BackendEntry(name="", target=target).load()()
        backend.setup(parse_scenario(scenario), Layout.parse(layout), {POLICY.name: Path(model)}, context.device)
        backend.train_step(read_batches(Path(batches))[0], lambda _: None)
        backend.export(Path(out) / "apart", POLICY.name)
        backend.export_merged(Path(out) / "merged", POLICY.name)
        backend.teardown()


class Unaware:
    """A backend that has never heard of adapters."""

    @classmethod
    def describe(cls) -> BackendInfo:
        return BackendInfo(name="unaware")

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        return Supported()
