"""transformers: under tensor parallelism, q_norm / k_norm gradients are wrong as soon as gradients are accumulated.

The style ``replicated_with_grad_allreduce`` sums ``param.grad`` over the ranks after each backward. ``param.grad`` is
the sum of all micro-batches so far, and the earlier ones have been summed already: micro-batch i of N counts
tp ** (N - i) times. Exit code 0: defect present. 1: gone. See hf-head-norm-accumulation.md.
"""

import copy
import sys
import tempfile
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


def norm(gradients: Any) -> float:
    return float(torch.stack([g.norm() for g in gradients]).norm())


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
    norms = {key.rpartition(".")[2] for key, style in model.tp_plan.items() if style == STYLE}
    model._tp_plan = {key: style for key, style in model.tp_plan.items() if not (fixed and style == STYLE)}
    expand: Any = getattr(model, "_expand_parallel_plan", None)  # releases without it read the plan themselves
    apply_tensor_parallelism(model, mesh, *([expand(model.tp_plan)] if expand else []))

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

    for name, parameter in model.named_parameters() if fixed else ():
        if name.split(".")[-2] in norms:
            parameter.register_hook(summed)  # THE FIX: sum what comes in, not what has piled up
    return model


def train(model: Any, micro_batches: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss / len(micro_batches) for ids in micro_batches]
    for loss in losses:
        loss.backward()
    grads = ((name, p.grad) for name, p in model.named_parameters())
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads}
    return sum(loss.item() for loss in losses), full


def rank_main(rank: int, store: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, TP), rank=rank, world_size=TP)
    mesh, whole = init_device_mesh("cpu", (TP,)), build()
    shipped, fixed = parallel(whole, mesh, fixed=False), parallel(whole, mesh, fixed=True)
    errors, repaired = {}, 0.0
    for count in (1, 2, 3):
        data = torch.randint(0, 96, (count, 2, 24), generator=torch.Generator().manual_seed(count))
        (loss, right), (bad_loss, wrong), (_, good) = (train(m, data) for m in (whole, shipped, fixed))
        error, ok = ({n: norm([g[n] - right[n]]) / norm([right[n]]) for n in right} for g in (wrong, good))
        worst = max(error, key=lambda n: error[n])
        errors[count], repaired = error[worst], max(repaired, *ok.values())
        told = sum(TP ** (count - 1 - i) / count * train(whole, data[i : i + 1])[1][worst] for i in range(count))
        found, should, rest = norm([wrong[worst]]), norm([right[worst]]), norm([wrong[worst] - told])
        if rank == 0:
            print(f"{count} micro-batches: |gradient| of {worst} {found:.6f}, right {should:.6f}: {found / should:.3f}")
            print(f"  error {error[worst]:.1e}, fixed {max(ok.values()):.1e}; explained but for {rest:.0e}")
            print(f"  norm off {norm(wrong.values()) / norm(right.values()) - 1:.1e}, loss {bad_loss / loss - 1:.1e}")
    if rank == 0:
        verdict.put(errors[1] < 1e-5 and errors[2] > 0.1 and errors[3] > 0.1 and repaired < 1e-5)


if __name__ == "__main__":
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, Qwen3, float64, tp{TP}")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict), TP, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
