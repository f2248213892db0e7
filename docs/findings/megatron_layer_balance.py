"""megatron-core: its load-balancing loss is of one layer and one micro-batch, transformers' of all layers together.

Two ranks (each does the same), CPU, routers of several layers, two micro-batches. The reference is transformers'
function over all tokens and layers. Exit code 0: with the same coefficient the gradients of routers differ by layers
and choices, and the remedy mends it. 1: gone. See megatron-layer-balance.md.
"""

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

HIDDEN, EXPERTS, CHOSEN, TOKENS, LAYERS, BATCHES = 16, 8, 2, 64, 4, 2
vars(moe_utils).setdefault("te_general_gemm", None)  # megatron-router-needs-te.md


def routers() -> list[TopKRouter]:
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=CHOSEN,
        moe_ffn_hidden_size=HIDDEN, ffn_hidden_size=HIDDEN, moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1.0, add_bias_linear=False,
    )  # fmt: skip
    found = [TopKRouter(config, pg_collection=moe_utils.get_default_pg_collection()) for _ in range(LAYERS)]
    for number, router in enumerate(found, start=1):
        router.set_layer_number(number)
        router.weight.data = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(number))
    return found


def inputs() -> torch.Tensor:
    """(layers, tokens, 1, hidden), of all micro-batches."""
    return torch.randn(LAYERS, TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(9))


def logits(found: list[TopKRouter]) -> list[torch.Tensor]:
    return [torch.nn.functional.linear(x[:, 0], r.weight) for x, r in zip(inputs(), found, strict=True)]


def of_transformers() -> torch.Tensor:
    found = routers()
    load_balancing_loss_func(tuple(logits(found)), EXPERTS, CHOSEN).backward()
    return torch.stack([router.weight.grad for router in found])


def of_megatron() -> torch.Tensor:
    """The gradients of routers, (layers, experts, hidden), by the library's own loss."""
    found = routers()
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / BATCHES)  # as schedules do
    for tokens in inputs().chunk(BATCHES, dim=1):
        for of_layer, router in zip(tokens, found, strict=True):
            (0 * router(of_layer)[0]).sum().backward()
    return torch.stack([router.weight.grad for router in found])


def mended() -> torch.Tensor:
    """The library's formula with the counts of all layers and micro-batches, part by part."""
    found = routers()
    of_layers = logits(found)
    counts = sum(torch.bincount(one.topk(CHOSEN).indices.flatten(), minlength=EXPERTS) for one in of_layers)
    for one in of_layers:
        for part in one.softmax(dim=-1).chunk(BATCHES):
            moe_utils.switch_load_balancing_loss_func(part, counts, LAYERS * TOKENS, 1, EXPERTS, 1.0).backward(
                retain_graph=True
            )
    return torch.stack([router.weight.grad for router in found])


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    right, wrong, remedy = of_transformers(), of_megatron(), mended()
    scaled = on_cpu.error(wrong * CHOSEN / LAYERS, right)
    if rank == 0:
        print(f"{LAYERS} layers, {CHOSEN} of {EXPERTS} experts, coefficient 1: gradients of routers", end=" ")
        print(
            f"{float(wrong.norm() / right.norm()):.2f} times those of transformers, {on_cpu.error(wrong, right):.2f}",
            end=" ",
        )
        print(f"off, {scaled:.2f} off with choices / layers; REMEDY {on_cpu.error(remedy, right):.1e}", flush=True)
    return on_cpu.error(wrong, right) > 0.5 and scaled > 0.1 and on_cpu.error(remedy, right) < 1e-5


if __name__ == "__main__":
    on_cpu.two_ranks(present)
