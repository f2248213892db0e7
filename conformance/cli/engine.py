"""Judges what is served from a process of its own, with the exit codes of `parity run`.

`parity engine` judges rollout engines, with a table for each. `parity text` judges pipelines from text to tokens, with
a line for each stage and a table of chat templates.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from conformance.backends.engines import EngineProcess, ServedEngine
from conformance.backends.text import PipelineProcess, ServedPipeline
from conformance.cli import EXIT
from conformance.core.errors import UsageError
from conformance.core.host import resolve
from conformance.core.io import make_folder, write_file
from conformance.core.packages import write_reports
from conformance.data.inputs import prepare_inputs
from conformance.judge.engines import Check
from conformance.judge.sample_order import judge_order
from conformance.judge.text import (
    Conversation,
    TemplateFolder,
    TextCheck,
    judge_conversations,
    own_template,
    published,
    read_conversations,
)
from conformance.matrix.cell import Cell
from conformance.matrix.options import Ranks, Selection
from conformance.matrix.profile import select_cells
from conformance.results.verdict import PASSES, STATES, overall
from conformance.runner.engine_rollouts import on_policy
from conformance.runner.engine_run import EngineRun, Expected, judge_engine
from conformance.runner.placement import SessionConfig
from conformance.runner.preflight import check_device, leased_gpus
from conformance.runner.session import Session
from conformance.runner.weight_updates import BROKEN, Trained, judge_against, judge_updates, moved, train
from conformance.spec.scenario import Scenario

SCENARIO, LAYOUT = "sft-packed", "dp2"
WHOLE = 2**50  # elements of a matrix: records keep no sketches, because an engine takes whole weights


def engine_command(options: argparse.Namespace) -> int:
    pythons = dict(map(environment, options.python or ()))
    engines = dict.fromkeys(options.engine or ["transformers"])
    against = [one for one in options.against.split(",") if one]
    options.backend, faults = against or ["fsdp2"], options.engine_faults
    options.python = [f"{name}={python}" for name, python in pythons.items() if name not in engines]
    options.scenario, options.precision = options.scenario or [SCENARIO], options.precision or ["fp32"]
    options.layout, options.sketch = options.layout or [LAYOUT], WHOLE
    cells, ranks = select_cells(Selection.from_options(options)), Ranks.from_options(options)
    check_device(ranks)
    if options.out:
        make_folder(options.out)
    results = []
    for name in engines:
        for scenario in dict.fromkeys(cell.scenario for cell in cells):
            found = []
            own = [cell for cell in cells if cell.scenario == scenario and against]
            with tempfile.TemporaryDirectory(prefix="parity-engines-") as folder:
                python = pythons.get(name, "")
                serve = partial(EngineProcess, name, python=python, limit_s=ranks.budget, faults=faults)
                for check in _judged(serve, scenario, own, Path(folder), ranks, options.way):
                    found.append(check)
                    if not options.json:
                        print(_line(f"{name} {scenario.precision}", check), flush=True)
            where = {"model": scenario.model_name, "scenario": scenario.name, "precision": scenario.precision}
            result = {"engine": name, **where, "device": ranks.device, "state": _state(found)}
            results.append(result | {"checks": [asdict(check) for check in found]})
    lines = []
    if options.out:
        write_file(options.out / "engine.json", json.dumps(results))
        lines = write_reports(options.out, only="html")
    print(json.dumps(results) if options.json else "\n".join(lines), end="\n" if options.json or lines else "")
    return EXIT[_overall([str(one["state"]) for one in results])]


def environment(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if not name or not python:
        raise UsageError(f"--python {text}: give NAME=EXECUTABLE, such as vllm=VENV/bin/python")
    return name, python


def _judged(
    serve: Callable[[], EngineProcess],
    scenario: Scenario,
    cells: Sequence[Cell],
    out: Path,
    ranks: Ranks,
    ways: Sequence[str],
) -> Iterator[Check]:
    """Yields the checks of an engine. cells: those of training backends that give it weights; may be empty."""
    folder = prepare_inputs(scenario, out).models["policy"]
    run = EngineRun(serve=serve, scenario=scenario, folder=folder, device=ranks.device, ways=tuple(ways))

    config = SessionConfig(
        out=out / "cells",
        device=ranks.device,
        gpus=leased_gpus(ranks),
        ranks_per_gpu=ranks.ranks_per_gpu,
        budget_s=ranks.budget,
    )

    def trained() -> Iterator[Trained]:
        if not cells:
            yield from moved(scenario, folder, out)
            return
        with Session(config) as session:
            for cell in cells:
                yield from train(cell, session, scenario, folder, out)

    def steps(engine: ServedEngine, run: EngineRun, scored: Sequence[Tensor], expected: Expected) -> Iterator[Check]:
        if cells and not (scenario.lora or run.ways):
            engine.start(run.folder, scenario.precision, run.settings)
            with Session(replace(config, out=out / "steps")) as session:
                for cell in cells:
                    yield from on_policy(engine, expected.asked, scenario, folder, cell, session)

    def updates(engine: ServedEngine, run: EngineRun, scored: Sequence[Tensor], expected: Expected) -> Iterator[Check]:
        broken = BROKEN
        for training in trained():
            yield from judge_against(training, scored, expected)
            yield from judge_updates(engine, run, expected, training, broken)
            broken = broken if training.folder == run.folder else {}  # what is refused does not depend on the trainer

    yield from judge_engine(run, steps, updates)


def _line(engine: str, check: Check) -> str:
    numbers = "" if check.error is None or check.bound is None else f" {check.error:.1e} of {check.bound:.1e};"
    return f"{STATES[check.state].word:<14} {engine:<18} {check.name}:{numbers} {check.text}"


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


LIMIT_S = 120.0  # for one call of a pipeline


def text_command(options: argparse.Namespace) -> int:
    pythons, conversations = dict(map(environment, options.python)), read_conversations(options.data)
    if options.out:
        make_folder(options.out)
    results = []
    with tempfile.TemporaryDirectory(prefix="parity-text-") as folder:
        if options.model:
            templates = [own_template(resolve(options.model), trusted=options.trust_remote_code)]
        else:
            templates = list(published(options.template or ["qwen2.5"], Path(folder)))
        for name in dict.fromkeys(options.pipeline or ["reference"]):
            with PipelineProcess(
                name, python=pythons.get(name, ""), limit_s=LIMIT_S, faults=options.text_faults
            ) as pipeline:
                for template, check in _judged_templates(pipeline, templates, conversations):
                    results.append({"pipeline": pipeline.info.name, "template": template} | asdict(check))
                    if not options.json:
                        print(_stage_line(pipeline.info.name, template, check), flush=True)
    if options.out:
        write_file(options.out / "text.json", json.dumps(results))
    if options.json:
        print(json.dumps(results))
    elif len(templates) > 1:
        print("\n".join(_table(results)))
    verdict = overall((one["state"] for one in results if one["state"] != "unsupported"), complete=True)
    return EXIT["conforms" if verdict in PASSES else verdict]


def _judged_templates(
    pipeline: ServedPipeline, templates: Sequence[TemplateFolder], conversations: Sequence[Conversation]
) -> Iterator[tuple[str, TextCheck]]:
    for template in templates:
        for check in judge_conversations(pipeline, template, conversations):
            yield template.name, check
    for check in judge_order(pipeline):
        yield "", check


def _stage_line(pipeline: str, template: str, check: TextCheck) -> str:
    return f"{STATES[check.state].word:<12} {f'{pipeline} {template}'.strip():<24} {check.stage}: {check.text}"


def _table(results: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yields a Markdown table: what each pipeline renders and trains on with each template."""
    pipelines = list(dict.fromkeys(one["pipeline"] for one in results))
    yield f"\n| template | {' | '.join(pipelines)} |"
    yield "|---|" + "---|" * len(pipelines)
    for template in dict.fromkeys(one["template"] for one in results if one["template"]):
        cells = []
        for pipeline in pipelines:
            found = {
                one["stage"]: one["short"]
                for one in results
                if (one["pipeline"], one["template"]) == (pipeline, template)
            }
            mask = f"; trains on {found['mask']}" if "mask" in found else ""
            cells.append(f"text {found.get('rendered text', 'not judged')}{mask}")
        yield f"| {template} | {' | '.join(cells)} |"
