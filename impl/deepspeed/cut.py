"""How a checkpoint of DeepSpeed is cut, and which of them a layout can read.

A checkpoint is cut as DeepSpeed's optimizer is, so it fits an optimizer of the same class only. What DeepSpeed cannot
read it refuses without a cause, in part when it has changed weights (docs/findings/deepspeed-checkpoint-changes.md), so
it is refused here.
"""

from dataclasses import dataclass

from conformance.layout import Layout
from conformance.scenario import Precision
from conformance.validation import UsageError
from impl.deepspeed.settings import zero_stage

WAY_ON = 'hand over a state instead, which every layout reads (export_state and import_state; save = "state" in a cell)'


@dataclass(frozen=True, kw_only=True)
class Cut:
    """stage: those whose optimizer is of one class. ranks: those that ZeRO cuts over; they may be data ranks, or of a
    ring or of Ulysses. optimizer: the name of the class of what it steps with."""

    stage: str
    precision: str
    tp: int
    ulysses: int
    ranks: int
    optimizer: str


def engine_cut(layout: Layout, precision: Precision, *, optimizer: str) -> Cut:
    """How an engine is cut whose base optimizer is of this class."""
    stage = zero_stage(layout)
    one_class = stage in (1, 2) and precision != "bf16"  # in bf16, ZeRO-1 has a class of its own
    return Cut(
        stage="zero1 or zero2" if one_class else f"zero{stage}",
        precision=precision,
        tp=layout.tp,
        ulysses=layout.ulysses,
        ranks=layout.world_size // layout.tp,
        optimizer=optimizer,
    )


def fits(saved: Cut, own: Cut) -> bool:
    """Whether the files are cut as this layout is, so that they need not go through DeepSpeed's universal form."""
    return saved.tp == own.tp and (saved.ranks == own.ranks or own.stage == "zero0")


def check(saved: Cut, own: Cut) -> None:
    """Raises UsageError where DeepSpeed cannot read a checkpoint that is cut as ``saved`` is into what is cut as
    ``own``."""
    for name in ("stage", "precision", "optimizer"):
        before, now = getattr(saved, name), getattr(own, name)
        if before != now:
            raise UsageError(f"DeepSpeed reads a checkpoint of {name} {before} into the same only, not {now}; {WAY_ON}")
    if fits(saved, own):
        return
    reason = ""
    if own.stage == "zero0":
        reason = "zero0"
    elif "Adam" not in own.optimizer:
        reason = f"{own.optimizer}, only for AdamW"
    elif own.stage != "zero3" and any(cut.ulysses > 1 and cut.tp == 1 for cut in (saved, own)):
        reason = "Ulysses below zero3"  # its mpu does not say what is asked of it then
    elif own.stage == "zero3" and own.tp not in (1, saved.tp):
        reason = "another tp at zero3"  # it lays whole tensors into the space of parts
    if reason:
        raise UsageError(
            f"the checkpoint is cut over tp{saved.tp} and {saved.ranks} ranks of ZeRO, and this layout over tp{own.tp} "
            f"and {own.ranks}; DeepSpeed's universal form, which goes between them, is not for {reason}; {WAY_ON}"
        )
