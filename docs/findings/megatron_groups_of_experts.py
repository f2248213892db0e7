"""megatron-core: groups of experts are chosen by as many scores as fit, and not by those that DeepSeek's models go by.

Two ranks (each does the same), CPU, routers with random scores. The references are the routers of transformers'
DeepSeek-V2 and V3. Exit code 0: other experts for published and other numbers but those of DeepSeek-V3, and with the
remedy the same. 1: gone. See megatron-groups-of-experts.md.
"""

from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3 import modeling_deepseek_v3

TOKENS = 2000
MODELS = {  # experts, chosen ones, groups, chosen ones, scores of a group that are added up
    "DeepSeek-V2": (160, 6, 8, 3, 1),
    "DeepSeek-V3": (256, 8, 8, 4, 2),
    "a V3 that chooses 4 of 64 experts in 4 of 8 groups": (64, 4, 8, 4, 2),
}


def drawn(experts: int) -> torch.Tensor:
    """Logits (tokens, experts)."""
    return torch.randn(TOKENS, experts, generator=torch.Generator().manual_seed(experts))


def right(experts: int, chosen: int, groups: int, kept: int, best: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, the experts of each token), by transformers: a router of which the logits are the inputs."""
    sizes: dict[str, Any] = {
        "hidden_size": experts, "n_routed_experts": experts, "num_experts_per_tok": chosen, "n_group": groups,
        "topk_group": kept, "num_attention_heads": 1,
    }  # fmt: skip
    logits = drawn(experts)
    if best == 1:
        router: Any = DeepseekV2TopkRouter(DeepseekV2Config(**sizes, topk_method="group_limited_greedy"))
        scores = logits.softmax(dim=-1)
    else:
        router = modeling_deepseek_v3.DeepseekV3TopkRouter(DeepseekV3Config(**sizes))
        router.e_score_correction_bias.zero_()
        scores = logits.sigmoid()
    router.weight.data = torch.eye(experts)
    return scores, router(logits)[2]


def of_megatron(scores: torch.Tensor, experts: int, chosen: int, groups: int, kept: int, _: int) -> torch.Tensor:
    found: torch.Tensor = group_limited_topk(scores, chosen, TOKENS, experts, groups, kept)[1]
    return found


def mended(scores: torch.Tensor, experts: int, chosen: int, groups: int, kept: int, best: int) -> torch.Tensor:
    of_group = scores.view(TOKENS, groups, -1).topk(best, dim=2).values.sum(dim=2)
    inside = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, of_group.topk(kept, dim=1).indices, value=True)
    inside = inside.repeat_interleave(experts // groups, dim=1)
    return scores.masked_fill(~inside, -torch.inf).topk(chosen, dim=1).indices


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The fraction of tokens with other experts."""
    return float((found.sort(dim=1).values != expected.sort(dim=1).values).any(dim=1).double().mean())


def present(rank: int) -> bool:
    answers = []
    for name, numbers in MODELS.items():
        scores, expected = right(*numbers)
        wrong, remedy = apart(of_megatron(scores, *numbers), expected), apart(mended(scores, *numbers), expected)
        answers.append(remedy == 0 and (wrong == 0 if name == "DeepSeek-V3" else wrong > 0.05))
        if rank == 0:
            print(f"{name}: {wrong:.0%} of tokens go to other experts; REMEDY {remedy:.0%}", flush=True)
    return all(answers)


if __name__ == "__main__":
    on_cpu.two_ranks(present)
