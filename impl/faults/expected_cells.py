"""Where each fault of the catalogue changes something: one cell for each backend that has the seam.

Tests plant faults there, with fewer steps and rows, and benchmarks/mutation_score.py with all of them. A place names a
scenario and a model of the fixtures, and by backend a layout. Half precision has scenarios of its own for roll-outs,
whose clips are never reached; ``blank`` says in which precisions a fault changes nothing that could be seen, and why.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from conformance.core.paths import resolve
from conformance.matrix.cell import Cell, Handover
from conformance.spec.layout import Layout
from conformance.spec.precision import HALF_PRECISIONS, PRECISIONS, Precision, PrecisionName

DROPOUT = 0.1

LIFTED = "float64 stands for every dtype in the exact tier, so nothing is rounded"
GIVEN = "below the exact tier backends are given the choices of experts"
NOT_GIVEN = "in the exact tier backends choose experts by themselves"
OF_HALF = "what it changes runs in half precision only"
OF_FP16 = "only fp16 has a loss scale"
NO_SCENARIO = "half precision has no scenario with a clip that is reached, Dr. GRPO or GSPO"
BASE_ROUNDED = "DeepSpeed rounds a base without masters, so what was merged differs without a fault, too"
FP16_ELSEWHERE = "fp16 is for what bf16 cannot show"

IN_HALF = {"grpo": "grpo-half", "grpo-off-policy": "grpo-half", "ppo": "ppo-half"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The cheapest cell in which a fault changes anything. ``layouts``: by backend. ``dropout``: the model's
    configuration has it. ``hands_over``: it has two legs, of which the first hands this over after two steps."""

    scenario: str
    model: str
    layouts: Mapping[str, str]
    dropout: bool = False
    hands_over: Handover | None = None
    blank: Mapping[PrecisionName, str] = field(default_factory=dict)

    def scenario_in(self, precision: PrecisionName) -> str:
        """The scenario of a cell in this precision."""
        return IN_HALF.get(self.scenario, self.scenario) if precision in HALF_PRECISIONS else self.scenario

    def why_blank(self, precision: PrecisionName) -> str:
        """Why the fault cannot be seen in this precision; empty if it can be."""
        if precision == "fp16" and "bf16" not in self.blank:
            return FP16_ELSEWHERE
        return self.blank.get(precision, "")


def _sft(scenario: str, model: str, *, blank: Mapping[PrecisionName, str] | None = None, **layouts: str) -> Place:
    return Place(scenario=scenario, model=model, layouts=layouts, blank=blank or {})


def _blank(reason: str, in_tier: Callable[[Precision], bool]) -> dict[PrecisionName, str]:
    return {name: reason for name, tier in PRECISIONS.items() if in_tier(tier)}


_ROUNDED = _blank(LIFTED, lambda tier: tier.is_exact)
_GIVEN = _blank(NOT_GIVEN, lambda tier: tier.is_exact)
_REPLAYED = _blank(GIVEN, lambda tier: not tier.is_exact and not tier.is_loss_scaled)
_HALF = _blank(OF_HALF, lambda tier: not tier.is_half)
_FP16 = _blank(OF_FP16, lambda tier: not tier.is_loss_scaled)
_OVERFLOW = {"fsdp2": "dp2", "deepspeed": "dp2.zero2", "megatron": "dp2"}

_SFT = {
    "dropped-o-bias": _sft("sft-padded", "pangu", fsdp2="dp2", deepspeed="dp2.zero1", megatron="dp2"),
    "rotary-in-bf16": _sft("sft-long", "pangu", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", blank=_ROUNDED),
    "positions-not-scaled": _sft("sft-packed", "llama3", fsdp2="tp2", deepspeed="dp2.zero2", megatron="pp2"),
    "window-one-longer": _sft("sft-packed", "mistral", fsdp2="sp2", deepspeed="dp2.zero1", megatron="sp2"),
    "lost-qkv-biases": _sft("sft-packed", "qwen2", fsdp2="dp2", deepspeed="dp2.zero1", megatron="dp2"),
    "scores-not-capped": _sft("sft-packed", "gemma2", fsdp2="dp2", deepspeed="dp2.zero2"),
    "adapter-scaled-twice": _sft("sft-lora", "llama", fsdp2="tp2", deepspeed="dp2.zero2"),
    "adapter-counted-twice": _sft("sft-lora", "llama", fsdp2="dp2", deepspeed="dp2.zero1"),
    "adapters-of-a-layer-frozen": _sft("sft-lora", "llama", fsdp2="dp2", deepspeed="dp2.zero3"),
    "base-trained-too": _sft("sft-lora", "llama", fsdp2="dp2", deepspeed="dp2.zero2"),
    "sinks-dropped": _sft("sft-packed", "gpt-oss", fsdp2="sp2", deepspeed="dp2.zero2", megatron="tp2.seqpar"),
    "leaking-documents": _sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="tp2"),
    "local-token-mean": _sft("sft-padded", "pangu", fsdp2="dp2", deepspeed="dp2.zero3", megatron="dp2.zero1"),
    "cleared-gradients": _sft("sft-packed", "llama", fsdp2="dp2"),
    "replicas-counted": _sft("sft-sgd", "llama", fsdp2="tp2.seqpar"),
    "inverted-clip": _sft("sft-sgd", "llama", fsdp2="dp2"),
    "clip-always": _sft("sft-packed", "llama", fsdp2="dp2"),
    "clip-on-one-replica": _sft("sft-sgd", "llama", fsdp2="dp2.rep2"),
    "schedule-per-micro-batch": _sft("sft-sgd", "llama", fsdp2="dp2", megatron="dp2"),
    "copied-micro-batch": _sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="pp2"),
    "unreduced-replicas": _sft("sft-sgd", "llama", deepspeed="dp2.zero0", megatron="dp2"),
    "clip-never": _sft("sft-sgd", "llama", deepspeed="dp2.zero3", megatron="dp2"),
    "unmarked-shards": _sft("sft-padded", "llama", deepspeed="tp2.zero0", blank=_HALF),
    "lost-loss-scale": _sft("sft-packed", "llama", deepspeed="dp2.zero0", blank=_FP16),
    "overflow-on-one-rank": _sft("sft-overflow", "llama", fsdp2="dp2", blank=_FP16),
    "skip-counted-by-schedule": _sft("sft-overflow", "llama", **_OVERFLOW, blank=_FP16),
    "skip-counted-by-optimizer": _sft("sft-overflow", "llama", **_OVERFLOW, blank=_FP16),
    "scale-not-halved": _sft("sft-overflow", "llama", **_OVERFLOW, blank=_FP16),
    "scale-never-grows": _sft("sft-overflow", "llama", **_OVERFLOW, blank=_FP16),
    "overflow-stays": _sft("sft-overflow", "llama", deepspeed="dp2.zero1.offload", blank=_FP16),
    "step-at-setup": _sft("sft-padded", "llama", deepspeed="dp2.zero0", blank=_HALF),
    "summed-in-bf16": _sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", blank=_HALF),
    "no-weight-decay": _sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
    "default-betas": _sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
    "moments-in-bf16": _sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", blank=_ROUNDED),
    "local-positions": _sft("sft-packed", "llama", fsdp2="sp2", deepspeed="sp2.zero1", megatron="sp2"),
    "rolled-labels": _sft("sft-packed", "llama", fsdp2="sp2", deepspeed="ulysses2.zero2", megatron="sp2"),
    "dropped-last-token": _sft("sft-packed", "llama", fsdp2="sp2", deepspeed="sp2.zero1", megatron="sp2"),
    "merged-in-bf16": _sft("sft-packed", "llama", fsdp2="sp2.ring", deepspeed="sp2.ring.zero1", megatron="sp2.ring"),
    "divided-by-world": _sft("sft-sgd", "llama", fsdp2="sp2", deepspeed="tp2.zero1", megatron="tp2"),
    "ring-not-reduced": _sft("sft-sgd", "llama", fsdp2="sp2"),
    "ring-not-counted": _sft("sft-sgd", "llama", fsdp2="sp2", deepspeed="sp2.zero1", megatron="sp2"),
    "concatenated-qkv": _sft("sft-padded", "llama", megatron="dp1"),
    "o-bias-per-rank": _sft("sft-padded", "pangu", megatron="tp2"),
    "batched-p2p": _sft("sft-packed", "llama", megatron="pp2.vpp2"),
    "stage-local-layers": _sft("sft-padded", "llama", megatron="pp2"),
    "norms-not-summed": _sft("sft-sgd", "llama", megatron="tp2.seqpar"),
    "broken-tie": _sft("sft-sgd", "qwen3", megatron="pp2"),
    "router-not-reduced": _sft("sft-packed", "qwen3-moe", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
    "experts-normalised-otherwise": _sft("sft-packed", "qwen3-moe", fsdp2="dp2", deepspeed="dp2.zero1", megatron="ep2"),
    "shared-expert-twice": _sft("sft-packed", "qwen2-moe", fsdp2="tp2", deepspeed="dp2.zero2", megatron="ep2"),
    "router-loss-dropped": _sft("sft-packed", "mixtral", fsdp2="dp2", deepspeed="dp2.zero2", megatron="pp2"),
    "router-loss-of-micro-batch": _sft("sft-packed", "qwen3-moe", fsdp2="dp2", deepspeed="dp2.zero3", megatron="pp2"),
    "z-loss-of-micro-batch": _sft("sft-z-loss", "qwen2-moe", fsdp2="dp2", deepspeed="dp2.zero2", megatron="pp2"),
    "replay-of-another-pass": _sft(
        "grpo", "qwen3-moe", fsdp2="dp2", deepspeed="dp2.zero2", megatron="ep2", blank=_GIVEN
    ),
    "tokens-off-by-one": _sft("sft-packed", "qwen3-moe", fsdp2="ep2"),
    "experts-not-divided": _sft("sft-packed", "qwen2-moe", fsdp2="ep2"),
    "permutation-off-by-one": _sft("sft-packed", "qwen3-moe", megatron="ep2"),
    "experts-averaged-over-their-ranks": _sft("sft-packed", "qwen2-moe", megatron="ep2"),
    "groups-not-limited": _sft(
        "sft-packed", "deepseek-v3", fsdp2="dp2", deepspeed="dp2.zero2", megatron="ep2", blank=_REPLAYED
    ),
    "correction-bias-not-loaded": _sft("sft-packed", "deepseek-v3", fsdp2="dp2", deepspeed="dp2.zero1", megatron="dp2"),
    "correction-bias-moved": _sft("sft-packed", "deepseek-v3", megatron="dp2"),
    "shared-key-not-summed": _sft("sft-packed", "deepseek-v2", megatron="tp2.seqpar"),
    "duplicates-counted": _sft("sft-sgd", "llama", megatron="tp2"),
}

RL_LAYOUTS = {"fsdp2": "dp2", "deepspeed": "dp2.zero2", "megatron": "dp2"}
WHOLE = {"fsdp2": "dp2", "deepspeed": "dp2.zero0", "megatron": "dp2"}  # gradients lie where parameters have them
OF_ATTENTION = {"fsdp2": "dp2", "deepspeed": "dp2.zero2"}  # dropout of attention: Megatron's is a ring, which has none
CUT = {"fsdp2": "tp2.losspar", "megatron": "tp2"}  # logits are cut along the vocabulary


def _rl(scenario: str, layouts: Mapping[str, str] = RL_LAYOUTS, *, dropout: bool = False, half: bool = True) -> Place:
    blank = {} if half else _blank(NO_SCENARIO, lambda tier: tier.is_half)
    return Place(scenario=scenario, model="llama", layouts=layouts, dropout=dropout, blank=blank)


_RL = {
    "temperature-not-in-looks": _rl("grpo"),
    "policy-as-reference": _rl("grpo"),
    "old-of-every-update": _rl("grpo"),
    "groups-by-position": _rl("grpo-off-policy"),
    "biased-deviation": _rl("grpo"),
    "deviation-left-out": _rl("grpo"),
    "deviation-in-dr-grpo": _rl("grpo-off-policy", half=False),
    "rloo-with-itself": _rl("gspo", half=False),
    "reward-at-first-token": _rl("ppo"),
    "penalty-added": _rl("ppo"),
    "values-off-by-one": _rl("ppo"),
    "gae-across-documents": _rl("ppo"),
    "bootstrapped-end": _rl("ppo"),
    "whitened-by-response": _rl("ppo"),
    "sequence-mean-for-token-mean": _rl("grpo"),
    "token-mean-for-sequence-mean": _rl("gspo", half=False),
    "mean-of-micro-batch": _rl("grpo"),
    "divided-by-mini-batches": _rl("grpo-off-policy"),
    "padding-in-mean": _rl("grpo"),
    "mask-lost": _rl("ppo"),
    "prompt-trained": _rl("grpo"),
    "mask-off-by-one": _rl("grpo"),
    "metrics-of-one-rank": _rl("grpo"),
    "temperature-not-in-training": _rl("grpo-off-policy"),
    "ratio-inverted": _rl("grpo"),
    "clip-sides-exchanged": _rl("grpo", half=False),
    "dual-clip-of-positive": _rl("grpo-off-policy"),
    "gspo-without-length": _rl("gspo", half=False),
    "importance-not-truncated": _rl("gspo", half=False),
    "importance-inverted": _rl("gspo", half=False),
    "kl-sign": _rl("grpo"),
    "k1-for-k3": _rl("grpo"),
    "kl-subtracted": _rl("grpo-off-policy"),
    "kl-without-gradient": _rl("grpo-off-policy"),
    "entropy-sign": _rl("grpo"),
    "entropy-without-gradient": _rl("grpo"),
    "local-softmax-gradient": _rl("grpo-off-policy", CUT),
    "label-holders-only": _rl("grpo-off-policy", CUT),
    "optimistic-value-clip": _rl("ppo", half=False),
    "logprobs-in-train-mode": _rl("grpo", OF_ATTENTION, dropout=True),
    "dropout-in-updates": _rl("grpo", OF_ATTENTION, dropout=True),
    "dropout-by-default": _rl("grpo", {"megatron": "dp2"}),
    "critic-leaks-into-policy": _rl("ppo", WHOLE),
}

HANDED_LAYOUTS = {"fsdp2": "tp2", "deepspeed": "dp2.zero2", "megatron": "pp2"}
HANDED_TO = {"fsdp2": "dp2", "deepspeed": "dp2.zero3", "megatron": "tp2"}


def _handed(
    what: Handover = "state", *, model: str = "llama", blank: Mapping[PrecisionName, str] | None = None
) -> Place:
    return Place(scenario="sft-warmup", model=model, layouts=HANDED_LAYOUTS, hands_over=what, blank=blank or {})


_HANDOVER = {
    "moments-not-loaded": _handed(),
    "steps-not-loaded": _handed(),
    "moments-exchanged": _handed(),
    "moments-transposed": _handed(),
    "moments-of-another-layer": _handed(),
    "weights-of-another-layer": _handed(),
    "gate-for-up": _handed(),
    "masters-from-bf16": _handed(blank=_ROUNDED),
    "schedule-restarted": _handed(),
    "loss-scale-forgotten": _handed(blank=_FP16),
    "one-count-for-all": _handed(),
    "generators-of-first-rank": _handed("checkpoint"),
    "stale-shard": _handed("export"),
    "untied-export": _handed("export", model="qwen3"),
    "merged-without-scale": Place(
        scenario="sft-lora",
        model="llama",
        layouts={"fsdp2": "tp2", "deepspeed": "dp2.zero2"},
        hands_over="merge",
        blank=_blank(BASE_ROUNDED, lambda tier: tier.is_half),
    ),
}

PLACES: Mapping[str, Place] = {**_SFT, **_RL, **_HANDOVER}


def with_handover(cell: Cell, what: Handover) -> Cell:
    """The same in two legs: after two steps ``what`` goes to another layout of the same backend, a checkpoint to the
    same, in which alone random generators go on."""
    (leg,) = cell.legs
    first = replace(leg, steps=2, save=what)
    layout = leg.layout if what == "checkpoint" else Layout.parse(HANDED_TO[leg.backend.name])
    second = replace(leg, layout=layout, steps=leg.steps - 2)
    return replace(cell, legs=(first, second), program=what)


def with_dropout(cell: Cell, root: Path) -> Cell:
    """The same on a copy of its model, made under ``root``, whose configuration has dropout in attention."""
    scenario = cell.scenario
    folder = root / f"{scenario.model_name}-dropout"
    with contextlib.suppress(FileExistsError):
        shutil.copytree(resolve(scenario.model), folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": DROPOUT}), encoding="utf-8")
    data = replace(scenario.data, path=scenario.data.path.replace("{model}", scenario.model_name))
    return replace(cell, scenario=replace(scenario, model=str(folder), data=data))
