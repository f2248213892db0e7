"""Runs a rollout engine and judges it: what it computes, what may not change a number, and how it takes new weights.

With a training backend (``against``), a cell of it trains and exports: its log-probs are compared with the engine's,
and its exported weights are those that the engine takes. Otherwise the new weights are the model's, each number moved
by up to five percent.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from conformance.backends.engines import Decoding, EngineFailed, NotSupported, ServedEngine
from conformance.core.errors import UsageError
from conformance.data.prepare import batches_of, prepare_inputs
from conformance.judge.engines import (
    TEMPERATURE,
    Check,
    Score,
    Tolerance,
    divergence,
    judge_greedy,
    judge_invariance,
    judge_pair,
    judge_reported,
    shift_of,
)
from conformance.judge.weight_sync import explain
from conformance.matrix.cell import Cell, Phase
from conformance.oracle.primitives import Tap, Weights
from conformance.oracle.scoring import Reference, Scores
from conformance.records.header_checks import noise_runs
from conformance.records.record_format import RecordError
from conformance.records.step_tensors import Record, read_record
from conformance.results.verdict import State
from conformance.runner.session import Session
from conformance.spec.batch import Batch
from conformance.spec.scenario import Scenario

DOCUMENTS, SHORTEST = 6, 4  # and the least tokens of each
PROMPTS, NEW_TOKENS = 4, 12
LEAST_MOVE = 10.0  # times the bound: what an update has to change, so that a part of it shows
TEMPERATURES = (TEMPERATURE, TEMPERATURE**2)
NOT_COPIED = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Holds what an engine is asked: documents of the first step, and their beginnings as prompts."""

    documents: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, batch: Batch) -> "Requests":
        documents = [document.tokens for row in batch.rows for document in row.documents]
        found = tuple(one for one in documents if len(one) >= SHORTEST)[:DOCUMENTS]
        if not found:
            raise UsageError(
                f"no document of the first step has {SHORTEST} tokens; give other --data, or a larger --max-len"
            )
        return cls(documents=found)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [one[: max(2, len(one) // 2)] for one in self.documents[:PROMPTS]]


class Expected:
    """Computes what the reference and the noise runs give at some weights."""

    def __init__(self, scenario: Scenario, folder: Path, requests: Requests) -> None:
        self.requests, self.precision, self._scenario, self._folder = requests, scenario.precision, scenario, folder
        self.reference = Reference(scenario, folder)
        self.weights = self.reference.weights(folder)

    def at(self, folder: Path) -> "Expected":
        """Returns what is expected at the weights of another folder of the same model."""
        return Expected(self._scenario, folder, self.requests)

    @cached_property
    def _noise_weights(self) -> dict[str, Weights]:
        return {run: self.reference.weights(self._folder, run) for run in noise_runs(self.precision)}

    @property
    def score(self) -> Score:
        return partial(self.reference.scores, self.weights, temperatures=TEMPERATURES)

    @property
    def noise(self) -> list[Score]:
        return [
            partial(self.reference.scores, weights, run=run, temperatures=TEMPERATURES)
            for run, weights in self._noise_weights.items()
        ]

    def tolerance(self, requests: Sequence[Sequence[int]], read: Callable[[Scores], Tensor]) -> Tolerance:
        runs = [[read(one) for one in run(requests)] for run in (self.score, *self.noise)]
        return Tolerance(precision=self.precision, reference=runs[0], noise=runs[1:])

    @cached_property
    def documents(self) -> Tolerance:
        return self.tolerance(self.requests.documents, lambda one: one.chosen)

    @cached_property
    def prompts(self) -> Tolerance:
        return self.tolerance(self.requests.prompts, lambda one: one.last)

    def chosen(self, weights: Weights, tap: Tap) -> list[Tensor]:
        return [one.chosen for one in self.reference.scores(weights, self.requests.documents, tap=tap)]


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """Configures the judgement of an engine. serve: returns the engine, not started, in a new process."""

    serve: Callable[[], ServedEngine]
    scenario: Scenario
    folder: Path


def judge_engine(run: EngineRun, trained: Callable[[], Iterator["Trained"]]) -> Iterator[Check]:
    """Yields the checks of an engine as they are made. trained: runs the cells of training backends."""
    try:
        expected = Expected(run.scenario, run.folder, Requests.of(batches_of(run.scenario, run.folder)[0]))
        with run.serve() as engine:
            engine.start(run.folder, run.scenario.precision, {})
            versions = ", ".join(f"{name} {version}" for name, version in engine.info.versions.items())
            yield Check(name="start", state="conforms", text=versions)
            yield from judge_numbers(engine, expected)
            scored = engine.score(expected.requests.documents)
            for name, settings in engine.info.variants.items():
                yield _variant(engine, run, name, settings, scored, expected)
            for training in trained():
                yield from _against(training, scored, expected)
                yield from judge_updates(engine, run, expected, training)
    except NotSupported as error:
        yield Check(name="start", state="unsupported", text=str(error))
    except (EngineFailed, RecordError) as error:
        yield Check(name="engine", state="infrastructure", text=str(error))


def judge_numbers(engine: ServedEngine, expected: Expected) -> Iterator[Check]:
    """Yields the checks of a started engine's log-probs and tokens."""
    requests, tolerance = expected.requests, expected.documents
    scored = engine.score(requests.documents)
    why = partial(_why_wrong, scored, expected)
    yield tolerance.judge("scored log-probs", scored, why=why)
    vocab_size = expected.reference.vocab_size
    last = engine.next_token(requests.prompts, vocab_size)
    kl = divergence(last, torch.stack([*expected.prompts.reference]))
    yield expected.prompts.judge("distributions", [*last], more=f", KL {kl:.1e}")
    greedy = engine.generate(requests.prompts, Decoding(max_new_tokens=NEW_TOKENS))
    whole = [(*prompt, *one.tokens) for prompt, one in zip(requests.prompts, greedy, strict=True)]
    yield judge_greedy(greedy, expected.score(whole), allowed=expected.prompts.absolute)
    sampled = engine.generate(requests.prompts, Decoding(max_new_tokens=NEW_TOKENS, temperature=TEMPERATURE, seed=1))
    yield judge_reported(
        engine.info.reports,
        requests.prompts,
        sampled,
        expected.score,
        precision=expected.precision,
        noise=expected.noise,
    )
    alone = [engine.score([one])[0] for one in requests.documents]
    yield judge_invariance("alone and in a batch", scored, alone, allowed=tolerance.absolute)
    again = engine.next_token(requests.prompts, vocab_size)
    allowed = expected.prompts.absolute
    yield judge_invariance("the same prompts again (a warm prefix cache)", [*again], [*last], allowed=allowed)


def _why_wrong(observed: Sequence[Tensor], expected: Expected) -> str:
    """Explains wrong log-probs by those of another token, or by mistakes of loading."""
    if shift := shift_of(observed, expected.documents):
        return f"those of the token {shift}"
    return explain(observed, expected.chosen, expected.documents, expected.weights, None).text


def _variant(
    engine: ServedEngine,
    run: EngineRun,
    name: str,
    settings: Mapping[str, object],
    scored: Sequence[Tensor],
    expected: Expected,
) -> Check:
    """Judges settings that may not change a number."""
    try:
        engine.start(run.folder, run.scenario.precision, settings)
        found = engine.score(expected.requests.documents)
    except NotSupported as error:
        return Check(name=name, state="unsupported", text=str(error))
    return judge_invariance(name, found, scored, allowed=expected.documents.absolute)


# New weights


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Holds new weights, and the log-probs of the backend that has trained them, at the weights before.

    by: the name of the backend; empty for weights that were moved without one. cell: its verdict. logprobs: of each
    document of the requests; None for one whose tokens are not all targets.
    """

    by: str
    folder: Path
    cell: Check | None = None
    logprobs: tuple[tuple[int, Tensor], ...] = ()


def moved(scenario: Scenario, out: Path) -> Iterator[Trained]:
    """Yields the model with other numbers."""
    other = prepare_inputs(replace(scenario, seed=scenario.seed + 1), out / "moved")
    yield Trained(by="", folder=other.models["policy"])


def train(cell: Cell, session: Session, scenario: Scenario, folder: Path, out: Path) -> Iterator[Trained]:
    """Runs a cell that exports after two steps and goes on; yields its new weights and its first log-probs."""
    first = cell.phases[0]
    phases = (replace(first, steps=2, save="export"), Phase(backend=first.backend, layout=first.layout, steps=1))
    cell = replace(cell, scenario=replace(scenario, steps=3), phases=phases, program="export")
    judged = session.run(cell)
    verdict, name = judged.verdict, f"{cell.backend} {cell.layout}"
    check = Check(name=f"training by {name}", state=verdict.state, text=verdict.reason.partition("\n")[0] or "3 steps")
    if not judged.completed:
        yield Trained(by=name, folder=folder, cell=check)
        return
    records = [read_record(session.folder(cell) / path) for path in judged.records]
    weights = {
        key.removeprefix("weight/"): tensor
        for key, tensor in records[1].loaded.tensors().items()
        if key.startswith("weight/")
    }
    new = out / f"trained-{cell.slug}"
    shutil.copytree(folder, new, ignore=shutil.ignore_patterns(*NOT_COPIED))
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    yield Trained(by=name, folder=new, cell=check, logprobs=tuple(_first_logprobs(records[0], scenario, folder)))


def _first_logprobs(record: Record, scenario: Scenario, folder: Path) -> Iterator[tuple[int, Tensor]]:
    """Yields the number of each requested document, and the trainer's log-probs of its targets at the first step."""
    tensors, batch, number = record.steps[0].tensors(), batches_of(scenario, folder)[0], 0
    for row in batch.rows:
        rows, first = tensors.get(f"logprob/{row.index}", torch.zeros(0)), 0  # a row without targets has none
        for document in row.documents:
            count = sum(document.targets)
            if len(document.tokens) >= SHORTEST:
                if number < DOCUMENTS and count:
                    values = torch.full((len(document.tokens) - 1,), torch.nan, dtype=torch.float64)
                    values[torch.tensor(document.targets[1:])] = rows[first : first + count].double()
                    yield number, values
                number += 1
            first += count


def _against(training: Trained, scored: Sequence[Tensor], expected: Expected) -> Iterator[Check]:
    if training.cell:
        yield training.cell
    if training.logprobs:
        masks = [(number, values, ~values.isnan()) for number, values in training.logprobs]
        yield judge_pair(
            training.by,
            [values[mask] for _, values, mask in masks],
            [scored[number][mask] for number, _, mask in masks],
            [expected.documents.reference[number][mask] for number, _, mask in masks],
            bound=expected.documents.bound,
        )


def judge_updates(engine: ServedEngine, run: EngineRun, expected: Expected, training: Trained) -> Iterator[Check]:
    """Updates the engine in each of its ways, from the first weights, and says which weights it has then."""
    if training.folder == run.folder:
        return
    new, served = expected.at(training.folder), engine
    if (moved_by := new.documents.error(expected.documents.reference)) <= LEAST_MOVE * new.documents.bound:
        text = f"the new weights move log-probs by {moved_by:.1e}, too little to tell them from the old ones"
        yield Check(name="updates", state="unsupported", text=text)
        return
    with contextlib.ExitStack() as stack:
        for way in engine.info.ways:
            name = f"update by {way}" + (f", from {training.by}" if training.by else "")
            try:
                served.start(run.folder, run.scenario.precision, {})
                yield _updated(served, name, way, run.folder, training.folder, expected, new)
            except NotSupported as error:
                yield Check(name=name, state="unsupported", text=str(error))
            except EngineFailed as error:
                yield Check(name=name, state="infrastructure", text=str(error))
                served = stack.enter_context(run.serve())


def _updated(
    engine: ServedEngine, name: str, way: str, old_folder: Path, folder: Path, old: Expected, new: Expected
) -> Check:
    """Updates a started engine, and back again. Says which weights it has, and whether it keeps a prefix cache."""
    documents, vocab_size = old.requests.documents, old.reference.vocab_size

    def check(state: State, text: str, tolerance: Tolerance, observed: Sequence[Tensor]) -> Check:
        return Check(name=name, state=state, text=text, error=tolerance.error(observed), bound=tolerance.bound)

    engine.next_token(old.requests.prompts, vocab_size)  # fills a prefix cache, which an update has to reset
    raised = ""
    try:
        engine.update(way, folder)
    except EngineFailed as error:
        raised = str(error)
    scored = engine.score(documents)
    found = explain(scored, new.chosen, new.documents, new.weights, old.weights)
    if raised and found.state == "stale":
        return check("unsupported", f"raised, and left the old weights: {raised}", new.documents, scored)
    if raised or found.state != "new":
        why = f"raised: {raised}; the engine is left " if raised else ""
        return check("differs", f"{why}{found.state}: {found.text}", new.documents, scored)
    cached = [*engine.next_token(old.requests.prompts, vocab_size)]
    if new.prompts.error(cached) > new.prompts.bound:
        text = "new, but the prefix cache was kept: prompts that were served before get old keys and values"
        return check("differs", text, new.prompts, cached)
    engine.update(way, old_folder)
    again = engine.score(documents)
    back = explain(again, old.chosen, old.documents, old.weights, new.weights)
    if back.state != "new":
        text = f"new, but a second update, back to the first weights, is not right: {back.state}: {back.text}"
        return check("differs", text, old.documents, again)
    return check("conforms", "new, and back again", new.documents, scored)
