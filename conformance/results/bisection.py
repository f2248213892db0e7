"""Reads and writes ``cells/SLUG/bisect.json``, the result of bisecting a cell. Does not import torch.

A bisection changes no verdict. The place of the defect is computed on demand and never read from a file. A file that
belongs to other records than the cell's is not shown (see docs/principles.md#9-incomplete-is-never-green).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from conformance.core.io import Unreadable, read_file
from conformance.records.record_format import Count, first_error, parse_strict_json
from conformance.results.run_results import write_output_json

BISECTION = "bisect.json"
BISECTION_SCHEMA = 2
LONGEST = 2**24  # bytes; the file has names of modules and parameters, but no tensors

Direction = Literal["forward", "backward"]
Side = Literal["input", "output", "gradient of the output", "gradient of the input"]
Key = tuple[str, Side]  # module and side
Ranks = tuple[Count, ...]
OUTSIDE, UNKNOWN, PARAMETERS = "outside the model", "unknown", "gradients of parameters"


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Holds a value that differs from the oracle's.

    key: module and side. error: the largest root mean square of a rank's difference, relative to the whole value's.
    ranks: the ranks on which the value is wrong. hold: the ranks that have it. silent: the ranks that lack it although
    they should have it. tokens, compared: the number of wrong tokens and of compared tokens. rows: the number of rows
    with wrong tokens. places: (row, token index) of the first wrong tokens. missing: the number of tokens that no rank
    holds. features: first wrong feature, last wrong feature, number of features.
    would_be_right: the operation on the ranks' pieces that would give the oracle's value, in words; empty if none was
    found.
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
    """Holds the first wrong value in one direction.

    wrong: the value. before: the last right value in front of it. given_by: the ranks that have ``before``.
    module: if ``inside``, the Hugging Face module that contains the defect. Otherwise the module that receives the
    wrong value; the defect is between ``before`` and this module, or outside of the model if ``before`` is None.
    """

    direction: Direction
    module: str
    inside: bool
    before: Key | None
    given_by: Ranks
    wrong: Wrong


@dataclass(frozen=True, kw_only=True)
class Bisected:
    """Holds the findings in one step of one model. model: its role.

    forward, backward: None if every value is right. ``backward`` is also None if the forward pass is wrong, because
    wrong gradients follow from that. compared: the numbers of compared values, forward and backward.
    unseen: modules of the oracle that no rank recorded. unknown: those of ``unseen`` that are in no recorded module.
    parameters: the errors of the wrong gradients by parameter. gradients: the number of compared gradients.
    factor: the common factor, if the gradients of all parameters are wrong by the same one.
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
        """Returns the module with the defect, ``between A and B``, PARAMETERS if only the sum or reduction of their
        gradients is wrong, OUTSIDE, or UNKNOWN."""
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
        """Whether all compared values are right."""
        return not self.first and not self.parameters


def most_telling_first(models: Sequence[Bisected]) -> tuple[Bisected, ...]:
    """Sorts causes before effects: wrong modules, then wrong values around them, and right models last.

    A wrong critic, for example, makes the advantages wrong, and thereby all gradients of the policy.
    """

    def place(found: Bisected) -> int:
        if found.first and found.where != OUTSIDE:
            return 0 if found.forward else 2
        kinds = [bool(found.forward), found.where == PARAMETERS, not found.is_right, found.where == UNKNOWN]
        return next((number for kind, number in zip(kinds, (1, 3, 4, 5), strict=True) if kind), 6)

    return tuple(sorted(models, key=place))


@dataclass(frozen=True, kw_only=True)
class Issued:
    """Counts the collectives of one kind, group size and dtype that each of ``ranks`` issued in a step.

    elements: the sum over these collectives of the larger of input and output, in elements.
    """

    kind: str
    size: Count
    dtype: str
    times: Count
    elements: Count
    ranks: Ranks


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Holds the collectives that were issued at the first wrong module.

    conforming: a cell of another layout that conforms; empty if there is none. there: the collectives that it issued at
    the same module.
    """

    issued: tuple[Issued, ...]
    conforming: str
    there: tuple[Issued, ...]


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """Holds the bisection of a cell that differs.

    cell: the cell's id. records: the digests of the records that the verdict belongs to. stage: the first stage that
    differs. traced: the cell whose modules were traced: the cell itself, or the same cell in the exact tier.
    why_not: the reason if there are no ``models``. step: the traced step. models: the findings in each trained model,
    causes before effects. collectives: None unless the defect is in the model.
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
    """Adds the version of the file."""

    schema: Annotated[int, Field(ge=BISECTION_SCHEMA, le=BISECTION_SCHEMA)]


_FILE, _BISECTED = TypeAdapter(_File), TypeAdapter(tuple[Bisected, ...])


def bisected_from_json(values: Any) -> tuple[Bisected, ...]:
    """Parses the findings of a task. Raises ValidationError."""
    return _BISECTED.validate_python(values)


def write_bisection(folder: Path, bisection: Bisection) -> None:
    """Writes ``bisect.json`` of a cell. Raises Unwritable."""
    write_output_json(folder / BISECTION, {"schema": BISECTION_SCHEMA, **asdict(bisection)}, indent=None)


def read_bisection(folder: Path, *, cell: str, records: tuple[str, ...]) -> Bisection | None:
    """Reads the bisection of ``cell`` from its ``folder``; None if there is none. records: the digests of the cell's
    records. For a file that does not belong to these or is malformed, returns a bisection that only says why."""

    def refused(why: str) -> Bisection:
        why_not = f"{BISECTION} {why}; run: parity bisect {cell}"
        return Bisection(cell=cell, records=records, stage="", traced=cell, why_not=why_not)

    try:
        found = _FILE.validate_python(parse_strict_json(read_file(folder / BISECTION, limit=LONGEST)))
    except FileNotFoundError:
        return None
    except Unreadable as error:
        return refused(f"is not shown: {error}")
    except ValidationError as error:
        return refused(f"is not as the suite wrote it ({first_error(error)})")
    except ValueError as error:
        return refused(f"is not valid JSON ({error})")
    if (found.cell, found.records) != (cell, records):
        return refused("belongs to another run of the cell, or to another cell")
    if not found.models and not found.why_not:
        return refused("holds no result")
    return Bisection(**{name: value for name, value in vars(found).items() if name != "schema"})
