"""Plants the cause of a difference in a record made by hand; the finding names this cause."""

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from judge_sample import EQUAL, Change, Tensors, Values, both, clauses, scale, verdict_of, write

from conformance.judge.diagnosis import PARTS, Facts, _in_common, _known_factors, backward_place, likely_cause
from conformance.judge.tensor_views import number_off
from conformance.judge.verdict import judge
from conformance.results.verdict import Quantity, Verdict
from conformance.spec.layout import Layout
from conformance.spec.observables import AGAINST_REBUILT
from conformance.spec.precision import PRECISIONS
from conformance.spec.scenario import OptimizerConfig, Scenario, ScheduleConfig

MAX_NORM = 1.0  # of the sample's optimizer
HEAD, EMBEDDING = "score.weight", "model.embed_tokens.weight"  # which is not their order in the alphabet


def first_of(tmp_path: Path, change: Change, **options: str) -> Quantity:
    return verdict_of(tmp_path, change, **options).findings[0]


def norm_of(tmp_path: Path) -> float:
    norm = write(tmp_path / "reference").steps[0].value("grad_norm")
    assert norm
    assert norm > MAX_NORM
    return norm


@pytest.mark.parametrize(
    ("key", "factor", "words"),
    [
        ("gradient/a", 2.0, "2 times the reference, which is dp"),
        ("gradient/a", 1 / 3, "which is 1/(accumulation)"),
        ("gradient/a", 4.0, "which is world size"),
        ("gradient/a", 2.5, "which is tokens / dp"),
        ("gradient/a", 1 / math.sqrt(2), "0.7071 times the reference, which is 1/sqrt(dp) or 1/sqrt(tp)"),
        ("gradient/a", math.sqrt(3), "1.732 times the reference, which is sqrt(accumulation)"),
        ("gradient/a", 1 / math.sqrt(5), "1/sqrt(tokens)"),
        ("gradient/a", 0.0, "it is zero: the loss does not reach it"),
        ("loss", 0.0, "it is zero"),
        *((key, math.nan, "it holds NaN") for key in ("gradient/a", "loss", "logprob/7", "lr")),
        *((key, math.inf, "it holds infinite numbers") for key in ("gradient/a", "loss", "logprob/7", "lr")),
    ],
)
def test_the_likely_cause_of_a_factor_is_named(tmp_path: Path, key: str, factor: float, words: str) -> None:
    assert words in first_of(tmp_path, scale(key, factor)).hint


@pytest.mark.parametrize("axis", ["dp", "tp", "sp", "ulysses"])
def test_number_of_ranks_along_each_axis_is_a_known_factor(axis: str) -> None:
    layout = Layout.parse(f"{axis}2")
    facts: Any = SimpleNamespace(layout=layout, scenario=SimpleNamespace(accumulation=3), tokens=35, clip={})
    half: Any = SimpleNamespace(scale=0.5, stage="gradients", left_without=lambda factor: abs(factor - 0.5))
    assert f"1/({axis})" in ", ".join(_known_factors(half, facts, 1e-9))


def test_a_factor_of_nothing_known_has_no_likely_cause(tmp_path: Path) -> None:
    assert first_of(tmp_path, scale("gradient/a", 1.37)).hint == ""


def test_a_gradient_that_was_read_after_clipping_is_named(tmp_path: Path) -> None:
    found = first_of(tmp_path, scale("gradient/a", MAX_NORM / (norm_of(tmp_path) + 1e-6)))
    assert found.stage == "gradients"
    assert "which is the clip factor: clipped before it was read" in found.hint


@pytest.mark.parametrize(("power", "words"), [(1, "the clip factor: clipped twice"), (-1, "it was not clipped")])
def test_an_update_that_was_clipped_twice_or_not_at_all_is_named(tmp_path: Path, power: int, words: str) -> None:
    factor, start = (MAX_NORM / (norm_of(tmp_path) + 1e-6)) ** power, write(tmp_path / "start").loaded.tensors()

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            for name in ("weight/a", "weight/b"):
                tensors[name] = start[name] + factor * (tensors[name] - start[name])

    found = first_of(tmp_path, change)
    assert found.stage == "clipped update"
    assert words in found.hint


def test_a_weight_that_has_not_moved_is_never_trained(tmp_path: Path) -> None:
    start = write(tmp_path / "start").loaded.tensors()

    def change(step: int, values: Values, tensors: Tensors) -> None:
        tensors["weight/a"] = start["weight/a"].clone()

    found = first_of(tmp_path, change)
    assert found.stage == "clipped update"
    assert found.hint == "it has not moved: it is never trained, or its update is lost"


@pytest.mark.parametrize(("count", "words"), [(4, "1 targets are missing"), (7, "2 targets too many")])
def test_targets_that_are_missing_are_counted(tmp_path: Path, count: int, words: str) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        values["token_count"] = count

    assert words in first_of(tmp_path, change).hint


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (3, "5/3: divided by 3 tokens, so 2 targets are left out of the count"),
        (7, "5/7: divided by 7 tokens, so 2 positions without targets are counted"),
    ],
)
@pytest.mark.parametrize("precision", ["exact", "fp32"])
def test_a_loss_that_is_divided_by_another_count_of_tokens_tells_it(
    tmp_path: Path, count: int, words: str, precision: str
) -> None:
    oracle, noise = write(tmp_path / "oracle"), write(tmp_path / "noise", precision="fp32")
    cell = write(tmp_path / "cell", scale("loss", 5 / count), precision=precision)
    verdict = judge([cell], oracle=oracle, noise=[noise] if precision == "fp32" else ())
    assert words in verdict.findings[0].hint


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (math.sqrt(4 / 3) * (1 + 3e-7), "1.155 times the reference, which is sqrt(4/3): a deviation with n instead of"),
        (math.sqrt(7 / 8), "which is sqrt(7/8): a deviation with n - 1 instead of n of groups of 8"),
        (6 / 5, "1.2 times the reference, which is 6/5: a mean without the response itself of groups of 6"),
        (5 / 6, "which is 5/6: a mean with the response itself of groups of 6"),
        (1.1553, "1.155 times the reference"),
    ],
)
def test_factor_of_all_advantages_names_group_size(factor: float, words: str) -> None:
    m = number_off("advantages", "advantage", 0, factor * 0.7, 0.7, unit=0.7, fixed=None)
    scenario = SimpleNamespace(accumulation=1, tier=PRECISIONS["exact"])
    facts: Any = SimpleNamespace(
        layout=Layout.parse("dp2"), scenario=scenario, tokens=35, clip={}, gradients=(), updates=(), oracle=None
    )
    hint = likely_cause(m, facts, allowed=1e-11)
    assert hint.startswith(words) if words[0] == "1" else hint.endswith(words)
    assert ("which is" in hint) == (factor != 1.1553)


@pytest.mark.parametrize("stage", ["training state", "critic training state"])
def test_training_state_of_zero_was_not_loaded(stage: str) -> None:
    m = number_off(stage, "progress of schedule", 1, 0.0, 1.0, unit=1.0, fixed=0.0)
    facts: Any = SimpleNamespace(gradients=(), updates=())
    assert likely_cause(m, facts, allowed=0.0) == "it is zero: the resume has not loaded it"


@pytest.mark.parametrize(("precision", "factor"), [("exact", 5 / 3.001), ("bf16", 5 / 3), ("exact", 5 / 51)])
def test_a_loss_that_no_count_of_tokens_explains_has_no_likely_cause(
    tmp_path: Path, precision: str, factor: float
) -> None:
    oracle = write(tmp_path / "oracle")
    noise = [] if precision == "exact" else [write(tmp_path / "noise", precision=precision)]
    verdict = judge([write(tmp_path / "cell", scale("loss", factor), precision=precision)], oracle=oracle, noise=noise)
    found = next(f for f in verdict.findings if f.stage == "loss")
    assert found.hint.endswith("times the reference")


@pytest.mark.parametrize("precision", ["exact", "fp32", "bf16"])
def test_a_factor_that_leaves_more_than_noise_when_it_is_undone_is_no_cause(tmp_path: Path, precision: str) -> None:
    """The scale is that of two ranks to the last digit, and half of the tensor is wrong beside it."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            gradient = tensors["gradient/a"]
            across = gradient.flip(0)
            across = across - (across * gradient).sum() / gradient.square().sum() * gradient
            tensors["gradient/a"] = 2 * gradient + 0.5 * across

    oracle = write(tmp_path / "oracle")
    noise = [] if precision == "exact" else [write(tmp_path / "noise", precision=precision)]
    cell = write(tmp_path / "cell", change, precision=precision)
    found = judge([cell], oracle=oracle, noise=noise).findings
    assert found[0].stage == "gradients"
    assert [f.hint for f in found if f.tensor == "a" and f.stage == "gradients"] == [""]
    assert "2 times the reference, which is dp" in first_of(tmp_path / "whole", scale("gradient/a", 2.0)).hint


def test_log_probs_that_no_factor_explains_are_no_multiple_of_the_reference(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            tensors["logprob/7"] = tensors["logprob/7"].flip(0)

    assert first_of(tmp_path, change).hint == ""
    assert first_of(tmp_path / "2", twice).hint.startswith("2 times the reference, which is dp or tp")


def twice(step: int, values: Values, tensors: Tensors) -> None:
    if step == 0:
        for key in ("logprob/0", "logprob/7"):
            tensors[key] *= 2


def test_what_is_at_a_right_angle_to_the_reference_is_not_zero(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        gradient = tensors.get("gradient/a")
        if step == 0 and gradient is not None:
            gradient.zero_()[0, 0] = 1.0

    def reference(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            tensors["gradient/a"][0, 0] = 0.0

    cell, oracle = write(tmp_path / "cell", change), write(tmp_path / "oracle", reference)
    assert judge([cell], oracle=oracle, noise=()).findings[0].hint == ""


def test_diagnosis_learning_rate_of_other_step_names_step() -> None:
    schedule = ScheduleConfig(name="linear", warmup_steps=2, total_steps=10)
    optimizer = OptimizerConfig(name="sgd", lr=0.1)
    scenario = Scenario(name="x", model="m", precision="exact", optimizer=optimizer, schedule=schedule)
    none: dict[str, float] = {}
    facts = Facts(
        scenario=scenario,
        layout=Layout.parse("dp1"),
        tokens=5,
        clip=none,
        gradients=frozenset(),
        updates=frozenset(),
        oracle=None,
    )

    def said(rate: float) -> str:
        m = number_off("learning rate", "lr", 4, rate, 0.1 * schedule.factor(4), unit=0.1, fixed=None)
        return likely_cause(m, facts, allowed=1e-11)

    assert said(0.1 * schedule.factor(5)) == "the learning-rate schedule is at step 5 instead of 4"
    assert said(0.0) == "the learning-rate schedule is at step 0 instead of 4"
    assert said(0.0333) == ""


@pytest.mark.parametrize(("factor", "hint"), [(0.9999, ""), (1.37, "1.37 times the reference")])
def test_one_number_near_another_is_no_factor_of_it(tmp_path: Path, factor: float, hint: str) -> None:
    assert first_of(tmp_path, scale("loss", factor)).hint == hint


def test_replicas_that_differ_are_told_with_the_gradients_of_the_same_step(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            tensors["gradient/a"] *= 1.37
            entry = {"name": "a", "region": "full", "ranks": [0, 1], "relative": 1e-5}
            values["replicas"] = {**values["replicas"], "gradient": {**EQUAL, "differing": [entry]}}

    verdict = verdict_of(tmp_path, change)
    assert verdict.first_stage == "gradients"
    assert "; 1 differ between ranks as well, such as gradient a on ranks 0, 1" in verdict.reason
    assert verdict.findings[0].hint.startswith("not reduced: ")


def test_no_reduction_is_missed_where_other_gradients_are_wrong_as_well(tmp_path: Path) -> None:
    """Replicas of one parameter differ, and two have wrong gradients, so a missing reduction does not explain all."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            tensors["gradient/a"] *= 1.37
            tensors["gradient/b"] *= 1.37
            entry = {"name": "a", "region": "full", "ranks": [0, 1], "relative": 1e-5}
            values["replicas"] = {**values["replicas"], "gradient": {**EQUAL, "differing": [entry]}}

    assert not verdict_of(tmp_path, change).findings[0].hint


def test_a_loss_after_weights_that_were_not_read_may_come_from_their_update(tmp_path: Path) -> None:
    told = "clip or update of step 0 may be the cause: weights after it were not read"
    assert told in clauses(verdict_of(tmp_path / "unread", scale("loss", 1.5, at=1), drawn=0))
    assert told not in clauses(verdict_of(tmp_path / "read", scale("loss", 1.5, at=1)))


def of_a_model(*wrong: str) -> Change:
    """The sample's tensors as head and embedding; gradients of these are wrong."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        for kind in ("gradient", "weight"):
            for old, new in {"a": EMBEDDING, "b": HEAD}.items():
                if f"{kind}/{old}" in tensors:
                    tensors[f"{kind}/{new}"] = tensors.pop(f"{kind}/{old}")
        if step == 0:
            for name in wrong:
                tensors[f"gradient/{name}"] *= 1.37

    return change


def verdict_of_a_model(tmp_path: Path, *wrong: str) -> Verdict:
    return judge([write(tmp_path / "cell", of_a_model(*wrong))], oracle=write(tmp_path / "o", of_a_model()), noise=())


def test_diagnosis_wrong_gradients_names_one_nearest_loss(
    tmp_path: Path,
) -> None:
    verdict = verdict_of_a_model(tmp_path, EMBEDDING, HEAD)
    wrong = [f.tensor for f in verdict.findings if (f.stage, f.step) == ("gradients", 0)]
    assert list(dict.fromkeys(name.partition(" ")[0] for name in wrong)) == [HEAD, EMBEDDING]
    assert clauses(verdict)[-1] == f"nearest the loss: {HEAD}"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["lora_A", "lora_B"], []),
        (["lora_B"], ["only the gradients of lora_B of down_proj, lora_B of o_proj"]),
        (["1.mlp.down_proj.lora_B"], []),  # the layer before has such a parameter that is right
    ],
)
def test_wrong_gradients_have_their_kind_in_common(wrong: list[str], told: list[str]) -> None:
    kinds = [f"{module}.{part}.weight" for module in ("mlp.down_proj", "self_attn.o_proj") for part in PARTS[1:]]
    names = [f"model.layers.{layer}.{kind}" for layer in range(2) for kind in kinds]
    off = {name: float(any(part in name for part in wrong)) for name in names}
    found = [Quantity(stage="gradients", tensor=n, step=0, observed=by, allowed=0.1) for n, by in off.items()]
    assert _in_common(next(q for q in found if q.observed), found) == told


@pytest.mark.parametrize("zero", [0.0, -5.36e-15])
def test_zero_is_called_zero_and_explains_the_factor_beside_it(tmp_path: Path, zero: float) -> None:
    verdict = verdict_of(tmp_path, both(scale("loss", 1.003), scale("gradient/a", zero)))
    hints = {finding.hint for finding in verdict.findings if finding.step == 0}
    assert "it is zero: the loss does not reach it, or it was cleared before it was read" in hints
    assert not any(hint.endswith("times the reference") for hint in hints)


def test_parameters_nearer_the_loss_than_the_first_wrong_one_are_counted(tmp_path: Path) -> None:
    verdict = verdict_of_a_model(tmp_path, EMBEDDING)
    assert f"; nearest the loss: {EMBEDDING}, after 1 parameter within tolerance" in verdict.reason


def test_names_that_are_not_known_have_no_order(tmp_path: Path) -> None:
    assert "nearest the loss" not in verdict_of(tmp_path, scale("gradient/a", 1.37)).reason


def test_the_backward_pass_goes_from_the_head_through_layers_to_the_embedding() -> None:
    order = [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.11.mlp.down_proj.weight",
        "model.layers.11.mlp.up_proj.weight",
        "model.layers.11.post_attention_layernorm.weight",
        "model.layers.11.self_attn.o_proj.bias",
        "model.layers.11.self_attn.v_proj.weight",
        "model.layers.11.self_attn.q_norm.weight",
        "model.layers.11.input_layernorm.weight",
        "model.layers.2.mlp.down_proj.weight (worst row)",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "gradient: elements that are bf16 numbers, so added up in it",
    ]
    shuffled = random.Random(0).sample(order, len(order))
    assert sorted(shuffled, key=backward_place) == order


def test_what_is_said_of_all_gradients_is_no_parameter(tmp_path: Path) -> None:
    oracle, noise = write(tmp_path / "o", of_a_model()), write(tmp_path / "noise", of_a_model(), precision="bf16")
    leaks = [{"op": "aten.mm", "where": "here", "count": 1}]
    exact = judge([write(tmp_path / "1", of_a_model(), leaks=leaks)], oracle=oracle, noise=())
    assert exact.state == "differs"
    assert "nearest the loss" not in exact.reason

    def rounded(step: int, values: Values, tensors: Tensors) -> None:
        of_a_model()(step, values, tensors)
        for name in tensors.keys() & {f"gradient/{HEAD}", f"gradient/{EMBEDDING}"}:
            tensors[name] = tensors[name].bfloat16().double()

    summed = judge([write(tmp_path / "2", rounded, precision="bf16")], oracle=oracle, noise=[noise])
    assert any("added up in it" in finding.tensor for finding in summed.findings)
    assert clauses(summed)[-1] == f"nearest the loss: {HEAD}"


@pytest.mark.parametrize(("step", "told"), [(1, True), (2, False)])
def test_a_difference_at_the_first_step_after_loading_says_so(tmp_path: Path, step: int, told: bool) -> None:
    oracle = write(tmp_path / "oracle")
    phases = [write(tmp_path / "1", until=1), write(tmp_path / "2", scale("gradient/a", 1.37, at=step), first=1)]
    verdict = judge(phases, oracle=oracle, noise=())
    assert verdict.findings[0].step == step
    assert (f"; step {step} is the first after loading" in verdict.reason) == told


def test_a_plain_number_is_told_before_a_rebuilt_one() -> None:
    plain = Quantity(stage="gradient norm", tensor="grad_norm", step=0, observed=0.02, allowed=0.01)
    rebuilt = replace(plain, tensor=f"grad_norm{AGAINST_REBUILT}", observed=0.02, allowed=1e-6)
    inside = replace(plain, observed=0.001)
    assert sorted([plain, rebuilt, inside], key=lambda q: q.urgency) == [inside, rebuilt, plain]
    assert Verdict(state="differs", reason="", quantities=(rebuilt, plain)).worst == {"gradient norm": plain}


def test_the_cause_that_leaves_the_least_error_comes_first() -> None:
    optimizer = OptimizerConfig(name="sgd", lr=0.1)
    scenario = Scenario(
        name="x", model="m", precision="bf16", optimizer=optimizer, schedule=ScheduleConfig(total_steps=2)
    )
    facts = Facts(
        scenario=scenario,
        layout=Layout.parse("dp2"),
        tokens=5,
        clip={"gradients": 0.5004},
        gradients=frozenset({"gradients"}),
        updates=frozenset(),
        oracle=None,
    )
    m = number_off("gradients", "a", 0, 0.5004, 1.0, unit=1.0, fixed=None)
    hint = likely_cause(m, facts, allowed=0.01)
    assert hint.index("the clip factor") < hint.index("1/(dp)"), hint
