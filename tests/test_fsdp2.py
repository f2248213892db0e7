"""FSDP2: every way of arranging ranks computes what the oracle computes, to the last digits of float64.

The cells that quick runs are judged there; here are the layouts, options and precisions that it leaves out.
"""

import json
import re

import pytest
from conftest import make_cell

from conformance.backend import Supported, Unsupported
from conformance.layout import Layout
from conformance.run.session import Session
from conformance.scenario import Precision
from conformance.validation import UsageError
from impl.fsdp2.adapter import Fsdp2Backend
from impl.strategy import CONTEXTS, ContextConfig, get_context

HONEST = 1e-12  # what the exact tier shows when nothing is wrong; the bound is ten times that


@pytest.mark.parametrize(
    ("scenario", "model", "layout"),
    [
        ("sft-packed", "pangu", "tp2.seqpar"),
        ("sft-packed", "gemma3", "tp2.seqpar.losspar"),
        ("sft-packed", "qwen3", "tp2.plan"),
        ("sft-packed", "qwen3", "dp2.ckpt.offload"),
        ("sft-packed", "gemma3", "dp2.tp2.lastsync"),
        ("sft-packed", "pangu", "dp2.rep2.lastsync"),
        ("sft-resume", "qwen3", "dp2"),
        ("sft-resume", "pangu", "dp2.tp2"),
        ("sft-packed", "llama", "sp2.stride2"),
        ("sft-packed", "qwen3", "sp3"),
        ("sft-packed", "pangu", "sp2.tp2.seqpar.losspar"),
        ("sft-packed", "gemma3", "dp2.sp2.ckpt.offload"),
        ("sft-packed", "qwen3", "dp2.sp2.zigzag"),
        ("sft-padded", "llama", "sp2.torchcp"),
        ("sft-sgd", "pangu", "sp2.ring"),
        ("sft-resume", "gemma3", "dp2.sp2"),
    ],
)
def test_exact(session: Session, scenario: str, model: str, layout: str) -> None:
    cell = make_cell(scenario, model, layout, "exact")
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    assert max(quantity["observed"] for quantity in verdict.quantities) < HONEST
    footer = (session.config.out / "cells" / cell.slug / "record" / "record.jsonl").read_text().splitlines()[-1]
    assert json.loads(footer)["leaks"] == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "sp2", "sp2.ring"])
def test_mixed_precision_is_as_good_as_a_single_process(session: Session, layout: str, precision: Precision) -> None:
    verdict = session.run(make_cell("sft-sgd", "qwen3", layout, precision)).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
def test_head_norms_as_transformers_ships_them_are_an_expected_difference(session: Session, model: str) -> None:
    verdict = session.run(make_cell("sft-packed", model, "dp2.tp2.lastsync.shipped", "exact")).verdict
    assert verdict.state == "expected_difference", verdict.reason
    wrong = {
        finding.tensor.rpartition("self_attn.")[2]
        for finding in verdict.findings
        if finding.stage == "gradients" and finding.step == 0
    }
    assert wrong == {"q_norm.weight", "k_norm.weight"}


def test_an_expected_difference_hides_no_other_fault(session: Session) -> None:
    layout = "dp2.tp2.lastsync.shipped"
    verdict = session.run(make_cell("sft-packed", "qwen3", layout, "exact", faults=("cleared-gradients",))).verdict
    assert verdict.state == "differs"


def test_a_layout_that_does_not_fit_the_model_is_unsupported_with_one_that_does(session: Session) -> None:
    verdict = session.run(make_cell("sft-packed", "llama", "tp8", "exact")).verdict
    assert verdict.state == "unsupported"
    assert "tp4 would work" in verdict.reason


@pytest.mark.parametrize("model", ["pangu", "llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("layout", ["dp2.sp2.tp2", "sp4.tp2", "sp8", "dp4.sp2"])
def test_rings_of_eight_ranks(session: Session, model: str, layout: str) -> None:
    verdict = session.run(make_cell("sft-packed", model, layout, "exact", steps=1)).verdict
    assert verdict.state == "conforms", verdict.reason
    assert max(quantity["observed"] for quantity in verdict.quantities) < HONEST


@pytest.mark.parametrize(
    ("model", "layout", "precision", "stage"),
    [
        ("llama", "sp2.ring.shipped", "fp32", "gradients"),
        ("qwen3", "sp2.zigzag.shipped", "fp32", "gradients"),
        ("gemma3", "sp2.ring.shipped", "bf16", "log-probs"),
    ],
)
def test_rings_as_the_package_ships_them_are_an_expected_difference(
    session: Session, model: str, layout: str, precision: Precision, stage: str
) -> None:
    verdict = session.run(make_cell("sft-packed", model, layout, precision)).verdict
    assert verdict.state == "expected_difference", verdict.reason
    assert verdict.first_stage == stage


def test_rings_as_the_package_ships_them_are_right_in_bf16(session: Session) -> None:
    verdict = session.run(make_cell("sft-packed", "llama", "sp2.zigzag.shipped", "bf16")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize(
    ("scenario", "model", "layout", "advice"),
    [
        ("sft-packed", "llama", "pp2", "use pp1"),
        ("sft-packed", "llama", "ulysses2", "use sp, the ring, instead"),
        ("sft-packed", "llama", "dp2.zero2", "leave the stage out"),
        ("sft-packed", "llama", "sp2.torchcp", "attends over whole rows; use another ring"),
        ("sft-packed", "gemma3", "sp2.zigzag", "zigzag gets sliding windows wrong .* the default ring is right"),
        ("sft-padded", "gemma3", "sp2.torchcp", "PyTorch's context parallel has no sliding window"),
        ("sft-packed", "llama", "tp2.sp2.stride4", "tp2.sp2.stride2 would work"),
    ],
)
def test_what_the_backend_lacks_is_unsupported_with_advice(
    session: Session, scenario: str, model: str, layout: str, advice: str
) -> None:
    verdict = session.run(make_cell(scenario, model, layout, "exact")).verdict
    assert verdict.state == "unsupported"
    assert re.search(advice, verdict.reason)


def test_without_ring_flash_attn_a_ring_is_unsupported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("impl.ring.support.available", lambda: False)
    scenario = make_cell("sft-packed", "llama", "sp2", "exact").scenario
    answer = Fsdp2Backend.supports(scenario, Layout(sp=2))
    assert isinstance(answer, Unsupported)
    assert "pip install 'backend-parity[ring]'" in answer.reason
    assert isinstance(Fsdp2Backend.supports(scenario, Layout(dp=2)), Supported)


def test_an_unknown_backend_lists_the_known_ones() -> None:
    config = ContextConfig(layout=Layout(), precision="fp32", device="cpu", accumulation=1, packed=False)
    with pytest.raises(UsageError, match=f"unknown backend 'typo'; use one of {', '.join(CONTEXTS)}"):
        get_context("typo", config)
