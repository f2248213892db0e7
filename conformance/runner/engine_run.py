"""Runs a rollout engine and judges it: what it computes, and what may not change a number.

What it samples: conformance.runner.engine_rollouts. How it takes new weights: conformance.runner.weight_updates.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from conformance.backends.engines import GREEDY, EngineFailed, NotSupported, Sampled, ServedEngine
from conformance.core.errors import UsageError
from conformance.data.inputs import batches_of
from conformance.data.tokenizer import load_tokenizer
from conformance.judge.engines import (
    ROUTED,
    Check,
    Tolerance,
    divergence,
    judge_experts,
    judge_greedy,
    judge_invariance,
)
from conformance.judge.sampling import Policy, Score, judge_reported, judge_sampled_again, shift_of
from conformance.judge.weight_sync import Candidate, explain
from conformance.models.folders import SINGLE, weight_shapes
from conformance.oracle.feed_forward import published
from conformance.oracle.primitives import Weights
from conformance.oracle.scoring import Reference, Scores
from conformance.records.record_format import RecordError
from conformance.runner.engine_rollouts import (
    NEW_TOKENS,
    SAMPLED,
    Asked,
    judge_draws,
    judge_ends,
    judge_sampling,
)
from conformance.spec.batch import Batch
from conformance.spec.precision import FLOAT64, noise_runs
from conformance.spec.scenario import ADAPTER, FILE_PREFIX, WEIGHTS_FILE, Scenario, is_adapter

DOCUMENTS, SHORTEST = 6, 4  # and the least tokens of each
PROMPTS = 4
LONGEST = 250  # characters of an engine's own words
NOT_COPIED = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Holds what an engine is asked: documents of the first step, and their beginnings as prompts.

    specials: tokens that a text may lose.
    """

    documents: tuple[tuple[int, ...], ...]
    specials: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch: Batch, specials: Sequence[int] = ()) -> "Requests":
        documents = [document.tokens for row in batch.rows for document in row.documents]
        found = tuple(one for one in documents if len(one) >= SHORTEST)[:DOCUMENTS]
        if not found:
            raise UsageError(
                f"no document of the first step has {SHORTEST} tokens; give other --data, or a larger --max-len"
            )
        return cls(documents=found, specials=tuple(specials))

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [one[: max(2, len(one) // 2)] for one in self.documents[:PROMPTS]]


class Expected:
    """Computes what the reference and the noise runs give at some weights. device: where."""

    def __init__(self, scenario: Scenario, folder: Path, requests: Requests, device: str = "cpu") -> None:
        self.requests, self.precision, self._scenario, self.folder = requests, scenario.precision, scenario, folder
        self._device = device
        self.reference = Reference(scenario, folder, device)
        self.weights = self.reference.weights(folder)

    def at(self, folder: Path) -> "Expected":
        """Returns what is expected at the weights of another folder of the same model."""
        return Expected(self._scenario, folder, self.requests, self._device)

    @cached_property
    def merged(self) -> "Expected":
        """Returns what is expected of a folder whose adapter is merged into the weights."""
        folder = self.folder.with_name(f"{self.folder.name}-merged")
        if not folder.exists():
            write_weights(self.reference.merged(self.weights), source=self.folder, folder=folder)
        return Expected(replace(self._scenario, lora=None), folder, self.requests, self._device)

    @cached_property
    def _noise_weights(self) -> dict[str, Weights]:
        return {run: self.reference.weights(self.folder, run) for run in noise_runs(self.precision)}

    @property
    def score(self) -> Score:
        return partial(self.reference.scores, self.weights)

    @property
    def noise(self) -> list[Score]:
        return [partial(self.reference.scores, weights, run=run) for run, weights in self._noise_weights.items()]

    @property
    def asked(self) -> Asked:
        return Asked(
            prompts=self.requests.prompts,
            policy=Policy(precision=self.precision, score=self.score, noise=self.noise),
            allowed=self.prompts.absolute,
            vocab_size=self.reference.vocab_size,
            specials=self.requests.specials,
        )

    def tolerance(self, requests: Sequence[Sequence[int]], read: Callable[[Scores], Tensor]) -> Tolerance:
        ends = [*map(len, requests)]
        runs = [[read(one) for one in run(requests, ends)] for run in (self.score, *self.noise)]
        return Tolerance(precision=self.precision, reference=runs[0], noise=runs[1:])

    @cached_property
    def documents(self) -> Tolerance:
        return self.tolerance(self.requests.documents, lambda one: one.chosen)

    @cached_property
    def prompts(self) -> Tolerance:
        return self.tolerance(self.requests.prompts, lambda one: one.last)

    @cached_property
    def experts(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Returns the experts of each document's tokens, by the reference and by each noise run."""
        runs = {FLOAT64: self.weights, **self._noise_weights}
        first, *rest = (self.reference.experts(w, self.requests.documents, run) for run, w in runs.items())
        return first, rest

    def chosen(self, candidate: Candidate) -> list[Tensor]:
        found = self.reference.scores(
            candidate.weights, self.requests.documents, tap=candidate.tap, change=candidate.change
        )
        return [one.chosen for one in found]


def write_weights(weights: Weights, *, source: Path, folder: Path) -> None:
    """Writes a new Hugging Face folder with other weights than ``source``, in its names and in float32.

    An adapter among the weights gets a folder of its own, as in ``source``.
    """
    adapter = {FILE_PREFIX + name: tensor for name, tensor in weights.items() if is_adapter(name)}
    not_copied = shutil.ignore_patterns(*NOT_COPIED, *([] if adapter else [ADAPTER]))
    shutil.copytree(source, folder, ignore=not_copied)
    for file, tensors in {
        folder / SINGLE: published(weights, weight_shapes(source)),
        folder / ADAPTER / WEIGHTS_FILE: adapter,
    }.items():
        if tensors:
            save_file(
                {n: t.to("cpu", torch.float32, copy=True).contiguous() for n, t in tensors.items()},
                file,
                metadata={"format": "pt"},
            )


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """Configures the judgement of an engine. serve: returns the engine, not started, in a new process.

    device: where engine and reference compute. ways: of updating that alone are judged; empty: all, and the rest.
    """

    serve: Callable[[], ServedEngine]
    scenario: Scenario
    folder: Path
    device: str = "cpu"
    ways: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        return {} if self.device == "cpu" else {"device": self.device}


Further = Callable[[ServedEngine, EngineRun, Sequence[Tensor], Expected], Iterator[Check]]


def judge_engine(run: EngineRun, *further: Further) -> Iterator[Check]:
    """Yields the checks of an engine as they are made.

    further: more checks of the running engine. They get the log-probs that it has given for the documents, too.
    """
    try:
        tokenizer = load_tokenizer(run.folder, trusted=run.scenario.trust_remote_code)
        requests = Requests.of(batches_of(run.scenario, run.folder)[0], tokenizer.all_special_ids)
        expected = Expected(run.scenario, run.folder, requests, run.device)
        with run.serve() as engine:
            engine.start(run.folder, run.scenario.precision, run.settings)
            versions = ", ".join(f"{name} {version}" for name, version in engine.info.versions.items())
            yield Check(name="start", state="conforms", text=versions)
            yield from islice(judge_numbers(engine, expected), 1 if run.ways else None)
            scored = engine.score(expected.requests.documents)
            if not run.ways:
                yield from _settings(engine, run, scored, expected)
            for judge in further:
                yield from judge(engine, run, scored, expected)
    except NotSupported as error:
        yield Check(name="start", state="unsupported", text=str(error))
    except (EngineFailed, RecordError) as error:
        yield Check(name="engine", state="infrastructure", text=str(error))


def _settings(engine: ServedEngine, run: EngineRun, scored: Sequence[Tensor], expected: Expected) -> Iterator[Check]:
    """Judges what an engine samples and reports, and its variants."""
    yield from judge_draws(engine, expected.asked)
    sampled = engine.generate(expected.requests.prompts, SAMPLED)
    for kind, settings in engine.info.reports.items():
        if settings:
            engine.start(run.folder, run.scenario.precision, run.settings | settings)
        yield from judge_sampling(engine, expected.asked, kind)
    for name, settings in engine.info.variants.items():
        yield from _variant(engine, run, name, settings, scored, sampled, expected)
    if engine.info.experts is not None and expected.reference.routers[0]:
        yield attempted(ROUTED, partial(_experts, engine, run, engine.info.experts, expected))


def _experts(engine: ServedEngine, run: EngineRun, settings: dict[str, Any], expected: Expected) -> Check:
    engine.start(run.folder, run.scenario.precision, run.settings | settings)
    found = engine.experts(expected.requests.documents, expected.reference.routers)
    return judge_experts(found, *expected.experts)


def attempted(name: str, judge: Callable[[], Check]) -> Check:
    """Returns the check that ``judge`` makes of an engine, or what the engine says if it cannot, or fails."""
    try:
        return judge()
    except NotSupported as error:
        return Check(name=name, state="unsupported", text=str(error)[:LONGEST])
    except (EngineFailed, UsageError) as error:
        return Check(name=name, state="infrastructure", text=str(error)[:LONGEST])


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
    greedy = engine.generate(requests.prompts, replace(GREEDY, max_new_tokens=NEW_TOKENS))
    whole = [(*prompt, *one.tokens) for prompt, one in zip(requests.prompts, greedy, strict=True)]
    yield judge_greedy(greedy, expected.score(whole, [*map(len, whole)]), allowed=expected.prompts.absolute)
    yield judge_ends(engine, expected.asked, greedy)
    alone = [engine.score([one])[0] for one in requests.documents]
    yield judge_invariance("alone and in a batch", scored, alone, allowed=tolerance.absolute)
    again = engine.next_token(requests.prompts, vocab_size)
    allowed = expected.prompts.absolute
    yield judge_invariance("the same prompts again (a warm prefix cache)", [*again], [*last], allowed=allowed)


def _why_wrong(observed: Sequence[Tensor], expected: Expected) -> str:
    """Explains wrong log-probs by those of another token, or by mistakes of loading."""
    if shift := shift_of(observed, expected.documents):
        return f"those of the token {shift}"
    architecture = expected.reference.architecture
    if found := explain(observed, expected.chosen, expected.documents, expected.weights, None, architecture).text:
        return found
    rounded = expected.reference.scores(expected.weights, expected.requests.documents, softmax=torch.bfloat16)
    x, ref, near = (
        torch.cat([*of]) for of in (observed, expected.documents.reference, [one.chosen for one in rounded])
    )
    return "the softmax is computed in bf16" if (x - near).norm() < 0.2 * (x - ref).norm() else ""


def _variant(
    engine: ServedEngine,
    run: EngineRun,
    name: str,
    settings: dict[str, Any],
    scored: Sequence[Tensor],
    sampled: Sequence[Sampled],
    expected: Expected,
) -> Iterator[Check]:
    """Judges settings that may not change a number: given tokens, and sampled ones."""
    try:
        engine.start(run.folder, run.scenario.precision, run.settings | settings)
        found = engine.score(expected.requests.documents)
        yield judge_invariance(name, found, scored, allowed=expected.documents.absolute)
        again = engine.generate(expected.requests.prompts, SAMPLED)
        yield judge_sampled_again(f"{name}, sampled", again, sampled, allowed=expected.prompts.absolute)
        kind, rollout = next(iter(engine.info.reports)), expected.asked.of(again, SAMPLED)
        yield judge_reported(f"{name}, log-probs of sampled tokens", rollout, kind, expected.requests.specials)
    except NotSupported as error:
        yield Check(name=name, state="unsupported", text=str(error))
    except EngineFailed as error:
        yield Check(name=name, state="infrastructure", text=str(error))
