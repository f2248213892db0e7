"""No finding, but a module for the megatron_* findings: megatron-core on the CPU, two gloo ranks, and a toy pipeline.

megatron-core asks for CUDA by name. After an import of this module it gets the CPU; no arithmetic changes. This has to
be imported before megatron. GPUs are hidden, so that a machine with GPUs computes the same numbers.
"""

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor
CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """`device="cuda"` becomes the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def type_name(self: Tensor, *args: Any, own: Any = torch.Tensor.type, **kwargs: Any) -> Any:
    """Tensor.type for megatron-core, whose optimizers expect names such as torch.cuda.FloatTensor."""
    found = own(self, *args, **kwargs)
    if isinstance(found, str) and str(sys._getframe(1).f_globals.get("__name__")).startswith("megatron."):
        return found.replace("torch.", "torch.cuda.", 1)
    return found


os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.simplefilter("ignore")  # Transformer Engine and Apex are not installed
torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment, return-value]
torch.cuda.synchronize = lambda device=None: None
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
OnCpu().__enter__()  # type: ignore[no-untyped-call]

from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

HIDDEN, ROWS, BATCHES, CHUNKS = 64, 64, 4, 2  # rows of each micro-batch; chunks of the model on each rank


class Layer(torch.nn.Module):
    """A residual block, number 0 to 3 of the model; its weights depend on the number only."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, number: int, config: Any = None) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.config, self.linear = config, torch.nn.Linear(HIDDEN, HIDDEN)
        self.received: Tensor | None = None

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.received = received[0]

    def forward(self, batch: Tensor) -> Tensor:
        x = batch if self.received is None else self.received
        return x + torch.tanh(self.linear(x))


def batches() -> list[Tensor]:
    return list(torch.randn(BATCHES, ROWS, 1, HIDDEN, generator=torch.Generator().manual_seed(7)))


def plain() -> tuple[Tensor, list[Tensor]]:
    """The reference: loss and gradients of the four layers in one process, for the mean over all micro-batches."""
    layers = [Layer(number) for number in range(2 * CHUNKS)]
    model = torch.nn.Sequential(*layers)
    loss = torch.stack([model(x).square().mean() for x in batches()]).mean()
    return loss.detach(), list(torch.autograd.grad(loss, [layer.linear.weight for layer in layers]))


def pipeline_errors(rank: int, seconds: float = 0.0, **settings: Any) -> tuple[float, float]:
    """(relative error of the loss, worst relative error of a layer's gradient) of the interleaved schedule.

    Each of the two ranks has two chunks. Rank 1 sleeps for `seconds` in each forward step.
    """
    config = TransformerConfig(
        num_layers=2 * CHUNKS, hidden_size=HIDDEN, num_attention_heads=1, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=CHUNKS, batch_p2p_sync=False, **settings,
    )  # fmt: skip
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=CHUNKS
    )
    numbers = [2 * chunk + rank for chunk in range(CHUNKS)]
    chunks = [Layer(number, config) for number in numbers]

    def loss_of(output: Tensor) -> tuple[Tensor, Tensor]:
        loss = output.square().mean()
        return loss, loss.detach().clone()

    def forward_step(data: Any, chunk: Layer) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        time.sleep(seconds * rank)
        return chunk(next(data)), loss_of

    losses = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(batches()) for _ in chunks], model=chunks,
        num_microbatches=BATCHES, seq_length=ROWS, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    (loss, right), found = plain(), [chunk.linear.weight.grad for chunk in chunks]
    worst = max(error(g, right[n]) for n, g in zip(numbers, found, strict=True) if g is not None)
    both = torch.tensor([error(torch.stack(losses).mean(), loss) if rank else 0.0, worst])  # rank 1 has the losses
    dist.all_reduce(both, dist.ReduceOp.MAX)
    parallel_state.destroy_model_parallel()
    return float(both[0]), float(both[1])


def error(found: Tensor, right: Tensor) -> float:
    off = float((found - right).norm() / right.norm())
    return off if off == off else float("inf")


def rank_main(rank: int, store: str, verdict: Any, present: Callable[[int], bool]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = present(rank)
    if rank == 0:
        verdict.put(found)


def two_ranks(present: Callable[[int], bool]) -> NoReturn:
    """Print versions, call `present(rank)` on two gloo ranks, and exit with rank 0's answer: 0 if present, else 1."""
    print(*(f"{name} {version(name)}" for name in ("megatron-core", "torch")), sep=", ", end="; 2 ranks\n", flush=True)
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict, present), 2, start_method="fork")
    there = verdict.get()
    print("defect present" if there else "defect not as described")
    sys.exit(0 if there else 1)
