"""torchao: stochastic rounding rounds the replicas of a parameter apart, because each rank draws by itself.

Two replicas of FSDP2 (HSDP), whose ranks have other seeds, as they need for dropout. One step of torchao's AdamW on the
CPU, uncompiled. Exit code 0: the replicas hold other weights after it, and equal ones if they draw alike. 1: not so.
See torchao-rounded-replicas.md.
"""

import sys
import tempfile
import warnings
from importlib.metadata import version
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

RANKS, SIZE = 2, 64


def update(*, remedied: bool) -> torch.Tensor:
    """Returns the weight of this rank after a step with equal gradients on all ranks."""
    from torchao.optim import _AdamW

    torch.manual_seed(0)
    layer: Any = torch.nn.Linear(SIZE, SIZE, bias=False).bfloat16()
    model: Any = fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicas", "shards")))
    optimizer = _AdamW(model.parameters(), lr=1e-3, bf16_stochastic_round=True)
    model(torch.ones(4, SIZE, dtype=torch.bfloat16)).float().square().mean().backward()
    # REMEDY A seed that follows from what the rank holds: here the whole parameter.
    torch.manual_seed(1 if remedied else dist.get_rank())
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    weight: torch.Tensor = layer.weight.to_local().detach().clone()
    return weight


def rank_main(rank: int, store: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    differing = []
    for remedied in (False, True):
        weight = update(remedied=remedied)
        first = weight.clone()
        dist.broadcast(first, src=0)
        share = (weight != first).float().mean()
        dist.all_reduce(share, dist.ReduceOp.MAX)
        differing.append(float(share))
    if rank == 0:
        print(f"elements that differ between replicas: {differing[0]:.1%}; REMEDY {differing[1]:.1%}")
        verdict.put(differing[0] > 0.01 and differing[1] == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torchao {version('torchao')}, torch {torch.__version__}")
    answers: Any = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", answers), RANKS, start_method="fork")
    is_present = answers.get()
    print("defect present" if is_present else "not reproduced")
    sys.exit(not is_present)
