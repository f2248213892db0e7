"""Reads and verifies the lines of a record, for the judge and the reports. Does not import torch.

A record is a folder with ``record.jsonl`` and one safetensors file per step. Every line is validated when it is read,
so no reader has to check types again. Other keys are allowed and ignored. The record of a run that stopped half-way has
no footer, and a changed record has a wrong digest. Each raises its own error, and neither passes.
docs/reference/file-formats.md is generated from the classes here.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, TypeAdapter, ValidationError

from conformance.core.io import Unreadable, is_link, read_file
from conformance.spec.observables import Observable, observables_from_json

Count = Annotated[StrictInt, Field(ge=0)]
Pass = Annotated[str, Field(pattern=r"^(forward|backward [0-9]{1,9}|later)$")]  # of a training step


@dataclass(frozen=True, kw_only=True)
class _Header:
    """The first line of a record.

    observables: everything that is recorded, in causal order. first_step: the first step of this phase. cell: the
    cell's id. layout: the layout of this phase. scenario: the scenario as JSON. backend: name and versions of the
    backend. environment: versions, drivers and the commit. resolved: the configuration that the framework really uses.
    shows_generators: whether the backend shows the random generators that its library keeps.
    """

    observables: tuple[Observable, ...]
    first_step: Count
    cell: str = ""
    layout: str = ""
    scenario: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    shows_generators: bool = True


@dataclass(frozen=True, kw_only=True)
class _Differing:
    """A piece of a tensor that is not identical on all ranks that hold it.

    name: the name of the tensor. ranks: the ranks that hold the piece. relative: the largest relative difference from
    the piece of the first of these ranks.
    """

    name: str
    ranks: tuple[StrictInt, ...]
    relative: float


@dataclass(frozen=True, kw_only=True)
class _Replicas:
    """The comparison of numbers that several ranks hold.

    offered: number of pieces of all ranks together. compared: number of different pieces that at least two ranks hold.
    differing: the pieces that are not identical on all ranks that hold them.
    """

    offered: Count
    compared: Count
    differing: tuple[_Differing, ...]


@dataclass(frozen=True, kw_only=True)
class _TensorFile:
    """The safetensors file of a step.

    file: a name in the record's own folder. sha256: its digest.
    """

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One optimizer step.

    step: the number of the step, from 0; -1 for the weights as loaded. values: scalars and settings by the key of their
    observable. replicas: by observable, the comparison of ranks that have to hold the same numbers. seconds: the time
    of the step. generators: for each rank, the digests of its random generators by name. tensors: the file with the
    tensors, or null. unread: the kinds of tensors that were not read at this step, which was drawn.
    """

    step: StrictInt
    values: dict[str, float] = field(default_factory=dict)
    replicas: dict[str, _Replicas] = field(default_factory=dict)
    seconds: float = 0.0
    generators: tuple[dict[str, str], ...] = ()
    tensors: _TensorFile | None = None
    unread: tuple[Literal["gradient", "weight"], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Leak:
    """An operation that computed in another dtype than float64 in the exact tier.

    op: the operation. where: the line of code. count: the number of calls.
    """

    op: str
    where: str
    count: Count


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """What a rank was observed to do in a training step, by which the judge checks that a layout is real.

    collectives: operation, group size, dtype, pass and count. products: dtype, phase and count of matrix products.
    widths, lengths: the last and the last but one dimension of 3-dimensional results, such as logits. linear: dtype and
    count of matrix products of linear layers in forward passes. reduced: group size and number of elements that were
    summed over the group. held_weights: size in bytes and count of the storages that held weights when the gradients
    were complete. compiled: number of products of linear layers that code of torch.compile made. te: number of those
    that TransformerEngine made. moved: operation, ranks of the group, pass, number of calls and of elements. work:
    phase and number of multiplications of the products of linear layers. backwards: number of backward passes with such
    products. operands: dimensions, elements, sum and norm of each vector that is added or multiplied and of each matrix
    that a linear layer multiplies by in the first forward pass. rows: the rows of which the rank gave log-probs. step:
    the optimizer step. changed_by_reading: number of storages of weights that the backend changed while the suite read
    weights. float8: number of products of operands in float8 that a kernel made. float8_error: their largest distance
    from the products of the operands, in parts of the magnitudes. float8_casts: of operands of TransformerEngine's
    products the operand (input, weight or gradient), its format, what has a scale (tensor, rows or squares of 128),
    whether scales are powers of two (null for zeros), whether they are those of the operand (with delayed scaling: of
    the histories, which hold the magnitude of what is cast), whether what a backward product multiplies again has the
    numbers of the forward product, and the number of casts. float8_scales: SHA-256 of their scales, in order.
    float8_scale_ratios: the least and the largest scale that an update gave, in parts of the one that follows from its
    history. float8_amaxes: of the first 512 operands that updates scale the largest magnitude on this rank, and that of
    all ranks. float8_updates: by direction, how often the history of an operand was updated at most. float8_moved: by
    direction, the number of operands whose history was updated. float8_gathered: ranks that gather the parts of
    operands that they have cast, SHA-256 of the scales of these operands, in order, and their number. float8_left_out:
    dimensions, elements, sum and norm of weights that TransformerEngine multiplied in the precision of the cell, where
    layers are left out of float8. float8_began: after a resume, by direction, for each operand the scale before the
    first update, and the history loaded with it. embedded: where ranks have other tokens, for each lookup of tokens the
    rows of the embedding on this rank, and the
    tokens of each row. entered: for each of these lookups, for each token the number of the group of equal rows of what
    the layers multiply first; empty if it is not known. gathered: where ranks have other tokens, ranks of the group,
    shape of the input, elements and number of all-gathers in the forward pass. documents: where ranks have other
    tokens, on the first rank, the tokens of each document of each row of the first micro-batch of each data-parallel
    rank.
    """

    collectives: tuple[tuple[str, StrictInt, str, Pass, Count], ...]
    products: tuple[tuple[str, Literal["forward", "backward", "recomputed"], Count], ...]
    widths: tuple[StrictInt, ...]
    linear: tuple[tuple[str, Count], ...] = ()  # older records lack this field and all that follow
    lengths: tuple[StrictInt, ...] = ()
    reduced: tuple[tuple[StrictInt, Count], ...] = ()
    held_weights: tuple[tuple[Count, Count], ...] = ()
    compiled: Count = 0
    te: Count = 0
    moved: tuple[tuple[str, tuple[Count, ...], str, Count, Count], ...] = ()
    work: tuple[tuple[str, Count], ...] = ()
    backwards: Count = 0
    operands: tuple[tuple[Count, Count, float, float], ...] = ()
    rows: tuple[Count, ...] = ()
    step: StrictInt | None = None
    changed_by_reading: Count = 0
    float8: Count = 0
    float8_error: Annotated[float, Field(ge=0)] = math.inf
    float8_casts: tuple[tuple[str, str, str, bool | None, bool, bool, Count], ...] = ()
    float8_scales: str = ""
    float8_scale_ratios: tuple[float, ...] = ()
    float8_amaxes: tuple[tuple[float, float], ...] = ()
    float8_updates: dict[str, Count] = field(default_factory=dict)
    float8_moved: dict[str, Count] = field(default_factory=dict)
    float8_gathered: tuple[tuple[tuple[Count, ...], str, Count], ...] = ()
    float8_left_out: tuple[tuple[Count, Count, float, float], ...] = ()
    float8_began: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    embedded: tuple[tuple[Count, tuple[tuple[Count, ...], ...]], ...] = ()
    entered: tuple[tuple[Count, ...], ...] = ()
    gathered: tuple[tuple[tuple[Count, ...], tuple[Count, ...], Count, Count], ...] = ()
    documents: tuple[tuple[tuple[tuple[Count, ...], ...], ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The batch of a step, as the ranks received it.

    step: the optimizer step. tokens: number of tokens. targets: number of targets of each micro-batch of each
    data-parallel rank. rows: index, length and number of targets of each row of these micro-batches.
    """

    step: StrictInt
    tokens: Count
    targets: tuple[tuple[Count, ...], ...]
    rows: tuple[tuple[tuple[tuple[Count, Count, Count], ...], ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Footer:
    """The last line of a record.

    steps: number of optimizer steps. sha256: the digest of the whole record. leaks: operations outside of float64 in
    the exact tier. evidence: what each rank was observed to do at the first step, or the first that begins no rollout.
    later_evidence: the same at a later step that was drawn. batches: the batches as the ranks received them.
    memory, host_memory: for each rank, the peak memory of its device and host in bytes; 0 if it is not known. pieces:
    by parameter and region, the ranks that hold the piece. choices: for an oracle of a mixture of experts, the SHA-256
    of the batches with the choices of its routers. reseeded: for each rank, step and name of each random generator
    whose state after the step does not follow from the state before by drawing. float8_saved: for each rank, what
    float8_began has to be after a resume.
    """

    steps: Count
    sha256: str
    leaks: tuple[_Leak, ...] = ()
    evidence: tuple[_Evidence, ...] = ()
    batches: tuple[_Batch, ...] = ()  # older records lack this field and all that follow
    memory: tuple[Count, ...] = ()
    host_memory: tuple[Count, ...] = ()
    pieces: dict[str, dict[str, tuple[Count, ...]]] = field(default_factory=dict)
    choices: str = ""
    later_evidence: tuple[tuple[_Evidence, ...], ...] = ()
    reseeded: tuple[tuple[tuple[StrictInt, str], ...], ...] = ()
    float8_saved: tuple[dict[str, tuple[tuple[float, ...], ...]], ...] = ()


_LINE_TYPES = {"header": _Header, "step": _Step, "footer": _Footer}


def wrong_line(line: dict[str, Any]) -> str:
    """Returns the error of a line of a record; empty for a valid line. ``type`` has to be header, step or footer."""
    try:
        _adapter(line["type"]).validate_python(line)
        if line["type"] == "header":
            observables_from_json(line["observables"])  # rejects fields of another version, which pydantic accepts
    except ValidationError as error:
        return first_error(error)
    except TypeError as error:
        return str(error)
    return ""


def first_error(error: ValidationError) -> str:
    """Returns the first error of a validation, in one line."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_LINE_TYPES[kind])


RECORD_SCHEMA = 5
RECORD_FILE = "record.jsonl"
LOOKUPS_KEPT = 16  # the last lookups of tokens of a rank, because those of rollouts come first
CONTROL = "control.json"  # what the controller adds to the record of a phase: how a control of its loading ended
SMALL = 2**17  # bytes of a record whose lines are kept in memory after they were read; they are not to be changed
LONGEST = 2**28  # largest JSON or JSONL file in bytes; the files of thousands of cells have some MiB
MOST_NESTED = 64  # most levels of JSON; the suite writes fewer than ten
AGAIN = "run the cell again"
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The lines of a record. ``loaded``: the line of the weights as loaded. ``steps``: the lines of optimizer steps."""

    header: Line
    loaded: Line
    steps: tuple[Line, ...]
    footer: Line

    @cached_property
    def observables(self) -> tuple[Observable, ...]:
        """Returns the observables of the record's header, in causal order."""
        return observables_from_json(self.header["observables"])

    @property
    def digest(self) -> str:
        """Returns the SHA-256 (hexadecimal) of the whole record, from the footer; empty without a footer."""
        return str(self.footer.get("sha256", ""))


class RecordError(ValueError):
    """Says that a record cannot be trusted. The message names the file, the error, and the remedy.

    ``left``: the lines that could be read nevertheless, so that reports can show how far the cell came.
    """

    left: Lines | None = None


class MissingFooter(RecordError):
    """The record has no footer, because the run stopped before it was complete."""


class DigestMismatch(RecordError):
    """The record, or one of its tensor files, was changed after it was written."""


class WrongSchema(RecordError):
    """The record was written by another version of the suite, with another schema."""


def read_lines(path: Path) -> Lines:
    """Reads and verifies the lines of the record in folder ``path``; its tensor files are not read.

    Raises RecordError or one of its subclasses MissingFooter, DigestMismatch and WrongSchema.
    """
    file = path / RECORD_FILE
    data = _read_bytes(file)
    return (_small_lines if len(data) <= SMALL else _verified_lines)(file, data)


def _verified_lines(file: Path, data: bytes) -> Lines:
    raw = data.splitlines(keepends=True)
    values: list[Any] = []
    problem: RecordError | None = None
    for number, line in enumerate(raw, start=1):
        try:
            values.append(parse_strict_json(line))
        except ValueError as error:
            if number < len(raw):
                problem = DigestMismatch(f"{file}:{number} is not JSON ({error}): the file was changed; {AGAIN}")
            break
    if wrong := _first_line_problem(file, values):
        raise problem or wrong
    right, wrong = _valid_lines(file, values, complete=len(values) == len(raw))
    lines = _to_lines(right)
    problem = problem or _footer_problem(file, lines, values[-1], raw) or wrong or _step_order_problem(file, lines)
    if problem:
        problem.left = lines
        raise problem
    return lines


# The judge, the comparison of backends and the reports read the same records.
_small_lines = lru_cache(maxsize=256)(_verified_lines)


def peak_memory(records: Iterable[Path]) -> tuple[int, int]:
    """Returns the most bytes that a rank held in any of these records, of its device and of its host; 0 if it is not
    known."""
    of_device = of_host = 0
    for path in records:
        with contextlib.suppress(RecordError):
            footer = read_lines(path).footer
            of_device = max((of_device, *footer.get("memory", ())))
            of_host = max((of_host, *footer.get("host_memory", ())))
    return of_device, of_host


def _read_bytes(file: Path) -> bytes:
    if is_link(file.parent):
        raise RecordError(f"{file.parent} is a link; put the record itself there, or {AGAIN}")
    try:
        return read_file(file, limit=LONGEST)
    except FileNotFoundError:
        raise RecordError(
            f"{file.parent} holds no {RECORD_FILE}: this is not a record, or its cell ended before it wrote anything"
        ) from None
    except Unreadable as error:
        raise RecordError(str(error)) from None


def _first_line_problem(file: Path, values: list[Any]) -> RecordError | None:
    """Returns the error if the first line is not a header of this schema; None if it is."""
    header = values[0] if values else None
    if not isinstance(header, dict) or header.get("type") != "header":
        return RecordError(f"{file} does not begin with a header line: not a record, or its beginning is lost; {AGAIN}")
    if (schema := header.get("schema")) == RECORD_SCHEMA:
        return None
    environment = header.get("environment")
    writer = environment.get("backend-parity", "unknown") if isinstance(environment, dict) else "unknown"
    return WrongSchema(
        f"{file} has schema {schema}, this version reads {RECORD_SCHEMA}; run the cell again, or judge it with the "
        f"version that wrote it (backend-parity {writer})"
    )


def _valid_lines(file: Path, values: list[Any], *, complete: bool) -> tuple[list[Line], RecordError | None]:
    """Returns the lines before the first malformed one, and the error of the malformed line; None if there is none."""
    for place, value in enumerate(values):
        kinds = ("step", "footer") if complete and place == len(values) - 1 else ("step",) if place else ("header",)
        kind = value.get("type") if isinstance(value, dict) else None
        wrong = wrong_line(value) if kind in kinds else f"a line of type {kind!r} cannot stand there"
        if wrong:
            where = f"{file}:{place + 1} is not as the suite writes it ({wrong})"
            return values[:place], DigestMismatch(f"{where}: the file was changed; {AGAIN}")
    return values, None


def _to_lines(values: list[Line]) -> Lines:
    steps = [value for value in values if value["type"] == "step"]
    footer = values[-1] if values and values[-1]["type"] == "footer" else {}
    header = values[0] if values else {}
    return Lines(header=header, loaded=steps[0] if steps else {}, steps=tuple(steps[1:]), footer=footer)


def _footer_problem(file: Path, lines: Lines, last: Any, raw: list[bytes]) -> RecordError | None:
    if not isinstance(last, dict) or last.get("type") != "footer":
        step = lines.steps[-1]["step"] if lines.steps else "none"
        return MissingFooter(f"{file} has no footer: the cell stopped after step {step}; run it again")
    if record_digest(b"".join(raw[:-1]), last) != last.get("sha256"):
        return DigestMismatch(f"{file} does not match its own digest: it was edited; {AGAIN}")
    return None


def _step_order_problem(file: Path, lines: Lines) -> RecordError | None:
    first, count = lines.header.get("first_step", 0), lines.footer["steps"]
    observed = [line.get("step") for line in (lines.loaded, *lines.steps)]
    if len(observed) == count + 1 and all(step == first - 1 + i for i, step in enumerate(observed)):
        return None
    return DigestMismatch(
        f"{file} has steps {observed}, but its header and footer promise {count} from step {first}; {AGAIN}"
    )


def record_digest(body: bytes, footer: Line) -> str:
    """Returns the SHA-256 (hexadecimal) of all lines before the footer and the footer's values without the digest."""
    values = {key: value for key, value in footer.items() if key != "sha256"}
    return hashlib.sha256(body + dumps(values).encode()).hexdigest()


def parse_strict_json(data: bytes) -> Any:
    """Parses JSON that is nested at most MOST_NESTED deep. Raises ValueError for other text.

    The names NaN and Infinity, which Python's parser accepts, are errors: the suite writes such numbers as strings.
    """
    try:
        value = json.loads(data, parse_constant=_reject)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level: list[Any] = [[value]]
    for _ in range(MOST_NESTED + 1):
        inner = (each.values() if type(each) is dict else each for each in level)
        if not (level := [entry for entries in inner for entry in entries if type(entry) in (dict, list)]):
            return value
    raise ValueError("it is nested too deeply")


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def dumps(values: Any, *, indent: int | None = None) -> str:
    """Returns JSON text that every parser accepts: NaN and infinity, which JSON does not have, become strings."""
    try:
        return json.dumps(values, indent=indent, allow_nan=False)
    except ValueError:  # such numbers are rare
        return json.dumps(_without_non_finite(values), indent=indent, allow_nan=False)


def number(value: Any) -> float:
    """Returns a recorded number as a float; ``dumps`` writes non-finite ones as strings. None gives NaN."""
    return math.nan if value is None else float(value)


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _without_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(entry) for entry in value]
    return value
