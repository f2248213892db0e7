"""megatron-core: global_aux_loss divides counts of several micro-batches by the tokens of the last one.

Two ranks (each has its own tokens), CPU, one router, two micro-batches of 48 and 16 tokens. The reference divides the
counts by the tokens that were counted. Exit code 0: the router's gradient is wrong, is right where micro-batches are of
one size, and the remedy mends it. 1: gone. See megatron-running-counts.md.
"""

from typing import Any

import megatron_on_cpu as on_cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

HIDDEN, EXPERTS, CHOSEN = 16, 8, 2
UNEQUAL, EQUAL = (48, 16), (32, 32)  # tokens of the micro-batches of a rank
vars(moe_utils).setdefault("te_general_gemm", None)  # megatron-router-needs-te.md


class Mended(TopKRouter):  # type: ignore[misc]
    """Multiplies the loss by the tokens of the last micro-batch, times their number, by all tokens."""

    def routing(self, *args: Any, **options: Any) -> Any:
        self.before = self.global_tokens_per_expert.sum()
        return super().routing(*args, **options)

    def attach_and_log_load_balancing_loss(self, x: Any, factor: float, loss: Tensor, *more: Any, **o: Any) -> Any:
        now = self.global_tokens_per_expert.sum()
        return super().attach_and_log_load_balancing_loss(
            x, factor, loss * (now - self.before) * self.ga_steps / now, *more, **o
        )


def router(kind: type[TopKRouter]) -> TopKRouter:
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=CHOSEN,
        moe_ffn_hidden_size=HIDDEN, ffn_hidden_size=HIDDEN, moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1.0, add_bias_linear=False,
    )  # fmt: skip
    found = kind(config, pg_collection=moe_utils.get_default_pg_collection())
    found.set_layer_number(1)
    found.weight.data = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    return found


def micro_batches(rank: int, sizes: tuple[int, ...]) -> list[Tensor]:
    """(tokens, 1, hidden) of each."""
    generator = torch.Generator().manual_seed(9 + rank)
    return [torch.randn(size, 1, HIDDEN, generator=generator) for size in sizes]


def by_library(kind: type[TopKRouter], rank: int, sizes: tuple[int, ...]) -> Tensor:
    """The router's gradient, summed over ranks."""
    found = router(kind)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / len(sizes))  # as schedules do
    for tokens in micro_batches(rank, sizes):
        (0 * found(tokens)[0]).sum().backward()
    dist.all_reduce(found.weight.grad)
    gradient: Tensor = found.weight.grad
    return gradient


def by_formula(sizes: tuple[int, ...]) -> Tensor:
    """X sum_x f_x P_x, with f of all ranks in the micro-batches so far, and P of all ranks in the last one."""
    weight: Tensor = router(TopKRouter).weight
    logits = [
        torch.cat([torch.nn.functional.linear(x[:, 0], weight) for x in of_ranks])
        for of_ranks in zip(*(micro_batches(rank, sizes) for rank in range(2)), strict=True)
    ]
    for i, last in enumerate(logits, start=1):
        chosen = torch.cat(logits[:i]).topk(CHOSEN).indices.flatten()
        f = torch.bincount(chosen, minlength=EXPERTS) / len(chosen)
        (EXPERTS * (f * last.softmax(dim=-1).mean(dim=0)).sum() / len(sizes)).backward(retain_graph=True)
    assert weight.grad is not None
    return weight.grad


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    unequal, equal = by_formula(UNEQUAL), by_formula(EQUAL)
    off = [
        on_cpu.error(by_library(kind, rank, sizes), right)
        for kind, sizes, right in (
            (TopKRouter, UNEQUAL, unequal),
            (TopKRouter, EQUAL, equal),
            (Mended, UNEQUAL, unequal),
        )
    ]
    if rank == 0:
        print(f"micro-batches of {UNEQUAL}: router's gradient {off[0]:.2f} off; of {EQUAL}: {off[1]:.1e}", end="; ")
        print(f"REMEDY {off[2]:.1e}", flush=True)
    return off[0] > 0.1 and off[1] < 1e-5 and off[2] < 1e-5


if __name__ == "__main__":
    on_cpu.two_ranks(present)
