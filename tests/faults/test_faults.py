"""Checks that every planted fault is caught on every backend with its patch point, at the predicted stage.

The loss of the first step, the usual check, misses most of them. Faults of reinforcement learning are in
tests/faults/test_faults_rl.py, of checkpoint transfer in tests/faults/test_faults_handover.py, of merged adapters in
tests/engine/test_lora.py, of float8 in tests/cells/test_cells_float8.py,
of training without masters in tests/cells/test_cells_stored.py, and of Megatron's Muon in
tests/megatron_backend/test_megatron_muon.py.
"""

import contextlib
import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cells import BACKENDS, MICRO_BATCHES, cell_of, exhaustive, one_of_each_stage, slow, small
from rl_fault_cells import LATER as RL_LATER
from side_sample import NAMES, SCENARIO, Change, scaled, write_oracle, write_record

from conformance.backends.faults import catalogue, needs_in_words, plant
from conformance.backends.protocol import Backend
from conformance.core.host import FIXTURES
from conformance.judge.expected_differences import judge_cell
from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from conformance.results.verdict import Verdict
from conformance.runner import phases
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.objectives import all_observables
from conformance.spec.precision import PrecisionName
from impl.faults.catalogue import CATALOGUE, RL_FAULTS
from impl.faults.float8 import FLOAT8_FAULTS
from impl.faults.models import MERGE_FAULTS
from impl.faults.optimizer import MEGATRON_MUON_FAULTS
from impl.faults.resume import RESUME_FAULTS
from impl.faults.rounding import OVERFLOW_FAULTS, REMAINDER_FAULTS, ROUNDING_FAULTS
from impl.faults.transformer_engine import TE_FAULTS
from impl.models.loading import empty_model

WRONG = scaled(f"gradient/{NAMES[1]}", 1.01)
ELSEWHERE = (
    *RL_FAULTS,
    *RESUME_FAULTS,
    *MERGE_FAULTS,
    *FLOAT8_FAULTS,
    *TE_FAULTS,
    *ROUNDING_FAULTS,
    *REMAINDER_FAULTS,
    *MEGATRON_MUON_FAULTS,
)  # in test files of their own
# By backend and fault: scenario, model, layout.
CELLS = {
    backend: {
        fault.name: (place.scenario, place.model, place.layouts[backend])
        for fault in CATALOGUE
        if fault not in ELSEWHERE and backend in (place := fault.cells).layouts
    }
    for backend in BACKENDS
}
# Faults that the exact tier lifts, or that are to be caught below it too; others are planted in the exact tier.
BELOW: dict[str, PrecisionName] = {
    "rotary-in-bf16": "fp32",
    "offloaded-last-only": "fp32",
    "unmarked-shards": "bf16",
    "lost-loss-scale": "fp16",
    **{fault.name: "fp16" for fault in OVERFLOW_FAULTS},
    "step-at-setup": "bf16",
    "logits-not-upcast": "bf16",
    "no-weight-decay": "bf16",
    "norms-decayed": "bf16",
    "default-betas": "bf16",
    "moments-in-bf16": "bf16",
    "summed-in-bf16": "bf16",
    "averaged-before-last-micro-batch": "bf16",
    "masters-in-bf16": "bf16",
    "replay-of-another-pass": "fp32",
}
# Steps until a fault shows where one is not enough: at a schedule's second, at a step whose gradients are small.
LATER = {
    "rate-of-transposed": 2,
    "muon-without-zero-is-sgd": 2,
    "schedule-per-micro-batch": 2,
    "clip-always": 3,
    "default-betas": 2,
    "moments-in-bf16": 2,
    "overflow-on-one-rank": 2,
    "skip-counted-by-schedule": 3,
    "skip-counted-by-optimizer": 3,
    "scale-not-halved": 2,
    "scale-never-grows": 4,
    "overflow-stays": 3,
    "replay-of-another-pass": 2,
}
PACKS_MORE = ("sft-z-loss", "sft-expert-bias", "ipo")  # scenarios that need more documents, or rows of pairs
THREE_MICRO_BATCHES = {"rolled-labels", "batched-p2p"}  # of which some show less in two
CLIPS_TWICE = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3, "max_grad_norm": 2.5}  # of 2.6, 2.7, 2.3
DRIFT = {"unreduced-replicas", "norms-not-summed", "broken-tie"}  # after which replicas differ, too


def planted() -> list[tuple[str, str]]:
    """(backend, fault)."""
    return [(backend, name) for backend, cells in CELLS.items() for name in cells]


FAST = one_of_each_stage(
    [fault for fault in CATALOGUE if fault not in ELSEWHERE],
    lambda name: [one for one in BACKENDS if name in CELLS[one]],
)
PLANTED = [one if one in FAST else exhaustive(*one) for one in planted()]


@pytest.mark.parametrize("backend", CELLS)
def test_every_fault_whose_seam_a_backend_has_has_a_place_there(backend: str) -> None:
    seams = BACKENDS[backend].load().seams.keys()  # type: ignore[attr-defined]
    assert {fault.seam for fault in catalogue().values()} >= seams
    placed = {name for name, fault in catalogue().items() if backend in fault.cells.layouts}
    assert placed == {name for name, fault in catalogue().items() if fault.seam in seams}


def test_a_fast_run_has_a_fault_of_every_stage() -> None:
    assert {catalogue()[name].stage for _, name in FAST} == {catalogue()[name].stage for _, name in planted()}
    assert {backend for backend, _ in FAST} == BACKENDS.keys()


def assert_caught(session: Session, backend: str, name: str, precision: PrecisionName) -> Verdict:
    more: dict[str, Any] = {"steps": LATER.get(name, 1)}
    if name == "clip-always":
        more["optimizer"] = CLIPS_TWICE
    if name == "clip-always" or (precision == "fp32" and name not in BELOW):
        more["rows"] = 24  # of which norms are known, and noise is less
    scenario, _, layout = CELLS[backend][name]
    if precision == "exact" and not (name in LATER or scenario in PACKS_MORE) and Layout.parse(layout).data <= 2:
        more["rows"] = 2 * MICRO_BATCHES  # a row or two for each micro-batch: no noise hides anything
    if name in THREE_MICRO_BATCHES:
        more |= {"rows": 6, "accumulation": 3}
    if precision in ("bf16", "fp16") and name != "summed-in-bf16":  # it alone is near the noise
        more |= small(CELLS[backend][name][0])
    asked = cell_of(backend, *CELLS[backend][name], precision, name, **more)
    verdict = session.run(asked).verdict
    assert verdict.state == "differs", verdict.reason
    assert verdict.first_stage == catalogue()[name].stage_in(precision), verdict.reason
    return verdict


@pytest.mark.parametrize(("backend", "name"), PLANTED)
def test_fault_is_caught_at_the_predicted_stage(session: Session, backend: str, name: str) -> None:
    verdict = assert_caught(session, backend, name, BELOW.get(name, "exact"))
    first_loss = next(q for q in verdict.quantities if (q.stage, q.tensor, q.step) == ("loss", "loss", 0))
    assert (first_loss.ratio <= 1) == ("loss" in catalogue()[name].blind)
    if name in DRIFT:
        assert any(finding.stage == "weight replicas" for finding in verdict.findings)
    if name == "dropped-last-token":  # what is counted is what was trained on, not what the batch holds
        assert any(finding.tensor == "token_count" for finding in verdict.findings)


@pytest.mark.exhaustive
def test_full_trains_for_as_many_steps_as_it_takes_to_see_each_fault() -> None:
    """In each precision in which a fault is planted: with its scenario and backend, in a cell of some layout."""
    longest: dict[tuple[str, str, str], int] = {}
    for cell in select_cells(Selection(profile="full")):
        for backend in {phase.backend.name for phase in cell.phases}:
            key = backend, cell.scenario.name, cell.scenario.precision
            longest[key] = max(longest.get(key, 0), cell.scenario.steps)
    later = LATER | RL_LATER
    for name, steps in later.items():
        place = catalogue()[name].cells
        tiers = {"exact", "fp32"} - place.unobservable.keys() if name not in BELOW else {BELOW[name]}
        for backend, tier in itertools.product(place.layouts, tiers):
            scenario = "sft-eps" if name == "clip-always" else place.scenario  # norms of both are below the bound late
            assert longest[backend, scenario, tier] >= steps, (name, backend, tier)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [0, 1])  # of the two steps after which weights may not be read
@pytest.mark.parametrize("name", ["clip-always", "schedule-per-micro-batch"])
def test_the_drawn_step_moves_no_fault(session: Session, monkeypatch: pytest.MonkeyPatch, name: str, draw: int) -> None:
    monkeypatch.setattr(phases, "DRAW", draw)
    assert_caught(session, "fsdp2", name, "exact")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "name"),
    [one for one in planted() if one[1] not in BELOW and "fp32" not in catalogue()[one[1]].cells.unobservable],
)
def test_fault_is_caught_in_fp32_too(session: Session, backend: str, name: str) -> None:
    assert_caught(session, backend, name, "fp32")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "layout", "stage"),
    [
        ("leaking-documents", "sp2", "log-probs"),
        # Each document is to be cut into zigzag parts of its own; a row without documents is cut as a whole.
        ("leaking-documents", "sp2.zigzag", "configuration"),
        ("local-token-mean", "dp2.sp2", "loss"),
    ],
)
def test_faults_of_other_layouts_are_caught_on_a_ring(session: Session, name: str, layout: str, stage: str) -> None:
    verdict = session.run(cell_of("fsdp2", "sft-packed", "llama", layout, "exact", name, steps=1)).verdict
    assert verdict.first_stage == stage, verdict.reason
    assert catalogue()[name].stage in {finding.stage for finding in verdict.findings}
    if stage == "configuration":
        assert "each rank holds the tokens of its place, in their order" in verdict.reason


# In a fast run test_judge_likely_causes names the factors, and `clip-always` shows that updates are compared.
@pytest.mark.parametrize("layout", [exhaustive("dp2.sp2.zero1"), slow("ulysses2.zero2"), exhaustive("sp2.zero3")])
def test_division_by_sequence_ranks_is_caught_with_its_factor(session: Session, layout: str) -> None:
    asked = cell_of("deepspeed", "sft-sgd", "llama", layout, "exact", "divided-by-world", steps=1)
    verdict = session.run(asked).verdict
    assert verdict.first_stage == "gradients", verdict.reason
    axis = layout.partition(".")[0][:-1] if "dp" not in layout else "sp"
    assert f"0.5 times the reference, which is {'1/(dp) or ' if 'dp' in layout else ''}1/({axis})" in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_clipping_that_never_happens_is_caught_at_all_zero_stages(session: Session, stage: int) -> None:
    asked = cell_of("deepspeed", "sft-sgd", "llama", f"dp2.zero{stage}", "exact", "clip-never", steps=1)
    verdict = session.run(asked).verdict
    assert verdict.first_stage == "clipped update", verdict.reason


def test_norms_of_heads_have_to_be_summed_without_sequence_parallelism_too(session: Session) -> None:
    asked = cell_of("megatron", "sft-sgd", "qwen3", "tp2", "exact", "norms-not-summed", steps=1)
    verdict = session.run(asked).verdict
    assert verdict.first_stage == "gradients", verdict.reason
    wrong = {f.tensor.rpartition("self_attn.")[2] for f in verdict.findings if (f.stage, f.step) == ("gradients", 0)}
    assert {name.partition(" ")[0] for name in wrong} == {"q_norm.weight", "k_norm.weight"}


ODD = {name: place for name, place in CELLS["fsdp2"].items() if place[1].endswith("-odd")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ODD)
def test_what_odd_fixtures_show_the_first_fixtures_hide(session: Session, name: str) -> None:
    scenario, model, layout = ODD[name]
    asked = cell_of("fsdp2", scenario, model.removesuffix("-odd"), layout, "exact", name, steps=1)
    verdict = session.run(asked).verdict
    assert verdict.state == "infrastructure"
    assert f"{name} was planted and called, and nothing differs" in verdict.reason


FOLDERS = [path.parent.name for path in sorted((FIXTURES / "models").glob("*/model.safetensors"))]
FAMILIES = [name for name in FOLDERS if name != "deepseek-v3-mtp"]  # transformers does not have its last layer


@pytest.mark.parametrize("model", [name if name == "gemma3" else exhaustive(name) for name in FAMILIES])
def test_faults_of_loading_fit_every_family(model: str) -> None:
    """Also where they change nothing, as bases of rotary positions do that each kind of layer has for itself."""
    folder = FIXTURES / "models" / model
    loaded = empty_model(folder, dtype=torch.float32, attention=None, trusted=True)
    for fault in CATALOGUE:
        if fault.seam in ("load_model", "hugging_face_model"):
            assert fault.wrap(lambda *_, **__: loaded)(None, folder) is not None


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "name", "model"),
    [("megatron", "sinks-dropped", "llama3-odd"), ("fsdp2", "positions-not-scaled", "gemma3-odd")],
)
def test_a_fault_that_changes_nothing_says_so(session: Session, backend: str, name: str, model: str) -> None:
    verdict = session.run(cell_of(backend, "sft-packed", model, "dp2", "exact", name, steps=1)).verdict
    assert verdict.state == "infrastructure"
    assert f"{name} was planted and called, and nothing differs" in verdict.reason


def test_a_fault_that_is_never_called_is_no_pass(session: Session) -> None:
    verdict = session.run(cell_of("fsdp2", "sft-packed", "llama", "dp2", "exact", "merged-in-bf16", steps=1)).verdict
    assert verdict.state == "infrastructure"
    assert "'merged-in-bf16' was never called in this cell" in verdict.reason
    assert verdict.reason.endswith(needs_in_words("merged-in-bf16"))


def test_a_fault_whose_seam_a_backend_lacks_is_not_plantable_there(session: Session) -> None:
    refused = session.refusal(cell_of("deepspeed", "sft-packed", "llama", "dp2", "exact", "cleared-gradients", steps=1))
    assert refused is not None
    assert refused.state == "unsupported"
    said = "fault 'cleared-gradients' cannot be planted: deepspeed has no patch point "
    assert refused.reason.startswith(said)
    assert refused.reason.endswith(needs_in_words("cleared-gradients"))
    assert not session.refusal(cell_of("fsdp2", "sft-packed", "llama", "dp2", "exact", "cleared-gradients", steps=1))


@pytest.mark.parametrize(
    ("change", "planted", "state"),
    [
        (None, "", "conforms"),
        (None, "/fault-inverted-clip", "infrastructure"),
        (WRONG, "/fault-inverted-clip", "differs"),
    ],
)
def test_a_planted_fault_that_changes_nothing_is_no_pass(
    tmp_path: Path, change: Change | None, planted: str, state: str
) -> None:
    cell = f"sft-tiny/pangu/fsdp2/dp2/exact{planted}"
    write_oracle(tmp_path / "oracle" / "float64", SCENARIO)
    header = {"cell": cell, "layout": "dp2", "backend": {"name": "fsdp2", "default_zero": None}}
    write_record(tmp_path / "leg", SCENARIO, header, change or _unchanged, rounding=1e-15, seed=1)
    observables = all_observables(SCENARIO.objective)
    options: Any = {"oracles": lambda _: tmp_path / "oracle", "observables": observables}
    verdict = judge_cell(cell, [tmp_path / "leg"], known=(), conventions=(), **options)
    assert verdict.state == state
    for words in ("inverted-clip was planted and called, and nothing differs", needs_in_words("inverted-clip")):
        assert (words in verdict.reason) == (state == "infrastructure")


def test_what_a_fault_needs_is_said_with_a_cell_that_has_it() -> None:
    assert needs_in_words("cleared-gradients") == (
        "cleared-gradients needs accumulation of 2 or more, as in a cell of sft-packed/llama/fsdp2/dp2"
    )
    assert needs_in_words("of-nobody").startswith("of-nobody comes from a package that is not installed here")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "cell"), sorted({(backend, cell) for backend, cells in CELLS.items() for cell in cells.values()})
)
def test_the_same_cells_conform_without_a_fault(session: Session, backend: str, cell: tuple[str, str, str]) -> None:
    verdict = session.run(cell_of(backend, *cell, "exact")).verdict
    assert verdict.state == "conforms", verdict.reason


def _unchanged(*_: object) -> None:
    """Leave the step as the oracle has it."""


class _Seamless:
    """A backend that names no seams."""


class _Seamed:
    seams: ClassVar[dict[str, str]] = {"clip_coefficient": f"{__name__}:halve"}


def halve(norm: float, max_norm: float) -> float:
    return 0.5


def test_a_planted_fault_is_gone_afterwards_even_if_the_cell_raised() -> None:
    seamed: type[Backend] = _Seamed  # type: ignore[assignment]
    with contextlib.suppress(RuntimeError), plant(["inverted-clip"], seamed):
        assert halve(2.0, 1.0) == 1.0
        raise RuntimeError
    assert halve(2.0, 1.0) == 0.5


def test_a_fault_needs_its_seam() -> None:
    seamless: type[Backend] = _Seamless  # type: ignore[assignment]
    with (
        pytest.raises(ValueError, match=r"needs the patch point 'clip_coefficient'.*its patch points: none"),
        plant(["inverted-clip"], seamless),
    ):
        pass


def test_an_unknown_fault_lists_the_known_ones() -> None:
    seamed: type[Backend] = _Seamed  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"unknown fault 'typo'; known: .*dropped-o-bias"), plant(["typo"], seamed):
        pass
