"""Trains, saves and resumes in ranks, with dropout or until a rank is killed, for the tests of checkpoints."""

import contextlib
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from conformance.backends.protocol import BackendEntry, TensorKind
from conformance.runtime import RankContext
from conformance.spec.batch import Batch, read_batches
from conformance.spec.layout import Layout
from conformance.spec.scenario import LossScaleConfig, Scenario, parse_scenario
from conformance.worker.rank_state import generator_digests, generator_states, seed_generators
from impl.checkpoints import training_state
from impl.checkpoints.folder import TrainingFolder, read_native, write_native
from impl.checkpoints.manifest import verify
from impl.engine.adapter import ReferenceBackend
from impl.interface.distributed import FileFailure, on_all_ranks, on_first
from impl.interface.trainable import Trainable

SHARE = 0.1  # of what is dropped
PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a task is given of a cell, as JSON values; ``training`` of the tasks is one."""

    target: str
    scenario: dict[str, Any]
    layout: str
    models: dict[str, str]
    batches: str

    @property
    def config(self) -> Scenario:
        return parse_scenario(self.scenario)

    def set_up(self, context: RankContext) -> ReferenceBackend:
        adapter: type[ReferenceBackend] = BackendEntry(name="", target=self.target).load()  # type: ignore[assignment]
        backend = adapter()
        folders = {role: Path(folder) for role, folder in self.models.items()}
        backend.setup(self.config, Layout.parse(self.layout), folders, context.device)
        return backend

    def read_batches(self) -> list[Batch]:
        return read_batches(Path(self.batches))


def go_on(
    context: RankContext,
    *,
    training: dict[str, Any],
    folder: str,
    first: int,
    save_at: int | None,
    of_first_rank: bool = False,
) -> dict[str, Any]:
    """Train to the end with dropout, from the checkpoint in ``folder`` unless ``first`` is 0, which is written there at
    ``save_at``. Returns losses and sums of weights from there on. ``of_first_rank``: its generators, for all ranks."""
    of = Training(**training)
    seed_generators(of.config.seed, context.rank, first)
    backend = of.set_up(context)
    for module in (module for chunk in getattr(backend.models["policy"], "chunks", ()) for module in chunk.modules()):
        if hasattr(module, "hidden_dropout"):  # megatron-core's; dropout in attention is not built in
            module.hidden_dropout = SHARE
    if first:
        own = training_state.load_generators
        if of_first_rank:
            training_state.load_generators = lambda folder, rank: own(folder, 0)
        backend.load(Path(folder))
        training_state.load_generators = own
    told = []
    for batch in of.read_batches()[first:]:
        if batch.step == save_at:
            backend.save(Path(folder))
        metrics = backend.train_step(batch, lambda model: None)
        sums = [float(weight.double().sum()) for _, weight in backend.named_tensors("weight", "policy")]
        told.append([metrics.values["loss"], *sums])
    backend.teardown()
    return {"told": told[(save_at or first) - first :], "generators": generator_digests(generator_states({}))}


def save_forms(
    context: RankContext,
    *,
    training: dict[str, Any],
    folder: str,
    forms: list[str],
    steps: int,
) -> None:
    """Some steps, and a checkpoint of each form."""
    of = Training(**training)
    backend = of.set_up(context)
    for batch in of.read_batches()[:steps]:
        backend.train_step(batch, lambda model: None)
    for form in forms:
        (backend.save if form == "native" else backend.export_state)(Path(folder) / form)
    backend.teardown()


def train_until_killed(
    context: RankContext,
    *,
    training: dict[str, Any],
    root: str,
    victim: int,
    fraction: float,
    asynchronous: bool,
) -> None:
    """Two steps, each with a checkpoint; in the second save a rank is killed, at a fraction of the first one's time.

    The first is saved twice, because the very first save takes longer than any other.
    """
    folder = TrainingFolder(root=Path(root), asynchronous=asynchronous)
    of = Training(**training)
    backend = of.set_up(context)
    first, second, third = of.read_batches()
    backend.train_step(first, lambda model: None)
    for each in (TrainingFolder(root=Path(root) / "another"), folder):
        began = time.monotonic()
        with each.writing(backend.about("native")) as draft:
            write_native(draft, backend.context, backend.models)
        each.finish()
        seconds = time.monotonic() - began
    backend.train_step(second, lambda model: None)
    if context.rank == victim:
        threading.Timer(fraction * seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with folder.writing(backend.about("native")) as draft:
        write_native(draft, backend.context, backend.models)
    backend.train_step(third, lambda model: None)  # behind which an asynchronous save goes on
    folder.finish()
    time.sleep(60)  # the timer comes, later than the save has ended


def load_latest(
    context: RankContext,
    *,
    training: dict[str, Any],
    root: str,
) -> list[float]:
    """The step of the last checkpoint, and the losses of those after it."""
    of = Training(**training)
    backend = of.set_up(context)
    latest = TrainingFolder(root=Path(root)).latest()
    found = read_native(latest, backend.about("native"), backend.context, backend.models)
    losses = [backend.train_step(batch, lambda model: None).values["loss"] for batch in of.read_batches()[found.step :]]
    backend.teardown()
    return [found.step, *losses]


def save_while_the_disk_fills(
    context: RankContext,
    *,
    training: dict[str, Any],
    root: str,
    asynchronous: bool,
    stride: int,
    limit_s: float,
) -> dict[str, Any]:
    """Two steps, a save after the first, and after the second saves with more and more room until one is written.

    ``root``: alone on a small file system, of which ``stride`` pages are freed at a time, and all after ``limit_s``.
    Returns what the errors say, how many saves failed, the size of a save, and the loss of a third step. After each
    error the first save has to be whole.
    """
    of, above, end = Training(**training), Path(root).parent, time.monotonic() + limit_s
    backend, folder, ballast = (
        of.set_up(context),
        TrainingFolder(root=Path(root), asynchronous=asynchronous),
        above / "ballast",
    )
    first, second, third = of.read_batches()

    def save() -> None:
        with folder.writing(backend.about("native")) as draft:
            write_native(draft, backend.context, backend.models)
        folder.finish()

    def fill() -> None:
        for unfinished in set(Path(root).glob("step-*")) - {Path(root) / "step-000001"}:
            shutil.rmtree(unfinished)
        ballast.unlink(missing_ok=True)
        if time.monotonic() < end:
            ballast.write_bytes(bytes(max(0, _free(above) - failed * stride * PAGE)))

    def check() -> None:
        assert folder.latest().name == "step-000001"
        verify(folder.latest(), about)

    backend.train_step(first, lambda model: None)
    about = backend.about("native")
    save()
    backend.train_step(second, lambda model: None)
    told: list[str] = []
    failed = 0
    while True:
        on_all_ranks("closing the files of errors, which take room", gc.collect)
        on_first("filling the disk", fill)
        try:
            save()
        except Exception as error:
            told += [text] if (text := f"{type(error).__name__}: {error}") not in told else []
            on_first("checking the save before", check)
            failed += 1
        else:
            break
    loss = backend.train_step(third, lambda model: None).values["loss"]
    backend.teardown()
    return {"told": told, "failed": failed, "whole_kib": _size(folder.latest()) // 1024, "loss": loss}


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def train_behind_a_save(
    context: RankContext,
    *,
    training: dict[str, Any],
    root: str,
) -> dict[str, Any]:
    """A step, an asynchronous save whose writing waits until all other steps are done, and then is waited for.

    Returns the losses of these steps, and what is in the folder before and after that, with the bytes of its files.
    """
    of = Training(**training)
    backend = of.set_up(context)
    folder, trained = TrainingFolder(root=Path(root), asynchronous=True), threading.Event()
    first, *others = of.read_batches()
    backend.train_step(first, lambda model: None)
    with folder.writing(backend.about("native")) as draft:
        draft.when.add(trained.wait)
        write_native(draft, backend.context, backend.models)
    losses = [backend.train_step(batch, lambda model: None).values["loss"] for batch in others]
    before, written = _names(Path(root)), _size(Path(root))
    trained.set()
    folder.finish()
    backend.teardown()
    after = {"after": _names(Path(root)), "size": _size(Path(root))}
    return {"losses": losses, "before": before, "written": written, **after}


def save_one_after_another(
    context: RankContext,
    *,
    training: dict[str, Any],
    root: str,
) -> dict[str, Any]:
    """Three asynchronous saves, of which the first is slow and the second fails on one rank.

    Returns what the folder holds when the second begins, what the third hears of it and finds, and what it leaves.
    """
    backend = Training(**training).set_up(context)
    folder, told = TrainingFolder(root=Path(root), asynchronous=True), ""

    def fail() -> None:
        if context.rank == 1:
            raise OSError(28, "No space left on device")

    def save(step: int, work: Callable[[], None]) -> list[str]:
        backend.step = step
        with folder.writing(backend.about("native")) as draft:
            found = _names(Path(root))
            draft.when.add(work)
            write_native(draft, backend.context, backend.models)
        return found

    save(1, lambda: time.sleep(0.5))
    second = save(2, fail)
    try:
        save(3, lambda: None)
    except FileFailure as error:
        told = str(error)
    third = _names(Path(root))
    dist.barrier()  # until every rank has looked, because the next save makes room
    save(3, lambda: None)
    folder.finish()
    backend.teardown()
    return {"second": second, "told": told, "third": third, "after": _names(Path(root))}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def keep_two(
    context: RankContext,
    *,
    training: dict[str, Any],
    root: str,
) -> list[list[str]]:
    """What is in the folder of a training after each of four saves, the last of a step that is there but not latest."""
    of = Training(**training)
    backend = of.set_up(context)
    folder, there = TrainingFolder(root=Path(root), keep=2), []
    for step in (1, 2, 3, 4):
        backend.step = step
        if step == 4:
            on_first("leaving rests", lambda: _leave_rests(Path(root)))
        with folder.writing(backend.about("native")) as draft:
            write_native(draft, backend.context, backend.models)
        there.append(_names(Path(root)))
    backend.teardown()
    return there


def _leave_rests(root: Path) -> None:
    """What crashes leave: a half-written folder, and a whole one that ``latest`` does not name."""
    (root / "step-000003.partial").mkdir()
    (root / "step-000004").mkdir()


def one_rank_fails(
    context: RankContext,
    *,
    training: dict[str, Any],
    folder: str,
    failing: str,
    rank: int,
    exports: bool,
) -> str:
    """What this rank hears of a save or an export in which, on the one ``rank``, the disk is full for a function."""
    of = Training(**training)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    backend = of.set_up(context)
    module, _, name = failing.partition(":")
    told = ""
    with mock.patch(f"{module}.{name}", full) if context.rank == rank else contextlib.nullcontext():
        try:
            if exports:
                backend.export(Path(folder) / "model", "policy")
            else:
                backend.save(Path(folder))
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
    backend.teardown()
    return told


def scaled(context: RankContext, *, training: dict[str, Any]) -> dict[str, Any]:
    """Three updates in fp16 after the first: one that overflows, and two from where the loss scale is to grow.

    ``changed``: what the overflow has changed of weights, moments and steps; ``overflowed``: the progress after it;
    ``scales``: after the two.
    """
    of = Training(**training)
    backend = of.set_up(context)
    first, second, third = of.read_batches()
    model = backend.models["policy"]
    backend.train_step(first, lambda model: None)
    before, almost = held(model), {"schedule": 1.0, "good_steps": LossScaleConfig().growth_interval - 1.0}
    model.set_progress(almost | {"loss_scale": 2.0**40})
    backend.train_step(second, lambda model: None)
    after, overflowed = held(model), progress_of(model)
    model.set_progress(almost | {"loss_scale": 2.0**10})
    scales = []
    for batch in (second, third):
        backend.train_step(batch, lambda model: None)
        scales.append(progress_of(model)["loss_scale"])
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    backend.teardown()
    return {"changed": changed, "overflowed": overflowed, "scales": scales}


def held(model: Trainable) -> dict[str, torch.Tensor]:
    kinds: tuple[TensorKind, ...] = ("weight", "exp_avg", "exp_avg_sq", "step")
    found = {f"{kind}/{name}": t.clone() for kind in kinds for name, t in model.named_tensors(kind)}
    assert {name.partition("/")[0] for name in found} == set(kinds)
    return found


def progress_of(model: Trainable) -> dict[str, float]:
    return {name: float(number) for name, number in model.named_tensors("progress")}
