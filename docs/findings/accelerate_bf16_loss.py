"""Accelerate's bf16 policy of FSDP2 rounds the loss that a model returns to bf16, and with it its division.

The policy has ``output_dtype=torch.bfloat16``, so FSDP2 casts all that the wrapped model returns. The loss loses all
but eight bits, and ``Accelerator.backward`` divides it by the accumulation in bf16: 1 / 3 becomes 0.33398.

python docs/findings/accelerate_bf16_loss.py   exit code 0: the defect is there, 1: it is gone
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

RANKS, ACCUMULATION = 2, 3
REMEDY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Model(torch.nn.Module):
    """A model that computes its loss itself and in float32, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x).float(), y)


def train(rank: int, file: str, policy: MixedPrecisionPolicy | None) -> None:
    """Prints dtype and value of the loss, and the norm of the gradients of one step of three equal micro-batches."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # else the plugin is ignored without a GPU
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=ACCUMULATION),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, mixed_precision_policy=policy, auto_wrap_policy="no_wrap"
        ),
    )
    module = Model()
    model, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters()))
    torch.manual_seed(1)
    x, y = torch.randn(32, 16), torch.randint(64, (32,))
    for _ in range(ACCUMULATION):
        with accelerator.accumulate(model):
            loss = model(x, y)
            accelerator.backward(loss)
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    norm = torch.stack([gradient.full_tensor().norm() for gradient in gradients]).norm()
    if rank == 0:
        Path(f"{file}.out").write_text(f"{loss.dtype} {loss.item():.6f} {norm.item():.6f}")
    dist.destroy_process_group()


def measured(policy: MixedPrecisionPolicy | None) -> tuple[str, float, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/store"
        mp.spawn(train, (file, policy), nprocs=RANKS)
        dtype, loss, norm = Path(f"{file}.out").read_text().split()
    return dtype, float(loss), float(norm)


def main() -> int:
    print(f"torch {torch.__version__}, accelerate {accelerate.__version__}, {ACCUMULATION} micro-batches")
    (kind, loss, norm), (right_kind, right_loss, right_norm) = measured(None), measured(REMEDY)
    print(f"default policy: loss {loss:.6f} ({kind}), gradient norm {norm:.6f}")
    print(f"float32 output: loss {right_loss:.6f} ({right_kind}), gradient norm {right_norm:.6f}")
    print(f"the loss is {loss / right_loss - 1:+.2%} off, the gradient {norm / right_norm - 1:+.2%}")
    return 0 if kind == "torch.bfloat16" and norm / right_norm > 1.001 else 1


if __name__ == "__main__":
    sys.exit(main())
