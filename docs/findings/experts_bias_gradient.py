"""transformers: gradients of experts' biases (gpt-oss) are summed token by token in bf16.

Exit code 0: defect present. 1: gone. See experts-bias-gradient.md.
"""

import sys

import torch
import transformers
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

EXPERTS, SIZE, CHOSEN = 8, 64, 2
WAYS = ("eager", "grouped_mm", "batched_mm")


def bias_gradient(way: str, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, above: torch.Tensor):  # type: ignore[no-untyped-def]
    """The gradient of ``down_proj_bias`` (EXPERTS, SIZE), given that of the layer's output, ``above`` (N, SIZE)."""
    config = GptOssConfig(hidden_size=SIZE, intermediate_size=32, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    config._experts_implementation = way
    experts = GptOssExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    experts.bfloat16()(hidden, chosen, weights).backward(above)
    return experts.down_proj_bias.grad


def right(chosen: torch.Tensor, weights: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """The same in float64: of each expert, the sum over its tokens of weight times gradient; no weight matters."""
    gradient = torch.zeros(EXPERTS, SIZE, dtype=torch.float64)
    for slot in range(CHOSEN):
        gradient.index_add_(0, chosen[:, slot], weights[:, slot, None].double() * above.double())
    return gradient


def error(way: str, tokens: int, mean: float) -> float:
    torch.manual_seed(0)
    chosen = torch.rand(tokens, EXPERTS).topk(CHOSEN, dim=-1).indices
    weights = torch.softmax(torch.randn(tokens, CHOSEN), -1).bfloat16()
    hidden, above = torch.randn(tokens, SIZE).bfloat16(), (torch.randn(tokens, SIZE) + mean).bfloat16()
    exact = right(chosen, weights, above)
    found = bias_gradient(way, hidden, chosen, weights, above).double()
    return float((found - exact).norm() / exact.norm())


if __name__ == "__main__":
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, {EXPERTS} experts, {CHOSEN} a token, CPU"
    )
    worst = dict.fromkeys(WAYS, 0.0)
    for mean in (0.0, 1.0):
        for tokens in (64, 1024, 16384):
            errors = {way: error(way, tokens, mean) for way in WAYS}
            worst = {way: max(worst[way], errors[way]) for way in WAYS}
            said = ", ".join(f"{way} {found:.1e}" for way, found in errors.items())
            print(f"gradients N({mean:.0f}, 1), {tokens:5} tokens: bias off by {said}")
    present = worst["eager"] < 5e-3 and min(worst["grouped_mm"], worst["batched_mm"]) > 0.1
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
