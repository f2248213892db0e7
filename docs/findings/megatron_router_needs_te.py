"""megatron-core: the router of every mixture of experts needs TransformerEngine, though its layer spec does not.

Two ranks, CPU, one router. The reference is torch's linear layer and softmax.
Exit code 0: defect present (NameError), and with the remedy the router gives the right weights. 1: gone, or
TransformerEngine is installed. See megatron-router-needs-te.md.
"""

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

HIDDEN, EXPERTS, CHOSEN, TOKENS = 16, 8, 2, 32


def router() -> TopKRouter:
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=CHOSEN,
        moe_ffn_hidden_size=HIDDEN, ffn_hidden_size=HIDDEN, moe_router_load_balancing_type="none",
        add_bias_linear=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return TopKRouter(config, pg_collection=moe_utils.get_default_pg_collection())


def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1))


def right(weight: torch.Tensor) -> torch.Tensor:
    """(tokens, experts): a softmax over the chosen experts."""
    logits = torch.nn.functional.linear(tokens()[:, 0], weight)
    chosen = logits.topk(CHOSEN, dim=-1)
    return torch.zeros_like(logits).scatter(-1, chosen.indices, chosen.values.softmax(dim=-1))


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    made = router()
    try:
        made(tokens())
        raised = ""
    except NameError as error:
        raised = str(error)
    vars(moe_utils).setdefault("te_general_gemm", None)
    off = on_cpu.error(made(tokens())[0], right(made.weight))
    if rank == 0:
        print(f"a router's forward pass: {raised or 'runs'}; REMEDY {off:.1e}", flush=True)
    return "te_general_gemm" in raised and off < 1e-6


if __name__ == "__main__":
    on_cpu.two_ranks(present)
