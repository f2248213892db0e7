"""Runs one phase of a cell in every rank of a worker group, and writes its record.

The task only observes and judges nothing. It reads gradients while they exist, compares the values that several ranks
hold, and in the exact tier prevents the libraries' silent downcasts.
"""

import contextlib
import platform
import random
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

import conformance
from conformance.backends import faults
from conformance.backends.protocol import Backend, BackendEntry, Shard, StepMetrics, TensorKind
from conformance.core.packages import package_version
from conformance.core.timeline import own
from conformance.matrix.cell import Handover, PhaseSpec
from conformance.models.folders import EMBEDDING, elements_of, weight_shapes
from conformance.numerics.float64_tier import LeakWatch, exact_tier, settings_of
from conformance.numerics.sketch import kept, key_of, sketched_above, without_all_modes
from conformance.oracle.role_model import is_routed
from conformance.records.step_tensors import RecordWriter
from conformance.runtime import RankContext, mark
from conformance.spec.batch import Batch, read_batches
from conformance.spec.layout import Layout
from conformance.spec.objectives import all_observables
from conformance.spec.observables import LOGPROBS, MOMENTS, POLICY, STATE_KINDS, Observable, Role, StateKind, model_key
from conformance.spec.scenario import ADAPTER, Scenario, scenario_to_json
from conformance.worker.activation_capture import capturing
from conformance.worker.evidence import Embedding, Watch
from conformance.worker.rank_state import (
    PeakMemory,
    Replicas,
    Source,
    changed_settings,
    compare,
    generator_digests,
    generator_states,
    goes_on,
    of_all_ranks,
    pieces,
    rows_on_first_rank,
    seed_generators,
)
from conformance.worker.transformer_engine import float8_state


def run_phase(rank: RankContext, *, spec: dict[str, Any]) -> dict[str, int]:
    """Runs one phase and writes its record. Called in every rank with the values of ``PhaseSpec.to_json``.

    Returns how often each planted fault was called in this rank.
    """
    phase = PhaseSpec.from_json(spec)
    scenario, layout, models, save = phase.scenario, phase.layout, phase.models, phase.save
    with contextlib.ExitStack() as stack:
        adapter: Any = BackendEntry(name="", target=phase.target).load()
        if hasattr(adapter, "begin"):
            adapter.begin(layout)
        begins = header(phase, adapter)
        begins["environment"] |= stack.enter_context(settings_of(scenario.precision, rank.device))
        above, routed = sketched_above(scenario.sketch, elements_of(models)), is_routed(next(iter(models.values())))
        observer = _Observer(
            rank,
            scenario,
            layout,
            begins,
            phase.record,
            phase.first_step,
            above=above,
            routed=routed,
            embedding=_embedding(next(iter(models.values())), layout),
        )
        # A phase begins and ends with different states of the generators, so that a checkpoint that does not restore
        # them is detected.
        seed_generators(scenario.seed, rank.rank, phase.first_step)
        calls = stack.enter_context(faults.plant(phase.planted, adapter))
        if scenario.tier.is_exact:
            stack.enter_context(exact_tier())
        started, memory = time.perf_counter(), PeakMemory(rank.device)
        stack.callback(register_module_forward_pre_hook(_mark_module).remove)
        rank.beat("setup")
        backend = adapter()
        resolved = backend.setup(scenario, layout, models, rank.device)
        if phase.load:
            rank.beat("load")
            what, folder = phase.load
            (backend.load if what == "checkpoint" else backend.import_state)(folder)
        with own.within("observe"):
            observer.start(backend, resolved, handed=bool(phase.load) or bool(save and not phase.steps))
        batches = read_batches(phase.batches)[phase.first_step : phase.first_step + phase.steps]
        candidates = evidence_steps(batches, rollouts="te" in layout.options and layout.float8 is not None)
        other = None if phase.draw is None else phase.draw + 2
        # What is traced is compared with the oracle and gives no verdict, so all of it is read.
        hidden = 0 if phase.trace else len(batches) - 1
        watched, unread = Drawn(len(candidates) - 1, seed=other), Drawn(hidden, seed=phase.draw)
        for batch in batches:
            rank.beat(f"step {batch.step}")
            with contextlib.ExitStack() as captured:
                if phase.trace and phase.trace[0] == batch.step:
                    _capture(captured, backend, scenario, batch, rank=rank.rank, folder=phase.trace[1])
                handed = bool(save) and batch is batches[-1]
                is_first = batch.step == candidates[0]
                is_watched = is_first or (batch.step in candidates and watched.is_now())
                observer.step(backend, batch, unread=unread, watched=is_watched, handed=handed)
        changed: list[str] = []
        if save:
            rank.beat("save")
            changed = _save(rank, backend, scenario, models, *save)
        rank.beat("teardown")
        backend.teardown()
        given = [batch_counts(batch, dp_size=layout.data, accumulation=scenario.accumulation) for batch in batches]
        seconds = time.perf_counter() - started
        own.switch("write")
        observer.finish({"seconds": seconds, "batches": given, "changed_settings": changed}, memory=memory)
        return dict(calls)


def evidence_steps(batches: Sequence[Batch], *, rollouts: bool) -> list[int]:
    """Returns the steps at which evidence may be taken; it is taken at the first one, and at one of the others.

    Steps that begin a rollout are left out if possible, because their extra forward passes hide the training pass.
    ``rollouts``: they are not, because evidence tells what these passes cast.
    """
    without = [batch.step for batch in batches if rollouts or not batch.rollout]
    return without or [batch.step for batch in batches]


class Drawn:
    """Draws one of several steps, each with the same probability.

    It is asked at each of the ``candidates``, in order, and the first rank decides at that moment. Before, there is
    nothing that a backend could read.
    """

    def __init__(self, candidates: int, *, seed: int | None = None) -> None:
        self._left = candidates
        self._random = random.SystemRandom() if seed is None else random.Random(seed)

    def is_now(self) -> bool:
        """Decides whether this is the step. Collective."""
        if self._left < 1:
            return False
        decided = [self._random.randrange(self._left) == 0]
        dist.broadcast_object_list(decided, src=0)
        self._left = 0 if decided[0] else self._left - 1
        return decided[0]


def _capture(
    captured: contextlib.ExitStack, backend: Backend, scenario: Scenario, batch: Batch, *, rank: int, folder: Path
) -> None:
    """Captures the activations of every trained model until ``captured`` ends."""
    for role in (role for role in scenario.objective.roles if role.trained):
        captured.enter_context(capturing(backend, role.name, batch, rank=rank, folder=folder / role.name))


def _save(
    rank: RankContext, backend: Backend, scenario: Scenario, models: Mapping[str, Path], what: Handover, path: Path
) -> list[str]:
    """Saves the state that the next phase begins with. Returns, on rank 0, the settings of exported folders that differ
    from the models' settings, each as ``ROLE/FILE: KEY``."""
    changed: list[str] = []
    if rank.rank == 0:
        path.mkdir()
    dist.barrier()
    if what == "checkpoint":
        backend.save(path)
    elif what == "state":
        backend.export_state(path)
    else:
        for role in scenario.objective.roles:
            merges = what == "merge" and role == POLICY
            (backend.export_merged if merges else backend.export)(path / role.name, role.name)
            dist.barrier()
            if rank.rank == 0 and not merges:
                changed += [f"{role.name}/{key}" for key in changed_settings(path / role.name, models[role.name])]
        if what == "merge" and rank.rank == 0:  # the next phase adds the same adapter to the new base
            shutil.copytree(models[POLICY.name] / ADAPTER, path / POLICY.name / ADAPTER)
            changed += [f"{POLICY.name}/{key}" for key in changed_settings(path / POLICY.name, models[POLICY.name])]
    return changed


def _mark_module(*_: Any) -> None:
    if not torch.compiler.is_compiling():  # torch.compile would trace it as a part of the model
        mark()


def header(phase: PhaseSpec, adapter: type[Backend]) -> dict[str, Any]:
    """Returns the header of the phase's record: cell, backend, scenario, layout, environment, and loaded state."""
    info = adapter.describe()
    return {
        "cell": phase.cell,
        "backend": {"name": info.name, "url": info.url, "default_zero": info.default_zero},
        "scenario": scenario_to_json(phase.scenario),
        "layout": str(phase.layout),
        "optimizer": "loaded" if phase.load else "new",
        "shows_generators": hasattr(adapter, "library_generators"),
        "loads": phase.loads,
        "environment": {
            "backend-parity": conformance.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            **{package: package_version(package) for package in info.packages},
        },
    }


def _embedding(model: Path, layout: Layout) -> Embedding | None:
    """Returns the embedding of a model folder, where ranks have other tokens; None if its name is not known."""
    if layout.data * layout.sp * layout.ulysses == 1:
        return None
    shapes = (shape for name, shape in weight_shapes(model).items() if name.endswith(EMBEDDING) and len(shape) == 2)
    return next((Embedding(rows=rows, columns=columns, tp=layout.tp) for rows, columns in shapes), None)


class _Observer:
    """Reads the backend's numbers on all ranks, compares the ranks, and writes the record on rank 0."""

    def __init__(
        self,
        rank: RankContext,
        scenario: Scenario,
        layout: Layout,
        header: dict[str, Any],
        path: Path,
        first_step: int,
        *,
        above: float,
        routed: bool,
        embedding: Embedding | None,
    ) -> None:
        self.above = above  # matrices with more elements are sketched
        self.rank, self.header, self.path, self.first_step = rank, header, path, first_step
        self.exact, self.seed = scenario.tier.is_exact, scenario.seed
        self.data, self.accumulation = layout.data, scenario.accumulation
        self.embedding = embedding
        self.roles = scenario.objective.roles
        self.observables = all_observables(
            scenario.objective, scaled=scenario.judged_loss_scale is not None, routed=routed
        )
        self.writer: RecordWriter | None = None
        self.leaks: list[dict[str, Any]] = []
        self.pieces: dict[str, dict[str, list[int]]] = {}
        self.watch = Watch()  # of the latest step at which evidence was taken
        self.evidence: list[dict[str, Any]] = []  # of each of these steps
        self.generators: dict[str, bytes] = {}  # the states that were seen last
        self.reseeded: list[tuple[int, str]] = []  # step and name of generators that left their stream
        self.float8_saved: dict[str, list[list[float]]] = {}  # scales and histories at the end, by direction
        self._parts = layout.tp if "seqpar" in layout.options else 1
        self._leaves_out = "fp8ends" in layout.options
        self.continues_unread = False  # the weights after the step before were not read

    def start(self, backend: Backend, resolved: dict[str, Any], *, handed: bool) -> None:
        """Begins the record with the weights as loaded. ``handed``: the phase has loaded a training state, or has no
        steps and saves one, so the training state is recorded as well."""
        loaded: dict[str, torch.Tensor] = {}
        for role in self.roles:
            loaded |= self._gather("weight", role, backend)
        self.generators = generator_states(_library_generators(backend))
        generators = self._digests() if handed else []
        if handed:
            loaded |= self._training_state(backend)
        if self.rank.rank == 0:
            header = {**self.header, "resolved": resolved}
            self.writer = RecordWriter(self.path, header, observables=self.observables, first_step=self.first_step)
            self.writer.loaded(loaded, generators=generators)

    def step(self, backend: Backend, batch: Batch, *, unread: Drawn, watched: bool, handed: bool) -> None:
        """Trains on a batch and records the step.

        unread: draws the step after which the weights are not read, nor the gradients of the next step. Moments are
        read after that one, so that the judge can rebuild both. The backend's values and rows are always recorded.
        watched: whether the evidence is taken at this step. handed: whether the training state is saved after it.
        """
        resumes, self.continues_unread = self.continues_unread, False
        first = batch.step == self.first_step
        tensors: dict[str, torch.Tensor] = {}
        replicas: dict[str, Replicas] = {}
        called: list[str] = []
        observing = 0.0
        leaks = LeakWatch() if first and self.exact else None
        watching: contextlib.AbstractContextManager[object] = leaks or contextlib.nullcontext()
        if watched:
            self.watch = Watch(embedding=self.embedding, sequence_parts=self._parts, leaves_out=self._leaves_out)
            self.watch.leaks, watching = leaks, self.watch.step()
        trained = {role.name: role for role in self.roles if role.trained}

        def on_gradients(model: str) -> None:
            nonlocal observing
            called.append(model)
            began = time.perf_counter()
            if model in trained and not resumes:
                with self.watch.reading(), own.within("observe"):
                    tensors.update(self._gather("gradient", trained[model], backend))
                    replicas.update(compare(_shards("gradient", [trained[model]], backend)))
            if watched:  # after the comparison, when no thread of a collective holds a buffer of the backward pass
                self.watch.count_live_storages()
            if len(called) == len(trained):
                self.watch.begin_update()
            observing += time.perf_counter() - began

        started = time.perf_counter()
        with watching:
            metrics = backend.train_step(batch, on_gradients)
        seconds = time.perf_counter() - started - observing
        if sorted(called) != sorted(trained):
            raise ValueError(
                f"{type(backend).__name__}.train_step called on_gradients() for {called or 'no model'}; call it "
                f"exactly once per step for each of {list(trained)}, after the last backward and before clipping"
            )
        if watched:
            rows = sorted(row for row, t in metrics.rows.get(LOGPROBS.key, {}).items() if t.numel())
            self.evidence.append(self.watch.to_json() | {"step": batch.step, "rows": rows})
            if first and self.header["optimizer"] == "loaded" and self.watch.library.delayed:
                self.evidence[-1]["float8_began"] = self.watch.library.delayed.began
            if self.embedding and self.rank.rank == 0:
                firsts = first_documents(batch, dp_size=self.data, accumulation=self.accumulation)
                self.evidence[-1]["documents"] = firsts
        if leaks:
            self.leaks += [{"op": leak.op, "where": leak.where, "count": leak.count} for leak in leaks.leaks]
        before_observing = own.switch("observe")
        shards: dict[str, Source] = {}
        self.continues_unread = unread.is_now()  # after the last step, no candidate is left
        read = not self.continues_unread
        before = self.watch.checksums() if watched and read else {}
        if read:
            for role in trained.values():
                tensors |= self._gather("weight", role, backend)
            shards = _shards("weight", trained.values(), backend)
            self.pieces = self.pieces or pieces(shards)
        if watched:
            after = self.watch.checksums() if read else {}
            # A storage of another size was freed or gathered again, as ZeRO-3 does.
            changed = [
                key for key, (size, sum_) in before.items() if after.get(key, (0, 0)) not in ((0, 0), (size, sum_))
            ]
            self.evidence[-1]["changed_by_reading"] = sum(after[key][0] == before[key][0] for key in changed)
        generators: list[dict[str, str]] = []
        states = generator_states(library := _library_generators(backend))
        left = (name for name, before in self.generators.items() if not goes_on(before, states.get(name, b"")))
        self.reseeded += [(batch.step, name) for name in left]
        self.generators = states
        if resumes and not handed:
            tensors |= self._training_state(backend, MOMENTS)
        if handed:
            self.float8_saved = float8_state()
            tensors |= self._training_state(backend)
            # Without this, generators that a framework seeds at every start would look as if they had been restored.
            seed_generators(self.seed, self.rank.rank, batch.step + 1, ending=True, library=library)
            self.generators = generator_states(_library_generators(backend))
            generators = self._digests()
        values = check_values(metrics, self.observables, type(backend).__name__)
        replicas |= compare(shards | _replicated_values(metrics, self.observables))
        tensors |= self._rows(metrics)
        lost = {o.key for o in self.observables if o.lost_if and values.get(o.lost_if)}
        values = {key: value for key, value in values.items() if key not in lost}
        tensors = {name: tensor for name, tensor in tensors.items() if key_of(name) not in lost}
        if self.writer:
            own.switch("write")
            found = {key: vars(result) for key, result in replicas.items()}
            kinds = [*(["gradient"] if resumes else []), *([] if read else ["weight"])]
            with without_all_modes():  # the modes of the exact tier cost more than the copies of the file
                self.writer.step(values, tensors, replicas=found, seconds=seconds, generators=generators, unread=kinds)
        own.switch(before_observing)

    def finish(self, totals: dict[str, Any], *, memory: PeakMemory) -> None:
        """Writes the footer: ``totals`` and the observations of all ranks. ``memory``: this rank's peaks."""
        # All ranks take part in this collective, so a footer also proves that all of them reached the end.
        evidence = self.evidence or [Watch().to_json()]
        observed = of_all_ranks((evidence, memory.read(), memory.read_host(), self.reseeded, self.float8_saved))
        if self.writer:
            of_ranks, peaks, host_peaks, reseeded, saved = (list(each) for each in zip(*observed, strict=True))
            first, *later = map(list, zip(*of_ranks, strict=True))
            found = {"leaks": self.leaks, "evidence": first, "later_evidence": later, "pieces": self.pieces}
            found |= {"memory": peaks, "host_memory": host_peaks, "reseeded": reseeded}
            self.writer.finish({**totals, **found, **({"float8_saved": saved} if any(saved) else {})})

    def _gather(self, kind: TensorKind, role: Role, backend: Backend) -> dict[str, torch.Tensor]:
        """Walks ``named_tensors`` on all ranks; returns their recorded parts on rank 0, an empty dict on other ranks.

        Raises ValueError for a name that comes twice: only one of the two tensors would be judged.
        """
        names: set[str] = set()

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in backend.named_tensors(kind, role.name):
                if name in names:
                    raise ValueError(
                        f"{type(backend).__name__}.named_tensors({kind!r}, {role.name!r}) names {name} twice; yield "
                        f"each tensor once"
                    )
                names.add(name)
                yield f"{model_key(role.prefix, kind)}/{name}", tensor
                mark()

        if self.rank.rank == 0:
            return kept(named(), above=self.above)
        for _ in named():
            pass
        return {}

    def _training_state(self, backend: Backend, kinds: Sequence[StateKind] = STATE_KINDS) -> dict[str, torch.Tensor]:
        """Returns the training state of all trained models on rank 0; empty if the backend does not show it."""
        if not getattr(backend, "shows_training_state", False):
            return {}
        trained = [role for role in self.roles if role.trained]
        parts = [self._gather(kind, role, backend) for role in trained for kind in kinds]
        return {name: tensor for part in parts for name, tensor in part.items()}

    def _digests(self) -> list[dict[str, str]]:
        """Returns, for each rank, the digests of its random generators by the generator's name. Collective."""
        return of_all_ranks(generator_digests(self.generators))

    def _rows(self, metrics: StepMetrics) -> dict[str, torch.Tensor]:
        """Gathers the rows of all ranks on rank 0; each row is taken from the first rank that has it. Collective."""
        # A row without targets has no numbers; backends may return or omit it.
        rows = ((key, row, t) for key, rows in metrics.rows.items() for row, t in rows.items() if t.numel())
        return rows_on_first_rank({f"{key}/{row}": t for key, row, t in rows})


def _library_generators(backend: Backend) -> Mapping[str, torch.Tensor]:
    """Returns the live states of the generators that the backend's library keeps, if the backend shows them."""
    return backend.library_generators() if hasattr(backend, "library_generators") else {}


def check_values(metrics: StepMetrics, observables: tuple[Observable, ...], backend: str) -> dict[str, float]:
    """Returns the values of a step. Raises ValueError for undeclared keys, and for missing or non-numeric values."""
    numbers = {o.key: o for o in observables if o.kind in ("scalar", "setting")}
    rows = {o.key for o in observables if o.kind == "rows"}
    if unknown := sorted((metrics.values.keys() - numbers.keys()) | (metrics.rows.keys() - rows)):
        raise ValueError(
            f"{backend}.train_step gave {', '.join(unknown)}, but no observable has this key; values are "
            f"{', '.join(numbers)}, rows are {', '.join(sorted(rows)) or 'none'}"
        )
    for key, observable in numbers.items():
        value = metrics.values.get(key)
        if key not in metrics.values:
            if observable.required:
                raise ValueError(f"{backend}.train_step gave no {key}; every step needs it in StepMetrics.values")
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{backend}.train_step gave {key}={value!r}; StepMetrics.values wants a plain number")
    if metrics.values.get("token_count", 1) < 1:
        raise ValueError(f"{backend}.train_step gave token_count={metrics.values['token_count']}; count target tokens")
    return metrics.values


def batch_counts(batch: Batch, *, dp_size: int, accumulation: int) -> dict[str, Any]:
    """Returns the batch statistics of a step: all ``tokens``, and for each micro-batch of each data-parallel rank the
    ``targets``, and ``rows`` as index, length and number of targets."""
    parts = [batch.micro_batches(dp_rank=rank, dp_size=dp_size, accumulation=accumulation) for rank in range(dp_size)]
    targets = [[sum(row.target_count for row in rows) for rows in micro_batches] for micro_batches in parts]
    given = [
        [[[row.index, row.length, row.target_count] for row in rows] for rows in micro_batches]
        for micro_batches in parts
    ]
    tokens = sum(row.length for row in batch.rows)
    return {"step": batch.step, "tokens": tokens, "targets": targets, "rows": given}


def first_documents(batch: Batch, *, dp_size: int, accumulation: int) -> list[list[list[Sequence[int]]]]:
    """Returns the tokens of each document of each row of the first micro-batch of each data-parallel rank."""
    firsts = (batch.micro_batches(dp_rank=n, dp_size=dp_size, accumulation=accumulation)[0] for n in range(dp_size))
    return [[[document.tokens for document in row.documents] for row in rows] for rows in firsts]


def _shards(kind: TensorKind, roles: Iterable[Role], backend: Backend) -> dict[str, Source]:
    """Returns this rank's pieces of the tensors of the given roles, by the observable's key."""
    return {model_key(role.prefix, kind): partial(backend.local_shards, kind, role.name) for role in roles}


def _replicated_values(metrics: StepMetrics, observables: tuple[Observable, ...]) -> dict[str, Source]:
    """Returns this rank's scalars and rows that other ranks should hold as well, as shards, by the observable's key."""
    pieces: dict[str, Source] = {}
    for o in observables:
        if o.replicated == "no" or o.kind == "tensors":
            continue
        if o.kind == "rows":
            shards = [Shard(f"row {row}", "full", tensor) for row, tensor in metrics.rows.get(o.key, {}).items()]
        else:
            # A rank without the number gives NaN, so that it differs from ranks that have the number.
            number = metrics.values.get(o.key, float("nan"))
            shards = [Shard(o.key, "full", torch.tensor(number, dtype=torch.float64))]
        pieces[o.key] = partial(iter, shards)
    return pieces
