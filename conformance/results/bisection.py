"""Bisection: what bisecting a cell has found, kept as ``cells/SLUG/bisect.json`` beside its verdict; without torch.

It changes no verdict. What follows from it, such as the place of the defect, is computed on demand and never read from
a file; a file that is of other records than the cell's is not told of (claim 9).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from conformance.core.io import Unreadable, read_file
from conformance.records.record_format import Count, dumps, first_error, parse_strict_json
from conformance.results.run_results import write_output_json

BISECTION = "bisect.json"
BISECTION_SCHEMA = 2
LONGEST = 2**24  # bytes; names of modules and parameters, no tensors

Direction = Literal["forward", "backward"]
Side = Literal["input", "output", "gradient of the output", "gradient of the input"]
Key = tuple[str, Side]  # module and side
Ranks = tuple[Count, ...]
OUTSIDE, UNKNOWN, PARAMETERS = "outside the model", "unknown", "gradients of parameters"


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A value that is not the oracle's.

    key: module and side. error: the largest root mean square of a rank's difference, over that of the whole value.
    ranks: on which ranks it is wrong, of those that ``hold`` it. silent: ranks that have it not, although they should.
    tokens: how many tokens are wrong, of all that were ``compared``, and in how many ``rows``; places: row and number
    there of the first few. missing: how many tokens no rank holds. features: first and last
    wrong feature, and how many there are in the whole. would_be_right: in words, what of the ranks' pieces would give
    the oracle's value; empty if nothing was found.
    """

    key: Key
    error: float
    ranks: Ranks
    hold: Ranks
    silent: Ranks
    tokens: Count
    compared: Count
    rows: Count
    places: tuple[tuple[Count, Count], ...]
    missing: Count
    features: tuple[Count, Count, Count]
    would_be_right: str


@dataclass(frozen=True, kw_only=True)
class First:
    """The first wrong value of a direction.

    wrong: the value. Everything that was before it in this direction is right, the last of it ``before``, which the
    ranks ``given_by`` have.
    module: the Hugging Face module inside which the defect is if ``inside``. Otherwise it is the module that gets
    the wrong value, and the defect is between ``before`` and it; without ``before`` it is outside of the model.
    """

    direction: Direction
    module: str
    inside: bool
    before: Key | None
    given_by: Ranks
    wrong: Wrong


@dataclass(frozen=True, kw_only=True)
class Bisected:
    """What was found in one step of one model. model: its role.

    forward, backward: None if every value is right. ``backward`` is also None if the forward pass is wrong, because
    wrong gradients follow from that. compared: numbers of values that were compared, forward and backward.
    unseen: modules of the oracle that no rank has shown. unknown: those of them that are no part of one that was shown,
    so nothing is known of them. parameters: errors of wrong gradients of parameters, by name,
    of ``gradients`` in all. factor: of the gradients of all parameters, if they are wrong by one factor.
    """

    model: str
    forward: First | None
    backward: First | None
    compared: tuple[Count, Count]
    unseen: tuple[str, ...]
    unknown: tuple[str, ...]
    parameters: Mapping[str, float]
    gradients: Count
    factor: float | None

    @property
    def first(self) -> First | None:
        return self.forward or self.backward

    @property
    def where(self) -> str:
        """The module with the defect, ``between A and B``, PARAMETERS where only their sum or reduction is wrong,
        OUTSIDE, or UNKNOWN."""
        first = self.first
        if first is None and self.unknown:
            return UNKNOWN
        if first is None and self.parameters and self.factor is None:
            return PARAMETERS
        if first is None or (first.before is None and not first.inside):
            return OUTSIDE
        if first.inside:
            return first.module
        assert first.before is not None
        return f"between {first.before[0]} and {first.module}"

    @property
    def is_right(self) -> bool:
        """Whether all that was compared is the oracle's."""
        return not self.first and not self.parameters


def most_telling_first(models: Sequence[Bisected]) -> tuple[Bisected, ...]:
    """A wrong module before what is wrong around it, the forward pass before what follows from it, and what is right
    last: a critic that is wrong makes advantages wrong, and with them all gradients of the policy."""

    def place(found: Bisected) -> int:
        if found.first and found.where != OUTSIDE:
            return 0 if found.forward else 2
        kinds = [bool(found.forward), found.where == PARAMETERS, not found.is_right, found.where == UNKNOWN]
        return next((number for kind, number in zip(kinds, (1, 3, 4, 5), strict=True) if kind), 6)

    return tuple(sorted(models, key=place))


@dataclass(frozen=True, kw_only=True)
class Issued:
    """Collectives of one kind, group size and dtype that ``ranks`` issued alike in a step: how many ``times``, and
    ``elements`` in all, of the larger one of what goes in and what comes out."""

    kind: str
    size: Count
    dtype: str
    times: Count
    elements: Count
    ranks: Ranks


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """What was issued in the first wrong place, and there in ``conforming``, a cell of another layout that conforms.
    ``conforming`` is empty if there is none."""

    issued: tuple[Issued, ...]
    conforming: str
    there: tuple[Issued, ...]


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The bisection of a cell that differs.

    cell: its id. records: the digests of the records that its verdict is about. stage: the first stage that differs.
    traced: the cell whose modules were traced: itself, or its exact twin. why_not: if it has no ``models``, why not.
    step: the step that was traced. models: what was found of each trained model, the most telling first.
    collectives: None unless the place is in the model.
    """

    cell: str
    records: tuple[str, ...]
    stage: str
    traced: str
    why_not: str = ""
    step: StrictInt = 0
    models: tuple[Bisected, ...] = ()
    collectives: Collectives | None = None


@dataclass(frozen=True, kw_only=True)
class _File(Bisection):
    """``sha256``: of all other values, in the order of the file."""

    schema: Annotated[int, Field(ge=BISECTION_SCHEMA, le=BISECTION_SCHEMA)]
    sha256: str


_FILE, _BISECTED = TypeAdapter(_File), TypeAdapter(tuple[Bisected, ...])


def bisected_from_json(values: Any) -> tuple[Bisected, ...]:
    """What a task has found, from its JSON values. Raises ValidationError."""
    return _BISECTED.validate_python(values)


def write_bisection(folder: Path, bisection: Bisection) -> None:
    """Write ``bisect.json`` of a cell. Raises Unwritable."""
    values = {"schema": BISECTION_SCHEMA, **asdict(bisection)}
    write_output_json(folder / BISECTION, {**values, "sha256": _digest(values)}, indent=None)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        dumps({name: value for name, value in values.items() if name != "sha256"}).encode()
    ).hexdigest()


def not_told(cell: str, records: tuple[str, ...], why: str) -> Bisection:
    """In place of a file that cannot be believed. ``why``: what follows the name of the file."""
    again = f"run: parity bisect {cell}"
    return Bisection(cell=cell, records=records, stage="", traced=cell, why_not=f"{BISECTION} {why}; {again}")


def read_bisection(folder: Path, *, cell: str, records: tuple[str, ...]) -> Bisection | None:
    """The bisection of ``cell`` in its ``folder``; None if there is none. ``records``: the digests of the cell's.

    A file that cannot be trusted gives one that says so, and nothing else.
    """

    def refused(why: str) -> Bisection:
        return not_told(cell, records, why)

    try:
        values = parse_strict_json(read_file(folder / BISECTION, limit=LONGEST))
        found = _FILE.validate_python(values)
    except FileNotFoundError:
        return None
    except Unreadable as error:
        return refused(f"is not told: {error}")
    except ValidationError as error:
        return refused(f"is not as the suite wrote it ({first_error(error)})")
    except ValueError as error:
        return refused(f"is not valid JSON ({error})")
    if found.sha256 != _digest(values):
        return refused("was edited: its digest is another one")
    if (found.cell, found.records) != (cell, records):
        return refused("is of another run of the cell, or of another cell")
    if not found.models and not found.why_not:
        return refused("holds no result")
    kept = {name: value for name, value in vars(found).items() if name not in ("schema", "sha256")}
    return Bisection(**kept)
