"""Defines the adapter protocol that every training framework implements, and finds adapters.

An adapter runs in every rank of a worker group. torch.distributed is already initialised (gloo on the CPU, NCCL on
GPUs), the default dtype is float64 in the exact tier, and all ranks together make the calls in this order::

    setup -> (train_step)* -> teardown            # train_step calls on_gradients(model) once per trained model

The protocol is coarse so that it fits frameworks that own their training step. The suite reads everything after the
step except gradients: it reads them *during* the step, because afterwards they are clipped, freed or stale.
"""

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from conformance.core.errors import UsageError, did_you_mean
from conformance.core.packages import UnsupportedVersion, entry_points_of, missing_package
from conformance.spec.batch import Batch
from conformance.spec.layout import Layout
from conformance.spec.observables import StateKind
from conformance.spec.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Describes which part of a micro-batch's activations one rank has. Their shape is (rows, length, features).

    length_first: the shape is (length, rows, features). part, parts: this rank has part number ``part`` of ``parts``
    equal parts of the length. first_feature: the index of its first feature in the whole; features beyond the whole are
    padding. The input tokens of an embedding have the shape (rows, length).
    """

    length_first: bool = False
    part: int = 0
    parts: int = 1
    first_feature: int = 0


@dataclass(frozen=True, kw_only=True)
class TracedModule:
    """Describes a module that this rank runs once per micro-batch.

    name: the name of the Hugging Face module, such as ``model.layers.0.mlp``. input, output: the parts that this rank
    has. The input is the first tensor among the arguments, the output the first tensor of the result.
    leaves_bias: the result is (output, bias), and the caller adds the bias, which the Hugging Face module adds itself.
    """

    name: str
    module: torch.nn.Module
    input: Cut = field(default_factory=Cut)
    output: Cut = field(default_factory=Cut)
    leaves_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Holds the modules of this rank, so that the suite can hook them and compare their activations with the oracle's.

    tokens: for each micro-batch that this rank runs, int64 (rows, length): the index of the token in the optimizer
        step, whose rows are concatenated, and -1 for padding. The length is the whole one, before ``Cut.parts``.
    gradient_scale: the factor by which gradients of activations exceed those of the step's loss, because the framework
        averages gradients of parameters later.
    """

    modules: tuple[TracedModule, ...]
    tokens: tuple[torch.Tensor, ...]
    gradient_scale: float = 1.0


ENTRY_POINT_GROUP = "parity.backends"
DISTRIBUTION = "backend-parity"


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """Describes an adapter.

    packages: distributions whose versions are written into every record.
    default_zero: the ZeRO stage that the backend uses if a layout names none (FSDP2 shards like stage 3; plain replicas
        are stage 0). None: unknown, so the judge cannot check the sharding.
    """

    name: str
    packages: tuple[str, ...] = ("torch",)
    url: str = ""
    default_zero: int | None = None


@dataclass(frozen=True)
class Supported:
    """Says that the backend can run the cell. The suite then runs and judges it."""


@dataclass(frozen=True)
class Unsupported:
    """Says that the backend does not support the cell. reason: what is missing, and what to use instead."""

    reason: str


Support = Supported | Unsupported


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Reports one optimizer step. The names are keys of observables (conformance.spec.observables).

    values: numbers of the whole step, the same on all ranks. For every trained model: ``lr``, the learning rate of this
        step, and ``grad_norm``, the global 2-norm of the model's gradients before clipping, as the framework reports
        it; omit ``grad_norm`` if the framework reports none. For SFT: ``token_count``, the number of target tokens in
        this step, over all ranks and micro-batches, counted where the loss is computed; and ``loss``, the sum of -log p
        over these tokens divided by their number. In fp16, if the scenario has a ``loss_scale``, also for every trained
        model: ``skipped``, 1 if this step made no update because gradients overflowed, else 0; and, for the next step,
        ``loss_scale`` and ``good_steps``, the number of updates since the scale last fell or grew. For GRPO and PPO,
        ``token_count``, ``loss`` and, with a critic, ``critic.loss``; the metrics that verl prints, such as
        ``ppo_kl``, are optional.
    rows: ``rows[key][index]`` is a float tensor of shape (row.target_count,) with one number per target token, in
        order; empty, or omitted, for a row without targets. ``index`` is the row's index in the whole step. Under the
        key ``logprob``, the number is log p of the target. Each rank gives the rows that it holds. GRPO and PPO require
        ``logprob``, ``old_logprob`` and ``advantage``, PPO also ``critic.value``, ``critic.old_value`` and ``return``.

    Omit every other key if the framework does not expose the number. The cell is then partly observed, and its verdict
    names the key. Report what the framework computed: a number that the adapter works out itself only compares the
    adapter's formula with the oracle's.
    """

    values: dict[str, float] = field(default_factory=dict)
    rows: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """Holds one rank's piece of a parameter or of a gradient.

    Ranks that give the same ``name`` and ``region`` have to hold the same numbers; the suite compares them.
    region: any text that identifies the piece, such as ``"0:32,0:64"`` or ``"full"``.
    """

    name: str
    region: str
    tensor: torch.Tensor


TensorKind = Literal["weight", "gradient"] | StateKind
NamedTensors = Iterator[tuple[str, torch.Tensor]]


class Backend(Protocol):
    """Trains the models of one phase of a cell; each rank has one instance.

    ``model`` is the name of a role of the scenario's objective; with only one role it is ``policy``. Tensors have the
    parameter names of the Hugging Face model; a tied pair appears once, under its first name. Tensors are full
    (gathered), on any device, in float32 (float64 in the exact tier), and yielded one at a time, so that memory is
    bounded by the largest tensor. Every rank has to walk the iterators, because they may communicate; the suite keeps
    the tensors of rank 0.

    Optional class attributes:

    objectives: the kinds of objective that the backend trains. Default: ``sft`` only.
    optimizers: the names of optimizers that it trains with. Default: ``sgd`` and ``adamw``.
    lacking_optimizers: by name of an optimizer that it does not train with, why; the reason that such cells show.
    seams: patch points, functions that faults may wrap; see conformance.backends.faults.
    expected: a tuple of conformance.spec.known_defects.ExpectedDifference.
    preload: names of modules that are slow to import; they are imported once, before ranks are forked.
    preload_apart: by the name of a layout option, the modules to import instead, for options that need other libraries
        in the process. Cells with such an option have their own ranks.
    fresh_ranks: True for a framework that leaves state behind in its process. Each cell then runs in new ranks.
    gpu_backend: the backend of the process group of ranks on GPUs, as in torch.distributed.init_process_group. Default:
        ``nccl``.
    shows_training_state: True if ``named_tensors`` yields the kinds of training state. Otherwise a resume is judged
        only by the steps that follow it.

    Optional class method ``begin(layout)``: called first in every rank, before faults are planted, because planting
    imports the modules with the patch points. It is for choices of the layout that have to precede these imports.

    Optional class method ``host_bytes(scenario, layout) -> int``: returns the peak bytes of the host's memory that a
    rank on a GPU needs for its models, such as offloaded tensors. It is called without ranks, like ``supports``, so it
    has to compute them from shapes. Default: 0. The suite adds the memory of a rank without a model.

    Optional method ``library_generators() -> Mapping[str, Tensor]``: returns the live states of the random generators
    that the library keeps beside torch's, by name, each as torch.get_rng_state() returns it. The suite overwrites them
    in place at the end of a phase that saves a checkpoint, and compares them after loading.

    Optional method ``traced(model, batch) -> conformance.backends.protocol.Traced``: returns the modules of a trained
    model that this rank runs in the step of ``batch``, and how their activations are cut. Without it, a cell cannot be
    bisected.
    """

    @classmethod
    def describe(cls) -> BackendInfo: ...

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        """Whether the backend supports this cell. It is called in a process without ranks, and must not need a GPU."""
        ...

    def setup(self, scenario: Scenario, layout: Layout, weights: Mapping[str, Path], device: str) -> dict[str, Any]:
        """Builds every model and its optimizer from its Hugging Face folder ``weights[model]``, never from a seed.

        device: ``cpu``, or ``cuda:N`` with this rank's GPU.

        Returns the resolved configuration (as the framework really uses it) as plain JSON values, for the report.
        """
        ...

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        """Runs one optimizer step of every trained model.

        It has to call ``on_gradients(model)`` on all ranks, exactly once for each trained model, when the model's
        gradients of this step are complete and reduced, but not yet clipped or consumed. The suite then walks
        ``named_tensors("gradient", model)`` and ``local_shards("gradient", model)``.
        """
        ...

    def named_tensors(self, kind: TensorKind, model: str) -> NamedTensors:
        """Yields (name, tensor): the current (master) weights, or the unclipped gradients of the step's loss. A
        repeated name is an error.

        If the adapter sets ``shows_training_state``, the suite also requests the kinds of training state
        (conformance.spec.observables.STATE_KINDS) before and after a resume. ``exp_avg``, ``exp_avg_sq`` and
        ``momentum_buffer`` are the optimizer's moments by parameter, under torch's names. ``step`` is the number of
        updates that the optimizer has counted for each parameter, as a 0-dimensional tensor. ``progress`` holds other
        numbers of the training under names that the adapter chooses, such as ``schedule`` or ``loss_scale``. A kind
        that the optimizer does not have yields nothing.
        """
        ...

    def local_shards(self, kind: TensorKind, model: str) -> Iterator[Shard]:
        """Yields this rank's pieces of the tensors, for the check that replicas are equal. The suite walks them several
        times; a repeated pair of name and region in one walk is an error.

        Without pieces the check is skipped, and a cell of several ranks can only be partly observed.
        """
        ...

    def save(self, path: Path) -> None:
        """Writes the training state of all models (weights, optimizer, schedule, loss scale) and the random generators
        of every rank into the empty folder ``path``. The weights of frozen models may be omitted."""
        ...

    def load(self, path: Path) -> None:
        """Restores what ``save`` wrote, into a backend that was just set up in another process.

        The layout may differ from the one that saved; random generators are then not restored. A backend that cannot
        load the checkpoint of every layout in every other layout has a class method
        ``supports_checkpoint(scenario, before, after)``, which answers as ``supports`` does."""
        ...

    def export_state(self, path: Path) -> None:
        """Writes the training state of each trained model into the folder ``path/MODEL``, in the format that every
        backend reads (docs/explanations/checkpoints.md). ``path`` exists and is empty. An adapter without
        ``export_state`` or ``import_state`` does not run programs with ``save = "state"``."""
        ...

    def import_state(self, path: Path) -> None:
        """Restores the training state that ``export_state`` of any backend wrote in any layout."""
        ...

    def export(self, path: Path, model: str) -> None:
        """Writes a model into the new folder ``path`` as Hugging Face would: config.json and safetensors files, in the
        dtype of the master weights. ``setup`` of every backend can read this folder."""
        ...

    def export_merged(self, path: Path, model: str) -> None:
        """Writes a model with a LoRA adapter into the new folder ``path``, with the adapter merged into the weights.

        A backend without this method does not run scenarios with ``lora``. In those, ``weights["policy"]`` has a folder
        ``adapter``, and ``export`` also writes this folder.
        """
        ...

    def teardown(self) -> None:
        """Releases everything that ``setup`` created or changed: process groups, hooks, patched globals."""
        ...


@dataclass(frozen=True, kw_only=True)
class BackendEntry:
    """Names an adapter by its import path, without importing it.

    target: ``module:Class``. python: the executable of the adapter's and its ranks' environment; empty: this one.
    """

    name: str
    target: str
    python: str = ""

    def load(self) -> type[Backend]:
        """Imports the adapter.

        Raises UsageError if the target does not exist or is not a backend, MissingExtra if a package that the backend
        declares is not installed or has an unsupported version, and BrokenBackend for every other error of the import.
        """
        module_name, _, attribute = self.target.partition(":")
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            self._check_target(module_name, error)
            if missing := missing_package(_registration(self), error.name or ""):
                raise MissingExtra(str(missing)) from error
            raise BrokenBackend.of(self, error) from error
        except UnsupportedVersion as error:
            raise MissingExtra(str(error)) from error
        except (Exception, SystemExit) as error:  # one broken plug-in must not stop the others
            raise BrokenBackend.of(self, error) from error
        if not hasattr(module, attribute):
            raise UsageError(f"backend {self.name!r}: module {module_name!r} has no {attribute!r}")
        adapter: type[Backend] = getattr(module, attribute)
        if lacking := [name for name in ("describe", "supports") if not callable(getattr(adapter, name, None))]:
            raise UsageError(
                f"backend {self.name!r}: {self.target} is not a backend, it has no {' and no '.join(lacking)}; "
                f"docs/guides/adding-a-backend.md explains what a backend needs"
            )
        return adapter

    def _check_target(self, module_name: str, error: ModuleNotFoundError) -> None:
        """Raises UsageError if the missing module is the adapter's own module or one of its parent packages."""
        if not error.name or not f"{module_name}.".startswith(f"{error.name}."):
            return
        missing = error.name.partition(".")[0]
        found = getattr(sys.modules.get(missing), "__file__", None)
        other = f" (the package {missing!r} that was found is {found})" if found else ""
        raise UsageError(
            f"backend {self.name!r} is given as {self.target!r}, but there is no module {error.name!r}{other}; "
            f"check the spelling, set PYTHONPATH to its folder, reinstall the package that registers it, or "
            f"run where no other package of this name comes first"
        ) from None


class MissingExtra(Exception):
    """Reports that a declared package of the backend is not installed. Its cells are ``unsupported``; the message says
    what to install."""


class BrokenBackend(Exception):
    """Reports that the adapter cannot be imported although all declared packages are installed. Its cells are
    ``infrastructure``."""

    @classmethod
    def of(cls, entry: BackendEntry, error: BaseException) -> "BrokenBackend":
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        message = " ".join(str(error).split())
        missing = error.name if isinstance(error, ModuleNotFoundError) and "run: " not in message else ""
        advice = f"; run: {sys.executable} -m pip install {missing}, or set PYTHONPATH to its folder"
        return cls(
            f"backend {entry.name!r} cannot be imported: {type(error).__name__}{where}: {message}"
            + advice * bool(missing and "." not in missing)
        )


def _registration(entry: BackendEntry) -> EntryPoint | None:
    """Returns the entry point with the same name and target as ``entry``; None if there is none."""
    known = entry_points_of(ENTRY_POINT_GROUP)
    return next((one for one in known if (one.name, one.value) == (entry.name, entry.target)), None)


def is_registered(entry: BackendEntry) -> bool:
    """Whether the environment's packages register this target by this name."""
    return _registration(entry) is not None


def is_own(entry: BackendEntry) -> bool:
    """Whether a backend is one of the suite's own, whose expected differences the suite documents."""
    same = (e for e in entry_points_of(ENTRY_POINT_GROUP) if (e.name, e.value) == (entry.name, entry.target))
    return any(e.dist.name == DISTRIBUTION for e in same if e.dist)  # the name is read from a file, each time


def registered_backends() -> dict[str, BackendEntry]:
    """Returns all adapters of the entry-point group ``parity.backends``, by name. Nothing is imported."""
    found = {e.name: BackendEntry(name=e.name, target=e.value) for e in entry_points_of(ENTRY_POINT_GROUP)}
    return dict(sorted(found.items()))


def find_backend(name: str) -> BackendEntry:
    """Finds an adapter by its registered name, or by ``module:Class`` if it is not registered.

    An unregistered adapter is imported, because its ``describe`` gives its name. Raises UsageError, which lists the
    registered names, for any other name.
    """
    if ":" in name:
        return BackendEntry(name=_declared_name(name), target=name)
    registered = registered_backends()
    if name not in registered:
        raise UsageError(
            f"unknown backend {name!r}; {did_you_mean(name, registered)}registered: {', '.join(registered) or 'none'}. "
            f"To use your own backend, register it in the entry-point group {ENTRY_POINT_GROUP!r}, or give module:Class"
        )
    return registered[name]


def _declared_name(target: str) -> str:
    """Returns the name that the adapter ``module:Class`` gives itself, or the name of its class if it cannot be
    imported."""
    entry = BackendEntry(name=target.rpartition(":")[2].lower(), target=target)
    try:
        name = entry.load().describe().name
    except (MissingExtra, BrokenBackend):
        return entry.name
    if not re.fullmatch(r"[\w.-]+", name):
        raise UsageError(
            f"{target} calls itself {name!r}; a name has letters, digits, dots and dashes, because it is in cell ids"
        )
    return name
