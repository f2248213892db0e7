"""Tests of the registry of precisions: every row against torch, and the values that verdicts depend on."""

import subprocess
import sys
from typing import get_args

import pytest
import torch
from cells import cell_of, exhaustive

from conformance.oracle.primitives import Policy
from conformance.oracle.run import POLICIES
from conformance.runner.session import Session
from conformance.spec.precision import (
    BF16,
    HALF_PRECISIONS,
    PRECISIONS,
    FloatFormat,
    PrecisionName,
    noise_runs,
    precision_of_run,
)

FORMATS = {number_format for tier in PRECISIONS.values() for number_format in (tier.compute, tier.master)}


def test_every_name_of_the_literal_has_a_row() -> None:
    assert tuple(PRECISIONS) == get_args(PrecisionName)
    assert all(name == tier.name for name, tier in PRECISIONS.items())


@pytest.mark.parametrize("number_format", sorted(FORMATS, key=str), ids=lambda one: one.name)
def test_formats_agree_with_torch(number_format: FloatFormat) -> None:
    limits = torch.finfo(number_format.dtype)
    assert limits.bits == 8 * number_format.bytes
    assert limits.eps == 2 * number_format.rounding


def test_values_that_verdicts_depend_on() -> None:
    assert HALF_PRECISIONS == ("bf16", "bf16-reduce", "bf16-nearest", "bf16-stochastic", "fp16")
    assert [name for name, tier in PRECISIONS.items() if tier.is_exact] == ["exact"]
    assert [name for name, tier in PRECISIONS.items() if tier.is_loss_scaled] == ["fp16"]
    assert {name: tier.noise_limit for name, tier in PRECISIONS.items() if noise_runs(name)} == {
        "fp32": 1e-4,
        "bf16": 1 / 6,
        "bf16-reduce": 1 / 6,
        "bf16-nearest": 1 / 6,
        "bf16-stochastic": 1 / 6,
        "fp16": 0.1,
    }
    assert {name: tier.count_error for name, tier in PRECISIONS.items() if tier.count_error} == {
        "exact": 1e-6,
        "fp32": 1e-3,
    }
    assert {name: (tier.compute.significant_bits, tier.master.rounding) for name, tier in PRECISIONS.items()} == {
        "exact": (53, 2.0**-53),
        "fp32": (24, 2.0**-24),
        "bf16": (8, 2.0**-24),
        "bf16-reduce": (8, 2.0**-24),
        "bf16-nearest": (8, 2.0**-24),
        "bf16-stochastic": (8, 2.0**-24),
        "fp16": (11, 2.0**-24),
    }


def test_gradients_are_added_up_in_the_master_format_but_in_some_precisions() -> None:
    others = {name: tier for name, tier in PRECISIONS.items() if tier.summing != tier.master}
    assert list(others) == ["bf16-reduce", "bf16-nearest", "bf16-stochastic"]
    assert all(tier.summing == tier.compute for tier in others.values())


def test_parameters_are_stored_in_the_compute_format_where_there_are_no_masters() -> None:
    found = {name: (tier.kept, tier.is_stochastic) for name, tier in PRECISIONS.items() if tier.stored}
    assert found == {"bf16-nearest": (BF16, False), "bf16-stochastic": (BF16, True)}
    assert all(tier.kept == tier.master for tier in PRECISIONS.values() if not tier.stored)


@pytest.mark.parametrize(
    ("backend", "layout"), [("fsdp2", "dp2"), exhaustive("deepspeed", "dp2.zero2"), exhaustive("megatron", "dp2")]
)
def test_cell_that_reduces_in_bf16_conforms(session: Session, backend: str, layout: str) -> None:
    rows = {"rows": 24, "accumulation": 3}
    verdict = session.run(cell_of(backend, "sft-packed", "llama", layout, "bf16-reduce", **rows)).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize("layout", ["dp2.zero0", "dp2.zero1"])
def test_deepspeed_reduces_in_bf16_from_zero2_on(session: Session, layout: str) -> None:
    refused = session.refusal(cell_of("deepspeed", "sft-packed", "llama", layout, "bf16-reduce"))
    assert refused is not None
    assert refused.state == "unsupported"
    assert "use zero2 or zero3" in refused.reason


def test_policies_of_the_oracle() -> None:
    assert {
        "float64": Policy(torch.float64, torch.float64),
        "fp32": Policy(torch.float32, torch.float32, fused=True),
        "bf16": Policy(torch.bfloat16, torch.float32, fused=True),
        "bf16-reduce": Policy(torch.bfloat16, torch.float32, fused=True),
        "bf16-nearest": Policy(torch.bfloat16, torch.float32, fused=True, stored=torch.bfloat16),
        "bf16-stochastic": Policy(torch.bfloat16, torch.float32, fused=True, stored=torch.bfloat16, stochastic=True),
        "fp16": Policy(torch.float16, torch.float32, fused=True),
        "fp32-plain": Policy(torch.float32, torch.float32),
        "bf16-plain": Policy(torch.bfloat16, torch.float32),
        "bf16-reduce-plain": Policy(torch.bfloat16, torch.float32),
        "bf16-nearest-plain": Policy(torch.bfloat16, torch.float32, stored=torch.bfloat16),
        "bf16-stochastic-plain": Policy(torch.bfloat16, torch.float32, stored=torch.bfloat16, stochastic=True),
        "fp16-plain": Policy(torch.float16, torch.float32),
    } == POLICIES


@pytest.mark.parametrize(("run", "name"), [("float64", "exact"), ("fp16", "fp16"), ("bf16-plain-dp4", "bf16")])
def test_precision_of_an_oracle_run(run: str, name: str) -> None:
    assert precision_of_run(run) == name


def test_only_half_precision_on_a_cpu_has_a_further_noise_run_for_each_number_of_data_ranks() -> None:
    assert {noise_runs("bf16", ranks)[1] for ranks in (None, 1, 2)} == {
        "bf16-plain",
        "bf16-plain-dp1",
        "bf16-plain-dp2",
    }
    assert {noise_runs("fp32", ranks) for ranks in (None, 1, 2)} == {("fp32", "fp32-plain")}


def test_unknown_precision_has_no_noise_runs() -> None:
    assert noise_runs("int8") == ()


def test_registry_imports_without_torch() -> None:
    code = "import sys, conformance.spec.precision; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_half_dtype_is_the_compute_dtype_of_half_precision_only() -> None:
    found = {name: tier.half_dtype for name, tier in PRECISIONS.items()}
    bf16 = torch.bfloat16
    halves = dict.fromkeys(HALF_PRECISIONS, bf16) | {"fp16": torch.float16}
    assert found == {"exact": None, "fp32": None, **halves}
