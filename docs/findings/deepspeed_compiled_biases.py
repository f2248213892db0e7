"""DeepSpeed: what feeds a linear layer with a bias is not trained, where ZeRO-3 and torch.compile meet in torch 2.11.

One rank on the CPU. Exit code 0: defect present, and right with the remedy. 1: gone. See deepspeed-compiled-biases.md.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore")
os.environ.update(MASTER_ADDR="localhost", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402
from torch import Tensor, nn  # noqa: E402

LINEAR = nn.functional.linear


class AddsInPlace(torch.autograd.Function):
    """Adds 1, in place as DeepSpeed's linear layer adds its bias to an output of three dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone().add_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def of_torch_alone() -> float:
    """The gradient of x + 1 by x, compiled."""
    x = torch.zeros((), requires_grad=True)
    torch.compile(AddsInPlace.apply, backend="eager")(x).backward()
    assert x.grad is not None
    return float(x.grad)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def of_deepspeed(*, compiled: bool, remedied: bool = False) -> dict[str, Tensor]:
    """The gradients of all parameters after one backward pass at ZeRO-3, by name."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    nn.functional.linear = LINEAR  # DeepSpeed leaves its own there
    model = Model()
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    settings["zero_optimization"] = {"stage": 3, "memory_efficient_linear": not remedied}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    if compiled:
        engine.compile(backend="eager")
    tokens = torch.arange(6).view(2, 3)
    engine.backward(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
    return {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()}


def main() -> bool:
    gradient = of_torch_alone()
    print(f"torch alone, compiled: the gradient of x + 1 is {gradient:g}")
    present = gradient != 1
    plain = of_deepspeed(compiled=False)
    for what, remedied in (("DeepSpeed", False), ("DeepSpeed, REMEDY", True)):
        others = of_deepspeed(compiled=True, remedied=remedied)
        wrong = [name for name in plain if not torch.allclose(plain[name], others[name], atol=1e-7)]
        zero = [name for name in plain if not others[name].any()]
        print(f"{what}, compiled: {len(wrong)} of {len(plain)} gradients wrong, zero: {', '.join(zero) or 'none'}")
        present &= bool(wrong) != remedied
    return present


if __name__ == "__main__":
    print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, 1 rank, ZeRO-3")
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="gloo")
        present = main()
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
