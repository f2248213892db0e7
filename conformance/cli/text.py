"""Judges the path from text to tokens (`parity text`): one line for each stage, and a table of chat templates."""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from conformance.backends.text import PipelineProcess, ServedPipeline
from conformance.cli import EXIT
from conformance.cli.engine import environment
from conformance.core.host import resolve
from conformance.core.io import write_file
from conformance.data.chat_templates import Conversation, TemplateFolder, own_template, published, read_conversations
from conformance.judge.sample_order import judge_order
from conformance.judge.text import TextCheck, judge_conversations
from conformance.results.verdict import PASSES, STATES, overall

LIMIT_S = 120.0  # for one call of a pipeline


def text_command(options: argparse.Namespace) -> int:
    pythons, conversations = dict(map(environment, options.python)), read_conversations(options.data)
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
                for template, check in _judged(pipeline, templates, conversations):
                    results.append({"pipeline": pipeline.info.name, "template": template} | asdict(check))
                    if not options.json:
                        print(_line(pipeline.info.name, template, check), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_file(options.out / "text.json", json.dumps(results))
    if options.json:
        print(json.dumps(results))
    elif len(templates) > 1:
        print("\n".join(_table(results)))
    verdict = overall((one["state"] for one in results if one["state"] != "unsupported"), complete=True)
    return EXIT["conforms" if verdict in PASSES else verdict]


def _judged(
    pipeline: ServedPipeline, templates: Sequence[TemplateFolder], conversations: Sequence[Conversation]
) -> Iterator[tuple[str, TextCheck]]:
    for template in templates:
        for check in judge_conversations(pipeline, template, conversations):
            yield template.name, check
    for check in judge_order(pipeline):
        yield "", check


def _line(pipeline: str, template: str, check: TextCheck) -> str:
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
