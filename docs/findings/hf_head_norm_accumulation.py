"""transformers: under tensor parallelism, q_norm / k_norm gradients are wrong as soon as gradients are accumulated.

The style ``replicated_with_grad_allreduce`` sums ``param.grad`` over the ranks after each backward. ``param.grad`` is
the sum of all micro-batches so far, and the earlier ones have been summed already: micro-batch i of N counts
tp ** (N - i) times. Exit code 0: defect present. 1: gone. See hf-head-norm-accumulation.md.
"""

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

TP = 2
STYLE = "replicated_with_grad_allreduce"
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}


def build() -> Any:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, attn_implementation="eager")).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            dist.broadcast(parameter, src=0)
    return model


def parallel(model: Any, mesh: DeviceMesh, *, fixed: bool) -> Any:
    model = copy.deepcopy(model)
    plan = model._expand_parallel_plan(model.tp_plan)
    norms = [name for name, style in plan.items() if style == STYLE]
    apply_tensor_parallelism(model, mesh, {k: v for k, v in plan.items() if not (fixed and k in norms)})

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

    for name in norms if fixed else ():
        model.get_submodule(name).weight.register_hook(summed)  # THE FIX: sum what comes in, not what has piled up
    return model


def train(model: Any, micro_batches: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss / len(micro_batches) for ids in micro_batches]
    for loss in losses:
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    full = {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in grads.items()}
    return sum(loss.item() for loss in losses), full


def norm(gradients: Any) -> float:
    return float(torch.stack([g.norm() for g in gradients]).norm())


def rank_main(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, TP), rank=rank, world_size=TP)
    mesh, whole = init_device_mesh("cpu", (TP,)), build()
    shipped, fixed = parallel(whole, mesh, fixed=False), parallel(whole, mesh, fixed=True)
    for count in (1, 2, 3):
        data = torch.randint(0, 96, (count, 2, 24), generator=torch.Generator().manual_seed(count))
        (loss, right), (bad_loss, wrong), (_, repaired) = (train(m, data) for m in (whole, shipped, fixed))
        error, ok = ({n: norm([g[n] - right[n]]) / norm([right[n]]) for n in right} for g in (wrong, repaired))
        worst = max(error, key=lambda n: error[n])
        total, bad_total = norm(right.values()), norm(wrong.values())
        if rank == 0:
            row = f"{count} | {worst if error[worst] > 1e-9 else '(all)':33} | {norm([wrong[worst]]):.6f} | "
            row += f"{norm([right[worst]]):.6f} | {norm([wrong[worst]]) / norm([right[worst]]):.3f} | "
            row += f"{error[worst]:.1e} | {abs(bad_total / total - 1):.1e} | {abs(bad_loss / loss - 1):.1e} | "
            results.put((count, error[worst], max(ok.values()), f"{row}{max(ok.values()):.1e}"))


if __name__ == "__main__":
    results = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (str(Path(folder) / "store"), results), TP, start_method="fork")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, Qwen3, float64, tp{TP}")
    print("micro-batches | worst parameter | |grad| wrong | right | ratio | error | norm error | loss error | error, fixed")
    errors, repaired = {}, 0.0
    for count, error, ok, row in (results.get() for _ in range(3)):
        errors[count], repaired = error, max(repaired, ok)
        print(row)
    present = errors[1] < 1e-6 and errors[2] > 0.1 and errors[3] > 0.1 and repaired < 1e-6
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
