"""torch: ``parallelize_module`` silently unties the embedding and the head of a model.

Each style puts a new Parameter into its module. The two copies start equal, so the first loss is exactly right; but
each gets only its own share of the gradient. Exit code 0: defect present. 1: gone. See
tied-weights-parallelize-module.md.
"""

import copy
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TP, VOCAB, HIDDEN, STEPS = 2, 64, 32, 5


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.up, self.down = torch.nn.Linear(HIDDEN, 64), torch.nn.Linear(64, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(F.rms_norm(x + self.down(F.silu(self.up(x))), (HIDDEN,)))  # type: ignore[no-any-return]


def parallel(model: torch.nn.Module, *, retie: bool) -> Any:
    copied: Any = copy.deepcopy(model)  # keeps the tie
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(copied, init_device_mesh("cpu", (TP,)), plan)
    if retie:
        assert copied.head.weight.placements == copied.embed.weight.placements == (Shard(0),)
        copied.head.weight = copied.embed.weight  # THE REMEDY: both are cut along the vocabulary, so tie again
    return copied


def train(model: Any, ids: torch.Tensor) -> tuple[list[float], list[float], torch.Tensor]:
    losses, norms, embedding = [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        grads = [full(p.grad) for p in model.parameters()]
        losses.append(loss.item())
        norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
        embedding.append(full(model.embed.weight.grad).clone())
        optimizer.step()
    return losses, norms, embedding[0]


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def report(name: str, right: Any, found: Any) -> float:
    error = float((found[2] - right[2]).norm() / right[2].norm())
    print(f"{name}: |embedding gradient| {found[2].norm():.6f}, right {right[2].norm():.6f}, error {error:.1e}")
    print(f"  gradient norm, step 0: {found[1][0]:.6f}, right {right[1][0]:.6f}, ratio {found[1][0] / right[1][0]:.4f}")
    off = (f"{a / b - 1:.1e}" for a, b in zip(found[0], right[0], strict=True))
    print("  loss / right loss - 1, by SGD step:", ", ".join(off))
    return error


def rank_main(rank: int, store: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", store=dist.FileStore(store, TP), rank=rank, world_size=TP)
    torch.manual_seed(0)
    whole, ids = Tied(), torch.randint(0, VOCAB, (8, 33))
    untied, retied = parallel(whole, retie=False), parallel(whole, retie=True)
    tied = untied.head.weight is untied.embed.weight
    right, wrong, fixed = (train(model, ids) for model in (whole, untied, retied))
    if rank == 0:
        print(f"torch {torch.__version__}, float64, tp{TP}; head.weight is embed.weight after the plan: {tied}")
        errors = report("as shipped", right, wrong), report("tied again", right, fixed)
        verdict.put(not tied and errors[0] > 0.1 and errors[1] < 1e-9)


if __name__ == "__main__":
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict), TP, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
