"""GRPO and PPO: every way of cutting computes what the oracle computes, where the loss says nothing.

The sweep over all families, layouts and precisions is the full profile; here is one cell of each kind.
"""

from collections.abc import Sequence

import pytest
import torch
from cells import assert_honest, cell_of, exhaustive, record_of
from rl_fault_cells import ROWS

from conformance.matrix.cell import Cell
from conformance.records.step_tensors import StepRecord
from conformance.runner.session import Session
from conformance.spec.objectives import PolicyGradient

MINI_BATCHES, EPOCHS = 2, 2  # of the scenarios in RECOMPUTED
RECOMPUTED = ("grpo", "ppo", "reinforce", "reinforce-baseline")  # old log-probs are; they have a reference


@pytest.mark.parametrize(
    ("backend", "scenario", "model", "layout"),
    [
        exhaustive("fsdp2", "grpo", "gemma3", "dp2.rep2"),
        exhaustive("fsdp2", "ppo", "llama", "sp2.zigzag"),
        exhaustive("fsdp2", "ppo", "llama", "dp2"),
        exhaustive("fsdp2", "gspo", "qwen3", "dp2"),
        ("fsdp2", "grpo-off-policy", "pangu", "dp2"),
        ("fsdp2", "cispo", "qwen3", "dp2"),
        exhaustive("deepspeed", "cispo", "llama", "sp2.zero2"),
        exhaustive("deepspeed", "sapo", "llama", "dp2.zero2"),
        exhaustive("megatron", "gmpo", "pangu", "pp2"),
        exhaustive("megatron", "cispo", "pangu", "tp2"),
        exhaustive("deepspeed", "grpo", "pangu", "ulysses2.zero2"),
        exhaustive("deepspeed", "ppo", "llama", "dp2.zero3"),
        exhaustive("megatron", "grpo", "pangu", "sp2"),
        exhaustive("megatron", "ppo", "qwen3", "pp2.vpp2"),
        exhaustive("fsdp2", "reinforce", "pangu", "dp2"),
        exhaustive("deepspeed", "reinforce-baseline", "qwen3", "dp2.zero1"),
        exhaustive("megatron", "reinforce", "llama", "tp2"),
        exhaustive("fsdp2", "reinforce-baseline", "gemma3", "sp2"),
        exhaustive("fsdp2", "grpo", "pangu", "tp2.seqpar.losspar"),
        exhaustive("fsdp2", "ppo", "qwen3", "tp2.plan"),
        exhaustive("fsdp2", "ppo", "pangu", "dp2.ckpt.offload"),
        exhaustive("fsdp2", "grpo", "llama", "dp2.sp2.tp2"),
        exhaustive("deepspeed", "grpo", "qwen3", "dp2.zero0"),
        exhaustive("deepspeed", "ppo", "pangu", "dp2.zero1"),
        exhaustive("deepspeed", "gspo", "llama", "tp2.zero1"),
        exhaustive("deepspeed", "grpo-off-policy", "gemma3", "sp2.zero2"),
        exhaustive("megatron", "ppo", "pangu", "dp2.zero1.overlap"),
        exhaustive("megatron", "grpo", "llama", "tp2.seqpar.ckpt"),
        exhaustive("megatron", "gspo", "qwen3", "tp2.pp2"),
        exhaustive("megatron", "grpo-off-policy", "pangu", "pp2"),
        exhaustive("fsdp2", "grpo-turns", "llama", "tp2"),
        exhaustive("deepspeed", "grpo-turns", "llama", "sp2"),
        exhaustive("megatron", "grpo-turns", "llama", "dp2"),
        exhaustive("fsdp2", "ppo-turns", "llama", "sp2"),
        exhaustive("deepspeed", "ppo-turns", "llama", "dp2"),
        exhaustive("megatron", "ppo-turns", "llama", "tp2"),
    ],
)
def test_exact(session: Session, backend: str, scenario: str, model: str, layout: str) -> None:
    """Over five steps: the mini-batches of a roll-out, its second epoch, and the next roll-out."""
    steps = MINI_BATCHES * EPOCHS + 1
    cell = cell_of(backend, scenario, model, layout, "exact", steps=steps, rows=ROWS)
    verdict = assert_honest(session, cell)
    stages = {"advantages", "log-probs", "ratios", "loss", "policy metrics", "gradients", "clipped update"}
    if scenario == "ppo":
        stages |= {"old values", "returns", "values", "critic gradients", "critic clipped update"}
    if scenario in RECOMPUTED:
        stages |= {"old log-probs", "reference log-probs"}
    assert stages <= verdict.worst.keys()
    if scenario in RECOMPUTED:
        assert_first_ratio_is_one(session, cell)
    assert_reaches_what_it_is_about(cell, record_of(session, cell).steps)


def assert_first_ratio_is_one(session: Session, cell: Cell) -> None:
    """At the first update of a roll-out, old log-probs are those of the very policy that is trained."""
    for step in record_of(session, cell).steps:
        off = (numbers(step, "ratio") - 1).abs().max().item()
        begins = step.step % (MINI_BATCHES * EPOCHS) == 0
        assert off < 1e-14 if begins else off > 1e-2


@pytest.mark.parametrize(
    ("backend", "scenario", "model", "layout"),
    [
        exhaustive("fsdp2", "grpo-half", "qwen3", "dp2"),
        exhaustive("deepspeed", "grpo-half", "llama", "dp2.zero1"),
        exhaustive("megatron", "ppo-half", "llama", "dp2.zero1"),
        exhaustive("fsdp2", "ppo-half", "gemma3", "tp2"),
        exhaustive("fsdp2", "ppo-half", "pangu", "sp2"),
        exhaustive("deepspeed", "ppo-half", "qwen3", "dp2.zero3"),
        exhaustive("megatron", "grpo-half", "qwen3", "tp2.seqpar"),
    ],
)
def test_bf16_is_as_good_as_a_single_process(
    session: Session, backend: str, scenario: str, model: str, layout: str
) -> None:
    verdict = session.run(cell_of(backend, scenario, model, layout, "bf16")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize("backend", ["fsdp2", exhaustive("deepspeed"), exhaustive("megatron")])
def test_fp32_judges_the_clips_too(session: Session, backend: str) -> None:
    verdict = session.run(cell_of(backend, "grpo", "llama", "dp2", "fp32")).verdict
    assert verdict.state == "conforms", verdict.reason
    metrics = {q.tensor: q for q in verdict.quantities if q.stage == "policy metrics" and q.step == 1}
    assert metrics["pg_clipfrac"].ratio <= 1


def assert_reaches_what_it_is_about(cell: Cell, steps: Sequence[StepRecord]) -> None:
    """Clips on both sides and the dual clip, where they are configured; the numbers are the oracle's to 1e-12."""
    ratios, objective = [numbers(step, "ratio") for step in steps], cell.scenario.objective
    assert isinstance(objective, PolicyGradient)
    low, high = 1 - objective.clip_ratio_low, 1 + objective.clip_ratio_high
    assert any((ratio < low).any() and (ratio > high).any() for ratio in ratios)
    assert any(step.value("pg_clipfrac") for step in steps)
    if cell.scenario.name == "grpo-off-policy":
        assert all(step.value("pg_clipfrac_lower") for step in steps)
    if cell.scenario.name == "ppo":
        assert any(step.value("critic.clipfrac") for step in steps)
    advantages = torch.cat([numbers(step, "advantage") for step in steps])
    assert (advantages < 0).any()


def numbers(step: StepRecord, key: str) -> torch.Tensor:
    """All rows of an observable at a step."""
    return torch.cat([tensor for name, tensor in step.tensors().items() if name.startswith(f"{key}/")])
