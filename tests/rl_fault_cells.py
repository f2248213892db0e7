"""The cells in which faults of reinforcement learning are planted, for the two files that test faults.

A cell is small: as few rows as whole groups fit into, and one step, unless a fault shows at a later one only.
"""

from typing import Any

from cells import BACKENDS, cell_of

from conformance.plan.cell import Cell

# The cheapest scenario in which each fault changes anything.
SCENARIOS = {
    "temperature-not-in-looks": "grpo",
    "policy-as-reference": "grpo",
    "old-of-every-update": "grpo",
    "groups-by-position": "grpo-off-policy",
    "biased-deviation": "grpo",
    "deviation-left-out": "grpo",
    "deviation-in-dr-grpo": "grpo-off-policy",
    "rloo-with-itself": "gspo",
    "reward-at-first-token": "ppo",
    "penalty-added": "ppo",
    "values-off-by-one": "ppo",
    "gae-across-documents": "ppo",
    "bootstrapped-end": "ppo",
    "whitened-by-response": "ppo",
    "sequence-mean-for-token-mean": "grpo",
    "token-mean-for-sequence-mean": "gspo",
    "mean-of-micro-batch": "grpo",
    "divided-by-mini-batches": "grpo-off-policy",
    "padding-in-mean": "grpo",
    "mask-lost": "ppo",
    "prompt-trained": "grpo",
    "mask-off-by-one": "grpo",
    "metrics-of-one-rank": "grpo",
    "temperature-not-in-training": "grpo-off-policy",
    "ratio-inverted": "grpo",
    "clip-sides-exchanged": "grpo",
    "dual-clip-of-positive": "grpo-off-policy",
    "gspo-without-length": "gspo",
    "importance-not-truncated": "gspo",
    "importance-inverted": "gspo",
    "kl-sign": "grpo",
    "k1-for-k3": "grpo",
    "kl-subtracted": "grpo-off-policy",
    "kl-without-gradient": "grpo-off-policy",
    "entropy-sign": "grpo",
    "entropy-without-gradient": "grpo",
    "local-softmax-gradient": "grpo-off-policy",
    "label-holders-only": "grpo-off-policy",
    "optimistic-value-clip": "ppo",
    "logprobs-in-train-mode": "grpo",
    "dropout-in-updates": "grpo",
    "dropout-by-default": "grpo",
    "critic-leaks-into-policy": "ppo",
}
ROWS = {"grpo": 6, "grpo-off-policy": 4, "gspo": 4, "ppo": 6}
# Steps until a fault shows where one is not enough: from the second update of a roll-out on.
LATER = {
    "old-of-every-update": 2,
    "metrics-of-one-rank": 2,
    "clip-sides-exchanged": 3,
    "gspo-without-length": 2,
    "optimistic-value-clip": 2,
    "critic-leaks-into-policy": 2,
}
# Loss and gradient norm of the first step, of policy and critic, are within a percent of what they should be.
LOSS_AND_NORM_BLIND = {
    "policy-as-reference",
    "old-of-every-update",
    "metrics-of-one-rank",
    "ratio-inverted",
    "clip-sides-exchanged",
    "gspo-without-length",
    "kl-sign",
    "kl-without-gradient",
    "entropy-without-gradient",
    "optimistic-value-clip",
    "critic-leaks-into-policy",
}
LAYOUTS = {"fsdp2": "dp2", "deepspeed": "dp2.zero2", "megatron": "dp2"}
CUT = {"fsdp2": "tp2.losspar", "megatron": "tp2"}  # logits are cut along the vocabulary
OF_CUT = {"local-softmax-gradient", "label-holders-only"}
OF_DROPOUT = {"logprobs-in-train-mode", "dropout-in-updates"}  # of attention, which Megatron's, a ring, has none of
WHOLE = {"fsdp2": "dp2", "deepspeed": "dp2.zero0", "megatron": "dp2"}  # gradients lie where parameters have them
# What depends on how ranks are arranged, or on a function that each backend has for itself.
ON_EACH_BACKEND = {
    *OF_CUT,
    *OF_DROPOUT,
    "dropout-by-default",
    "critic-leaks-into-policy",
    "temperature-not-in-training",
    "values-off-by-one",
}


def layout_of(backend: str, name: str) -> str | None:
    """Where a fault is planted; None if the backend has nothing that it could change."""
    if name in OF_CUT:
        return CUT.get(backend)
    if name in OF_DROPOUT:
        return None if backend == "megatron" else LAYOUTS[backend]
    if name == "dropout-by-default":
        return LAYOUTS[backend] if backend == "megatron" else None
    return WHOLE[backend] if name == "critic-leaks-into-policy" else LAYOUTS[backend]


def cells() -> list[tuple[str, str]]:
    """(backend, fault), the full product."""
    return [(backend, name) for name in SCENARIOS for backend in BACKENDS if layout_of(backend, name)]


def in_a_fast_run(backend: str, name: str) -> bool:
    """Each fault on one backend, or on all of them. Two take turns; cells of the third take twice as long."""
    turn = ("fsdp2", "deepspeed")[list(SCENARIOS).index(name) % 2]
    return name in ON_EACH_BACKEND or backend == turn


def rl_cell(backend: str, scenario: str, layout: str, *faults: str, **overrides: Any) -> Cell:
    return cell_of(backend, scenario, "llama", layout, "exact", *faults, rows=ROWS[scenario], **overrides)
