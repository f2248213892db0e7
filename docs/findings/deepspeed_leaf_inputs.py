"""DeepSpeed: a leaf module of ZeRO-3 whose input needs no gradient loses its weights before it has used them.

Two ranks on the CPU: layers behind a frozen embedding. Exit code 0: gradients are right without leaf modules, the
backward pass raises with them, and they are right again where the embedding's output asks for a gradient. 1: not so.
See deepspeed-leaf-inputs.md.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore")
os.environ.update(MASTER_ADDR="localhost", WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules  # noqa: E402
from torch import Tensor, nn  # noqa: E402


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.embedding.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def gradients(*, leaf: bool, remedied: bool) -> list[Tensor]:
    """Of all trained parameters, after one backward pass at ZeRO-3."""
    torch.manual_seed(0)
    model = Model()
    if leaf:
        set_z3_leaf_modules(model, [Layer])
    if remedied:
        model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_(True))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    settings["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.SGD(trained, lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    tokens = torch.arange(6)
    engine.backward(nn.functional.cross_entropy(engine(tokens), tokens))
    return [safe_get_full_grad(parameter) for parameter in trained]


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo")
    right = gradients(leaf=False, remedied=False)
    cases = (("leaf modules, REMEDY", True, ""), ("leaf modules", False, "The size of tensor a (0) must match"))
    for what, remedied, expected in cases:
        try:
            found, said = gradients(leaf=True, remedied=remedied), ""
        except RuntimeError as error:
            found, said = [], str(error)
        equal = len(found) == len(right) and all(map(torch.equal, found, right))
        if rank == 0:
            print(f"{what}: {said or f'gradients are equal to those without: {equal}'}", flush=True)
            verdict.put(said.startswith(expected) and bool(said) == bool(expected) and equal == remedied)
    dist.barrier()
    os._exit(0)  # threads of the pass that raised would end the process with SIGABRT


if __name__ == "__main__":
    print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, 2 ranks, ZeRO-3, frozen embedding")
    verdict = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="spawn")
    present = all(verdict.get() for _ in range(2))
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
