"""Schema: the fields of a record's lines and their types; without torch.

Every line is validated when it is read, so no reader has to check types again (claim 9). Other keys are allowed and
ignored.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from conformance.observable import Observable, observables_from_json

Count = Annotated[StrictInt, Field(ge=0)]
Pass = Annotated[str, Field(pattern=r"^(forward|backward [0-9]{1,9}|later)$")]  # of a training step


@dataclass(frozen=True, kw_only=True)
class _Header:
    observables: tuple[Observable, ...]
    first_step: Count
    cell: str = ""
    layout: str = ""
    scenario: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Differing:
    name: str
    ranks: tuple[StrictInt, ...]
    relative: float


@dataclass(frozen=True, kw_only=True)
class _Replicas:
    offered: Count
    compared: Count
    differing: tuple[_Differing, ...]


@dataclass(frozen=True, kw_only=True)
class _TensorFile:
    """``file`` is a name in the record's own folder."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class _Step:
    step: StrictInt
    values: dict[str, float] = field(default_factory=dict)
    replicas: dict[str, _Replicas] = field(default_factory=dict)
    seconds: float = 0.0
    generators: tuple[dict[str, str], ...] = ()  # by rank, a digest by the generator's name
    tensors: _TensorFile | None = None


@dataclass(frozen=True, kw_only=True)
class _Leak:
    op: str
    where: str
    count: Count


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    collectives: tuple[tuple[str, StrictInt, str, Pass, Count], ...]
    products: tuple[tuple[str, Literal["forward", "backward", "recomputed"], Count], ...]
    widths: tuple[StrictInt, ...]
    linear: tuple[tuple[str, Count], ...] = ()  # older records have neither this field nor the next five
    lengths: tuple[StrictInt, ...] = ()
    reduced: tuple[tuple[StrictInt, Count], ...] = ()
    held_weights: tuple[tuple[Count, Count], ...] = ()
    compiled: Count = 0
    engine: Count = 0


@dataclass(frozen=True, kw_only=True)
class _Batch:
    step: StrictInt
    tokens: Count
    targets: tuple[tuple[Count, ...], ...]  # of each micro-batch of each data-parallel rank


@dataclass(frozen=True, kw_only=True)
class _Footer:
    steps: Count
    sha256: str
    leaks: tuple[_Leak, ...] = ()
    evidence: tuple[_Evidence, ...] = ()
    batches: tuple[_Batch, ...] = ()  # older records have neither this field nor the next two
    memory: tuple[Count, ...] = ()  # by rank, the peak of its device in bytes; 0 where it is not known
    host_memory: tuple[Count, ...] = ()  # the same of its host; older records lack it
    pieces: dict[str, dict[str, tuple[Count, ...]]] = field(default_factory=dict)  # by name and region, the ranks
    choices: str = ""  # the oracle's of a mixture of experts: SHA-256 of the batches with its routers' choices


_LINE_TYPES = {"header": _Header, "step": _Step, "footer": _Footer}


def wrong_line(line: dict[str, Any]) -> str:
    """What is wrong with a line of a record; empty if nothing is. ``type`` has to be header, step or footer."""
    try:
        _adapter(line["type"]).validate_python(line)
        if line["type"] == "header":
            observables_from_json(line["observables"])  # refuses fields of another version, which pydantic would not
    except ValidationError as error:
        return first_error(error)
    except TypeError as error:
        return str(error)
    return ""


def first_error(error: ValidationError) -> str:
    """The first error of a validation, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_LINE_TYPES[kind])
