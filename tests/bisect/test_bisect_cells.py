"""`parity bisect` of cells: on several ranks of the three backends, and what is refused."""

from pathlib import Path

import pytest
from bisect_backends import FAMILIES, PLANTED, entry
from cells import BACKENDS, cell_of, exhaustive
from conftest import make_cell
from report_sample import RUN, write_cell

from conformance.backends.faults import catalogue
from conformance.backends.protocol import BackendEntry
from conformance.bisect.explain import describe
from conformance.bisect.run import NO_FINDING, bisect_cell, bisect_run, bisect_step, not_bisected
from conformance.cli import main as cli
from conformance.matrix.cell import Cell
from conformance.results.bisection import OUTSIDE
from conformance.results.run_results import cell_summary, write_summary
from conformance.results.verdict import Quantity, Verdict
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.spec.precision import PrecisionName

CANNOT: dict[tuple[str, str, PrecisionName], str] = {
    ("sft-packed", "dp2.ckpt", "exact"): "recomputation (ckpt) runs modules more than once",
    ("sft-warmup", "dp1", "exact"): "it has 2 phases",
}


@pytest.mark.parametrize(("scenario", "layout", "precision"), CANNOT)
def test_cells_that_cannot_be_bisected_are_refused_with_a_reason(
    scenario: str, layout: str, precision: PrecisionName, session: Session
) -> None:
    cell = make_cell(scenario, "llama", layout, precision)
    assert CANNOT[scenario, layout, precision] in not_bisected(session, cell)


def test_a_backend_that_does_not_name_its_modules_is_refused(session: Session) -> None:
    cell = make_cell(
        "sft-sgd", "llama", "dp1", "exact", backend=BackendEntry(name="bare", target="bisect_backends:Bare")
    )
    assert "bare does not say which modules it runs; its adapter needs the method traced()" in not_bisected(
        session, cell
    )


def test_cells_without_findings_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale convention makes a cell differ in which every quantity agrees. It must not stand for its group."""
    stale, wrong = (make_cell("sft-sgd", "llama", layout, "exact") for layout in ("dp1", "dp2"))
    finding = Quantity(stage="loss", tensor="loss", step=0, observed=1.0, allowed=1e-11)
    reason = "declares the convention weight decay on norms and biases (DecaysAll), but does not show it"
    said, bisected, own = list[str](), list[Cell](), Session(SessionConfig(out=tmp_path))

    def answer(_: Session, cell: Cell, *__: object) -> str:
        bisected.append(cell)
        return "a reason"

    entries = [
        write_cell(
            tmp_path,
            str(cell),
            folder=str(own.folder(cell).relative_to(tmp_path)),
            records=(),
            oracle=None,
            observables=(),
            verdict=Verdict(state="differs", reason=reason, quantities=quantities),
        )
        for cell, quantities in ((stale, ()), (wrong, (finding,)))
    ]
    write_summary(tmp_path, RUN, [cell_summary(entry) for entry in entries])
    monkeypatch.setattr("conformance.bisect.run.not_bisected", lambda *_: "")
    monkeypatch.setattr("conformance.bisect.run._bisect", answer)
    with own:
        bisect_run(own, [stale, wrong], say=said.append)
    assert bisected == [wrong]
    assert said == [f"not bisected: {stale}: {NO_FINDING}", f"bisect {wrong}: not bisected: a reason"]


def test_bisecting_needs_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bisect", "sft-*/*/fsdp2/*"]) == 2
    assert "give the id of one, as parity list shows it" in capsys.readouterr().err
    assert cli.main(["bisect", "sft-warmup/llama/fsdp2/dp2/exact/resume"]) == 2
    assert "cannot be bisected" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_defect_of_one_rank_is_found_there_and_its_collectives_are_listed(session: Session) -> None:
    defective = entry(BACKENDS["fsdp2"], "forward", "model.layers.1.self_attn")
    cell = make_cell("sft-packed", "qwen3", "tp2.seqpar.losspar", "exact", rows=6, backend=defective)
    conforming = cell_of("fsdp2", "sft-packed", "qwen3", "tp2.seqpar.losspar", "exact", rows=6, accumulation=3)
    traced = bisect_step(session, cell, 0, conforming)
    found = traced.found
    assert found.forward
    assert found.where == "model.layers.1.self_attn"
    assert (found.forward.wrong.ranks, found.forward.wrong.hold) == ((1,), (0, 1))
    assert traced.collectives
    assert traced.collectives.conforming == str(conforming)
    assert traced.collectives.issued == traced.collectives.there
    gathered, scattered = traced.collectives.issued
    assert (gathered.kind, gathered.size, gathered.dtype, gathered.ranks) == ("all_gather", 2, "float64", (0, 1))
    assert (scattered.kind, scattered.times) == ("reduce_scatter", cell.scenario.accumulation)


@pytest.mark.exhaustive
def test_a_stage_of_a_pipeline_has_its_layers(session: Session) -> None:
    defective = entry(BACKENDS["megatron"], "forward", "model.layers.1.self_attn.o_proj")
    cell = make_cell("sft-packed", "llama", "pp2", "exact", rows=6, backend=defective)
    found = bisect_step(session, cell, 0).found
    assert found.forward
    assert found.where == "model.layers.1.self_attn.o_proj"
    assert found.forward.wrong.hold == (1,)
    assert found.unseen[0] == "model.layers.0.self_attn.q_proj"  # part of a fused projection


@pytest.mark.exhaustive
def test_a_wrong_schedule_is_outside_the_model_at_the_step_that_it_is_wrong_in(session: Session) -> None:
    cell = cell_of("fsdp2", "sft-sgd", "llama", "dp2", "exact", "schedule-per-micro-batch")
    verdict, traced = bisect_cell(session, cell)
    assert verdict.first_stage == "clipped update"
    assert traced
    (found,) = traced.models
    assert (traced.step, found.where, dict(found.parameters)) == (1, OUTSIDE, {})


LAYOUTS = {
    "fsdp2": ("dp2.rep2", "tp2", "tp2.plan", "tp2.seqpar.losspar", "sp2.ring"),
    "deepspeed": ("dp2.zero3", "tp2.zero1", "ulysses2.zero2"),
    "megatron": ("pp2", "tp2.seqpar", "sp2"),
}


def test_all_gradients_of_a_later_step_are_compared(session: Session) -> None:
    """In a run that is judged, those of a step that ranks draw are not read."""
    found = bisect_step(session, cell_of("fsdp2", "sft-sgd", "llama", "dp2", "exact", steps=2), 1).found
    assert found.is_right, found
    assert found.gradients == 21


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize(("backend", "layout"), [(backend, one) for backend in LAYOUTS for one in LAYOUTS[backend]])
def test_all_values_of_a_cell_that_conforms_are_right(backend: str, layout: str, model: str, session: Session) -> None:
    cell = cell_of(backend, "sft-packed", model, layout, "exact")
    if session.refusal(cell):
        pytest.skip(f"{backend} has no {model}")
    found = bisect_step(session, cell, 0).found
    assert (found.forward, found.backward, dict(found.parameters)) == (None, None, {})
    assert min(found.compared) >= 29


@pytest.mark.parametrize(
    ("backend", "model", "layout"),
    [
        exhaustive("fsdp2", "gpt-oss", "tp2.seqpar"),  # a fast run looks at their modules (tests/bisect/test_bisect.py)
        exhaustive("fsdp2", "mixtral", "ep2"),
        exhaustive("fsdp2", "deepseek-v3", "tp2"),
        exhaustive("deepspeed", "qwen2-moe", "dp2.zero2"),
        exhaustive("megatron", "mixtral", "ep2"),
    ],
)
def test_the_experts_of_a_layer_are_one_module(session: Session, backend: str, model: str, layout: str) -> None:
    conforming = bisect_step(session, cell_of(backend, "sft-packed", model, layout, "exact"), 0).found
    assert (conforming.forward, conforming.backward, dict(conforming.parameters)) == (None, None, {})
    defective = entry(BACKENDS[backend], "forward", "model.layers.1.mlp")
    cell = make_cell("sft-packed", model, layout, "exact", rows=6, backend=defective)
    assert bisect_step(session, cell, 0).found.where == "model.layers.1.mlp"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "module"),
    [("unsummed_output", "model.layers.1.self_attn.o_proj"), ("unsummed_gradient", "model.layers.0.mlp")],
)
def test_a_missing_reduction_is_told(kind: str, module: str, session: Session) -> None:
    defective = entry(BACKENDS["megatron"], kind, module)
    found = bisect_step(session, make_cell("sft-packed", "llama", "tp2", "exact", rows=6, backend=defective), 0).found
    first = found.forward if kind == "unsummed_output" else found.backward
    assert first
    assert found.where == module
    assert first.wrong.would_be_right == "the sum over ranks 0, 1 would be right: a reduction is missing"


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_a_defect_is_found_in_every_backend(backend: str, number: int, session: Session) -> None:
    (kind, module), layouts = PLANTED[number], LAYOUTS[backend]
    defective = entry(BACKENDS[backend], kind, module)
    layout = layouts[number % len(layouts)]
    found = bisect_step(session, make_cell("sft-packed", "llama", layout, "exact", rows=6, backend=defective), 0).found
    assert found.where == module
    assert (found.forward is None) == (kind == "backward")


ATTENTION, O_PROJ = "model.layers.0.self_attn", "model.layers.0.self_attn.o_proj"
FAULTS = {
    ("fsdp2", "leaking-documents"): ATTENTION,
    ("fsdp2", "packed-states-leaking"): "model.layers.0.linear_attn",
    ("fsdp2", "local-positions"): ATTENTION,
    ("fsdp2", "merged-in-bf16"): ATTENTION,  # of a ring
    ("fsdp2", "dropped-o-bias"): O_PROJ,
    ("fsdp2", "local-token-mean"): OUTSIDE,
    ("fsdp2", "rolled-labels"): OUTSIDE,
    ("fsdp2", "copied-micro-batch"): OUTSIDE,
    ("fsdp2", "cleared-gradients"): "gradients of parameters",
    ("fsdp2", "inverted-clip"): OUTSIDE,
    ("fsdp2", "no-weight-decay"): OUTSIDE,
    ("deepspeed", "leaking-documents"): ATTENTION,
    ("deepspeed", "local-positions"): ATTENTION,
    ("deepspeed", "merged-in-bf16"): ATTENTION,
    ("deepspeed", "local-token-mean"): OUTSIDE,
    ("deepspeed", "divided-by-world"): OUTSIDE,
    ("deepspeed", "clip-never"): OUTSIDE,
    ("deepspeed", "no-weight-decay"): OUTSIDE,
    ("deepspeed", "unreduced-replicas"): "gradients of parameters",
    ("megatron", "concatenated-qkv"): ATTENTION,
    ("megatron", "o-bias-per-rank"): O_PROJ,
    ("megatron", "merged-in-bf16"): ATTENTION,
    ("megatron", "stage-local-layers"): "model.layers.1.input_layernorm",
    ("megatron", "batched-p2p"): "between model.layers.1.mlp and model.norm",  # where a later micro-batch overwrites it
    ("megatron", "norms-not-summed"): "gradients of parameters",
    ("megatron", "broken-tie"): "gradients of parameters",
    ("megatron", "local-token-mean"): OUTSIDE,
    ("megatron", "clip-never"): OUTSIDE,
    ("megatron", "schedule-per-micro-batch"): OUTSIDE,
    ("megatron", "duplicates-counted"): OUTSIDE,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "fault"), FAULTS)
def test_faults_of_the_catalogue_are_found_where_they_are(backend: str, fault: str, session: Session) -> None:
    place = catalogue()[fault].cells
    more = {"rows": 6, "accumulation": 3} if fault == "batched-p2p" else {}  # with two, none is overwritten
    cell = cell_of(backend, place.scenario, place.model, place.layouts[backend], "exact", fault, **more)
    verdict, traced = bisect_cell(session, cell)
    assert traced, verdict.reason
    (found,) = traced.models
    assert found.where == FAULTS[backend, fault]
    assert (("first stage that differs", verdict.first_stage) in describe(traced).facts) == (found.where == OUTSIDE)
