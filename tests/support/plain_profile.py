"""Writes a profile of one cell that conforms and one that is unsupported, for tests of commands on plain_backend.py."""

from pathlib import Path

SCENARIO = """
steps = 2
accumulation = 2
data.rows = 8
[optimizer]
name = "sgd"
lr = 0.05
momentum = 0.9
max_grad_norm = 0.5
"""
PROFILE = """
description = "one cell that conforms, one that is unsupported"
[[cells]]
scenarios = ["{scenario}"]
models = ["llama"]
layouts = ["dp2", "pp2"]
precisions = ["fp32"]
"""


def write_profile(folder: Path) -> str:
    """Write the scenario and the profile into ``folder``; returns what to give as ``--profile``."""
    (folder / "tiny.toml").write_text(SCENARIO)
    (folder / "two.toml").write_text(PROFILE.format(scenario=folder / "tiny.toml"))
    return str(folder / "two.toml")
