"""The strategy interface: what a training backend has to offer so that one trainer can drive it.

Backends are standalone classes without a shared base; ``get_strategy`` picks one by name and imports it then. The
contract that keeps their numbers equal is in ``forward_backward`` and ``optimizer_step``: the trainer divides by the
whole step's token count, and each strategy undoes whatever averaging its library does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from conformance.backend import Kind, NamedTensors, Shard
from conformance.batch import Batch, Row
from conformance.layout import Layout
from conformance.scenario import OptimizerConfig, Precision, ScheduleConfig
from impl.collate import Inputs
from impl.micro_batches import Loss

STRATEGIES = {
    "deepspeed": "impl.deepspeed.strategy:DeepspeedStrategy",
    "fsdp2": "impl.fsdp2.strategy:Fsdp2Strategy",
    "megatron": "impl.megatron.strategy:MegatronStrategy",
}


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """What a strategy needs to know besides model and data. ``device`` is ``cpu`` or this rank's ``cuda:N``.

    packed: rows may hold several documents (``--packing_samples``).
    """

    layout: Layout
    precision: Precision
    device: str
    accumulation: int
    packed: bool
    max_grad_norm: float | None


class Strategy(Protocol):
    """All methods are collective: every rank calls them, in the same order."""

    def __init__(self, config: StrategyConfig) -> None: ...

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

    def prepare(self, model: Any, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> None:
        """Shard the model and build its optimizer and learning-rate schedule."""
        ...

    def create_optimizer(self, model: Any, config: OptimizerConfig) -> Any: ...

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        """This rank's micro-batches of an optimizer step."""
        ...

    def forward_backward(self, inputs: Sequence[Inputs], loss: Loss) -> list[torch.Tensor]:
        """Run all micro-batches of an optimizer step, forward and backward, in the order that suits the library.

        ``loss(index, logp)`` gets the log-probs (rows, length) of ``inputs[index].labels``, float32 or wider, 0 where
        there is no target; ranks of a ring hold parts of the rows and get the log-probs of whole rows. The gradient is
        that of the sum of losses over data ranks and micro-batches. Returns these log-probs, detached, on every rank.
        """
        ...

    def finish_gradients(self) -> None:
        """Complete reductions and undo loss scaling, so that gradients may be observed."""
        ...

    def optimizer_step(self) -> float:
        """Clip, update, advance the schedule; returns the global gradient norm before clipping."""
        ...

    def learning_rate(self) -> float: ...

    def all_reduce(self, value: float) -> float:
        """Sum of a number over the data-parallel ranks."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """A picklable value from each rank of the world, by rank."""
        ...

    def named_tensors(self, kind: Kind) -> NamedTensors:
        """Full weights or gradients under Hugging Face names; see conformance.backend.Backend."""
        ...

    def local_shards(self, kind: Kind) -> Iterator[Shard]: ...

    def resolved(self) -> dict[str, Any]:
        """What is really used (classes, dtypes, mesh, optimizer settings), as JSON values."""
        ...

    def save_ckpt(self, path: Path) -> None:
        """Training state: weights, optimizer, schedule."""
        ...

    def load_ckpt(self, path: Path) -> None: ...

    def save_model(self, path: Path) -> None:
        """Hugging Face folder: config and safetensors."""
        ...

    def load_model(self, path: Path) -> Any:
        """What ``prepare`` takes, from a Hugging Face folder: the whole model in the dtype of the master weights, not
        yet sharded, or only this rank's parts of it."""
        ...

    def teardown(self) -> None: ...


def get_strategy(backend: str, config: StrategyConfig) -> Strategy:
    """The strategy registered as ``backend``; ValueError that lists the known ones."""
    if backend not in STRATEGIES:
        raise ValueError(f"unknown backend {backend!r}; use one of {', '.join(STRATEGIES)}")
    module, _, name = STRATEGIES[backend].partition(":")
    strategy: Strategy = getattr(import_module(module), name)(config)
    return strategy
