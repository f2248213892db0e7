"""Judges rollout engines (`parity engine`): one table for each, and exit codes as those of `parity run`."""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from conformance.backends.engines import EngineProcess
from conformance.cli import EXIT
from conformance.data.prepare import prepare_inputs
from conformance.judge.engines import Check
from conformance.matrix.options import Ranks, Selection
from conformance.matrix.profile import select_cells
from conformance.results.verdict import STATES
from conformance.runner.engine_run import EngineRun, Trained, judge_engine, moved, train
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session

SCENARIO, LAYOUT = "sft-packed", "dp2"


def engine_command(options: argparse.Namespace) -> int:
    checks = []
    with tempfile.TemporaryDirectory(prefix="parity-engines-") as folder:
        for name in dict.fromkeys(options.engine or ["transformers"]):
            found = []
            for check in _judged(name, options, Path(folder)):
                found.append(check)
                if not options.json:
                    print(_line(name, check), flush=True)
            checks.append({"engine": name, "checks": [asdict(check) for check in found]})
            checks[-1]["state"] = _state(found)
    if options.json:
        print(json.dumps(checks))
    return EXIT[_overall([str(one["state"]) for one in checks])]


def _judged(name: str, options: argparse.Namespace, out: Path) -> Iterator[Check]:
    pythons = dict(one.partition("=")[::2] for one in options.python or ())
    python = pythons.pop(name, "")
    against = [one for one in options.against.split(",") if one]
    options.backend = against or ["fsdp2"]
    options.python = [f"{backend}={executable}" for backend, executable in pythons.items()]
    options.scenario, options.precision = [SCENARIO], options.precision or ["fp32"]
    options.layout = options.layout or [LAYOUT]
    selection, ranks = Selection.from_options(options), Ranks.from_options(options)
    cells = select_cells(selection)
    scenario = cells[0].scenario
    run = EngineRun(
        serve=partial(EngineProcess, name, python=python, limit_s=ranks.budget),
        scenario=scenario,
        folder=prepare_inputs(scenario, out).models["policy"],
    )

    def trained() -> Iterator[Trained]:
        if not against:
            yield from moved(scenario, out)
            return
        with Session(SessionConfig(out=out / "cells", budget_s=ranks.budget)) as session:
            for cell in cells:
                yield from train(cell, session, scenario, run.folder, out)

    yield from judge_engine(run, trained)


def _line(engine: str, check: Check) -> str:
    numbers = "" if check.error is None or check.bound is None else f" {check.error:.1e} of {check.bound:.1e};"
    return f"{STATES[check.state].word:<14} {engine:<13} {check.name}:{numbers} {check.text}"


def _state(checks: list[Check]) -> str:
    states = [check.state for check in checks]
    if "differs" in states:
        return "differs"
    if "infrastructure" in states:
        return "infrastructure"
    return "conforms" if "conforms" in states else "unsupported"


def _overall(states: list[str]) -> str:
    if "differs" in states:
        return "differs"
    return "conforms" if all(state == "conforms" for state in states) else "incomplete"
