"""The task that tests/engine/test_compiling.py runs in ranks."""

import importlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cells import BACKENDS

from conformance.runtime import RankContext
from conformance.spec.layout import Layout
from conformance.spec.scenario import parse_scenario


def asked_for(
    context: RankContext, *, backend: str, scenario: dict[str, Any], layout: str, models: dict[str, str]
) -> list[bool]:
    """Whether a backend that is set up asks for layers that are compiled alike; nothing is compiled."""
    asked: list[bool] = []
    trainable = importlib.import_module(f"impl.{backend}.model")
    with patch.object(trainable, "compile_layers", lambda _, *, deterministic, shipped: asked.append(deterministic)):
        instance = BACKENDS[backend].load()()
        folders = {role: Path(folder) for role, folder in models.items()}
        instance.setup(parse_scenario(scenario), Layout.parse(layout), folders, context.device)
        instance.teardown()
    return asked
