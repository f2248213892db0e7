"""Backend: WHO trains. The adapter protocol that every training framework implements, and how adapters are found.

An adapter runs in every rank of a world. torch.distributed is already initialised (gloo on the CPU, NCCL on GPUs), the
default dtype is float64 in the exact tier, and the calls come in this order on all ranks together::

    setup -> (train_step)* -> teardown            # train_step calls on_gradients(model) once per trained model

The protocol is coarse on purpose, so that frameworks which own their training step fit. One thing departs from
"train, then ask": gradients are asked for *during* the step, because afterwards they are clipped, freed or stale.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from conformance.batch import Batch
from conformance.layout import Layout
from conformance.observable import StateKind
from conformance.packages import missing_package
from conformance.scenario import Scenario
from conformance.validation import UsageError

ENTRY_POINT_GROUP = "parity.backends"


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """``packages`` are the distributions whose versions a record keeps. ``default_zero``: the ZeRO stage that a layout
    without one means (FSDP2 cuts what stage 3 cuts, replicas are stage 0); None leaves it unproven.
    """

    name: str
    packages: tuple[str, ...] = ("torch",)
    url: str = ""
    default_zero: int | None = None


@dataclass(frozen=True)
class Supported:
    """The backend claims that it can run the cell; it will be judged."""


@dataclass(frozen=True)
class Unsupported:
    """The backend does not claim the cell. ``reason`` is for the user: what is missing, and what to use instead."""

    reason: str


Support = Supported | Unsupported


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What a backend reports of one optimizer step. The names are the keys of observables (conformance.observable).

    values: numbers of the whole step, the same on all ranks. Of every trained model: ``lr``, the learning rate that
        this step used, and ``grad_norm``, the global 2-norm of its gradients before clipping as the framework reports
        it; leave it out if it reports none. Of SFT: ``token_count``, the target tokens that the backend has really
        trained on in the step, over all ranks and micro-batches, counted where it computes the loss; and ``loss``, the
        sum of -log p over them divided by their number.
    rows: by key, for each row by its index in the whole step, a float tensor (row.target_count,) of a number per target
        token in order: ``logprob`` is log p of the target. Each rank gives the rows that it has. Leave a key out if the
        framework does not show it; the cell is then observed in part only.
    """

    values: dict[str, float] = field(default_factory=dict)
    rows: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """A rank's own piece of a parameter or gradient.

    Ranks that give the same ``name`` and ``region`` claim to hold the same numbers; the suite checks it. ``region`` is
    any text that identifies the piece, such as ``"0:32,0:64"`` or ``"full"``.
    """

    name: str
    region: str
    tensor: torch.Tensor


TensorKind = Literal["weight", "gradient"] | StateKind
NamedTensors = Iterator[tuple[str, torch.Tensor]]


class Backend(Protocol):
    """One instance trains the models of one leg of a cell, in each rank.

    ``model`` is the name of a role of the scenario's objective: ``policy`` where there is only one. Tensors have the
    parameter names of the Hugging Face model; a tied pair appears once, under its first name. They are full (gathered),
    on any device, float32 (float64 in the exact tier), yielded one at a time so that memory is bounded by the largest;
    every rank has to walk the iterators (they may communicate), rank 0's tensors are kept.

    Optional class attributes: ``objectives`` (a container of the kinds of objective that it trains; ``sft`` alone where
    it is missing), ``seams`` (see conformance.faults), ``expected`` (a tuple of
    conformance.expectation.ExpectedDifference), ``preload``
    (names of modules that are slow to import, loaded once before ranks are forked), ``fresh_ranks`` (True for a
    framework that leaves something in its process: each cell then runs in ranks that have seen no other), and
    ``shows_training_state`` (True if ``named_tensors`` gives the kinds of training state; else a handover is judged by
    the steps that follow it).
    """

    @classmethod
    def describe(cls) -> BackendInfo: ...

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        """Whether the backend claims this cell; called without ranks, must not need a GPU."""
        ...

    def setup(self, scenario: Scenario, layout: Layout, weights: Mapping[str, Path], device: str) -> dict[str, Any]:
        """Build every model and its optimizer from its Hugging Face folder ``weights[model]``, never from a seed.

        ``device`` is ``cpu``, or ``cuda:N`` with this rank's GPU.

        Returns the resolved configuration as plain JSON values: what the framework really uses, for the report.
        """
        ...

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        """Run one optimizer step of every trained model.

        Call ``on_gradients(model)`` exactly once for each, on all ranks, when the model's gradients of this step are
        complete and reduced but not clipped and not consumed. The suite then walks ``named_tensors("gradient", model)``
        and ``local_shards("gradient", model)``.
        """
        ...

    def named_tensors(self, kind: TensorKind, model: str) -> NamedTensors:
        """Current (master) weights, or the unclipped gradients of the step's loss.

        Where the adapter ``shows_training_state``, its kinds (conformance.observable.STATE_KINDS) are asked for around
        a handover. ``exp_avg``, ``exp_avg_sq`` and ``momentum_buffer`` are the optimizer's, as torch calls them, by
        parameter; ``step`` is the number of updates that it counts for each parameter, without dimensions; ``progress``
        has other numbers of the training by names of the adapter's own, such as ``schedule`` or ``loss_scale``. What an
        optimizer does not have gives no tensor.
        """
        ...

    def local_shards(self, kind: TensorKind, model: str) -> Iterator[Shard]:
        """This rank's pieces, for the check that replicas are equal.

        An empty iterator leaves that unobserved: a cell of several ranks that agrees is then observed in part only.
        """
        ...

    def save(self, path: Path) -> None:
        """Write the training state of all models (weights, optimizer, schedule, loss scale), and every rank's random
        generators, into the empty folder ``path``. The weights of what is frozen need not be in it."""
        ...

    def load(self, path: Path) -> None:
        """Restore what ``save`` wrote, into a backend that was set up afresh, in another process. The layout may be
        another one; random generators are then nobody's. A backend that cannot load every layout's in every other has
        a class method ``supports_checkpoint(scenario, before, after)``, which answers as ``supports`` does."""
        ...

    def export_state(self, path: Path) -> None:
        """Write the training state of all trained models into the empty folder ``path``, a folder each by the model's
        name, in the form that every backend reads: see docs/checkpoints.md. An adapter without it, or without
        ``import_state``, is in no program that hands over a ``state``."""
        ...

    def import_state(self, path: Path) -> None:
        """Restore what ``export_state`` of any backend wrote in any layout."""
        ...

    def export(self, path: Path, model: str) -> None:
        """Write a model into the new folder ``path`` as Hugging Face would: config.json, safetensors, in the dtype of
        the master weights. ``setup`` of any backend reads it."""
        ...

    def teardown(self) -> None:
        """Release everything: process groups made in setup, hooks, patched globals."""
        ...


@dataclass(frozen=True, kw_only=True)
class BackendEntry:
    """A registered adapter that is not imported yet. ``target`` is ``module:Class``."""

    name: str
    target: str

    def load(self) -> type[Backend]:
        """Import the adapter.

        Raises UsageError for a wrong target, MissingExtra where a package that was declared for it is not installed,
        and BrokenBackend for whatever else goes wrong.
        """
        module_name, _, attribute = self.target.partition(":")
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            self._check_target(module_name, error)
            if missing := missing_package(_registration(self), error.name or ""):
                raise MissingExtra(str(missing)) from error
            raise BrokenBackend(self, error) from error
        except (Exception, SystemExit) as error:  # whatever a plug-in does is no reason to stop the others
            raise BrokenBackend(self, error) from error
        if not hasattr(module, attribute):
            raise UsageError(f"backend {self.name!r}: module {module_name!r} has no {attribute!r}")
        adapter: type[Backend] = getattr(module, attribute)
        return adapter

    def _check_target(self, module_name: str, error: ModuleNotFoundError) -> None:
        """Raises UsageError where the module that is missing is the adapter's own, or a package around it."""
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            return
        missing = error.name.partition(".")[0]
        standing = getattr(sys.modules.get(missing), "__file__", None)
        other = f" (the package {missing!r} that was found is {standing})" if standing else ""
        raise UsageError(
            f"backend {self.name!r} is given as {self.target!r}, but there is no module {error.name!r}{other}; "
            f"check the spelling, set PYTHONPATH to its folder, reinstall the package that registers it, or "
            f"run where no other package of this name comes first"
        ) from None


class MissingExtra(Exception):
    """A package that a backend declares is not installed; the message says what to do. The backend is unsupported."""


class BrokenBackend(Exception):
    """An adapter that cannot be imported although nothing that it declares is missing: a failure, not an answer."""

    def __init__(self, entry: BackendEntry, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        super().__init__(
            f"backend {entry.name!r} cannot be imported: {type(error).__name__}{where}: {' '.join(str(error).split())}"
        )


def _registration(entry: BackendEntry) -> EntryPoint | None:
    """The entry point that announces this very adapter, if any does."""
    known = entry_points(group=ENTRY_POINT_GROUP)
    return next((one for one in known if (one.name, one.value) == (entry.name, entry.target)), None)


def registered_backends() -> dict[str, BackendEntry]:
    """Adapters announced under the entry-point group ``parity.backends``, by name; nothing is imported."""
    found = {e.name: BackendEntry(name=e.name, target=e.value) for e in entry_points(group=ENTRY_POINT_GROUP)}
    return dict(sorted(found.items()))


def find_backend(name: str) -> BackendEntry:
    """Look up an adapter by registered name, or by ``module:Class`` for one that is not installed.

    Raises UsageError that lists the registered names.
    """
    if ":" in name:
        return BackendEntry(name=name.rpartition(":")[2].lower(), target=name)
    registered = registered_backends()
    if name not in registered:
        raise UsageError(
            f"unknown backend {name!r}; registered: {', '.join(registered) or 'none'}. "
            f"A backend of your own: register it under the entry point {ENTRY_POINT_GROUP!r}, or give module:Class"
        )
    return registered[name]
