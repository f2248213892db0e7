"""Prints backends, profiles, faults and the cells of a profile (`parity list`)."""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from conformance.backends.faults import catalogue
from conformance.backends.protocol import registered_backends
from conformance.cli import EXIT
from conformance.matrix.options import Demands, Portion, Ranks, Selection
from conformance.matrix.plan import make_plan
from conformance.matrix.profile import profile_names, profile_of
from conformance.results.verdict import STATES, State
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session

NOT_HERE: dict[State, str] = {"not_run": "not here"}  # shown for a cell that another machine could run


def run(options: argparse.Namespace) -> int:
    selection, ranks = Selection.from_options(options), Ranks.without_budget(options)
    cells = make_plan(selection, Demands(), Portion.from_options(options), ranks=ranks).cells
    with tempfile.TemporaryDirectory() as folder:
        config = SessionConfig(out=Path(folder), device=ranks.device, ranks_per_gpu=ranks.ranks_per_gpu)
        with Session(config) as session:
            refused = [session.refusal(cell) for cell in cells]
    rows = [
        {
            "id": str(cell),
            "world_size": cell.world_size,
            "refused": f"{NOT_HERE.get(why.state, STATES[why.state].name)}: {why.reason}" if why else "",
        }
        for cell, why in zip(cells, refused, strict=True)
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
    for row in rows:
        print(f"  {row['id']}  [{row['world_size']} ranks] {row['refused']}")
    if coverage:
        print(f"\n{coverage}")
    return EXIT["conforms"]
