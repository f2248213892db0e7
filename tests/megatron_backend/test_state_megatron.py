"""Megatron over handovers: what a layout has saved, another goes on from, through both forms of a training state.

That it is the same to the bit, and what is refused, is in tests/megatron_backend/test_megatron_models.py.
"""

from itertools import permutations, product

import pytest
from cells import BACKENDS, assert_honest, needs
from conftest import make_cell

from conformance.matrix.cell import Cell, Handover, Phase
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName

pytestmark = needs("megatron-core")

PLAIN = ("dp2", "tp2", "tp2.seqpar", "pp2", "pp2.vpp2", "sp2")
DISTRIBUTED = ("dp2.zero1", "dp2.zero1.overlap", "tp2.zero1", "pp2.vpp2.zero1")


def goes_on(scenario: str, model: str, before: str, after: str, precision: PrecisionName, save: Handover) -> Cell:
    """Two steps in each of two layouts; of sft-frozen, which has three, one in the first."""
    first = 1 if scenario == "sft-frozen" else 2
    config = make_cell(scenario, model, "dp1", precision, steps=first + 2).scenario
    backend = BACKENDS["megatron"]
    phases = (
        Phase(backend=backend, layout=Layout.parse(before), steps=first, save=save),
        Phase(backend=backend, layout=Layout.parse(after), steps=2),
    )
    return Cell(scenario=config, phases=phases, program=save)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp2.zero1.overlap", "pp2.vpp2"),
        *permutations((*PLAIN, "dp2.zero1"), 2),
        *product(PLAIN[:4], ["dp2.zero1.overlap"]),
        *(("tp2.pp2", "dp2.tp2.zero1"), ("dp2.tp2.zero1", "dp2"), ("dp2", "tp2.pp2")),
    ],
)
def test_a_state_goes_to_any_layout(session: Session, before: str, after: str) -> None:
    assert_honest(session, goes_on("sft-warmup", "qwen3", before, after, "exact", "state"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *permutations(PLAIN, 2),
        *permutations(DISTRIBUTED, 2),
        ("tp2.pp2", "dp2"),
        ("dp2.tp2.zero1", "tp2.pp2.zero1"),
        ("dp2.zero1", "dp2.tp2.zero1"),
    ],
)
def test_a_checkpoint_goes_to_any_layout_with_the_same_optimizer(session: Session, before: str, after: str) -> None:
    assert_honest(session, goes_on("sft-warmup", "qwen3", before, after, "exact", "checkpoint"))


SAVES: tuple[Handover, ...] = ("state", "checkpoint")
LOWER: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("save", "scenario", "before", "after", "precision"),
    [
        *product(SAVES, ["sft-warmup"], ["dp2.zero1"], ["tp2.zero1"], LOWER),
        *product(SAVES, ["sft-warmup"], ["tp2.seqpar"], ["pp2.vpp2"], LOWER),
        *product(["state"], ["sft-warmup"], ["pp2.vpp2"], ["dp2.zero1.overlap"], LOWER),
        *product(SAVES, ["sft-sgd"], ["tp2"], ["pp2"], ("exact", "fp16")),
        *product(SAVES, ["sft-frozen"], ["pp2"], ["tp2.seqpar"], ("exact",)),
        *product(SAVES, ["sft-frozen"], ["dp2.zero1"], ["pp2.zero1"], ("exact",)),
    ],
)
def test_other_precisions_and_optimizers(
    session: Session, save: Handover, scenario: str, before: str, after: str, precision: PrecisionName
) -> None:
    verdict = session.run(goes_on(scenario, "llama", before, after, precision, save)).verdict
    assert verdict.state == "conforms", verdict.reason
