"""How a DeepSpeed checkpoint is partitioned, and which checkpoints a layout can load.

A checkpoint is partitioned like the state of DeepSpeed's optimizer, so only an optimizer of the same class can load it.
For a checkpoint that it cannot load, DeepSpeed raises errors that do not name the cause, some of them after it has
changed weights (docs/findings/deepspeed-checkpoint-changes.md); ``check`` refuses such a checkpoint first.
"""

from dataclasses import dataclass

from conformance.layout import Layout
from conformance.scenario import Precision
from conformance.validation import UsageError
from impl.deepspeed.settings import zero_stage

WAY_ON = (
    'hand over a state instead, which every layout reads (export_state and import_state; save = "state" in a cell; '
    "parity convert makes one of a checkpoint)"
)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the files of a checkpoint are partitioned.

    stage: the ZeRO stage, or the two stages that share an optimizer class. ranks: the number of ranks that ZeRO
    partitions over, which are those of data parallelism, ring and Ulysses together. optimizer: the class name of the
    base optimizer. groups: the order of its parameter groups; checkpoints of before 2026-11-25 do not say it.
    """

    stage: str
    precision: str
    tp: int
    ulysses: int
    ranks: int
    optimizer: str
    groups: str = "with the largest first"


def largest_group_last(stage: int) -> bool:
    """Whether the engine gets the largest of its parameter groups last."""
    return stage in (1, 2)


def engine_cut(layout: Layout, precision: Precision, *, optimizer: str) -> Cut:
    """How the checkpoints of an engine are partitioned. ``optimizer``: the class name of its base optimizer."""
    stage = zero_stage(layout)
    one_class = stage in (1, 2) and precision != "bf16"  # in bf16, ZeRO-1 has a class of its own
    return Cut(
        stage="zero1 or zero2" if one_class else f"zero{stage}",
        precision=precision,
        tp=layout.tp,
        ulysses=layout.ulysses,
        ranks=layout.world_size // layout.tp,
        optimizer=optimizer,
        groups="with the largest last" if largest_group_last(stage) and "Adam" in optimizer else Cut.groups,
    )


def fits(saved: Cut, own: Cut) -> bool:
    """Whether the files are partitioned like this layout, so that DeepSpeed loads them without its universal form."""
    return saved.tp == own.tp and (saved.ranks == own.ranks or own.stage == "zero0")


def check(saved: Cut, own: Cut) -> None:
    """Raise UsageError if an engine partitioned as ``own`` cannot load a checkpoint partitioned as ``saved``."""
    for name in ("stage", "precision", "optimizer", "groups"):
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
        reason = "Ulysses below zero3"  # its mpu lacks functions that DeepSpeed calls then
    elif own.stage == "zero3" and own.tp not in (1, saved.tp):
        reason = "another tp at zero3"  # it would copy whole tensors into the space of tensor-parallel parts
    if reason:
        raise UsageError(
            f"the checkpoint is cut over tp{saved.tp} and {saved.ranks} ranks of ZeRO, and this layout over tp{own.tp} "
            f"and {own.ranks}; DeepSpeed's universal form, which goes between them, is not for {reason}; {WAY_ON}"
        )
