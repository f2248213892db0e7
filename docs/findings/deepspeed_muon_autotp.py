"""DeepSpeed: beside AutoTP, Muon orthogonalizes each rank's part of a matrix by itself.

Two ranks on the CPU, one step of Muon on the same batch, with data parallelism and with tensor parallelism over both.
Exit code 0: updates are more than 10 % apart, and those of tensor parallelism are those of each part of the gradient.
1: not so. See deepspeed-muon-autotp.md.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(MASTER_ADDR="localhost", WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import transformers  # noqa: E402

LR = 0.01
torch.compiler.set_stance("force_eager")  # compiling Muon's functions takes minutes on a CPU
CUT = {"self_attn.q_proj": 0, "mlp.down_proj": 1}  # the dimension that tensor parallelism cuts


def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def loss_of(module: Any) -> torch.Tensor:
    tokens = torch.arange(32)[None]
    loss: torch.Tensor = module(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def weights(own: Any) -> dict[str, torch.Tensor]:
    """Returns this rank's weights."""
    return {name: own.get_submodule(f"model.layers.0.{name}").weight.detach().clone() for name in CUT}


def updates(parallel: int) -> dict[str, torch.Tensor]:
    """Returns the updates of whole matrices / learning rate, with tensor parallelism over ``parallel`` ranks."""
    own = model()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Muon", "params": {"lr": LR, "momentum": 0.95, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
    }
    settings |= {"tensor_parallel": {"autotp_size": parallel}} if parallel > 1 else {}
    engine, *_ = deepspeed.initialize(
        model=own, model_parameters=own.parameters(), config=settings, dist_init_required=False
    )
    before = weights(engine.module)
    engine.backward(loss_of(engine))
    engine.step()
    found = {}
    for name, after in weights(engine.module).items():
        update = (after - before[name]) / LR
        parts = [torch.empty_like(update) for _ in range(parallel)]
        if parallel > 1:
            dist.all_gather(parts, update.contiguous())
        found[name] = torch.cat(parts, dim=CUT[name]) if parallel > 1 else update
    return found


def of_parts() -> dict[str, torch.Tensor]:
    """Returns what DeepSpeed's function makes of each half of the gradients."""
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    own = model()
    loss_of(own).backward()
    found = {}
    for name, dim in CUT.items():
        halves = own.get_submodule(f"model.layers.0.{name}").weight.grad.chunk(2, dim)
        made = [muon_update(half.clone(), torch.zeros_like(half)) for half in halves]
        found[name] = -torch.cat(made, dim)
    return found


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo")
    whole, cut, parts = updates(1), updates(2), of_parts()
    is_present = True
    for name, right in whole.items():
        off, same = ((cut[name] - one).norm() / right.norm() for one in (right, parts[name]))
        is_present = is_present and bool(off > 0.1) and bool(same < 0.02)
        if rank == 0:
            print(f"{name}: update at tp2 {off:.2g} off that of one whole matrix, {same:.2g} off that of its halves")
    if rank == 0:
        verdict.put(is_present)
    dist.barrier()


if __name__ == "__main__":
    print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}; 2 ranks")
    verdict = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="spawn")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
