"""Judges records in half precision whose errors are as large as rounding, and lie along the reference."""

from functools import cache
from pathlib import Path

import pytest
import torch
from judge_sample import Change, Tensors, Values, both, unchanged, write

from conformance.judge.direction import is_summed_in
from conformance.judge.verdict import judge
from conformance.results.verdict import Quantity

SHAPE, LAST = (40, 30), 2  # the step before the last one is not observed, so the last update is not rebuilt


@cache
def rounding(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(seed: int, *, by: float = 1e-2) -> Change:
    """Gradients and their norm are off by rounding, of relative size ``by``; weights by a thousandth of it."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        for number, (name, tensor) in enumerate(sorted(tensors.items())):
            size = by if name.startswith("gradient/") else by / 1000 if name.startswith("weight/") and step >= 0 else 0
            tensors[name] = tensor * (1 + size * rounding(tuple(tensor.shape), 1000 * seed + 10 * step + number))
        if step >= 0:
            values["grad_norm"] = sum(t.square().sum().item() for n, t in tensors.items() if "gradient/" in n) ** 0.5

    return change


def scaled(prefix: str, factor: float, *, since: int = 0) -> Change:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        for name in tensors:
            if step >= since and name.startswith(prefix):
                tensors[name] = factor * tensors[name]

    return change


def normed(factor: float) -> Change:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            values["grad_norm"] *= factor

    return change


def wrong(tmp_path: Path, change: Change, *, precision: str = "bf16", by: float = 1e-2) -> list[Quantity]:
    """Returns the findings but those of rebuilt numbers, which these records do not keep together."""
    oracle = write(tmp_path / "oracle", shape=SHAPE)
    noise = write(tmp_path / "noise", rounded(1, by=by), precision=precision, shape=SHAPE)
    cell = write(tmp_path / "cell", both(rounded(2, by=by), change), precision=precision, shape=SHAPE)
    findings = judge([cell], oracle=oracle, noise=[noise]).findings
    return [finding for finding in findings if "against rebuilt" not in finding.tensor]


@pytest.mark.parametrize(("precision", "by"), [("bf16", 1e-2), ("fp16", 1e-3), ("fp32", 1e-6)])
def test_rounding_in_any_direction_conforms(tmp_path: Path, precision: str, by: float) -> None:
    assert not wrong(tmp_path, unchanged, precision=precision, by=by)


@pytest.mark.parametrize(
    ("change", "stage", "named"),
    [
        (scaled("gradient/", 1.01), "gradients", {"gradient: scale", "gradient: scale of a", "gradient: scale of b"}),
        (scaled("gradient/b", 1.01), "gradients", {"gradient: scale", "gradient: scale of b"}),
        (normed(1.01), "gradient norm", {"grad_norm"}),
        # A weight decay that was lost at the unobserved step.
        (scaled("weight/", 1 + 1e-5, since=LAST), "weights after N steps", {"weight: scale"}),
    ],
)
def test_an_error_along_the_reference_is_found(tmp_path: Path, change: Change, stage: str, named: set[str]) -> None:
    found = wrong(tmp_path, change)
    assert {finding.stage for finding in found} == {stage}
    assert named <= {finding.tensor for finding in found}
    assert all(": scale" in finding.tensor or finding.tensor == "grad_norm" for finding in found)


@pytest.mark.parametrize(
    ("scale", "is_one_of_them"),
    [
        ("gradient: scale", True),
        ("gradient: scale of layer 1", True),
        ("gradient: scale of layer 11", False),
        ("gradient: scale of model.layers.*.mlp.up_proj.weight", True),
        ("gradient: scale of model.layers.*.mlp.down_proj.weight", False),
    ],
)
def test_a_scale_knows_its_tensors(scale: str, is_one_of_them: bool) -> None:
    assert is_summed_in("model.layers.1.mlp.up_proj.weight", scale) == is_one_of_them
