"""torch: a compiled layer cuts the embedding before it off from its gradient, under tensor parallelism with FSDP2.

The embedding is cut along the vocabulary, its outputs are added up over ranks, and the layer behind it is compiled, as
each layer is in a transformer that is compiled layer by layer. Exit code 0: defect present. 1: gone. See
compiled-collective-inputs.md.
"""

import copy
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

TP, VOCAB, HIDDEN = 2, 16, 8
WAYS = {  # name -> (backend of torch.compile, whether the output is copied before it comes to the layer)
    "not compiled": ("", False),
    "compiled": ("inductor", False),
    "compiled without inductor": ("aot_eager", False),
    "REMEDY: compiled, behind a copy": ("inductor", True),
}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x  # type: ignore[no-any-return]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = torch.nn.Embedding(VOCAB, HIDDEN), Layer()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embed(ids))  # type: ignore[no-any-return]


def gradients(whole: Model, ids: torch.Tensor, *, backend: str, copied: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and each parameter's gradient, whole."""
    model: Any = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (1, TP), mesh_dim_names=("dp", "tp"))
    plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model.embed, mesh["tp"], plan)
    if copied:
        model.embed.register_forward_hook(lambda _, __, output: output.clone())  # THE REMEDY
    if backend:
        model.layer.compile(backend=backend)
    fully_shard(model.layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    loss = model(ids).square().mean()
    loss.backward()
    return loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def rank_main(rank: int, store: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", store=dist.FileStore(store, TP), rank=rank, world_size=TP)
    torch.manual_seed(0)
    whole, ids = Model(), torch.randint(0, VOCAB, (4, 12))
    loss = whole(ids).square().mean()
    loss.backward()
    right: dict[str, Any] = {name: parameter.grad for name, parameter in whole.named_parameters()}
    wrong = []
    for name, (backend, copied) in WAYS.items():
        found_loss, found = gradients(whole, ids, backend=backend, copied=copied)
        off = {key: norm([found[key] - right[key]]) / norm([right[key]]) for key in right}
        wrong += [name] * (off["embed.weight"] > 0.5)
        if rank == 0:
            others, ratio = off["layer.linear.weight"], norm(found.values()) / norm(right.values())
            print(f"{name}: embedding's gradient {off['embed.weight']:.0e} off, the layer's {others:.0e}, loss")
            print(f"  {abs(found_loss / loss.item() - 1):.0e}; gradient norm {ratio:.4f} times the right one")
    if rank == 0:
        print(f"torch {torch.__version__}, float64, tp{TP}")
        verdict.put(wrong == ["compiled", "compiled without inductor"])


if __name__ == "__main__":
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict), TP, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
