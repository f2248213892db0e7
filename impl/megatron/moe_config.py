"""Reads a mixture of experts from a Hugging Face configuration; does not import Megatron."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from conformance.backends.protocol import Support, Supported, Unsupported
from conformance.core.errors import UsageError
from conformance.spec.layout import Layout


class Keys(NamedTuple):
    """Names the keys of a mixture in a family's configuration; None for a key that the family does not have.

    normalised: whether the weights of the chosen experts are divided by their sum; without a key they always are.
    shared: the size of an expert that processes every token, with a gate of its own. clamped: see Mixture. best: see
    Groups; 0 for families other than DeepSeek.
    """

    experts: str
    size: str
    normalised: str | None = None
    shared: str | None = None
    chooses_layers: bool = False
    clamped: bool = False
    best: int = 0


MIXTRAL = Keys("num_local_experts", "intermediate_size")
GPT_OSS = MIXTRAL._replace(clamped=True)
QWEN3_MOE = Keys("num_experts", "moe_intermediate_size", "norm_topk_prob", chooses_layers=True)
QWEN2_MOE = QWEN3_MOE._replace(shared="shared_expert_intermediate_size")
DEEPSEEK_V2 = Keys("n_routed_experts", "moe_intermediate_size", "norm_topk_prob", best=1)
DEEPSEEK_V3 = DEEPSEEK_V2._replace(best=2)


class Groups(NamedTuple):
    """Limits a router to experts in ``chosen`` of ``many`` groups: those with the largest sums of ``best`` scores."""

    many: int
    chosen: int
    best: int


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Describes a mixture of experts, the same in all layers that have one.

    layers: numbers of these layers. size, shared: widths of an expert and of the shared one (None without). normalised:
    see Keys. loss_factor: factor of the load-balancing loss; 0 if the configuration does not switch it on. clamped:
    experts are those of gpt-oss, with biases on experts and routers and clamped activations; None in other mixtures.
    sigmoid: the scores are sigmoids instead of a softmax, and an untrained bias is added when experts are chosen.
    factor: multiplies the weights of chosen experts. shared_gate: a gate weights the shared expert's output.
    """

    layers: tuple[int, ...]
    experts: int
    chosen: int
    size: int
    normalised: bool
    shared: int | None
    loss_factor: float
    clamped: Literal[True] | None = None
    sigmoid: bool = False
    groups: Groups | None = None
    factor: float = 1.0
    shared_gate: bool = True

    @property
    def shared_name(self) -> str:
        return "mlp.shared_expert" if self.shared_gate else "mlp.shared_experts"


def mixture_of(config: dict[str, Any], keys: Keys) -> Mixture:
    """Reads a mixture. Raises UsageError for an unsupported setting and KeyError for a missing key."""
    if config.get("router_jitter_noise"):
        raise UsageError("router_jitter_noise is random; set it to 0.0 in the model's config.json")
    experts, chosen = config[keys.experts], config["num_experts_per_tok"]
    normalised = True if keys.normalised is None else bool(config[keys.normalised])
    if keys.clamped and (config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise UsageError("experts need swiglu_alpha 1.702 and swiglu_limit 7.0; use fsdp2 or deepspeed for others")
    if chosen > experts:
        raise UsageError(f"the model chooses {chosen} of {experts} experts; lower num_experts_per_tok")
    if chosen == 1 and normalised:  # a softmax over one expert has no gradient
        raise UsageError("megatron-core cannot normalise one expert's weight; use fsdp2 or deepspeed, or two experts")
    count: int = config["num_hidden_layers"]
    if keys.best:
        return _deepseek(config, keys, experts=experts, chosen=chosen, normalised=normalised)
    dense = (config.get("mlp_only_layers") or []) if keys.chooses_layers else []
    step = config.get("decoder_sparse_step", 1) if keys.chooses_layers else 1
    balanced = config.get("output_router_logits", False)
    return Mixture(
        layers=tuple(n for n in range(count) if n not in dense and (n + 1) % step == 0),
        experts=experts,
        chosen=chosen,
        size=config[keys.size],
        normalised=normalised,
        shared=None if keys.shared is None else config[keys.shared],
        loss_factor=float(config["router_aux_loss_coef"]) if balanced else 0.0,
        clamped=True if keys.clamped else None,
    )


def _deepseek(config: dict[str, Any], keys: Keys, *, experts: int, chosen: int, normalised: bool) -> Mixture:
    """Reads a configuration of DeepSeek-V2 or V3 as transformers does."""
    sigmoid = keys is DEEPSEEK_V3
    method = None if sigmoid else config["topk_method"]
    if method not in (None, "greedy", "group_limited_greedy"):
        raise UsageError(f"topk_method {method!r} is unknown; use greedy or group_limited_greedy")
    if normalised != sigmoid:  # the library always normalises sigmoids, and a softmax by taking it over chosen logits
        raise UsageError(
            f"norm_topk_prob={normalised} not built in for megatron, whose routers do not support it with "
            f"{'sigmoids' if sigmoid else 'a softmax in groups'}; use fsdp2 or deepspeed"
        )
    size: int = config[keys.size]
    return Mixture(
        layers=tuple(range(config["first_k_dense_replace"], config["num_hidden_layers"])),
        experts=experts,
        chosen=chosen,
        size=size,
        normalised=normalised,
        shared=config["n_shared_experts"] * size,
        loss_factor=0.0,
        sigmoid=sigmoid,
        groups=None if method == "greedy" else Groups(config["n_group"], config["topk_group"], keys.best),
        factor=float(config["routed_scaling_factor"]),
        shared_gate=False,
    )


class ExpertSizes(NamedTuple):
    """Holds the number of ranks with different experts, and the number of tensor-parallel ``cuts`` of each expert."""

    ranks: int
    cuts: int


def expert_sizes(layout: Layout, *, whole: bool) -> ExpertSizes:
    """Returns the expert-parallel sizes; if experts stay ``whole``, tp ranks hold different experts."""
    return ExpertSizes(layout.ep * layout.tp, 1) if whole else ExpertSizes(layout.ep, layout.tp)


def mixture_support(mixture: Mixture | None, layout: Layout) -> Support:
    """Whether megatron-core can run a model's experts in a layout."""
    if mixture is None:
        return Unsupported("the model has no experts; use ep1") if layout.ep > 1 else Supported()
    if layout.tp > 1 and "seqpar" not in layout.options:
        return Unsupported("megatron-core trains experts with tp only with sequence parallelism; add seqpar")
    sizes = expert_sizes(layout, whole=bool(mixture.clamped))
    for size in (mixture.size, mixture.shared):
        if size and size % sizes.cuts:
            return Unsupported(f"tp={layout.tp} does not divide experts of {size}; use tp1, or another divisor")
    if mixture.clamped and layout.tp > 1 and (layout.ep > 1 or mixture.experts % layout.tp):
        return Unsupported(
            f"megatron-core does not shard experts with biases, so tp ranks share out {mixture.experts} whole experts; "
            f"use a tp that divides this number, without ep"
        )
    return Supported()
