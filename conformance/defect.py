"""Defect: something that a library is known to compute differently, as configuration.

Serves claim 8: a known defect hides nothing else. A cell with a known defect is judged, in all stages and with the
usual bounds, against an oracle that has the same defect. conformance.expectation decides which cells have which
defects. This module only describes them; the oracle implements each in its own file (conformance/oracle/defects.py
lists these files).
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
    """The float32 master weights of trained models are initialised with weights rounded to ``precision``."""

    kind: Literal["rounded-masters"] = "rounded-masters"
    precision: Literal["bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PaddedSoftmax:
    """Rows of zeros are appended to the output embedding until the number of rows is a multiple of ``multiple``. These
    rows take part in the softmax, so they are trained, and their gradients count in the gradient norm."""

    kind: Literal["padded-softmax"] = "padded-softmax"
    multiple: Several


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainedPaddingToken:
    """The input embedding of the padding token (of the model's configuration) gets a gradient."""

    kind: Literal["trained-padding-token"] = "trained-padding-token"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ResummedHeadNorms:
    """The accumulated gradients of head norms are summed over ``ranks`` tensor-parallel ranks after every micro-batch,
    so the gradients of earlier micro-batches are summed repeatedly.

    ``data_ranks``, ``micro_batches``: how the rows of an optimizer step are divided.
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
    """A ring of ``ranks`` ranks cuts every document into blocks, and applies a sliding window to each block of keys as
    if the block ended where the queries end. ``zigzag``: the ring has two ranks, and each holds one piece from both
    ends of the document."""

    kind: Literal["window-per-block"] = "window-per-block"
    ranks: Several
    zigzag: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LostEmbeddingGradient:
    """The input embedding gets no gradient; of a model whose output embedding is another tensor."""

    kind: Literal["lost-embedding-gradient"] = "lost-embedding-gradient"


Defect = (
    RoundedMasters
    | PaddedSoftmax
    | TrainedPaddingToken
    | ResummedHeadNorms
    | DividedGradients
    | WindowPerBlock
    | LostEmbeddingGradient
)
_ADAPTER: TypeAdapter[tuple[Defect, ...]] = TypeAdapter(tuple[Annotated[Defect, Field(discriminator="kind")], ...])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Unmodelled:
    """The symptoms of a defect that the oracle does not implement: findings at ``stage``, of any model, whose tensor
    matches one of the shell patterns ``tensors``. Any other finding makes the cell differ.

    onward: the wrong numbers are used further, so other stages may differ from the oracle after the first finding.
        Quantities that are rebuilt from the cell's own record, replicas, settings and the configuration still have to
        be right at all steps.
    """

    stage: str
    tensors: tuple[str, ...]
    onward: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Known:
    """An expected difference of one cell, as it is stored with the verdict: either ``defects`` or ``unmodelled``."""

    reason: str
    link: str
    defects: tuple[Annotated[Defect, Field(discriminator="kind")], ...] = ()
    unmodelled: Unmodelled | None = None


def defects_of(known: Iterable[Known]) -> tuple[Defect, ...]:
    """All defects of a cell's expected differences, in order."""
    return tuple(defect for one in known for defect in one.defects)


def defects_to_json(defects: tuple[Defect, ...]) -> list[dict[str, Any]]:
    """Plain JSON values, which ``parse_defects`` reads back."""
    values: list[dict[str, Any]] = _ADAPTER.dump_python(defects, mode="json")
    return list(values)


def parse_defects(values: Any) -> tuple[Defect, ...]:
    """Defects from the JSON values that ``defects_to_json`` returned. Raises pydantic's ValidationError for others."""
    return _ADAPTER.validate_python(values)
