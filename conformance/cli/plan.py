"""Shows the selected cells (`parity list`) and estimates their memory, disk and time (`parity plan`)."""

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from conformance.backends.faults import catalogue
from conformance.backends.protocol import registered_backends
from conformance.cli import EXIT
from conformance.core.errors import UsageError
from conformance.core.host import host_resources_of, resolve
from conformance.matrix.cell import Cell
from conformance.matrix.options import Demands, Portion, Ranks, Selection
from conformance.matrix.plan import make_plan
from conformance.matrix.profile import profile_names, profile_of
from conformance.models.synthetic import is_without_weights
from conformance.results.verdict import STATES, State
from conformance.runner.placement import SessionConfig
from conformance.runner.preflight import GB, advice, check_shared, needs_of
from conformance.runner.resource_estimate import Estimate
from conformance.runner.session import Session
from conformance.spec.conventions import Conventions
from conformance.spec.precision import PRECISIONS, FloatFormat, PrecisionName

_NOT_HERE = (
    "none is visible here: whether there are enough for each cell, and whether their machine has this memory and disk, "
    "is not known; times are those of this machine's processors"
)
_SIDE, _TIMES = 384, 5  # size and number of the matrix products that measure a processor


def plan_command(options: argparse.Namespace) -> int:
    ranks = Ranks.without_budget(options)
    check_shared(ranks)
    portion = Portion.from_options(options)
    cells = make_plan(Selection.from_options(options), Demands(), portion, ranks=ranks).cells
    lines, fits = _plan(cells, options.out, ranks=ranks)
    print("\n".join(lines))
    return EXIT["conforms" if fits else "usage"]


def _plan(cells: Sequence[Cell], out: Path, *, ranks: Ranks) -> tuple[list[str], bool]:
    """Returns the lines to print, and whether the cells can fit.

    If no GPU is visible, cells on GPUs are planned for another machine with unknown memory and disk: they always fit.
    Raises UsageError for a model or a data set that cannot be used, and if no cell is supported.
    """
    elsewhere = ranks.device == "cuda" and not torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        config = SessionConfig(out=Path(folder), device=ranks.device, ranks_per_gpu=ranks.ranks_per_gpu)
        with Session(config) as session:
            refused = [(cell, session.refusal(cell, plans=True)) for cell in cells]
    # The verdict of a cell that only lacks GPUs is "not_run".
    supported = [cell for cell, why in refused if why is None or (elsewhere and why.state == "not_run")]
    if not supported:
        raise UsageError(f"none of the {len(cells)} selected cells is supported; parity list shows the reasons")
    room = host_resources_of(out)
    needs = needs_of(supported, room, device=ranks.device)
    rates, processors = _rates(), os.cpu_count() or 1
    seconds = [one.seconds(rates, cell.scenario.precision, processors=processors) for cell, one in needs.cells]
    width = max(len(str(cell)) for cell in supported)
    lines = [f"{'cell':<{width}}  {'GB a rank':>9} {'oracle':>7} {'in all':>7} {'GB of disk':>11} {'time':>8}"]
    lines += [_line(cell, one, took, width) for (cell, one), took in zip(needs.cells, seconds, strict=True)]
    cached = "" if room.cache is None or elsewhere else f" ({room.cache / GB:.1f} there)"
    memory, disk = ("", "") if elsewhere else (f", {free / GB:.1f} GB are free" for free in (room.memory, room.disk))
    lines += [
        "",
        f"cells   {len(supported)} of {len(cells)} are supported; about {_time(sum(seconds))} while nothing else runs",
        f"memory  {needs.total.host / GB:.1f} GB at the peak{memory}",
        f"disk    {needs.total.disk / GB:.1f} GB of records and {needs.total.cache / GB:.1f} GB of oracles in the cache"
        f"{cached}{disk}; tensors of cells that conform are removed",
    ]
    lines += [
        f"model   {model} has no weights: shapes are those of its config.json; tokenizer and data were not checked"
        for model in dict.fromkeys(cell.scenario.model for cell in supported)
        if is_without_weights(resolve(model))
    ]
    if elsewhere:
        return [*lines, f"gpus    {_NOT_HERE}"], True
    lines += [
        *(f"cannot fit: {message}; {advice(needs, room)}" for message in needs.impossible),
        *(f"may not fit: {message}" for message in needs.doubtful),
    ]
    return lines, not needs.impossible


def _line(cell: Cell, one: Estimate, seconds: float, width: int) -> str:
    sizes = f"{one.rank / GB:>9.2f} {one.oracle / GB:>7.2f} {one.host / GB:>7.2f} {one.record / GB:>11.3f}"
    return f"{cell!s:<{width}}  {sizes} {_time(seconds):>8}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _rates() -> dict[PrecisionName, float]:
    """Measures the operations per second of one processor now, in matrix products of each precision's master dtype."""
    rates: dict[FloatFormat, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number_format in dict.fromkeys(tier.master for tier in PRECISIONS.values()):
        a = torch.ones(_SIDE, _SIDE, dtype=number_format.dtype)
        torch.mm(a, a)
        began = time.perf_counter()
        for _ in range(_TIMES):
            torch.mm(a, a)
        rates[number_format] = _TIMES * 2 * _SIDE**3 / (time.perf_counter() - began)
    torch.set_num_threads(threads)
    return {name: rates[tier.master] for name, tier in PRECISIONS.items()}


NOT_HERE: dict[State, str] = {"not_run": "not here"}  # shown for a cell that another machine could run


def list_command(options: argparse.Namespace) -> int:
    """Prints backends, profiles, faults and the cells of a profile."""
    selection, ranks = Selection.from_options(options), Ranks.without_budget(options)
    cells = make_plan(selection, Demands(), Portion.from_options(options), ranks=ranks).cells
    with tempfile.TemporaryDirectory() as folder:
        config = SessionConfig(out=Path(folder), device=ranks.device, ranks_per_gpu=ranks.ranks_per_gpu)
        with Session(config) as session:
            refused = [session.refusal(cell) for cell in cells]
            declared = [() if why else session.conventions(cell) for cell, why in zip(cells, refused, strict=True)]
    rows = [
        {
            "id": str(cell),
            "world_size": cell.world_size,
            "refused": f"{NOT_HERE.get(why.state, STATES[why.state].name)}: {why.reason}" if why else "",
            "conventions": [str(one) for one in conventions],
        }
        for cell, why, conventions in zip(cells, refused, declared, strict=True)
    ]
    coverage = None
    if options.coverage:
        from conformance.runner.coverage import measure_coverage  # loads transformers

        coverage = measure_coverage(cell for cell, why in zip(cells, refused, strict=True) if not why)
    if options.json:
        backends = {name: entry.target for name, entry in registered_backends().items()}
        known = {"backends": backends, "profiles": profile_names(), "faults": list(catalogue()), "cells": rows}
        print(json.dumps(known | ({"coverage": dataclasses.asdict(coverage)} if coverage else {})))
        return EXIT["conforms"]
    print(f"profiles: {', '.join(profile_names())}; faults: {', '.join(catalogue())}")
    print(f"{len(rows)} cells of {selection.profile_name} ({profile_of(selection).description}):")
    for row, conventions in zip(rows, declared, strict=True):
        print(f"  {row['id']}  [{row['world_size']} ranks] {row['refused'] or _declares(conventions)}")
    if coverage:
        print(f"\n{coverage}")
    return EXIT["conforms"]


def _declares(conventions: Conventions) -> str:
    return f"declares {', '.join(map(str, conventions))}" if conventions else ""
