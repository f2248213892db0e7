"""Declares the interface that a training backend implements so that one trainer can drive it.

The interface has two parts, because several models can share a process. A *context* holds what the models share:
meshes, process groups, context parallelism, and the globals of a library; each cell sets up one. A *trainable* is one
model in a context, with its optimizer, schedule, tensors and checkpoints: an actor, a critic, or a frozen reference.

Backends are standalone classes without a shared base class; ``get_context`` imports one by its name. The contract that
keeps their numbers equal is in ``forward_backward`` and ``optimizer_step``: the objective divides by the totals of the
whole step, and each trainable undoes the averaging of its library.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, dtype

from conformance.backends.protocol import NamedTensors, Shard, TensorKind, Traced
from conformance.core.errors import UsageError
from conformance.spec.batch import Batch, Row
from conformance.spec.layout import Layout
from conformance.spec.observables import Head
from conformance.spec.precision import PRECISIONS, Precision, PrecisionName
from conformance.spec.scenario import LossScaleConfig, OptimizerConfig, ScheduleConfig
from impl.interface.distributed import Group
from impl.interface.micro_batches import Loss, MicroBatch, Outputs, RouterTerms, Wanted
from impl.interface.sharded_safetensors import SliceReader

CONTEXTS = {
    "deepspeed": "impl.deepspeed.model:DeepspeedContext",
    "fsdp2": "impl.fsdp2.model:Fsdp2Context",
    "megatron": "impl.megatron.adapter:megatron_context",
}


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Configures a context.

    device: ``cpu`` or this rank's ``cuda:N``.
    accumulation: micro-batches per optimizer step and data rank.
    packed: rows may hold several documents (``--packing_samples``).
    loss_scale: for fp16.
    trust_remote_code: Python code of model folders may be run (``--trust_remote_code``).
    router_z_loss: the factor of the routers' z-loss; 0 adds none.
    router_bias_rate: by which biases of routers move after each step.
    whole_experts: the experts of the models have biases, and not every library can shard these.
    """

    layout: Layout
    precision: PrecisionName
    device: str
    accumulation: int
    packed: bool
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    trust_remote_code: bool = False
    router_z_loss: float = 0.0
    router_bias_rate: float = 0.0
    whole_experts: bool = False

    @property
    def tier(self) -> Precision:
        """Returns the facts about this precision."""
        return PRECISIONS[self.precision]


class Writing(Protocol):
    """Declares the writer to which a save passes its work, in the same order on all ranks.

    copies: whether the written tensors must be copies, because the training continues.
    group: the process group of all ranks for collective calls of the work. Read it inside the work; it does not exist
        before.
    """

    copies: bool
    group: Group

    def add(self, work: Callable[[], object]) -> None:
        """Does ``work`` or queues it. After ``wait``, its files are on the disk, or an error has been raised."""
        ...

    def start(self) -> None:
        """Starts the queued work; no more is added. Collective."""
        ...

    def wait(self) -> None:
        """Returns when all work is done; an error of one rank is raised on all ranks. Collective."""
        ...


class AtOnce:
    """Does work as soon as it is added."""

    copies = False
    group: Group = None

    def add(self, work: Callable[[], object]) -> None:
        work()

    def start(self) -> None:
        pass

    def wait(self) -> None:
        pass


AT_ONCE = AtOnce()
WrittenKind = Literal["weight", "exp_avg", "exp_avg_sq", "momentum_buffer", "step"]
Dtype = Literal["masters", "source"]  # see impl.models.export


class Trainable(Protocol):
    """Declares one model. All methods are collective: every rank calls them, in the same order."""

    def load_model(self, path: Path) -> Any:
        """Loads a Hugging Face folder and returns the object that ``prepare`` accepts.

        This object is the model in the dtype of the master weights (for Megatron, this rank's chunks of it). Its
        numbers are still in the files.
        """
        ...

    def prepare(self, model: Any, optimizer: OptimizerConfig | None, schedule: ScheduleConfig) -> None:
        """Shards the model and builds its optimizer and schedule; without ``optimizer`` the model is frozen."""
        ...

    def create_optimizer(self, model: Any, config: OptimizerConfig) -> Any: ...

    def forward_backward(
        self,
        inputs: Sequence[MicroBatch],
        *,
        want: Wanted,
        temperature: float = 1.0,
        loss: Loss | None,
        terms: RouterTerms | None = None,
    ) -> list[Outputs]:
        """Runs all micro-batches of an optimizer step, in the library's order; without a loss, forward passes only.

        ``loss(index, outputs)`` gets the outputs of ``inputs[index]`` that ``want`` names, as whole rows (rows, length)
        even if this rank holds only a part of each row. The gradient is that of the sum of losses over data ranks and
        micro-batches, plus the routers' ``terms``.
        Returns the outputs of each micro-batch, detached, on every rank.
        """
        ...

    @property
    def router_loss_factor(self) -> float:
        """Returns the factor of the routers' load-balancing loss; 0 if the model has none."""
        ...

    def traced(self, numbers: Sequence[MicroBatch]) -> Traced:
        """Returns the modules that this rank runs in an optimizer step, for `parity bisect`.

        ``numbers`` are the step's micro-batches with token numbers instead of tokens (micro_batches.numbered).
        """
        ...

    def finish_gradients(self) -> None:
        """Completes reductions and undoes loss scaling, so that gradients may be observed."""
        ...

    def optimizer_step(self) -> float | None:
        """Clips, updates and advances the schedule; returns the gradient norm before clipping, None if unknown.

        If gradients in fp16 overflow, there is no update, the schedule does not advance, and the loss scale falls
        (conformance.spec.scenario). The norm is then not finite, or None.
        """
        ...

    @property
    def skipped(self) -> bool:
        """Returns whether the last ``optimizer_step`` made no update because gradients overflowed."""
        ...

    def learning_rate(self) -> float: ...

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        """Yields full weights, gradients or training state by Hugging Face name.

        The contract is in conformance.backends.protocol.Backend. ``progress`` yields ``schedule``, the number of
        updates that the learning-rate schedule has counted, and with a loss scale also ``loss_scale`` and
        ``good_steps``, the number of updates since the scale last overflowed or grew. ``step`` and ``progress`` are
        float64 tensors without dimensions.
        """
        ...

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None:
        """Sets the weights or one kind of optimizer state from whole tensors under Hugging Face names.

        ``weight`` sets both the master weights and the weights that the model computes with. A rank reads only the
        slices that it holds. The method also works before the optimizer's first step.
        """
        ...

    def set_progress(self, progress: Mapping[str, float]) -> None:
        """Sets the numbers that ``named_tensors("progress")`` yields; names that this backend lacks are ignored."""
        ...

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        """Yields this rank's own pieces of weights or gradients; see conformance.backends.protocol.Backend."""
        ...

    def resolved(self) -> dict[str, Any]:
        """Returns the configuration that is in use (classes, dtypes, mesh, optimizer settings), as JSON values."""
        ...

    def save_ckpt(self, path: Path, when: Writing = AT_ONCE) -> None:
        """Saves the current weights, optimizer and schedule to ``path``, by work that is added to ``when``."""
        ...

    def load_ckpt(self, path: Path) -> None: ...

    def save_model(self, path: Path, *, dtype: Dtype = "source") -> None:
        """Writes the master weights as a Hugging Face folder; all other files are copied from the loaded folder.

        ``dtype``: ``source`` gives each tensor the dtype that it has in the loaded folder, ``masters`` that of the
            masters. See impl.models.export.
        """
        ...

    def teardown(self) -> None: ...


@runtime_checkable
class Adaptable(Trainable, Protocol):
    """Declares a trainable whose model can have an adapter (LoRA)."""

    def add_adapter(self, model: Any, folder: Path) -> None:
        """Adds the adapter in ``folder`` (peft's format) to a model that ``load_model`` has returned.

        Only the adapter is trained then, and ``save_model`` writes it into the folder ADAPTER (spec.scenario).
        """
        ...

    def save_merged(self, path: Path, *, dtype: Dtype = "source") -> None:
        """Saves as ``save_model`` does, with the adapter merged into the weights; the first rank holds them all."""
        ...


class Context(Protocol):
    """Declares what the models of a cell share in a process. All methods are collective.

    Several contexts may be open at a time; the teardown of the last one restores the library's globals.
    """

    config: ContextConfig
    data_rank: int
    data_size: int

    def __init__(self, config: ContextConfig) -> None: ...

    @property
    def sequence_multiple(self) -> int:
        """Returns the number of tokens; rows are padded to a multiple of it."""
        ...

    def setup_distributed(self) -> None:
        """Builds the meshes on the initialised default process group, and context parallelism if the layout has it."""
        ...

    def setup_ring_attn(self) -> None:
        """Prepares sequence sharding and the ring's communication. Raises ValueError without ring_flash_attn."""
        ...

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        """Returns this rank's micro-batches of an optimizer step."""
        ...

    def all_reduce(self, value: float) -> float:
        """Returns the sum of a number over the data-parallel ranks."""
        ...

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor:
        """Returns the sum of a tensor over the data-parallel ranks."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the picklable values of all ranks in the worker group, in rank order."""
        ...

    def new_trainable(self, head: Head) -> Trainable:
        """Makes a trainable without a model, for a language model or for a value model (one number per token)."""
        ...

    def library_generators(self) -> dict[str, Tensor]:
        """Returns the states of this rank's random generators that the library keeps beside torch's, by name."""
        ...

    def set_library_generators(self, states: Mapping[str, Tensor]) -> None: ...

    def teardown(self) -> None:
        """Releases everything that the context holds. Its trainables must be torn down before."""
        ...


def code_that_ran(*, optimizer: object, update: object, gradients: dtype) -> dict[str, str]:
    """Names the code that a library chose by precision, for the record.

    ``optimizer``: what wraps ``update``, torch's optimizer; None without one. ``gradients``: the dtype of their sums.
    """
    return {
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
        "update": type(update).__name__,
        "gradients": str(gradients).removeprefix("torch."),
    }


def get_context(backend: str, config: ContextConfig) -> Context:
    """Makes a new context of the backend called ``backend``. Raises UsageError for an unknown name."""
    if backend not in CONTEXTS:
        raise UsageError(f"unknown backend {backend!r}; use one of {', '.join(CONTEXTS)}")
    module, _, name = CONTEXTS[backend].partition(":")
    context: Context = getattr(import_module(module), name)(config)
    return context
