"""Header: what a record of the oracle says of itself in its first line."""

import platform
from collections.abc import Mapping
from typing import Any

import torch

import conformance
from conformance.defect import Defect, defects_to_json
from conformance.oracle.decoder import Decoder
from conformance.oracle.policy import Policy
from conformance.scenario import Scenario, scenario_to_json


def header(
    scenario: Scenario,
    precision: str,
    policy: Policy,
    *,
    settings: Mapping[str, str],
    decoders: Mapping[str, Decoder],
    loss_scale: float,
    defects: tuple[Defect, ...],
) -> dict[str, Any]:
    """JSON values for a RecordWriter. ``settings``: what is in force for kernels on GPUs. ``decoders``: by role, those
    of models that are trained last; ``loss_scale`` is that of these at the first step."""
    return {
        "cell": "oracle",
        "backend": {"name": "oracle", "precision": precision, "defects": defects_to_json(defects)},
        "scenario": scenario_to_json(scenario),
        "layout": "dp1",
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "backend-parity": conformance.__version__,
            **settings,
        },
        "resolved": {
            "compute_dtype": str(policy.compute),
            "stable_dtype": str(policy.stable),
            "master_dtype": str(policy.stable),
            "loss_scale": loss_scale,
            "micro_batch": "one document",
            "architecture": {name: decoder.described() for name, decoder in decoders.items()},
            "second_class": list(decoders.values())[-1].second_class,
        },
    }
