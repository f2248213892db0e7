"""DeepSpeed over handovers: its training state in the form of all backends, and its own checkpoints.

Masters and moments that nobody handed over show in half precision only, where what is computed with is not the master.
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from cells import BACKENDS, assert_honest, exhaustive, needs
from conftest import make_cell
from test_deepspeed import in_ranks

from conformance.core.errors import UsageError
from conformance.matrix.cell import Cell, Handover, Phase
from conformance.results.verdict import Verdict
from conformance.runner.session import Session
from conformance.runtime import Pool
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from impl.deepspeed.checkpoint_layout import Cut, check, engine_cut

pytestmark = needs("deepspeed")

EVERY_KIND = (
    "dp2.zero0",
    "dp2.zero1",
    "dp2.zero2",
    "dp2.zero3",
    "tp2.zero1",
    "tp2.zero3",
    "sp2.zero2",
    "ulysses2.zero2",
    "dp4.zero3",
    "dp2.zero2.offload",
    "dp2.zero3.offload",
)
# Each of these layouts hands over to the next: all write and all read.
CIRCLE = list(zip(EVERY_KIND, (*EVERY_KIND[1:], EVERY_KIND[0]), strict=True))


def handed(
    *layouts: str, save: Handover, scenario: str = "sft-warmup", precision: PrecisionName = "exact", **overrides: Any
) -> Cell:
    """A cell in which each layout hands over to the next after two steps. ``overrides`` are fields of the scenario."""
    rows = None if precision in ("bf16", "fp16") else 12
    config = make_cell(scenario, "qwen3", "dp1", precision, steps=2 * len(layouts), rows=rows, **overrides).scenario
    phases = [
        Phase(backend=BACKENDS["deepspeed"], layout=Layout.parse(layout), steps=2, save=save) for layout in layouts
    ]
    return Cell(scenario=config, phases=(*phases[:-1], replace(phases[-1], save=None)), program="handed")


def assert_handed_over(verdict: Verdict) -> None:
    """The state as loaded is the state as saved, to the bit."""
    found = [quantity for quantity in verdict.quantities if quantity.stage == "training state"]
    kinds = {quantity.tensor.partition(" of ")[0] for quantity in found}
    assert kinds in ({"exp_avg", "exp_avg_sq", "step", "progress"}, {"momentum_buffer", "progress"})
    assert max(quantity.observed for quantity in found) == 0


@pytest.mark.parametrize(
    "layouts",
    [
        ("dp2.zero0", "dp2.zero3.offload"),
        exhaustive(("dp2.zero3.offload", "tp2.zero1")),
        exhaustive(("tp2.zero3", "ulysses2.zero2", "dp2.zero0")),
        *(exhaustive(pair) for pair in CIRCLE),
    ],
    ids="-to-".join,
)
def test_every_layout_goes_on_from_the_state_of_another(session: Session, layouts: tuple[str, ...]) -> None:
    assert_handed_over(assert_honest(session, handed(*layouts, save="state")))


HALF_CIRCLE = ("dp2.zero1", "dp2.zero3", "tp2.zero1", "dp2.zero2.offload", "ulysses2.zero2", "dp2.zero1")
LOWER: tuple[PrecisionName, ...] = ("bf16", "fp16", "fp32")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "before", "after"),
    [(precision, *pair) for precision, pair in product(LOWER, pairwise(HALF_CIRCLE))],
)
def test_masters_moments_and_loss_scale_are_handed_over_in_lower_precisions(
    session: Session, precision: PrecisionName, before: str, after: str
) -> None:
    verdict = session.run(handed(before, after, save="state", precision=precision)).verdict
    assert verdict.state == "conforms", verdict.reason
    assert_handed_over(verdict)
    progress = {q.tensor for q in verdict.quantities if q.tensor.startswith("progress")}
    scaled = {"progress of loss_scale", "progress of good_steps"} if precision == "fp16" else set()
    assert progress == {"progress of schedule", *scaled}


@pytest.mark.parametrize("layout", [exhaustive("dp1.zero0"), "dp1.zero2", exhaustive("dp1.zero3")])
def test_a_loss_scale_that_is_not_the_first_is_handed_over(pool: Pool, tmp_path: Path, layout: str) -> None:
    """In a few steps of a cell it does not change."""
    (told,) = in_ranks(pool, tmp_path, "progress", layout, worker_group="one", precision="fp16")
    assert told == {"schedule": 4.0, "loss_scale": 512.0, "good_steps": 8.0}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "before", "after"), [("bf16", "dp2.zero0", "tp2.zero3"), ("fp16", "dp2.zero3", "dp2.zero0")]
)
def test_masters_of_zero_0_are_handed_over(session: Session, precision: PrecisionName, before: str, after: str) -> None:
    """With a single micro-batch, so that there are no gradients to add up in half precision."""
    verdict = session.run(handed(before, after, save="state", precision=precision, accumulation=1)).verdict
    assert verdict.state == "conforms", verdict.reason
    assert_handed_over(verdict)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("scenario", "layouts"),
    [
        ("sft-sgd", ("dp2.zero1", "tp2.zero3", "dp2.zero0")),
        ("sft-frozen", ("dp2.zero3", "dp2.zero2", "tp2.zero1")),
        ("sft-packed", ("dp2.zero3.ownopt", "dp2.zero1.ownopt", "dp2.ulysses2.zero2")),
    ],
)
def test_any_optimizer_hands_over(session: Session, scenario: str, layouts: tuple[str, ...]) -> None:
    assert_handed_over(assert_honest(session, handed(*layouts, save="state", scenario=scenario)))


@pytest.mark.exhaustive
def test_a_critic_hands_over_beside_its_policy(session: Session) -> None:
    config = make_cell("ppo", "llama", "dp1", "exact", steps=8, rows=12).scenario
    layouts = [Layout.parse(layout) for layout in ("dp2.zero2", "tp2.zero3")]
    first = Phase(backend=BACKENDS["deepspeed"], layout=layouts[0], steps=4, save="state")
    last = Phase(backend=first.backend, layout=layouts[1], steps=4)
    verdict = assert_honest(session, Cell(scenario=config, phases=(first, last), program="handed"))
    assert_handed_over(verdict)
    assert {q.stage for q in verdict.quantities} >= {"training state", "critic training state"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layouts", "precision"),
    [
        (("dp2.zero3", "dp1.zero3"), "exact"),
        (("dp2.zero1", "dp1.zero2"), "exact"),
        (("dp2.zero2", "dp4.zero1", "dp2.zero1"), "exact"),
        (("dp4.zero3", "dp2.zero3.offload"), "exact"),
        (("dp2.zero0", "dp4.zero0"), "exact"),
        (("dp2.zero2", "sp2.zero1"), "exact"),
        (("dp2.zero3", "dp2.ulysses2.zero3"), "exact"),
        (("dp2.zero1", "ulysses2.zero1"), "exact"),
        (("dp2.ulysses2.zero3", "dp2.zero3"), "exact"),
        (("dp2.tp2.zero1", "tp2.zero2", "dp2.zero1"), "exact"),
        (("dp2.tp2.zero3", "tp2.zero3", "dp2.zero3"), "exact"),
        (("dp2.zero1", "tp2.zero1"), "bf16"),
        (("dp2.zero1", "dp4.zero1"), "bf16"),
        (("dp2.zero2", "dp1.zero2"), "bf16"),
        (("dp2.zero3", "dp1.zero3"), "bf16"),
        (("dp2.zero2", "dp1.zero1"), "fp16"),
        (("dp2.zero3", "dp1.zero3"), "fp16"),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(
    session: Session, layouts: tuple[str, ...], precision: PrecisionName
) -> None:
    cell = handed(*layouts, save="checkpoint", precision=precision)
    verdict = assert_honest(session, cell) if precision == "exact" else session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    assert_handed_over(verdict)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layouts",
    [
        ("tp2.zero2", "dp2.zero1"),
        ("dp2.zero2", "tp2.zero2"),
        ("dp2.zero3", "dp4.zero3"),
        ("dp2.tp2.zero1", "tp2.zero2"),
        ("dp2.tp2.zero3", "dp2.zero3"),
    ],
    ids="-to-".join,
)
def test_frozen_parameters_go_on_in_another_layout(
    session: Session, pool: Pool, tmp_path: Path, layouts: tuple[str, str]
) -> None:
    """Also where they are not those of the model's folder."""
    assert_handed_over(assert_honest(session, handed(*layouts, save="checkpoint", scenario="sft-frozen")))
    before, after = layouts
    in_ranks(pool, tmp_path, "save_numbered", before, worker_group=before, scenario="sft-frozen")
    for found in in_ranks(pool, tmp_path, "load_numbered", after, worker_group=after, scenario="sft-frozen"):
        assert "model.embed_tokens.weight" in found
        assert all(found.values()), found


REFUSED = [
    ("dp2.zero1", "dp2.zero3", "adamw", "exact", "of stage zero1 or zero2 only into the same, not zero3"),
    ("dp2.zero0", "dp2.zero1", "adamw", "exact", "of stage zero0 only into the same, not zero1 or zero2"),
    ("dp2.zero1", "dp2.zero2", "adamw", "bf16", "of stage zero1 only into the same, not zero2"),
    ("dp2.zero0", "tp2.zero0", "adamw", "exact", "over tp1 and 2 ranks of ZeRO.*tp2 and 1;.* does not support zero0"),
    ("dp2.zero1", "dp2.ulysses2.zero1", "adamw", "exact", "does not support Ulysses below zero3"),
    ("dp2.ulysses2.zero2", "dp2.zero2", "adamw", "fp16", "does not support Ulysses below zero3"),
    ("dp2.zero3", "dp2.tp2.zero3", "adamw", "exact", "does not support another tp at zero3"),
    ("dp2.zero3", "dp4.zero3", "sgd", "exact", "does not support SGD, only AdamW"),
]
ALLOWED = [
    ("dp2.zero1", "sp2.zero2", "sgd", "exact"),
    ("dp2.zero0", "dp4.zero0", "sgd", "bf16"),
    ("dp2.zero1", "ulysses2.zero1", "adamw", "exact"),
    ("dp2.zero1", "dp2.tp2.zero2", "adamw", "fp16"),
    ("dp2.tp2.zero3", "tp2.zero3", "adamw", "bf16"),
    ("dp2.tp2.zero3", "ulysses2.zero3", "adamw", "fp32"),
    ("dp2.zero1", "dp4.zero2", "adamw", "fp16"),
    ("dp2.zero3", "dp3.sp2.zero3", "adamw", "bf16"),
]


def cut(layout: str, optimizer: str, precision: PrecisionName) -> Any:
    return engine_cut(Layout.parse(layout), precision, optimizer={"adamw": "AdamW", "sgd": "SGD"}[optimizer])


@pytest.mark.parametrize(
    ("before", "after", "optimizer", "precision", "message"), [*REFUSED, *((*allowed, None) for allowed in ALLOWED)]
)
def test_only_an_unreadable_checkpoint_is_refused(
    before: str, after: str, optimizer: str, precision: PrecisionName, message: str | None
) -> None:
    refused = pytest.raises(UsageError, match=f"{message}.*transfer a training state instead")
    with refused if message else nullcontext():
        check(cut(before, optimizer, precision), cut(after, optimizer, precision))


@pytest.mark.parametrize(("stage", "refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_checkpoint_without_group_order_has_older_order(stage: int, refused: bool) -> None:
    own = cut(f"dp2.zero{stage}", "adamw", "fp32")
    before = Cut(**{name: value for name, value in vars(own).items() if name != "groups"})
    message = "groups with the largest first.*transfer a training state"
    with pytest.raises(UsageError, match=message) if refused else nullcontext():
        check(before, own)


def test_what_is_refused_changes_nothing_and_what_is_converted_leaves_nothing(pool: Pool, tmp_path: Path) -> None:
    """The checkpoint is written by two ranks, and one goes on from it; at another stage they could not, either."""
    assert in_ranks(pool, tmp_path, "save_checkpoint", "dp2.zero3") == [None, None]
    for result in in_ranks(pool, tmp_path, "load_checkpoint", "dp2.zero2"):
        assert "of stage zero3 only into the same" in result.pop("said")
        assert result == {"changed": False, "left": ["checkpoint"]}
    (result,) = in_ranks(pool, tmp_path, "load_checkpoint", "dp1.zero3", worker_group="one")
    assert result == {"said": "", "changed": True, "left": ["checkpoint"]}
