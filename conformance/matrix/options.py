"""Declares the options that select, share out, demand and run cells, for the command line and the pytest plugin.

This module imports nothing slow, because pytest loads the plugin in every run wherever the package is installed.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePath
from typing import Any, Literal, Self

COMMON, INPUTS, WHERE, DEMANDS, JOBS, RECORDS = GROUPS = (
    "common options",
    "models and data",
    "ranks",
    "what a run has to show",
    "parts of a run, and runs that go on",
    "records and output",
)  # the headings of --help, in this order
NO_BISECT = "do not look for the first wrong module of cells that differ, which runs these once or twice more"


def positive_number(unit: str) -> Callable[[str], float]:
    """Returns a parser of finite numbers above 0."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise argparse.ArgumentTypeError(f"must be a positive number of {unit}, got {text!r}")
        return number

    return parse


def _whole(least: int, most: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers between two bounds, which are those of a scenario's file."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return parse


_count, _seed = _whole(1, 2**20), _whole(0, 2**32 - 1)


def _size(text: str) -> int:
    """Parses a whole number from 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, got {text!r}")
    return int(text)


def _several(text: str) -> list[str]:
    """Parses values that commas separate."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise argparse.ArgumentTypeError(f"must be one value, or several with commas between, got {text!r}")
    return values


def _option(help_text: str, *, default: Any = None, group: str = COMMON, **arguments: Any) -> Any:
    return field(default=default, metadata={"group": group, "about": {"help": help_text, **arguments}})


@dataclass(frozen=True, kw_only=True)
class Option:
    """Describes one option. ``field``: the attribute of its value. ``about``: arguments for argparse and pytest."""

    field: str
    group: str
    about: dict[str, Any]

    @property
    def name(self) -> str:
        """Returns the option as it is written, without leading dashes: ``max-len``."""
        return self.field.replace("_", "-")


class Options:
    """Turns the fields of a dataclass into options, with equal names on the command line and in the plugin."""

    @classmethod
    def options(cls) -> Iterator[Option]:
        """Yields every option. The value of an option that is not given is None or False."""
        for option in fields(cls):  # type: ignore[arg-type]
            yield Option(field=option.name, **option.metadata)

    @classmethod
    def from_options(cls, options: object, *, prefix: str = "") -> Self:
        """Builds from a parser's namespace: one attribute per field, None if the option was not given."""
        names = [option.name for option in fields(cls)]  # type: ignore[arg-type]
        values: dict[str, Any] = {name: getattr(options, prefix + name) for name in names}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{name: value for name, value in (values | lists).items() if value is not None})

    def arguments(self, *, without: str = "") -> tuple[str, ...]:
        """Returns the command-line arguments that set these options, except the option ``without``."""
        arguments: list[str] = []
        for option in fields(self):  # type: ignore[arg-type]
            value = getattr(self, option.name)
            if option.name == without or value == option.default:
                continue
            flag = f"--{option.name.replace('_', '-')}"
            for single in value if isinstance(value, tuple) else (value,):
                arguments += [flag] if single is True else [flag, str(single)]
        return tuple(arguments)


@dataclass(frozen=True, kw_only=True)
class Demands(Options):
    """Sets what a run must judge at least. If it judges less, its verdict is ``incomplete`` even if nothing differs."""

    require: tuple[str, ...] = _option(
        "cells that have to conform, or to differ as expected; may be repeated",
        default=(),
        action="append",
        metavar="GLOB",
        group=DEMANDS,
    )
    min_judged: int = _option(
        "how many cells have to be judged at least", default=0, type=_count, metavar="N", group=DEMANDS
    )
    baseline: str | None = _option(
        "an earlier run (its --out folder or summary.json), or a folder of parity history: the report says what has "
        "changed since, and no coverage may be lost",
        metavar="OUT|DIR",
        group=DEMANDS,
    )


@dataclass(frozen=True, kw_only=True)
class Portion(Options):
    """Selects the part of the cells that this run runs, if several jobs share them."""

    shard: str | None = _option(
        "the K-th of N parts of the selected cells; parity merge puts the parts together", metavar="K/N", group=JOBS
    )


@dataclass(frozen=True, kw_only=True)
class Kept(Options):
    """Selects the records that stay after the comparison."""

    keep: Literal["differing", "all"] = _option(
        "tensors of the records: of cells that differ or fail (differing, the default), or of all of them",
        default="differing",
        choices=("differing", "all"),
        group=RECORDS,
    )


@dataclass(frozen=True, kw_only=True)
class Again(Options):
    """Resumes in the output folder of an earlier run of the same cells, with ``parity run`` only."""

    resume: str | None = _option(
        "go on in the folder of an earlier run with the same options, with its cells that have no verdict; --cells "
        "need not be repeated",
        metavar="OUT",
        group=JOBS,
    )
    rerun: str | None = _option(
        "with --resume: run its cells that differ or ended in an infrastructure failure again, and no other; --cells "
        "selects some of them",
        choices=("failed",),
        group=JOBS,
    )


@dataclass(frozen=True, kw_only=True)
class Ranks(Options):
    """Sets where and how long ranks run."""

    device: Literal["cpu", "cuda"] = _option(
        "where ranks compute (default: cpu)", default="cpu", choices=("cpu", "cuda")
    )
    ranks_per_gpu: int = _option(
        "with --device cuda: up to N ranks share a GPU, so that cells of more ranks than GPUs run, too (default: 1)",
        default=1,
        type=_whole(1, 64),
        metavar="N",
        group=WHERE,
    )
    budget: float = _option(
        "seconds that a cell may go without progress (default: 300)",
        default=300.0,
        type=positive_number("seconds"),
        metavar="S",
        group=WHERE,
    )

    @classmethod
    def without_budget(cls, options: object) -> Self:
        """Builds from the options of a command that runs no cells, and so has no budget."""
        given = {name: getattr(options, name) for name in ("device", "ranks_per_gpu")}
        return cls(**{name: value for name, value in given.items() if value is not None})


def _workers(text: str) -> int:
    """Parses a number of cells at once; 0 for ``auto``."""
    return 0 if text == "auto" else _whole(1, 1024)(text)


@dataclass(frozen=True, kw_only=True)
class AtOnce(Options):
    """Sets how many cells run side by side."""

    workers: int = _option(
        "cells at once on this host, with --device cuda on each GPU: a number, or auto (the default), by processors "
        "and memory; fewer if memory does not suffice",
        default=0,
        type=_workers,
        metavar="N",
        group=WHERE,
    )


@dataclass(frozen=True, kw_only=True)
class Output(Options):
    """Sets where results go."""

    out: Path | None = _option("new or empty folder (default: parity-out/DATE_TIME)", type=Path)


@dataclass(frozen=True, kw_only=True)
class Selection(Options):
    """Selects cells for ``parity run``.

    An empty ``backend`` selects all registered backends, and an empty ``cells`` all cells of the profile.
    """

    profile: str | None = _option("name (parity list shows them) or .toml file (default: quick)")
    backend: tuple[str, ...] = _option(
        "name or module:Class; several with commas (default: all)", default=(), action="extend", type=_several
    )
    python: tuple[str, ...] = _option(
        "run the ranks of a backend in another Python environment; may be repeated",
        default=(),
        action="append",
        metavar="BACKEND=EXECUTABLE",
        group=WHERE,
    )
    cells: tuple[str, ...] = _option(
        "cell ids, with *, ? and {a,b}; may be repeated", default=(), action="append", metavar="GLOB"
    )
    scenario: tuple[str, ...] = _option(
        "name or .toml file; with --layout, --precision and --model, each combination is a cell, instead of those of a "
        "profile; several with commas (default then: sft-packed)",
        default=(),
        action="extend",
        type=_several,
    )
    layout: tuple[str, ...] = _option(
        "such as dp2.tp2, to choose cells as --scenario does (default then: dp2)",
        default=(),
        action="extend",
        type=_several,
    )
    precision: tuple[str, ...] = _option(
        "exact, fp32, bf16, fp16, bf16-reduce, bf16-nearest or bf16-stochastic (docs/glossary.md, tier), to choose "
        "cells as --scenario does (default then: exact)",
        default=(),
        action="extend",
        type=_several,
    )
    faults: tuple[str, ...] = _option(
        "plant a fault in every cell; repeated, all of them in the same cells, which gives no score",
        default=(),
        action="append",
        metavar="NAME",
    )
    model: str | None = _option(
        "Hugging Face folder, or ORG/NAME on the Hugging Face Hub, to use instead of the profile's models"
    )
    data: str | None = _option(
        "JSON lines, a JSON array, a Parquet file, a Hugging Face dataset on disk, or ORG/NAME[:CONFIG] of the hub"
    )
    input_key: str | None = _option("column of the prompt; a.b for an entry of a column", group=INPUTS)
    output_key: str | None = _option("column of the answer", group=INPUTS)
    split: str | None = _option("split of a data set that has several", metavar="NAME", group=INPUTS)
    max_len: int | None = _option("longest row, in tokens", type=_count, metavar="N", group=INPUTS)
    too_long: str | None = _option(
        "documents of more tokens: cut at the end (truncate, the default), left out (drop), or an error",
        choices=("truncate", "drop", "error"),
        group=INPUTS,
    )
    max_samples: int | None = _option(
        "read only the first N samples of the data", type=_count, metavar="N", group=INPUTS
    )
    packing_samples: bool = _option(
        "several documents per row, in every scenario", default=False, action="store_true", group=INPUTS
    )
    ring_head_stride: int | None = _option(
        "key-value heads that a ring gathers at a time", type=_count, metavar="N", group=INPUTS
    )
    seed: int | None = _option(
        "another model and another order of the documents", type=_seed, metavar="N", group=INPUTS
    )
    sketch: int | None = _option(
        "keep sketches of matrices with more than N elements, not the matrices (default: 65536 where models have more "
        "than 500 million parameters, else none)",
        type=_size,
        metavar="N",
        group=RECORDS,
    )
    trust_remote_code: bool = _option(
        "run the Python code that a model's folder brings along (auto_map)",
        default=False,
        action="store_true",
        group=INPUTS,
    )
    assume_inert: tuple[str, ...] = _option(
        "a key of the model's config.json that the oracle does not know and that changes nothing in a training; the "
        "verdict names it; may be repeated",
        default=(),
        action="append",
        metavar="KEY",
        group=INPUTS,
    )

    @property
    def chooses_cells(self) -> bool:
        """Tells whether scenario, layout or precision choose the cells, and not a profile."""
        return bool(self.scenario or self.layout or self.precision)

    @property
    def profile_name(self) -> str:
        """Returns the name or file of the profile, also of the one whose cells the options choose."""
        return self.profile or ("options" if self.chooses_cells else "quick")

    def text(self, where: Ranks) -> str:
        """Describes the selection, for a history of runs. Files count by name, because folders differ between jobs."""
        profile = () if self.profile or self.chooses_cells else ("--profile", self.profile_name)
        there = where.arguments(without="budget")
        parts = [PurePath(part).name or part for part in (*profile, *self.arguments(without="cells"), *there)]
        return " ".join([*parts, *(f"--cells {cell}" for cell in sorted(self.cells))])

    def with_cells_of(self, text: str) -> Self:
        """Returns the selection with the cells of the one that ``text`` describes, if it names none itself."""
        return self if self.cells else replace(self, cells=tuple(re.findall(r"--cells (\S+(?: (?!--)\S+)*)", text)))
