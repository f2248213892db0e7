"""Gives a rollout engine new weights in each of its ways, and says which weights it computes with afterwards.

The new weights are those that a cell of a training backend exports after two steps. Without a training backend they
are the model's, with each number moved by up to five percent. With LoRA, some ways take the adapter alone; the others
take the weights with the adapter merged into them. An update with broken weights has to fail, and to leave no mixture.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conformance.backends.engines import EngineFailed, NotSupported, ServedEngine
from conformance.core.errors import UsageError, did_you_mean
from conformance.data.inputs import batches_of, prepare_inputs
from conformance.judge.engines import Check, Tolerance, judge_pair
from conformance.judge.weight_sync import Synced, explain
from conformance.matrix.cell import Cell, Phase
from conformance.models.folders import weight_files
from conformance.oracle.primitives import Weights
from conformance.records.step_tensors import Record, read_record
from conformance.results.verdict import State
from conformance.runner.engine_rollouts import judge_interrupted, judge_version
from conformance.runner.engine_run import (
    DOCUMENTS,
    LONGEST,
    SHORTEST,
    EngineRun,
    Expected,
    attempted,
    write_weights,
)
from conformance.runner.session import Session
from conformance.spec.precision import PRECISIONS
from conformance.spec.scenario import ADAPTER, WEIGHTS_FILE, Scenario

LEAST_MOVE = (
    2.0  # times the bound: what an update has to change, so that old weights are not within the bound of new ones
)
CLEAR_MOVE = 100.0  # times the bound: of a larger change, a part shows, too
STEPS, STEPS_IN_HALF = 2, 4  # of a training before it exports; rounding hides smaller changes
NEW = "new, and back again"
Spoil = Callable[[Weights, str], Weights]  # weights, and the name of a tensor


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Holds new weights, and the log-probs of the backend that has trained them, at the weights before.

    by: the name of the backend; empty for weights that were moved without one. cell: its verdict. logprobs: the number
    of a document of the requests, and the log-probs of its tokens, NaN for those that are no targets.
    """

    by: str
    folder: Path
    cell: Check | None = None
    logprobs: tuple[tuple[int, Tensor], ...] = ()


def moved(scenario: Scenario, folder: Path, out: Path) -> Iterator[Trained]:
    """Yields the model with other numbers; with LoRA, the same base with another adapter."""
    other = prepare_inputs(replace(scenario, seed=scenario.seed + 1), out / "moved").models["policy"]
    if scenario.lora:
        new = out / "moved-adapter"
        shutil.copytree(folder, new)
        shutil.copy(other / ADAPTER / WEIGHTS_FILE, new / ADAPTER)
        other = new
    yield Trained(by="", folder=other)


def train(cell: Cell, session: Session, scenario: Scenario, folder: Path, out: Path) -> Iterator[Trained]:
    """Runs a cell that exports after two steps and goes on; yields its new weights and its first log-probs."""
    first = cell.phases[0]
    steps = STEPS_IN_HALF if PRECISIONS[scenario.precision].is_half else STEPS
    phases = (replace(first, steps=steps, save="export"), Phase(backend=first.backend, layout=first.layout, steps=1))
    cell = replace(cell, scenario=replace(scenario, steps=steps + 1), phases=phases, program="export")
    judged = session.run(cell)
    verdict, name = judged.verdict, f"{cell.backend} {cell.layout}"
    check = Check(name=f"training by {name}", state=verdict.state, text=verdict.reason.partition("\n")[0])
    if not judged.completed:
        yield Trained(by=name, folder=folder, cell=check)
        return
    records = [read_record(session.folder(cell) / path) for path in judged.records]
    loaded = records[1].loaded.tensors()
    weights = {key.removeprefix("weight/"): tensor for key, tensor in loaded.items() if key.startswith("weight/")}
    new = out / f"trained-{cell.slug}"
    write_weights(weights, source=folder, folder=new)
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


def judge_against(training: Trained, scored: Sequence[Tensor], expected: Expected) -> Iterator[Check]:
    """Yields the verdict of a training, and the comparison of its log-probs with the engine's."""
    if training.cell:
        yield training.cell
    if training.logprobs:
        masks = [(number, values, ~values.isnan()) for number, values in training.logprobs]
        yield judge_pair(
            training.by,
            [values[mask] for _, values, mask in masks],
            [scored[number][mask] for number, _, mask in masks],
            [expected.documents.reference[number][mask] for number, _, mask in masks],
            [mask.nonzero()[:, 0] + 1 for _, _, mask in masks],
            bound=expected.documents.bound,
        )


@dataclass(frozen=True, kw_only=True)
class Update:
    """Holds what is expected before and after an update. by: the name of the training backend, or empty.

    old, new: of the folders that the engine loads. explained: the same with the adapter apart, for explanations.
    """

    by: str
    old: Expected
    new: Expected
    explained: "Update | None" = None

    @property
    def hidden(self) -> str:
        """Says how large a part of the change may be hidden by rounding; empty for less than a hundredth."""
        share = self.new.documents.bound / self.new.documents.error(self.old.documents.reference)
        return (
            f"; old parts that make less than {share:.0%} of the change would not show"
            if share * CLEAR_MOVE > 1
            else ""
        )

    @property
    def reversed(self) -> "Update":
        separate = self.explained and self.explained.reversed
        return Update(by=self.by, old=self.new, new=self.old, explained=separate)

    def explain(self, observed: Sequence[Tensor]) -> Synced:
        separate = self.explained or self
        return explain(
            observed,
            separate.new.chosen,
            self.new.documents,
            separate.new.weights,
            separate.old.weights,
            separate.new.reference.architecture,
        )


class Serving:
    """Holds an engine, replaces it by a new process after it has failed, and knows which weights it has."""

    def __init__(self, engine: ServedEngine, run: EngineRun) -> None:
        self.engine, self._run = engine, run
        self.has: Path | None = None  # the folder of the engine's weights, if that is known

    def start(self, folder: Path) -> None:
        """Starts the engine with a folder, unless it has its weights."""
        if self.engine.failed:
            self.engine.end()
            self.engine = self._run.serve()
        elif folder == self.has:
            return
        self.has = None
        self.engine.start(folder, self._run.scenario.precision, self._run.settings)
        self.has = folder


def judge_updates(
    engine: ServedEngine,
    run: EngineRun,
    expected: Expected,
    training: Trained,
    broken: Mapping[str, Spoil] | None = None,
) -> Iterator[Check]:
    """Updates the engine in each of its ways, from the first weights, and says which weights it has then.

    broken: how weights are spoilt that it has to refuse; by default each of ``BROKEN``.
    """
    if training.folder == run.folder:
        return
    if unknown := [way for way in run.ways if way not in engine.info.ways]:
        near = did_you_mean(unknown[0], engine.info.ways)
        raise UsageError(f"--way {unknown[0]}: {near}{engine.info.name} has the ways {', '.join(engine.info.ways)}")
    separate = Update(by=training.by, old=expected, new=expected.at(training.folder))
    bound = separate.new.documents.bound
    if (moved_by := separate.new.documents.error(expected.documents.reference)) <= LEAST_MOVE * bound:
        text = f"the new weights move log-probs by {moved_by:.1e}, too little to tell them from the old ones"
        yield Check(name="updates", state="unsupported", text=text)
        return
    whole = separate
    if run.scenario.lora:
        whole = Update(by=training.by, old=expected.merged, new=separate.new.merged, explained=separate)
    serving, right = Serving(engine, run), list[str]()
    try:
        for way in run.ways or engine.info.ways:
            if way not in engine.info.adapter_ways or run.scenario.lora:
                update = separate if way in engine.info.adapter_ways else whole
                for check in _way(serving, way, update, BROKEN if broken is None else broken):
                    yield check
                    right += [way] if check.text.startswith(NEW) and way in engine.info.interrupts else []
        if right and broken != {}:
            name = f"requests interrupted by {right[0]}" + (f", from {training.by}" if training.by else "")
            yield attempted(name, partial(_interrupted, serving, name, right[0], whole))
    finally:
        if serving.engine is not engine:
            serving.engine.end()


def _way(serving: Serving, way: str, update: Update, broken: Mapping[str, Spoil]) -> Iterator[Check]:
    """Yields the checks of one way: an update and one back again, and updates that have to fail."""
    name = f"update by {way}" + (f", from {update.by}" if update.by else "")
    for title, spoil in {"": None, **broken}.items():
        try:
            serving.start(update.old.folder)
            if spoil:
                check = _refused(serving.engine, f"{name}, {title}", way, update, spoil)
            else:
                check = _updated(serving.engine, name, way, update)
        except NotSupported as error:
            serving.has = None
            yield Check(name=name, state="unsupported", text=str(error)[:LONGEST])
            return
        except (EngineFailed, UsageError) as error:
            check = Check(name=name, state="infrastructure", text=str(error)[:LONGEST])
        yield check
        kept = check.state == "conforms" and check.error is not None  # without a number, it answers nothing
        serving.has = update.old.folder if kept else None
        serving.engine.failed &= not kept  # a broken update has to raise
        if not (kept or spoil):
            return


def _interrupted(serving: Serving, name: str, way: str, update: Update) -> Check:
    serving.start(update.old.folder)
    serving.has = None
    return judge_interrupted(serving.engine, name, way, update.new.folder, update.new.asked, update.old.asked)


def _updated(engine: ServedEngine, name: str, way: str, update: Update) -> Check:
    """Updates a started engine, and back again. Says which weights it has, and whether it keeps a prefix cache."""
    old, new = update.old, update.new
    documents, vocab_size = old.requests.documents, old.reference.vocab_size

    def check(state: State, text: str, tolerance: Tolerance, observed: Sequence[Tensor]) -> Check:
        return Check(name=name, state=state, text=text, error=tolerance.error(observed), bound=tolerance.bound)

    engine.next_token(old.requests.prompts, vocab_size)  # fills a prefix cache, which an update has to reset
    raised = _raised(engine, way, new.folder)
    try:
        scored = engine.score(documents)
    except EngineFailed as error:
        if not engine.is_running:
            raise
        text = f"{f'raised: {raised}' if raised else 'no error'}; the engine answers nothing any more: {error}"
        return Check(name=name, state="unsupported" if raised else "differs", text=text[:LONGEST])
    found = update.explain(scored)
    if raised and found.state == "stale":
        return check("unsupported", f"raised, and left the old weights: {raised}", new.documents, scored)
    if raised or found.state != "new":
        why = f"raised: {raised}; the engine is left " if raised else ""
        return check("differs", f"{why}{found.state}: {found.text}", new.documents, scored)
    cached = [*engine.next_token(old.requests.prompts, vocab_size)]
    if new.prompts.error(cached) > new.prompts.bound:
        text = "new, but the prefix cache was kept: prompts that were served before get old keys and values"
        return check("differs", text, new.prompts, cached)
    version = judge_version(engine, name, new.asked, old.asked)
    if version.state == "differs":
        return replace(version, text=f"new where tokens are scored, but {version.text}")
    engine.update(way, old.folder)
    again = engine.score(documents)
    back = update.reversed.explain(again)
    if back.state != "new":
        text = f"new, but a second update, back to the first weights, is not right: {back.state}: {back.text}"
        return check("differs", text, old.documents, again)
    return check("conforms", f"{NEW}{update.hidden}", new.documents, scored)


def _raised(engine: ServedEngine, way: str, folder: Path) -> str:
    """Updates an engine; returns its words if it raises."""
    try:
        engine.update(way, folder)
    except (EngineFailed, NotSupported, UsageError) as error:
        return str(error).replace(f"{folder.parent}/", "")[:LONGEST]
    return ""


def _without_a_tensor(tensors: Weights, name: str) -> Weights:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def _of_another_shape(tensors: Weights, name: str) -> Weights:
    return tensors | {name: torch.cat([tensors[name], tensors[name][:1]])}


BROKEN: dict[str, Spoil] = {
    "without a tensor": _without_a_tensor,
    "with a tensor of another shape": _of_another_shape,
}


def _refused(engine: ServedEngine, name: str, way: str, update: Update, spoil: Spoil) -> Check:
    """Updates a started engine with broken weights: it has to raise, and to keep its old weights or to answer nothing.

    The tensor that is spoilt is in the middle of the file, so that weights before it are new already.
    """
    broken = update.new.folder.with_name(f"{update.new.folder.name}-broken")
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(update.new.folder, broken)
    adapter = broken / ADAPTER / WEIGHTS_FILE
    file = adapter if way in engine.info.adapter_ways else weight_files(broken)[0]
    tensors = load_file(file)
    spoilt = sorted(tensors)[len(tensors) // 2]
    file.unlink()  # it may be a link
    save_file(spoil(tensors, spoilt), file, metadata={"format": "pt"})
    raised = _raised(engine, way, broken)
    try:
        scored = engine.score(update.old.requests.documents)
    except EngineFailed as error:
        text = f"raised: {raised or 'nothing'}; and answers nothing until it is started again: {error}"[:LONGEST]
        return Check(name=name, state="conforms" if raised else "differs", text=text)
    found, tolerance = update.explain(scored), update.old.documents
    text = f"raised: {raised}" if raised else f"no error, and {spoilt} {name.rpartition(', ')[2]}"
    text += "; old weights" if found.state == "stale" else f"; the engine is left {found.state}: {found.text}"
    state: State = "conforms" if raised and found.state == "stale" else "differs"
    return Check(name=name, state=state, text=text, error=tolerance.error(scored), bound=tolerance.bound)
