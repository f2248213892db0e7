"""megatron-core: a bias of experts that is loaded before the model is wrapped for bf16 is rounded, and then kept so.

Two ranks (each does the same), CPU, one router with a published sort of bias. The reference is the router in float32.
Exit code 0: the bias is rounded and other experts are chosen, and with the remedy neither. 1: gone. See
megatron-rounded-bias.md.
"""

import copy
from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

HIDDEN, EXPERTS, CHOSEN, TOKENS = 16, 64, 4, 4000
vars(moe_utils).setdefault("te_general_gemm", None)  # megatron-router-needs-te.md


def router(*, bf16: bool) -> TopKRouter:
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=CHOSEN,
        moe_ffn_hidden_size=HIDDEN, ffn_hidden_size=HIDDEN, moe_router_load_balancing_type="none",
        add_bias_linear=False, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_dtype="fp32", bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )  # fmt: skip
    made = TopKRouter(config, pg_collection=moe_utils.get_default_pg_collection())
    weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    made.weight.data = weight.to(made.weight.dtype)
    return made


def bias() -> torch.Tensor:
    """Around 5, as published ones are, and as far apart as steps of 0.001 have made them."""
    return 5 + 0.001 * torch.randint(-20, 21, (EXPERTS,), generator=torch.Generator().manual_seed(1))


def tokens() -> torch.Tensor:
    return (0.05 * torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(2))).bfloat16()


def chosen(made: Any, wrapped: Any, *, after: bool) -> tuple[torch.Tensor, float]:
    """(which experts tokens go to, the largest error of the bias). ``after``: the bias is loaded after wrapping."""
    if not after:
        made.expert_bias.copy_(bias())
    wrapped(made)
    if after:
        made._maintain_float32_expert_bias()
        made.expert_bias.copy_(bias())
    found = made(tokens().to(made.weight.dtype))[1]
    return found, float((made.expert_bias - bias()).abs().max())


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    right, exact = chosen(router(bf16=False), copy.copy, after=False)
    half = router(bf16=True)
    wrong, off = chosen(half, lambda made: Float16Module(made.config, made), after=False)
    half = router(bf16=True)
    remedy, none = chosen(half, lambda made: Float16Module(made.config, made), after=True)
    moved, back = (float((found != right).any(dim=1).double().mean()) for found in (wrong, remedy))
    if rank == 0:
        print(f"the bias is {off:.4f} off, and {moved:.0%} of tokens go to other experts;", end=" ")
        print(f"REMEDY {none:.4f} and {back:.0%}", flush=True)
    return exact == none == back == 0 and off > 0.005 and moved > 0.1


if __name__ == "__main__":
    on_cpu.two_ranks(present)
