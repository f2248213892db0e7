"""What the judge works out from a cell's own record: rebuilt updates, single rows, digits of sums, leaks.

None of it depends on how noisy a precision is, and no backend is asked about it.
"""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from judge_sample import OBSERVABLES, Change, Tensors, Values, evidence, scale, unchanged, verdict_of, write

from conformance.core.host import FIXTURES
from conformance.judge.layout_evidence import SHOWN, _all_are_recomputed, unproven
from conformance.judge.rounding import expert_summands, measure_accumulation_precision, summands_of_steps
from conformance.judge.tolerance import OF_ROWS, Measurement, allowed_errors, noisiest
from conformance.judge.verdict import _judged_rows, judge
from conformance.judge.work_evidence import other_weights, sums_of, why_unknown
from conformance.records.record_format import RecordError
from conformance.records.step_tensors import Record
from conformance.results.verdict import Verdict
from conformance.spec.batch import Batch, Document, Row, expert_column
from conformance.spec.conventions import Float8Products
from conformance.spec.layout import Layout
from conformance.spec.offline import Sft
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import load_scenario, parse_scenario


def test_a_step_that_nothing_is_read_at_is_between_two_that_are(tmp_path: Path) -> None:
    assert verdict_of(tmp_path / "1", unchanged, drawn=1).state == "conforms"
    assert verdict_of(tmp_path / "2", scale("loss", 1.1, at=1)).first_stage == "loss"


@pytest.mark.parametrize("precision", ["exact", "fp16"])
def test_layers_compute_with_the_weights_that_are_shown(tmp_path: Path, precision: PrecisionName) -> None:
    """Of each rank; weights that never were operands, and weights that were not read, tell nothing."""

    def operands(record: Record, step: int, *names: str) -> Any:
        tensors = [record.loaded, *record.steps][step].tensors()
        dtype = record.scenario.tier.compute.dtype
        return [sums_of(tensors[f"weight/{name}"].to(dtype).double()) for name in names]

    def found(record: Record, later: int, *of_ranks: Any) -> list[tuple[int, str]]:
        first = {"step": 0, "operands": operands(record, 0, "a")}
        record.footer["evidence"] = [first] * len(of_ranks)
        record.footer["later_evidence"] = [[{"step": later, "operands": one} for one in of_ranks]]
        return [*other_weights(record, record.scenario)]

    record = write(tmp_path / "1", precision=precision, drawn=1)
    honest = operands(record, 1, "a", "b")
    assert found(record, 1, honest, honest) == [(1, "")]
    assert unproven([record], record.scenario, sizes=None) == []  # type: ignore[arg-type]
    assert found(record, 1, honest[:1], honest[:1]) == [(1, "")]
    other = "observed other numbers than those of weight/a"
    assert found(record, 1, honest, operands(record, 0, "a")) == [(1, other)]
    assert found(record, 1, operands(record, 0, "a", "b"), honest) == [(1, other)]
    assert found(record, 2, operands(record, 0, "a"), honest) == []  # weights after step 1 are not read
    why = "products were observed at step 2, and the weights before it were not read, as both are drawn"
    assert unproven([record], record.scenario, sizes=None) == [f"that {SHOWN} ({why})"]  # type: ignore[arg-type]
    assert found(record, 1, [], []) == []
    assert why_unknown(record, record.scenario) == "no weight that is recorded whole enters a product as it is"
    record.footer["later_evidence"] = []
    assert why_unknown(record, record.scenario) == "products were observed at the first step only"

    def frozen(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            tensors.pop("weight/a")

    record = write(tmp_path / "2", frozen, precision=precision)  # of a frozen model, which is shown as loaded alone
    assert found(record, 1, operands(record, 1, "b"), operands(record, 1, "b")) == [(1, "")]


def test_an_update_follows_from_the_cells_own_gradients_whatever_the_noise_allows(tmp_path: Path) -> None:
    def rounded(step: int, values: Values, tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name] = tensors[name].float().double()

    def shrunk(step: int, values: Values, tensors: Tensors) -> None:
        rounded(step, values, tensors)
        if step >= 0:
            tensors["weight/a"] += 1e-5  # a hundredth of the noise

    def noisy(step: int, values: Values, tensors: Tensors) -> None:
        for name in list(tensors):
            if name.startswith("weight/") and step >= 0:
                tensors[name] += 1e-3 * torch.sin(torch.arange(12.0, dtype=torch.float64)).reshape(4, 3)

    oracle, noise = write(tmp_path / "oracle"), write(tmp_path / "noise", noisy, precision="fp16")
    verdict = judge([write(tmp_path / "cell", shrunk, precision="fp16")], oracle=oracle, noise=[noise])
    assert [f.tensor for f in verdict.findings if f.stage == "clipped update"] == ["a against rebuilt"]


def test_a_row_that_is_lost_shows_though_the_tensor_hides_it(tmp_path: Path) -> None:
    def large(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            generator = torch.Generator().manual_seed(step)
            tensors["gradient/a"] = torch.randn(2000, 3, generator=generator, dtype=torch.float64)
            values["grad_norm"] = math.hypot(*(tensors[f"gradient/{name}"].norm().item() for name in "ab"))

    def noisy(step: int, values: Values, tensors: Tensors) -> None:
        large(step, values, tensors)
        if step >= 0:
            tensors["gradient/a"] *= 1 + 0.02 * torch.sin(torch.arange(6000.0, dtype=torch.float64)).reshape(2000, 3)

    def lost(step: int, values: Values, tensors: Tensors) -> None:
        noisy(step, values, tensors)
        if step == 0:
            tensors["gradient/a"][7] = 0

    oracle, noise = write(tmp_path / "oracle", large), write(tmp_path / "noise", noisy, precision="fp16")
    verdict = judge([write(tmp_path / "cell", lost, precision="fp16")], oracle=oracle, noise=[noise])
    found = next(f for f in verdict.findings if f.stage == "gradients")
    assert (found.tensor, found.where) == ("a (worst row)", "row 7")


def test_a_float32_tensor_in_the_exact_tier_is_a_finding(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle")
    leak = {"op": "aten.add.Tensor", "where": "model.py:7 in forward", "count": 3}
    cell = write(tmp_path / "cell", leaks=[leak])
    verdict = judge([cell], oracle=oracle, noise=())
    assert verdict.state == "differs"
    assert "aten.add.Tensor at model.py:7 in forward: a lower precision in the exact tier, 3 times" in verdict.reason


@pytest.mark.parametrize(("precision", "digits"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("divided", [1.0, 1.1])  # after the sum, as by a number of tokens
@pytest.mark.parametrize("rounded", ["ab", "b"])
def test_a_sum_in_half_precision_shows_in_its_digits(
    tmp_path: Path, precision: str, digits: torch.dtype, divided: float, rounded: str
) -> None:
    def summed(rounded: str) -> Change:
        def change(step: int, values: Values, tensors: Tensors) -> None:
            for name in "ab" if "gradient/a" in tensors else "":
                shares = torch.tensor([0.31, 0.23, 0.17, 0.13, 0.11, 0.05]).reshape(6, 1, 1)
                total = (tensors[f"gradient/{name}"] * divided * shares).to(digits).float().sum(dim=0)
                tensors[f"gradient/{name}"] = (total.to(digits).float() if name in rounded else total) / divided

        return change

    def run(name: str, rounded: str) -> Record:
        return write(tmp_path / name, summed(rounded), precision=precision, shape=(20, 30))

    def coarse(verdict: Verdict) -> set[str]:
        return {finding.tensor for finding in verdict.findings if "added up in it" in finding.tensor}

    oracle, noise = write(tmp_path / "oracle", shape=(20, 30)), run("noise", "")
    name = f"gradient: elements that are {precision} numbers, so added up in it"
    honest = judge([run("honest", "")], oracle=oracle, noise=[noise])
    assert not coarse(honest)
    assert name in {quantity.tensor for quantity in honest.quantities}
    of_tensors = {name.replace("that", f"of {tensor} that") for tensor in rounded}
    assert coarse(judge([run("wrong", rounded)], oracle=oracle, noise=[noise])) >= of_tensors


def test_a_weight_that_hides_other_documents_leaves_one_summand(tmp_path: Path) -> None:
    record = write(tmp_path / "record")

    def summands(*weights: float) -> list[int]:
        scenario = load_scenario(FIXTURES / "scenarios/sft-sgd.toml", model="models/llama", precision="bf16")
        found = summands_of_steps(record, replace(scenario, objective=Sft(document_weights=weights)))
        return [found[step] for step in (0, 1)]

    alike = summands(2.0, 1.0)
    assert alike[1] > 1
    assert summands(2.0, 1e9) == [alike[0], 1]


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_noise", [torch.float32, torch.bfloat16])
def test_log_probs_in_half_precision_show_in_their_digits(
    tmp_path: Path, own: torch.dtype, of_noise: torch.dtype
) -> None:
    def rounded(digits: torch.dtype) -> Change:
        def change(step: int, values: Values, tensors: Tensors) -> None:
            tensors |= {name: row.to(digits).float() for name, row in tensors.items() if name.startswith("logprob/")}
            if step >= 0:
                tensors["logprob/0"] = torch.cat([tensors["logprob/0"], torch.linspace(-9, -3, 30).exp().to(digits)])

        return change

    oracle = write(tmp_path / "oracle", rounded(torch.float32))
    noise = write(tmp_path / "noise", rounded(of_noise), precision="bf16")
    found = judge([write(tmp_path / "cell", rounded(own), precision="bf16")], oracle=oracle, noise=[noise]).findings
    name = "logprob: numbers that are bf16 numbers, so computed in it instead of float32"
    assert (name in {finding.tensor for finding in found}) == (own == torch.bfloat16 != of_noise)


def test_each_expert_is_judged_by_the_micro_batches_that_it_was_chosen_in() -> None:
    """Of six rows that are a micro-batch each, expert 0 has a token in all, and expert 1 in the first three. Half of
    the elements of expert 1 are coarse: of three numbers an honest sum may have 0.4, of six 0.2."""

    def batch_of(*chosen: float, targets: tuple[bool, ...] = (False, True)) -> Batch:
        columns = [{expert_column(0, 0): (expert, 2.0), expert_column(0, 1): (0.0, 2.0)} for expert in chosen]
        documents = [Document((5, 6), targets, column) for column in columns]
        return Batch(0, 2, tuple(Row(index, (document,)) for index, document in enumerate(documents)))

    batch = batch_of(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    asked: Any = {"key": "routing", "router": 0, "is_last": False, "accumulation": 3}
    assert expert_summands(batch, layout=Layout.parse("dp2"), **asked) == {0: 6, 1: 3}
    assert expert_summands(batch, layout=Layout.parse("ep2"), **asked) == {0: 3, 1: 3}  # one product for both ranks
    assert not expert_summands(batch_of(1.0, 1.0, 1.0, targets=(False, False)), layout=Layout(), **asked)

    optimizer = {"name": "sgd", "lr": 0.1}
    told = {"name": "x", "model": "m", "precision": "bf16", "optimizer": optimizer, "accumulation": 3}
    gradient = next(o for o in OBSERVABLES if o.key == "gradient")
    fine, coarse = 1 + 2**-12, 1.5

    def measured(name: str, *, elements: list[float], targets: int = 1, batches: Any = (batch,)) -> list[float]:
        """``targets``: of the last micro-batch of the second rank."""
        stacked = torch.tensor([elements, [coarse, coarse, fine, fine], [fine] * 4])
        step = SimpleNamespace(step=0, tensors=lambda: {f"gradient/{name}": stacked})
        loaded = SimpleNamespace(names=lambda: [f"weight/{name}"])
        layout, given = Layout.parse("dp2"), {"step": 0, "targets": [[1, 1, 1], [1, 1, targets]]}
        footer, header = {"batches": [given]}, {"first_step": 0}
        phase: Any = SimpleNamespace(header=header, layout=layout, steps=[step], loaded=loaded, footer=footer)
        return [
            measurement.error
            for measurement in measure_accumulation_precision([phase], parse_scenario(told), [gradient], batches)
        ]

    def found(name: str, *, elements: list[float], targets: int = 1) -> float:
        (error,) = measured(name, elements=elements, targets=targets)
        return error

    experts = "model.layers.3.mlp.experts.down_proj"
    assert found(experts, elements=[fine] * 4) == 0.5 * 3 / 2  # the median of 0 of 6 and a half of 3
    assert found(experts, elements=[coarse] * 4) == (6 + 0.5 * 3) / 2  # above 1.2
    assert measured(experts, elements=[coarse] * 4, batches=()) == []  # of a model whose routers nobody knows
    unsaid = Batch(0, 2, tuple(Row(row.index, (Document((5, 6), (False, True)),)) for row in batch.rows))
    with pytest.raises(RecordError, match="do not say which experts router 0 chooses"):
        measured(experts, elements=[coarse] * 4, batches=(unsaid,))
    assert found("model.layers.3.mlp.gate.weight", elements=[coarse] * 4) == 6 * 0.5  # a half of all elements
    assert found("model.layers.3.mlp.gate.weight", elements=[coarse] * 4, targets=0) == 5 * 0.5


def test_a_bound_that_would_be_too_blunt_for_a_lost_tensor_is_none(tmp_path: Path) -> None:
    def noisy(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            tensors["weight/a"] += 0.02 * torch.sin(torch.arange(12.0, dtype=torch.float64)).reshape(4, 3)

    oracle, noise = write(tmp_path / "oracle"), write(tmp_path / "noise", noisy, precision="fp32")
    with pytest.raises(RecordError, match=r"off in a .clipped update, step 0., more than can be judged by"):
        judge([write(tmp_path / "cell", precision="fp32")], oracle=oracle, noise=[noise])


def test_a_noisy_worst_row_allows_no_more_than_a_half_and_too_noisy_a_one_nothing() -> None:
    def bound(noise: float, *, drift: float = 1.0) -> float:
        row = Measurement(stage="gradients", tensor=f"a {OF_ROWS}", step=0, error=noise, of_row=True)
        bounds = allowed_errors(
            [row], precision="bf16", noise=[row], gradients=frozenset({"gradients"}), amplified={}, drift={0: drift}
        )
        return bounds[row.key]

    assert bound(0.1) == pytest.approx(0.3)
    assert bound(0.2) == bound(0.25) == bound(0.2, drift=2.0) == bound(0.1, drift=2.0) == pytest.approx(0.5)
    with pytest.raises(RecordError, match=r"more than can be judged by .2.5e-01.; run the cell in fp32"):
        bound(0.26)


def test_a_run_of_too_noisy_gradients_still_says_how_far_a_sum_over_tokens_may_be_off() -> None:
    """At the first update the errors of ratios cancel in one process, and not where another kernel scored."""
    gradient = Measurement(stage="gradients", tensor="a", step=0, error=0.1)
    scale = Measurement(stage="gradients", tensor="scale", step=0, error=0.0, scalar=True)
    loss = Measurement(stage="loss", tensor="pg_loss", step=0, error=0.0, scalar=True, of_tokens=True)
    further = [replace(q, error=0.4 if q is gradient else 0.0, typical=0.002) for q in (gradient, scale, loss)]
    names = frozenset({"gradients"})
    found = noisiest([[gradient, scale, loss], further], precision="bf16", gradients=names, amplified=frozenset())
    assert {q.tensor: q.typical for q in found} == {"a": 0.0, "scale": 0.0, "pg_loss": 0.002}


@pytest.mark.parametrize(("linear", "honest"), [("float64", True), ("float32", False)])
def test_precision_evidence_ignores_attention_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linear: str, honest: bool
) -> None:
    """Kernels on a CPU compute attention of half precision in float32, a product for each head and some documents."""
    other = "float32" if honest else "float64"
    seen = evidence("exact")
    seen["linear"] = [[linear, 4]]
    seen["products"] = [[linear, "forward", 4], [other, "forward", 40], ["float64", "backward", 88]]
    monkeypatch.setattr("judge_sample.evidence", lambda _: seen)
    verdict = verdict_of(tmp_path, unchanged)
    assert [finding.tensor for finding in verdict.findings] == ([] if honest else ["dp2.tp2: products in float64"])


@pytest.mark.parametrize("layout", ["dp2.tp2", "dp2.tp2.ckpt"])
@pytest.mark.parametrize(
    ("recomputed", "nested", "every"), [(0, 0, False), (3, 0, True), (1, 0, False), (0, 1, False), (0, 12, True)]
)
def test_graph_recorded_in_backward_counts_as_recompute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, recomputed: int, nested: int, every: bool
) -> None:
    """``every``: enough of it for all layers."""
    seen = evidence("exact") | {"nested": nested}
    seen["products"] += [["float64", "recomputed", recomputed]] if recomputed else []
    monkeypatch.setattr("judge_sample.evidence", lambda _: seen)
    verdict = verdict_of(tmp_path, unchanged, layout=layout)
    assert (verdict.state == "conforms") == (every if "ckpt" in layout else recomputed + nested == 0)
    assert verdict.first_stage in ("", "configuration")


@pytest.mark.parametrize(("again", "honest"), [(3, True), (2, False)])
def test_recompute_evidence_ignores_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: int, honest: bool
) -> None:
    """Of a ring, attention is recomputed inside of an autograd function, which records no graph; of eager attention, in
    two products, which a part of the layers may have as well."""
    seen = evidence("exact") | {"linear": [["float64", 4]], "again": again}
    seen["products"] = [["float64", "forward", 12], ["float64", "backward", 28], ["float64", "recomputed", 8 - again]]
    monkeypatch.setattr("judge_sample.evidence", lambda _: seen)
    verdict = verdict_of(tmp_path, unchanged, layout="dp2.tp2.ckpt")
    claim = "dp2.tp2.ckpt: activations of all layers are recomputed"
    assert [finding.tensor for finding in verdict.findings] == ([] if honest else [claim])


@pytest.mark.parametrize(("step", "tokens", "every"), [(0, 9, True), (0, 5, False), (1, 9, False)])
def test_recomputation_after_forward_passes_without_training(step: int, tokens: int, every: bool) -> None:
    """The step that begins a rollout of four steps has such passes, so what is recomputed is compared with tokens."""
    scenario = load_scenario(FIXTURES / "scenarios" / "grpo.toml", model="models/llama", precision="exact")
    began: Any = SimpleNamespace(number=step, tokens=10, work=lambda _: [7 * tokens])
    sizes: Any = SimpleNamespace(experts=0, layers=2, linear=SimpleNamespace(layers=7, passed_part=1.0))
    ranks: Any = SimpleNamespace(recomputed=lambda: 0.3, total=lambda _: 0)
    assert _all_are_recomputed(Layout(dp=2), ranks, scenario, sizes, began) is every


@pytest.mark.parametrize(
    ("layout", "compiled", "claim"),
    [
        ("dp2.tp2.compile", 27, ""),  # all but the head, for each of three micro-batches
        ("dp2.tp2.compile", 30, ""),
        ("dp2.tp2.compile", 26, "layers are compiled"),
        ("dp2.tp2.compile", 0, "layers are compiled"),
        ("dp2.tp2", 0, ""),
        ("dp2.tp2", 1, "layers run as they are written"),
    ],
)
def test_all_layers_are_compiled_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, compiled: int, claim: str
) -> None:
    seen = evidence("exact") | {"linear": [["float64", 30]], "compiled": compiled}
    seen["products"] = [["float64", "forward", 30], ["float64", "backward", 60]]
    monkeypatch.setattr("judge_sample.evidence", lambda _: seen)
    verdict = verdict_of(tmp_path, unchanged, layout=layout)
    assert [finding.tensor for finding in verdict.findings] == ([f"{layout}: {claim}"] if claim else [])


@pytest.mark.parametrize("last", [4, 6])
def test_lastsync_adds_collectives_to_last_backward_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    seen = evidence("exact")
    scattered = [
        ("forward", 4),
        ("backward 0", 4),
        ("backward 1", 4),
        ("backward 2", last),
    ]  # by seqpar, in groups of 2
    seen["collectives"] += [["reduce_scatter", 2, "float64", where, count] for where, count in scattered]
    monkeypatch.setattr("judge_sample.evidence", lambda _: seen)
    verdict = verdict_of(tmp_path, unchanged, layout="dp2.tp2.seqpar.lastsync")
    assert verdict.state == ("conforms" if last > 4 else "differs"), verdict.reason


def test_single_rows_in_float8_are_not_judged() -> None:
    whole = Measurement(stage="gradients", tensor="w", step=0, error=0.1)
    both = [whole, replace(whole, tensor=f"w {OF_ROWS}", of_row=True)]
    assert _judged_rows(both, True) == [whole]
    assert _judged_rows(both, False) == both


@pytest.mark.parametrize(("precision", "is_coarse"), [("exact", False), ("fp32", True)])
def test_float8_below_exact_proves_no_small_faults(tmp_path: Path, precision: PrecisionName, is_coarse: bool) -> None:
    oracle = write(tmp_path / "oracle", oracle="float64", defects=(Float8Products(),))
    noise = [write(tmp_path / "noise", precision=precision)] if is_coarse else []
    verdict = judge([write(tmp_path / "cell", precision=precision)], oracle=oracle, noise=noise)
    assert ("anything but gross faults" in verdict.reason) == is_coarse, verdict.reason
    assert ("not judged: single rows" in verdict.reason) == is_coarse
