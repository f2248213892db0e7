"""Shows the selected cells (`parity list`) and estimates their memory, disk and time (`parity plan`)."""

import argparse
import dataclasses
import itertools
import json
import math
import os
import shutil
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from conformance.backends.faults import catalogue
from conformance.backends.protocol import registered_backends
from conformance.backends.registry import adapter_of
from conformance.cli import EXIT
from conformance.core.errors import UsageError, first_few
from conformance.core.host import host_resources_of, resolve
from conformance.judge.cells import one_thread
from conformance.matrix.cell import Cell
from conformance.matrix.options import Demands, Portion, Ranks, Selection
from conformance.matrix.plan import make_plan
from conformance.matrix.profile import profile_names, profile_of
from conformance.models.synthetic import is_without_weights
from conformance.results.verdict import STATES, State
from conformance.runner.placement import SessionConfig
from conformance.runner.preflight import GB, advice, check_shared, leased_gpus, needs_of
from conformance.runner.resource_estimate import Estimate, gpu_bytes, size_of
from conformance.runner.session import Session
from conformance.runtime.gpu_inventory import gpus_of
from conformance.spec.conventions import Conventions
from conformance.spec.layout import ZERO_STAGES, Layout
from conformance.spec.precision import PRECISIONS, FloatFormat, PrecisionName

_NOT_HERE = (
    "none is visible here: whether there are enough for each cell, and whether their machine has this memory and disk, "
    "is not known"
)
MOST_REASONS = 5  # that are shown for cells that are refused
_SIDE, _TIMES = 384, 5  # size and number of the matrix products that measure a processor


def plan_command(options: argparse.Namespace) -> int:
    if options.gpus is not None:
        if options.layout or options.profile:
            raise UsageError("--gpus lists all layouts itself; leave out --layout and --profile")
        options.layout, options.device = layouts_of(options.gpus), "cuda"
    elif options.gpu_memory is not None:
        raise UsageError("--gpu-memory is the memory of each of --gpus N; give --gpus, too")
    ranks = Ranks.without_budget(options)
    check_shared(ranks)
    portion = Portion.from_options(options)
    cells = make_plan(Selection.from_options(options), Demands(), portion, ranks=ranks).cells
    lines, fits = _plan(cells, options.out, ranks=ranks, planned=options.gpus, gpu_memory=options.gpu_memory)
    print("\n".join(lines))
    return EXIT["conforms" if fits else "usage"]


def layouts_of(gpus: int) -> tuple[str, ...]:
    """Returns each layout of data, tensor, context and pipeline parallelism on this many GPUs, at each ZeRO stage."""
    divisors = [size for size in range(1, gpus + 1) if gpus % size == 0]
    meshes = [sizes for sizes in itertools.product(divisors, repeat=4) if math.prod(sizes) == gpus]
    return tuple(
        str(Layout(dp=dp, tp=tp, sp=sp, pp=pp, zero=zero))
        for dp, tp, sp, pp in meshes
        for zero in ((None, *ZERO_STAGES) if dp * sp > 1 else (None,))
    )


def _plan(
    cells: Sequence[Cell], out: Path, *, ranks: Ranks, planned: int | None, gpu_memory: float | None
) -> tuple[list[str], bool]:
    """Returns the lines to print, and whether the cells can fit.

    planned: the number of GPUs of another machine, if the user names one. If no GPU is visible, cells on GPUs are
    planned for another machine, too, whose memory and disk are unknown. gpu_memory: GB of each GPU, if known.
    Raises UsageError for a model or a data set that cannot be used, and if no cell is supported.
    """
    elsewhere = planned is not None or (ranks.device == "cuda" and not torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        config = SessionConfig(out=Path(folder), device=ranks.device, ranks_per_gpu=ranks.ranks_per_gpu)
        with Session(config) as session:
            refused = [(cell, session.refusal(cell, plans=True)) for cell in cells]
    # The verdict of a cell that only lacks GPUs is "not_run".
    reasons: dict[str, list[str]] = {}
    supported = []
    for cell, why in refused:
        if why is None or (elsewhere and why.state == "not_run"):
            supported.append(cell)
        else:
            reasons.setdefault(f"{NOT_HERE.get(why.state, STATES[why.state].name)}: {why.reason}", []).append(str(cell))
    if planned is not None:
        supported = [cell for cell in supported if not _names_default(cell)]
    if not supported:
        raise UsageError(f"none of the {len(cells)} selected cells is supported; parity list shows the reasons")
    resources = host_resources_of(out)
    needs = needs_of(supported, resources, device=ranks.device)
    on_gpus = ranks.device == "cuda"
    rates, processors = {} if on_gpus else _rates(), os.cpu_count() or 1
    seconds = [
        None if on_gpus else one.seconds(rates, cell.scenario.precision, processors=processors)
        for cell, one in needs.cells
    ]
    gpus = _gpu_gigabytes(supported) if on_gpus else [None] * len(supported)
    width = max(len(str(cell)) for cell in supported)
    gpu = f" {'GB a GPU':>9} {'fits' if gpu_memory else '':<4}" if on_gpus else ""
    lines = [f"{'cell':<{width}} {gpu} {'GB a rank':>9} {'oracle':>7} {'in all':>7} {'GB of disk':>11} {'time':>12}"]
    lines += [
        _line(cell, one, took, width, gpu=each, gpu_memory=gpu_memory)
        for (cell, one), took, each in zip(needs.cells, seconds, gpus, strict=True)
    ]
    took = sum(filter(None, seconds))
    duration = "times on GPUs are not measured" if on_gpus else f"about {_time(took)} while nothing else runs"
    cached = "" if resources.cache is None or elsewhere else f" ({resources.cache / GB:.1f} there)"
    memory, disk = (
        ("", "") if elsewhere else (f", {free / GB:.1f} GB are free" for free in (resources.memory, resources.disk))
    )
    lines += [
        "",
        f"cells   {len(supported)} of {len(cells)} are supported; {duration}",
        *_refusals(reasons),
        f"memory  {needs.total.host / GB:.1f} GB at the peak{memory}",
        f"disk    {needs.total.disk / GB:.1f} GB of records and {needs.total.cache / GB:.1f} GB of oracles in the cache"
        f"{cached}{disk}; tensors of cells that conform are removed",
    ]
    lines += [
        f"model   {model} has no safetensors weights{_unread(resolve(model))}: shapes are those of its config.json; "
        f"tokenizer and data were not checked"
        for model in dict.fromkeys(cell.scenario.model for cell in supported)
        if is_without_weights(resolve(model))
    ]
    if elsewhere:
        if planned is None:
            return [*lines, f"gpus    {_NOT_HERE}"], True
        fitting = [each for each in gpus if each is not None and each <= (gpu_memory or math.inf)]
        known = f"{len(fitting)} of {len(gpus)} fit into {gpu_memory:g} GB a GPU" if gpu_memory else "--gpu-memory GB"
        lines.append(f"gpus    {planned}; {known if gpu_memory else f'add {known} to see which cells fit'}")
        if not fitting:
            least = min(filter(None, gpus))
            lines.append(f"cannot fit: the smallest needs {least:.4g} GB a GPU; give more --gpus or shorter rows")
        return lines, bool(fitting)
    if slots := leased_gpus(ranks, cells=supported, workers=0):
        lines.append(f"gpus    {len(gpus_of(slots))}, divided into {len(slots)} shares; a rank leases one or more")
    lines += [
        *(f"cannot fit: {message}; {advice(needs, resources)}" for message in needs.impossible),
        *(f"may not fit: {message}" for message in needs.doubtful),
    ]
    return lines, not needs.impossible


def _refusals(reasons: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields a line for each of the most frequent ``reasons`` why cells are refused, with the first of its cells."""
    most = sorted(reasons.items(), key=lambda one: -len(one[1]))
    for reason, cells in most[:MOST_REASONS]:
        others = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        yield f"        {cells[0]}{others}: {reason}"
    if more := most[MOST_REASONS:]:
        yield f"        {sum(len(cells) for _, cells in more)} more cells, for other reasons: parity list shows them"


def _names_default(cell: Cell) -> bool:
    """Returns whether a layout names the ZeRO stage that the backend has by default: it is there without, too."""
    (phase,) = cell.phases
    default = adapter_of(phase.backend).traits.default_zero or 0
    return phase.layout.zero == default


def _unread(model: Path) -> str:
    """Names weights of a model folder in another format, which no run reads."""
    files = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in model.glob(pattern))
    return f" ({first_few(files, most=2)} is not read; convert it to safetensors before a run)" if files else ""


def _gpu_gigabytes(cells: Sequence[Cell]) -> list[float | None]:
    """Estimates the GB of the fullest GPU of each cell."""
    adapters = {entry: adapter_of(entry) for entry in {phase.backend for cell in cells for phase in cell.phases}}
    scenarios = {id(cell.scenario): cell.scenario for cell in cells}
    sizes = {key: size_of(scenario) for key, scenario in scenarios.items()}
    return [gpu_bytes(cell, sizes[id(cell.scenario)], adapters) / GB for cell in cells]


def _line(
    cell: Cell, one: Estimate, seconds: float | None, width: int, *, gpu: float | None, gpu_memory: float | None
) -> str:
    fits = "" if gpu is None or gpu_memory is None else "yes" if gpu <= gpu_memory else "no"
    own = "" if gpu is None else f" {gpu:>9.4g} {fits:<4}"
    sizes = f"{one.rank / GB:>9.2f} {one.oracle / GB:>7.2f} {one.host / GB:>7.2f} {one.record / GB:>11.3f}"
    return f"{cell!s:<{width}} {own} {sizes} {'not measured' if seconds is None else _time(seconds):>12}"


def _time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@one_thread()
def _rates() -> dict[PrecisionName, float]:
    """Measures the operations per second of one processor now, in matrix products of each precision's master dtype."""
    rates: dict[FloatFormat, float] = {}
    for number_format in dict.fromkeys(tier.master for tier in PRECISIONS.values()):
        a = torch.ones(_SIDE, _SIDE, dtype=number_format.dtype)
        torch.mm(a, a)
        began = time.perf_counter()
        for _ in range(_TIMES):
            torch.mm(a, a)
        rates[number_format] = _TIMES * 2 * _SIDE**3 / (time.perf_counter() - began)
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
    print(_wrapped("profiles: ", profile_names()))
    print(_wrapped("backends: ", registered_backends()))
    print(f"{len(rows)} cells of {selection.profile_name} ({profile_of(selection).description}):")
    for row, conventions in zip(rows, declared, strict=True):
        print(f"  {row['id']}  [{row['world_size']} ranks] {row['refused'] or _declares(conventions)}")
    if coverage:
        print(f"\n{coverage}")
    print(f"{len(catalogue())} faults that --faults plants (docs/reference/faults.md), by the stage that finds them:")
    by_stage: dict[str, list[str]] = {}
    for fault in catalogue().values():
        by_stage.setdefault(fault.stage, []).append(fault.name)
    for stage, names in by_stage.items():
        print(_wrapped(f"  {stage}: ", names))
    return EXIT["conforms"]


def _wrapped(head: str, names: Iterable[str]) -> str:
    """Lists names behind a head, in lines that fit the terminal and break only between names."""
    width = max(shutil.get_terminal_size((120, 24)).columns, 40)
    return textwrap.fill(head + ", ".join(names), width, subsequent_indent="    ", break_on_hyphens=False)


def _declares(conventions: Conventions) -> str:
    return f"declares {', '.join(map(str, conventions))}" if conventions else ""
