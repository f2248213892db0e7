"""Defect: what a library is known to compute otherwise, as configuration.

Serves claim 8: a known defect hides nothing. A cell that has one is judged, in all stages and by the usual bounds,
against the oracle that has it as well (conformance.expectation says which cells have which). Here is what a defect is;
the oracle computes each in a file of its own (conformance/oracle/defects.py lists them).
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from conformance.validation import STRICT

Several = Annotated[int, Field(strict=True, ge=2)]
Number = Annotated[int, Field(strict=True, ge=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RoundedMasters:
    """The float32 weights of models that are trained begin as numbers of the half precision ``precision``."""

    kind: Literal["rounded-masters"] = "rounded-masters"
    precision: Literal["bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PaddedSoftmax:
    """Rows of zeros stand behind the head until its rows are a multiple of ``multiple``. They take part in the softmax,
    and so they are trained, and their gradients are part of the norm."""

    kind: Literal["padded-softmax"] = "padded-softmax"
    multiple: Several


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainedPaddingToken:
    """The padding token of the model's configuration, as an input, gives a gradient to its embedding."""

    kind: Literal["trained-padding-token"] = "trained-padding-token"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ResummedHeadNorms:
    """Gradients of head norms are summed over ``ranks`` tensor-parallel ranks after every micro-batch, with those of
    the micro-batches before it, which were summed already.

    ``data_ranks``, ``micro_batches``: how the rows of an optimizer step are cut.
    """

    kind: Literal["resummed-head-norms"] = "resummed-head-norms"
    ranks: Several
    data_ranks: Number
    micro_batches: Number


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DividedGradients:
    """All gradients are divided by ``by``."""

    kind: Literal["divided-gradients"] = "divided-gradients"
    by: Several


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WindowPerBlock:
    """A ring of ``ranks`` cuts every document, and applies a sliding window to each block of keys as if the block ended
    where the queries end. ``zigzag``: of two ranks, each of which holds a piece from both ends of the document."""

    kind: Literal["window-per-block"] = "window-per-block"
    ranks: Several
    zigzag: bool = False


Defect = RoundedMasters | PaddedSoftmax | TrainedPaddingToken | ResummedHeadNorms | DividedGradients | WindowPerBlock
_ADAPTER: TypeAdapter[tuple[Defect, ...]] = TypeAdapter(tuple[Annotated[Defect, Field(discriminator="kind")], ...])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Unmodelled:
    """What a defect shows that the oracle cannot have: findings at ``stage``, of any model, of tensors that match one
    of ``tensors``.

    These are shell patterns of what is named at the stage. No finding may be another; nothing else is hidden.
    onward: wrong numbers go on to be used, so other stages may differ from the oracle after the first findings. What is
    rebuilt from the cell's own record, replicas, settings and the configuration still have to hold at all steps.
    """

    stage: str
    tensors: tuple[str, ...]
    onward: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Known:
    """An expected difference of one cell, as a verdict keeps it: ``defects``, or what is ``unmodelled``."""

    reason: str
    link: str
    defects: tuple[Annotated[Defect, Field(discriminator="kind")], ...] = ()
    unmodelled: Unmodelled | None = None


def defects_of(known: Iterable[Known]) -> tuple[Defect, ...]:
    """All defects of what is known of a cell, in order."""
    return tuple(defect for one in known for defect in one.defects)


def defects_to_json(defects: tuple[Defect, ...]) -> list[dict[str, Any]]:
    """Plain JSON values; ``parse_defects`` reads them back."""
    values: list[dict[str, Any]] = _ADAPTER.dump_python(defects, mode="json")
    return list(values)


def parse_defects(values: Any) -> tuple[Defect, ...]:
    """Defects from what ``defects_to_json`` gave."""
    return _ADAPTER.validate_python(values)
