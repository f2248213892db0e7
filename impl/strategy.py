"""The strategy interface: what a training backend has to offer so that one trainer can drive it.

In two parts, so that several models can live side by side. A *context* is the process's share: meshes, process groups,
rings, and whatever a library keeps in globals; it is entered once per cell. A *trainable* is one model in a context,
with its optimizer, schedule, tensors and checkpoints: an actor, a critic, or a frozen reference.

Backends are standalone classes without a shared base; ``get_context`` picks one by name and imports it then. The
contract that keeps their numbers equal is in ``forward_backward`` and ``optimizer_step``: the objective divides by the
whole step's totals, and each trainable undoes whatever averaging its library does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from conformance.backend import NamedTensors, Shard, TensorKind
from conformance.batch import Batch, Row
from conformance.layout import Layout
from conformance.role import Head
from conformance.scenario import OptimizerConfig, Precision, ScheduleConfig
from conformance.validation import UsageError
from impl.collate import MicroBatch
from impl.files import SliceReader
from impl.micro_batches import Loss
from impl.model_folder import Dtype
from impl.outputs import Outputs, Wanted
from impl.training_state import WrittenKind

CONTEXTS = {
    "deepspeed": "impl.deepspeed.context:DeepspeedContext",
    "fsdp2": "impl.fsdp2.context:Fsdp2Context",
    "megatron": "impl.megatron.context:MegatronContext",
}


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """What a process is set up for. ``device`` is ``cpu`` or this rank's ``cuda:N``.

    accumulation: micro-batches per optimizer step and data rank. packed: rows may hold several documents
    (``--packing_samples``). trust_remote_code: Python code of model folders may be run (``--trust_remote_code``).
    """

    layout: Layout
    precision: Precision
    device: str
    accumulation: int
    packed: bool
    trust_remote_code: bool = False


class Trainable(Protocol):
    """One model. All methods are collective: every rank calls them, in the same order."""

    def load_model(self, path: Path) -> Any:
        """Load a Hugging Face folder and return what ``prepare`` takes: the full unsharded model in the dtype of the
        master weights, or (Megatron) only this rank's chunks."""
        ...

    def prepare(self, model: Any, optimizer: OptimizerConfig | None, schedule: ScheduleConfig) -> None:
        """Shard the model and build its optimizer and learning-rate schedule; without ``optimizer`` it is frozen."""
        ...

    def create_optimizer(self, model: Any, config: OptimizerConfig) -> Any: ...

    def forward_backward(
        self, inputs: Sequence[MicroBatch], *, want: Wanted, temperature: float = 1.0, loss: Loss | None
    ) -> list[Outputs]:
        """Run all micro-batches of an optimizer step in the order that suits the library; forward only without a loss.

        ``loss(index, outputs)`` gets what ``want`` names of ``inputs[index]``, (rows, length): ranks of a ring hold
        parts of the rows and get whole rows. The gradient is that of the sum of losses over data ranks and
        micro-batches. Returns these outputs, detached, on every rank.
        """
        ...

    def finish_gradients(self) -> None:
        """Complete reductions and undo loss scaling, so that gradients may be observed."""
        ...

    def optimizer_step(self) -> float | None:
        """Clip, update, advance the schedule; returns the global gradient norm before clipping, None if unknown."""
        ...

    def learning_rate(self) -> float: ...

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        """Full weights, gradients or training state under Hugging Face names; see conformance.backend.Backend.

        ``progress`` has ``schedule`` (updates that the learning-rate schedule has counted) and, with a loss scale,
        ``loss_scale`` and ``good_steps`` (updates since the last overflow, or since it grew); ``step`` and ``progress``
        are float64 without dimensions.
        """
        ...

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None:
        """Set the masters, and what is computed with, or one kind of optimizer state from whole tensors under Hugging
        Face names, of which a rank reads what it holds. The optimizer may not have made a step yet."""
        ...

    def set_progress(self, progress: Mapping[str, float]) -> None:
        """Set what ``named_tensors("progress")`` gives; names that this backend does not have are left out."""
        ...

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]: ...

    def resolved(self) -> dict[str, Any]:
        """What is really used (classes, dtypes, mesh, optimizer settings), as JSON values."""
        ...

    def save_ckpt(self, path: Path) -> None:
        """Training state: weights, optimizer, schedule."""
        ...

    def load_ckpt(self, path: Path) -> None: ...

    def save_model(self, path: Path, *, dtype: Dtype = "source") -> None:
        """Hugging Face folder: everything of the folder that was loaded, with safetensors of the master weights, each
        in the dtype that it has in that folder, or in the masters'. See impl.model_folder."""
        ...

    def teardown(self) -> None: ...


class Context(Protocol):
    """All methods are collective. Several contexts may be open at a time; the last to leave undoes what is global."""

    config: ContextConfig
    data_rank: int
    data_size: int

    def __init__(self, config: ContextConfig) -> None: ...

    @property
    def sequence_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens."""
        ...

    def setup_distributed(self) -> None:
        """Build the meshes on top of the initialised default process group, and the ring where the layout has one."""
        ...

    def setup_ring_attn(self) -> None:
        """Prepare sequence shards and ring communication; ValueError where the backend has none."""
        ...

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        """This rank's micro-batches of an optimizer step."""
        ...

    def all_reduce(self, value: float) -> float:
        """Sum of a number over the data-parallel ranks."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """A picklable value from each rank of the world, by rank."""
        ...

    def new_trainable(self, head: Head) -> Trainable:
        """An empty trainable: a language model, or a value model with one number per token."""
        ...

    def library_generators(self) -> dict[str, Tensor]:
        """States of this rank's random generators that the library keeps beside torch's, by name."""
        ...

    def set_library_generators(self, states: Mapping[str, Tensor]) -> None: ...

    def teardown(self) -> None:
        """Leave; trainables are torn down before."""
        ...


def get_context(backend: str, config: ContextConfig) -> Context:
    """The context of the backend registered as ``backend``; UsageError that lists the known ones."""
    if backend not in CONTEXTS:
        raise UsageError(f"unknown backend {backend!r}; use one of {', '.join(CONTEXTS)}")
    module, _, name = CONTEXTS[backend].partition(":")
    context: Context = getattr(import_module(module), name)(config)
    return context
