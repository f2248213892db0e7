"""ring_flash_attn: the ring and zigzag functions accept `window_size` and silently compute something else.

They pass it on to flash-attn for every block of keys, and flash-attn aligns a window to the end of the block that it
gets. That is right only for the rank's own block. In the block of the previous rank, a query sees keys that are whole
blocks further back than the window reaches. In zigzag, queries that see no key of a block lose their output altogether.
flash_attn_stand_in.py takes the place of flash-attn. Exit code 0: defect present. 1: gone. See
ring-attention-window.md.
"""

import flash_attn_stand_in as stand_in
import torch

stand_in.install()
WINDOW, TOKENS = 8, 64
RINGS = ("ring_flash_attn", "zigzag_ring_flash_attn", "ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen")
RIGHT = "llama3_flash_attn_varlen"  # THE REMEDY: it gathers the keys, so that windows fit


def errors(kind: str, rank: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    found, right = stand_in.distributed(kind, torch.bfloat16, rank, window)
    return found["out"], right["out"], [stand_in.error(found[name], right[name]) for name in found]


def predicted() -> torch.Tensor:
    """Full attention with the mask that ring_flash_attn_func effectively has, for one sequence over two ranks."""
    q, k, v, _ = (x.bfloat16().double().transpose(0, 1)[None] for x in stand_in.inputs(TOKENS))
    at, half = torch.arange(TOKENS), TOKENS // 2
    back, same_rank = at[:, None] - at, at[:, None] // half == at // half
    seen = torch.where(same_rank, (back >= 0) & (back < WINDOW), (back >= half) & (back < half + WINDOW))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)


def present(rank: int) -> bool:
    say, there = print if rank == 0 else lambda *_: None, True
    for kind in (*RINGS, RIGHT):
        _, _, without = errors(kind, rank, None)
        found, right, windowed = errors(kind, rank, WINDOW)
        size, should, silent = found.norm(), right.norm(), int((found.flatten(1).norm(dim=1) == 0).sum())
        say(f"{kind}_func, window {WINDOW}: |out| {size:.4f}, right {should:.4f}: {size / should:.3f}")
        named = zip(stand_in.NAMES, windowed, strict=True)
        say("  errors", *(f"{n} {e:.1e}," for n, e in named), f"without a window at most {max(without):.1e}")
        if kind == RINGS[0]:
            told = stand_in.error(found, predicted())
            said = f"{TOKENS // 2} to {TOKENS // 2 + WINDOW - 1} tokens back"
            say(f"  keys of the other rank: those {said}, as predicted but for {told:.1e}")
            there &= told < 0.01
        elif silent:
            say(f"  {silent} of {TOKENS} tokens have output 0")
        there &= max(without) < 0.01 and silent == (16 if "zigzag" in kind else 0)
        there &= max(windowed) < 0.01 if kind == RIGHT else min(windowed) > 0.1
    return there


if __name__ == "__main__":
    stand_in.two_ranks(present)
