"""The judge, on records made by hand: every kind of difference is found, at its stage, with its hint.

Cells of real backends are judged elsewhere; here one number at a time is wrong, by a known amount.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.judge.compare import STAGES
from conformance.judge.verdict import Verdict, judge, judge_folder
from conformance.record.tensors import Record, RecordWriter, read_record
from conformance.scenario import parse_scenario, scenario_to_json
from conformance.judge.tolerance import EXACT, NOISE_FACTOR

Values = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Change = Callable[[int, Values, Tensors], None]

STEPS = 3


def unchanged(step: int, values: Values, tensors: Tensors) -> None:
    """Leave the step as the oracle has it."""


def write(
    path: Path, change: Change = unchanged, *, precision: str = "exact", layout: str = "dp2.tp2", lr: float = 0.1
) -> Record:
    """A record of three steps; ``change`` edits a step's values and tensors before they are written (step -1 too)."""
    optimizer = {"name": "sgd", "lr": lr, "max_grad_norm": 1.0}
    scenario = parse_scenario(
        {"name": "x", "model": "m", "precision": precision, "optimizer": optimizer, "steps": STEPS, "accumulation": 3}
    )
    header = {"cell": "x", "scenario": scenario_to_json(scenario), "layout": layout}
    writer = RecordWriter(path, header)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(4, 3, generator=generator, dtype=torch.float64) for name in ("a", "b")}
    for step in range(-1, STEPS):
        tensors = {f"weight/{name}": weight.clone() for name, weight in weights.items()}
        values: Values = {}
        if step >= 0:
            gradients = {name: torch.randn(4, 3, generator=generator, dtype=torch.float64) for name in weights}
            norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
            for name, gradient in gradients.items():
                weights[name] -= 0.1 * gradient / norm
                tensors |= {f"gradient/{name}": gradient, f"weight/{name}": weights[name].clone()}
            logprobs = torch.randn(5, generator=generator, dtype=torch.float64)
            tensors |= {"logprob/0": logprobs[:2].clone(), "logprob/7": logprobs[2:].clone()}
            values = {"loss": 2.0, "token_count": 5, "grad_norm": norm, "lr": 0.1}
            values["replicas"] = {"offered": 8, "compared": 4, "differing": []}
        change(step, values, tensors)
        writer.step(step, values, tensors)
    writer.finish({"seconds": 0.0, "leaks": []})
    return read_record(path)


def verdict_of(tmp_path: Path, change: Change, **options: Any) -> Verdict:
    oracle = write(tmp_path / "oracle")
    return judge(write(tmp_path / "cell", change, **options), oracle=oracle, noise=None)


def test_equal_records_conform_and_every_stage_was_compared(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, unchanged)
    assert verdict.state == "conforms"
    assert tuple(verdict.stages) == STAGES
    assert all(worst["ratio"] == 0 for worst in verdict.stages.values())


def test_a_stage_that_was_not_observed_is_named(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            values["grad_norm"] = None
            del tensors["logprob/0"], tensors["logprob/7"]

    verdict = verdict_of(tmp_path, change)
    assert verdict.state == "conforms"
    assert verdict.reason.endswith("not observed: log-probs, gradient norm")


def scale(key: str, factor: float, *, at: int = 0) -> Change:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == at and key in values:
            values[key] *= factor
        elif step == at:
            tensors[key] *= factor

    return change


@pytest.mark.parametrize(
    ("key", "stage"),
    [
        ("loss", "loss"),
        ("token_count", "loss"),
        ("logprob/7", "log-probs"),
        ("gradient/a", "gradients"),
        ("grad_norm", "gradient norm"),
        ("lr", "clipped update"),
        ("weight/b", "clipped update"),
    ],
)
def test_one_wrong_quantity_is_found_at_its_stage(tmp_path: Path, key: str, stage: str) -> None:
    verdict = verdict_of(tmp_path, scale(key, 1 + 1e-6))
    assert verdict.state == "differs"
    assert verdict.first_stage == stage
    assert verdict.findings[0].step == 0


def test_an_error_just_below_the_exact_bound_passes_and_just_above_does_not(tmp_path: Path) -> None:
    assert verdict_of(tmp_path / "1", scale("loss", 1 + 0.9 * EXACT)).state == "conforms"
    assert verdict_of(tmp_path / "2", scale("loss", 1 + 1.1 * EXACT)).state == "differs"


def test_weights_are_judged_as_loaded_and_after_the_last_step(tmp_path: Path) -> None:
    loaded = verdict_of(tmp_path / "1", scale("weight/a", 1.01, at=-1))
    assert loaded.first_stage == "weights"
    last = verdict_of(tmp_path / "2", scale("weight/a", 1 + 1e-6, at=STEPS - 1))
    assert [f.stage for f in last.findings] == ["weights after N steps"]


def test_an_update_is_judged_by_its_own_size_and_not_by_that_of_the_weight(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            tensors["weight/a"] += 1e-10

    verdict = verdict_of(tmp_path, change)
    assert verdict.first_stage == "clipped update"
    assert verdict.findings[0].observed > 1e-10 / 0.1


def test_the_reported_norm_is_held_against_the_gradients_that_were_gathered(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:  # both gradients too large, the norm the oracle's: only the rebuilt norm shows the contradiction
            tensors["gradient/a"] *= 2
            tensors["gradient/b"] *= 2

    names = [f.tensor for f in verdict_of(tmp_path, change).findings if f.stage == "gradient norm"]
    assert names == ["reported against rebuilt"]


def test_unequal_replicas_are_a_finding_even_if_rank_zero_is_right(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 1:
            entry = {"kind": "weight", "tensor": "a", "region": "full", "ranks": [0, 1], "relative": 1e-5}
            values["replicas"]["differing"] = [entry]

    verdict = verdict_of(tmp_path, change)
    assert verdict.first_stage == "replicas"
    assert "weight a on ranks 0, 1" in verdict.reason
    assert "a reduction over these ranks is missing" in verdict.reason


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (2.0, "which is dp"),
        (1 / 3, r"which is 1/\(accumulation\)"),
        (4.0, "which is world size"),
        (2.5, "which is tokens / dp"),
        (1.37, ""),
    ],
)
def test_a_known_factor_is_named(tmp_path: Path, factor: float, words: str) -> None:
    hint = verdict_of(tmp_path, scale("gradient/a", factor)).findings[0].hint
    assert (words.replace("\\", "") in hint) if words else hint == ""


def test_a_missing_an_unexpected_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            del tensors["gradient/a"]
            tensors["gradient/c"] = torch.zeros(1)
            tensors["gradient/b"] = tensors["gradient/b"].T.contiguous()

    names = {f.tensor for f in verdict_of(tmp_path, change).findings if f.stage == "gradients"}
    assert names == {"a (missing)", "c (unexpected)", "b (shape (3, 4) instead of (4, 3))"}


@pytest.mark.parametrize("key", ["loss", "grad_norm", "gradient/a", "logprob/0"])
def test_nan_never_passes(tmp_path: Path, key: str) -> None:
    assert verdict_of(tmp_path, scale(key, math.nan)).state == "differs"


def test_a_record_with_fewer_steps_than_the_oracle_differs(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle")
    writer = RecordWriter(tmp_path / "cell", oracle.header | {"layout": "dp1"})
    writer.step(-1, {}, oracle.initial.tensors())
    values = {k: v for k, v in oracle.steps[0].values.items() if k not in ("type", "step", "tensors")}
    writer.step(0, values, oracle.steps[0].tensors())
    writer.finish({"leaks": []})
    verdict = judge(read_record(tmp_path / "cell"), oracle=oracle, noise=None)
    assert verdict.state == "differs"
    assert "1 of 3 steps" in verdict.reason


def test_a_record_that_cannot_be_read_is_an_infrastructure_failure_not_a_pass(tmp_path: Path) -> None:
    write(tmp_path / "oracle" / "float64")
    write(tmp_path / "cell")
    file = tmp_path / "cell" / "record.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    verdict = judge_folder(tmp_path / "cell", tmp_path / "oracle")
    assert verdict.state == "infrastructure"
    assert "has no footer" in verdict.reason


def test_below_the_exact_tier_the_noise_of_a_single_process_sets_the_bound(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle")
    noisy = scale("gradient/a", 1 + 1e-7)
    noise = write(tmp_path / "noise", noisy, precision="fp32")

    def verdict(name: str, factor: float) -> Verdict:
        cell = write(tmp_path / name, scale("gradient/a", 1 + factor), precision="fp32")
        return judge(cell, oracle=oracle, noise=noise)

    assert verdict("within", 0.9 * NOISE_FACTOR * 1e-7).state == "conforms"
    assert verdict("beyond", 1.1 * NOISE_FACTOR * 1e-7).first_stage == "gradients"


def test_a_near_zero_gradient_is_held_against_the_norm_of_all(tmp_path: Path) -> None:
    def tiny(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            tensors["gradient/a"] *= 1e-12
            values["grad_norm"] = tensors["gradient/b"].norm().item()

    def tiny_and_wrong(step: int, values: Values, tensors: Tensors) -> None:
        tiny(step, values, tensors)
        if step >= 0:
            tensors["gradient/a"] *= 1 + 1e-5  # relative to itself far beyond the bound, to the whole gradient 1e-17

    oracle = write(tmp_path / "oracle", tiny)
    verdict = judge(write(tmp_path / "cell", tiny_and_wrong), oracle=oracle, noise=None)
    assert verdict.state == "conforms", verdict.reason


def test_a_gap_in_what_was_observed_is_a_finding(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 2:
            values["grad_norm"] = None

    verdict = verdict_of(tmp_path, change)
    assert [(f.stage, f.step) for f in verdict.findings] == [("gradient norm", 2)]


def test_replicas_that_no_two_ranks_name_alike_were_not_compared(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            values["replicas"] = {"offered": 8, "compared": 0, "differing": []}

    verdict = verdict_of(tmp_path, change, layout="dp2.rep2")
    assert verdict.first_stage == "replicas"


def test_a_half_precision_cell_that_is_too_good_computed_in_another_precision(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle")

    def rounded(step: int, values: Values, tensors: Tensors) -> None:
        for name in ("gradient/a", "gradient/b"):
            if name in tensors:
                tensors[name] = tensors[name].bfloat16().double()

    noise = write(tmp_path / "noise", rounded, precision="bf16")
    honest = judge(write(tmp_path / "honest", rounded, precision="bf16"), oracle=oracle, noise=noise)
    assert "gradients" not in {f.stage for f in honest.findings}
    verdict = judge(write(tmp_path / "cell", precision="bf16"), oracle=oracle, noise=noise)
    assert verdict.first_stage == "gradients"
    assert "computed in a higher precision" in verdict.reason


@pytest.mark.parametrize("factor", [math.nan, 1.01])
def test_noise_that_no_rounding_explains_is_no_bound(tmp_path: Path, factor: float) -> None:
    write(tmp_path / "oracle" / "float64")
    write(tmp_path / "oracle" / "fp32", scale("gradient/a", factor), precision="fp32")
    write(tmp_path / "cell", precision="fp32")
    verdict = judge_folder(tmp_path / "cell", tmp_path / "oracle")
    assert verdict.state == "infrastructure"
    assert "more than rounding can do" in verdict.reason


def test_a_record_is_judged_by_the_oracle_of_its_own_scenario_only(tmp_path: Path) -> None:
    write(tmp_path / "oracle" / "float64", lr=0.2)
    write(tmp_path / "cell")
    verdict = judge_folder(tmp_path / "cell", tmp_path / "oracle")
    assert verdict.state == "infrastructure"
    assert "are of different scenarios" in verdict.reason
