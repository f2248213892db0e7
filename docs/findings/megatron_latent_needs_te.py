"""megatron-core: latent attention (MLA) of the local layer spec cannot be built without TransformerEngine.

Two ranks, CPU, one attention. The reference is the same attention written in a few lines of torch.
Exit code 0: defect present (two TypeErrors, one behind the other), and with the remedies the attention gives the right
output. 1: gone, or TransformerEngine is installed. See megatron-latent-needs-te.md.
"""

from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
from megatron.core.transformer.spec_utils import build_module

HIDDEN, HEADS, PLAIN, TURNED, VALUE, RANK, TOKENS = 32, 4, 6, 4, 5, 8, 16
SETTINGS: dict[str, Any] = {
    "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "q_lora_rank": None, "kv_lora_rank": RANK,
    "qk_head_dim": PLAIN, "qk_pos_emb_head_dim": TURNED, "v_head_dim": VALUE, "rope_type": "rope",
    "rotary_scaling_factor": 1.0, "add_bias_linear": False, "use_cpu_initialization": True,
}  # fmt: skip


class Plain(torch.nn.Module):
    """Causal attention whose values may have another size than its keys: a remedy."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """(tokens, rows, heads, numbers) each -> (tokens, rows, heads x numbers of a value)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def attention(core: type | None = None, *, down: type | None = None, **settings: Any) -> Any:
    """The library's latent attention; ``core`` and ``down``: what stands in the place of its own parts."""
    spec = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    if core:
        spec.submodules.core_attention = core
    if down:
        spec.submodules.linear_kv_down_proj = down
    config = MLATransformerConfig(**SETTINGS, **settings)
    return build_module(spec, config=config, layer_number=1)


def refusal(core: type | None = None) -> str:
    try:
        attention(core)
    except TypeError as error:
        return str(error).partition(" when")[0]
    return "none"


def tokens() -> torch.Tensor:
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of (tokens, heads, TURNED), in pairs of neighbours."""
    angles = torch.arange(TOKENS)[:, None, None] / 10000 ** (torch.arange(0, TURNED, 2) / TURNED)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def right(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The attention by weights ``w`` of ``x`` (tokens, hidden)."""
    q_plain, q = (x @ w["linear_q_proj.weight"].T).view(TOKENS, HEADS, -1).split([PLAIN, TURNED], dim=-1)
    latent, key = (x @ w["linear_kv_down_proj.weight"].T).split([RANK, TURNED], dim=-1)
    k_plain, v = (latent @ w["linear_kv_up_proj.weight"].T).view(TOKENS, HEADS, -1).split([PLAIN, VALUE], dim=-1)
    queries = torch.cat([q_plain, turned(q)], dim=-1)
    keys = torch.cat([k_plain, turned(key[:, None]).expand(-1, HEADS, -1)], dim=-1)
    scores = torch.einsum("the,she->hts", queries, keys) / (PLAIN + TURNED) ** 0.5
    shares = scores.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)
    return torch.einsum("hts,shv->thv", shares, v).flatten(1) @ w["linear_proj.weight"].T


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    first, second = refusal(), refusal(Plain)
    vars(multi_latent_attention)["HAVE_TE"] = False
    made = attention(Plain)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    off = on_cpu.error(made(tokens(), None)[0][:, 0], right(dict(made.named_parameters()), tokens()[:, 0]))
    if rank == 0:
        print(f"building a latent attention: {first}; and then: {second}; REMEDY {off:.1e}", flush=True)
    return "k_channels" in first and "isinstance() arg 2" in second and off < 1e-5


if __name__ == "__main__":
    on_cpu.two_ranks(present)
