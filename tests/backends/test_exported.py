"""Settings of exported folders: what has changed, and what is only written elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.worker.rank_state import changed_settings

BASE = {"hidden_size": 8, "rms_norm_eps": 1e-5, "transformers_version": "4.51.0"}


def changed(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    for name, settings in (("before", BASE | before), ("after", BASE | after)):
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps(settings))
    return changed_settings(tmp_path / "after", tmp_path / "before")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"use_cache": True}, {"use_cache": False, "transformers_version": "5.23.0", "new": 1}, []),
        ({}, {"rms_norm_eps": 1e-6}, ["rms_norm_eps"]),
        ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, []),
        ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, ["rope_theta"]),
        ({"rope_theta": 1e6}, {"rope_parameters": None}, ["rope_theta"]),
        ({"rope_theta": 1e6}, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, ["rope_theta"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            [],
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            ["rope_scaling"],
        ),
        ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}, []),
        ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "linear"}}, ["rope_scaling"]),
    ],
)
def test_a_setting_has_to_be_the_models_wherever_it_is_written(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], said: list[str]
) -> None:
    assert changed(tmp_path, before, after) == [f"config.json: {key}" for key in said]
