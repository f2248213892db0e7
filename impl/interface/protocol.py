"""Declares the strategy interface: what a training backend has to offer so that one trainer can drive it.

The interface has two parts, so that several models can share a process. A *context* holds what the models share:
meshes, process groups, rings, and whatever a library keeps in globals; each cell sets up one. A *trainable* is one
model in a context, with its optimizer, schedule, tensors and checkpoints: an actor, a critic, or a frozen reference.

Backends are standalone classes without a shared base class; ``get_context`` imports the one that is named. The contract
that keeps their numbers equal is in ``forward_backward`` and ``optimizer_step``: the objective divides by the totals of
the whole step, and each trainable undoes whatever averaging its library does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from conformance.backends.protocol import NamedTensors, Shard, TensorKind, Traced
from conformance.core.errors import UsageError
from conformance.spec.batch import Batch, Row
from conformance.spec.layout import Layout
from conformance.spec.precision import PRECISIONS, Precision, PrecisionName
from conformance.spec.roles import Head
from conformance.spec.scenario import LossScaleConfig, OptimizerConfig, ScheduleConfig
from impl.interface.collate import MicroBatch
from impl.interface.distributed import Group
from impl.interface.outputs import Loss, Outputs, RouterTerms, Wanted
from impl.interface.sharded_safetensors import SliceReader

CONTEXTS = {
    "deepspeed": "impl.deepspeed.context:DeepspeedContext",
    "fsdp2": "impl.fsdp2.context:Fsdp2Context",
    "megatron": "impl.megatron.startup:megatron_context",
}


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """The configuration of a context. ``device`` is ``cpu`` or this rank's ``cuda:N``.

    accumulation: micro-batches per optimizer step and data rank. packed: rows may hold several documents
    (``--packing-samples``). loss_scale: of fp16. trust_remote_code: Python code of model folders may be run
    (``--trust-remote-code``). router_z_loss: what the z-loss of routers is multiplied by; 0 adds none.
    whole_experts: those of the models have biases, which not every library can cut.
    """

    layout: Layout
    precision: PrecisionName
    device: str
    accumulation: int
    packed: bool
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    trust_remote_code: bool = False
    router_z_loss: float = 0.0
    whole_experts: bool = False

    @property
    def tier(self) -> Precision:
        """The facts about this precision."""
        return PRECISIONS[self.precision]


class Writing(Protocol):
    """Runs the work of a save, in the same order on all ranks.

    copies: whether the written tensors have to be copies, because the training goes on. group: all ranks, for the
    collective calls of the work. Read it inside of the work, because it does not exist before.
    """

    copies: bool
    group: Group

    def add(self, work: Callable[[], object]) -> None:
        """Schedule ``work``, which has its files on the disk when it returns, or raises."""
        ...

    def start(self) -> None:
        """Run the scheduled work; no more work may be added. Collective."""
        ...

    def wait(self) -> None:
        """Wait until all work is done; an error of one rank is raised on all ranks. Collective."""
        ...


class AtOnce:
    """Runs work when it is added."""

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
    """One model. All methods are collective: every rank calls them, in the same order."""

    def load_model(self, path: Path) -> Any:
        """Load a Hugging Face folder and return the object that ``prepare`` accepts.

        That is the model in the dtype of the master weights, for Megatron this rank's chunks of it, whose numbers are
        still in the files.
        """
        ...

    def prepare(self, model: Any, optimizer: OptimizerConfig | None, schedule: ScheduleConfig) -> None:
        """Shard the model and build its optimizer and learning-rate schedule; without ``optimizer`` it is frozen."""
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
        """Run all micro-batches of an optimizer step, in the library's order; without a loss, forward passes only.

        ``loss(index, outputs)`` gets the outputs of ``inputs[index]`` that ``want`` names, as whole rows (rows, length)
        even if this rank holds only a part of each row. The gradient is that of the sum of losses over data ranks and
        micro-batches, and of what the routers add to it, the ``terms``.
        Returns the outputs of each micro-batch, detached, on every rank.
        """
        ...

    @property
    def router_loss_factor(self) -> float:
        """The factor of the load-balancing loss of the model's routers; 0 without such a loss."""
        ...

    def traced(self, numbers: Sequence[MicroBatch]) -> Traced:
        """List the modules that this rank runs in an optimizer step, for `parity bisect`.

        ``numbers`` are the step's micro-batches with numbers of tokens in the place of tokens
        (impl.models.tracing.numbered).
        """
        ...

    def finish_gradients(self) -> None:
        """Complete reductions and undo loss scaling, so that gradients may be observed."""
        ...

    def optimizer_step(self) -> float | None:
        """Clip, update, advance the schedule; returns the global gradient norm before clipping, None if unknown.

        Where gradients in fp16 overflow, neither is done, the loss scale falls (conformance.spec.scenario), and the
        norm is not finite or None.
        """
        ...

    @property
    def skipped(self) -> bool:
        """Whether the last ``optimizer_step`` made no update, because gradients overflowed."""
        ...

    def learning_rate(self) -> float: ...

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        """Yield full weights, gradients or training state under Hugging Face names; see
        conformance.backends.protocol.Backend.

        ``progress`` yields ``schedule``, the number of updates that the learning-rate schedule has counted, and with a
        loss scale also ``loss_scale`` and ``good_steps``, the number of updates since the scale last overflowed or
        grew. ``step`` and ``progress`` are float64 tensors without dimensions.
        """
        ...

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None:
        """Set the weights or one kind of optimizer state from whole tensors under Hugging Face names.

        ``weight`` sets both the master weights and the weights that the model computes with. A rank reads only the
        slices that it holds. This works before the optimizer's first step too.
        """
        ...

    def set_progress(self, progress: Mapping[str, float]) -> None:
        """Set the numbers that ``named_tensors("progress")`` yields; names that this backend lacks are ignored."""
        ...

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        """Yield this rank's pieces of weights or gradients; see conformance.backends.protocol.Backend."""
        ...

    def resolved(self) -> dict[str, Any]:
        """Give the observed configuration (classes, dtypes, mesh, optimizer settings) as JSON values."""
        ...

    def save_ckpt(self, path: Path, when: Writing = AT_ONCE) -> None:
        """Save weights, optimizer and schedule of now; ``path`` holds them when the work of ``when`` is done."""
        ...

    def load_ckpt(self, path: Path) -> None: ...

    def save_model(self, path: Path, *, dtype: Dtype = "source") -> None:
        """Write the master weights as a Hugging Face folder; all other files are copied from the loaded folder.

        ``dtype``: ``source`` gives each tensor the dtype that it has in the loaded folder, ``masters`` that of the
        masters. See impl.models.export.
        """
        ...

    def teardown(self) -> None: ...


@runtime_checkable
class Adaptable(Trainable, Protocol):
    """A trainable whose model can have an adapter (LoRA)."""

    def add_adapter(self, model: Any, folder: Path) -> None:
        """Add the adapter in ``folder`` (peft's format) to a model that ``load_model`` has returned.

        Then it alone is trained, and ``save_model`` writes it into the folder ADAPTER (conformance.spec.lora).
        """
        ...

    def save_merged(self, path: Path, *, dtype: Dtype = "source") -> None:
        """As ``save_model``, with the adapter added to the weights; the first rank holds the whole model."""
        ...


class Context(Protocol):
    """The part of a process that all models of a cell share. All methods are collective.

    Several contexts may be open at a time; the tear-down of the last one restores the library's globals.
    """

    config: ContextConfig
    data_rank: int
    data_size: int

    def __init__(self, config: ContextConfig) -> None: ...

    @property
    def sequence_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens."""
        ...

    def setup_distributed(self) -> None:
        """Build the meshes on top of the initialised default process group, and the ring if the layout has one."""
        ...

    def setup_ring_attn(self) -> None:
        """Prepare sequence sharding and the ring's communication. Raises ValueError without ring_flash_attn."""
        ...

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        """Give this rank's micro-batches of an optimizer step."""
        ...

    def all_reduce(self, value: float) -> float:
        """Sum a number over the data-parallel ranks."""
        ...

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the data-parallel ranks."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks, in rank order; ``value`` has to be picklable."""
        ...

    def new_trainable(self, head: Head) -> Trainable:
        """Create a trainable without a model, for a language model or for a value model (one number per token)."""
        ...

    def library_generators(self) -> dict[str, Tensor]:
        """Give the states of the library's own random generators on this rank, by name."""
        ...

    def set_library_generators(self, states: Mapping[str, Tensor]) -> None: ...

    def teardown(self) -> None:
        """Release everything that the context holds. Its trainables have to be torn down before."""
        ...


def get_context(backend: str, config: ContextConfig) -> Context:
    """Create a context of the backend ``backend``. Raises UsageError, with the known names, for another name."""
    if backend not in CONTEXTS:
        raise UsageError(f"unknown backend {backend!r}; use one of {', '.join(CONTEXTS)}")
    module, _, name = CONTEXTS[backend].partition(":")
    context: Context = getattr(import_module(module), name)(config)
    return context
