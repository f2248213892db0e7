"""ring_flash_attn's adapter for transformers: it does not import, does not install, and its sliding window is wrong.

It imports a name that transformers 5.23 does not have, and distinguishes versions of transformers by the number of
parameters of `_flash_attention_forward`. If both are worked around, its window is one token too large, and there is no
window at all if the tokens of one rank fit into it. flash_attn_stand_in.py takes the place of flash-attn. Exit code 0:
defect present. 1: gone. See ring-attention-hf-adapter.md.
"""

import importlib
import inspect
from typing import Any

import flash_attn_stand_in as stand_in
import torch
import transformers.modeling_flash_attention_utils as transformers_flash
from transformers import AttentionInterface, Gemma3ForCausalLM, Gemma3TextConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

TOKENS = 64
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"]}


stand_in.install(transformers_name=False)
try:
    adapter: Any = importlib.import_module("ring_flash_attn.adapters.hf_adapter")
    SAID = []
except ImportError as refusal:
    SAID = [f"import: {str(refusal).partition(' (')[0]}"]
    stand_in.install()  # with the name that is missing
    adapter = importlib.import_module("ring_flash_attn.adapters.hf_adapter")


def past_the_refusal() -> None:
    count = len(inspect.signature(transformers_flash._flash_attention_forward).parameters)
    known = [len(inspect.signature(f).parameters) for f in adapter.create_ring_flash_attention_forward(None, 1)]
    try:
        adapter.substitute_hf_flash_attn(None, 1)
    except ValueError as refusal:
        SAID.append(f"substitute_hf_flash_attn: {str(refusal).partition('. ')[0]}")
        SAID.append(f"parameters of _flash_attention_forward: {count}; the adapter knows {known}")
        adapter.check_params = lambda _, own: own.__name__ == "_flash_attention_forward_v3"
        adapter.substitute_hf_flash_attn(None, 1)


def remedy(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, sliding_window: Any, **_: Any) -> Any:
    """THE REMEDY: an attention function of our own, with the window that transformers means."""
    streams = (x[0].transpose(0, 1) for x in (q, k, v))
    window = (sliding_window - 1, 0) if sliding_window else (-1, -1)
    kwargs = {"softmax_scale": scaling, "window_size": window, "causal": True, "heads_k_stride": 1}
    return adapter.llama3_flash_attn_varlen_func(*streams, **kwargs, **adapter.DATA_PARAMS)[None], None


def gradients(attention: str, window: int, rank: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients over two ranks; without a rank, in this process alone."""
    torch.manual_seed(0)
    model: Any = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **HEADS, sliding_window=window)).double()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.config._attn_implementation = attention
    ids, at = torch.randint(0, 96, (TOKENS + 1,)), torch.arange(TOKENS)
    own = slice(None) if rank is None else slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2)
    logits = model(input_ids=ids[at][None, own], position_ids=at[None, own], use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, ids[1:][own], reduction="sum") / TOKENS
    loss.backward()
    pieces = [loss.detach(), *(p.grad for p in model.parameters())]
    for piece in pieces if rank is not None else ():
        torch.distributed.all_reduce(piece)
    return float(pieces[0]), dict(zip([n for n, _ in model.named_parameters()], pieces[1:], strict=True))


def present(rank: int) -> bool:
    past_the_refusal()
    say, there = print if rank == 0 else lambda *_: None, len(SAID) == 3
    say("\n".join(SAID))
    adapter.update_ring_flash_attn_params(torch.tensor([0, TOKENS], dtype=torch.int32), None)
    AttentionInterface.register("ours", remedy)
    ALL_MASK_ATTENTION_FUNCTIONS.register("ours", lambda *_, **__: None)
    for window, means in ((8, 9), (40, TOKENS)):
        loss, right = gradients("eager", window, None)
        bad_loss, wrong = gradients("flash_attention_2", window, rank)
        told, good = gradients("eager", means, None)[1], gradients("ours", window, rank)[1]
        pairs = (wrong, right), (wrong, told), (good, right)
        error, rest, fixed = ({n: stand_in.error(found[n], x[n]) for n in right} for found, x in pairs)
        worst = max(error, key=lambda n: error[n])
        size, should = wrong[worst].norm(), right[worst].norm()
        say(f"sliding_window {window}: |gradient| of {worst} {size:.6f}, right {should:.6f}: {size / should:.3f}")
        off = stand_in.norm(wrong) / stand_in.norm(right) - 1
        say(f"  error {error[worst]:.1e}; loss {bad_loss / loss - 1:.1e} off, gradient norm {off:.1e}")
        apart, repaired = max(rest.values()), max(fixed.values())
        say(f"  one process, sliding_window {means}: the same but for {apart:.0e}; with the remedy {repaired:.0e} off")
        there &= error[worst] > 0.01 and apart < 1e-5 and repaired < 1e-5
    return there


if __name__ == "__main__":
    stand_in.two_ranks(present)
