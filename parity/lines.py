"""Lines of ``record.jsonl``: what each kind has to have, by which a record that may come from anybody is checked."""

from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.validation import STRICT

Kind = Literal["weight", "gradient"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Parameter:
    """shards: how many pieces it was cut into. group: the optimizers' group that had it at first, by its place."""

    shape: list[int]
    dtype: str
    trained: bool
    group: str | None
    shards: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Header:
    """tied: further names of parameters. left_out: what ``names=`` leaves without a name, and how many rows of it."""

    kind: Literal["header"]
    format: str
    version: int
    ranks: int
    python: str
    libraries: dict[str, str]
    parameters: dict[str, Parameter]
    tied: dict[str, str]
    left_out: dict[str, str]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Loaded:
    """replicas: by kind and parameter, how far apart replicas are that are not the same. tensors: the whole ones."""

    kind: Literal["loaded"]
    replicas: dict[Kind, dict[str, float]]
    file: str
    tensors: str = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Batch:
    rows: int
    hash: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Step:
    """A step; without ``file`` and ``replicas`` if no optimizer made one.

    norm: of the gradients. settings: by group. regrouped: parameters that are in another group than at first. unseen:
    how many parameters of the optimizers are none of the model's.
    """

    kind: Literal["step"]
    step: int
    stepped: bool
    loss: float | None
    tokens: int | None
    batch: Batch | None
    norm: float
    settings: dict[str, dict[str, float | list[float] | str]]
    regrouped: dict[str, str | None]
    unseen: int
    computed_in: str | None
    replicas: dict[Kind, dict[str, float]] | None = None
    file: str = ""
    tensors: str = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class End:
    """error: what the training ended with, empty where it came to its end."""

    kind: Literal["end"]
    steps: int
    error: str


_LINES: dict[str, TypeAdapter[Any]] = {
    "header": TypeAdapter(Header),
    "loaded": TypeAdapter(Loaded),
    "step": TypeAdapter(Step),
    "end": TypeAdapter(End),
}


def problem(text: str, *, kind: str) -> str:
    """What is wrong with a line that should be of a kind; empty if nothing is."""
    try:
        line = _LINES[kind].validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    kinds = {"loaded": {"weight"}, "step": {"weight", "gradient"}}
    if kind in kinds and (kind == "loaded" or line.stepped) and set(line.replicas or ()) != kinds[kind]:
        return f"replicas: they are not of {' and '.join(sorted(kinds[kind]))}"
    return ""
