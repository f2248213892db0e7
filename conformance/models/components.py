"""Declares the parts that a decoder is made of. An architecture is a choice of parts and sizes; nothing here computes.

conformance/oracle computes each part. Each layer has its own parts, so layers of one model may differ.
Names and shapes of parameters are Hugging Face's: the weight of a Linear is (out, in), and experts are stacked.
"""

from dataclasses import dataclass
from typing import Literal

Projection = Literal["q", "k", "v", "o"]


@dataclass(frozen=True)
class Linear:
    """Interpolates positions: every frequency is divided by ``factor``."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Scales as Llama 3.1: long wavelengths are stretched by ``factor``, short ones stay, with a slope between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Scales as YaRN: frequencies with enough turns within the original positions stay, slow ones are divided.

    factor: divides slow frequencies. attention_factor: multiplies cos and sin. score_factor: multiplies scores, for
    DeepSeek only. truncate: whether the ends of the ramp are whole numbers.
    """

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int
    truncate: bool
    score_factor: float = 1.0


@dataclass(frozen=True)
class Rotary:
    """Rotates the first ``dims`` dimensions of each head by position."""

    theta: float
    dims: int
    scaling: Linear | Llama3 | Yarn | None = None


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Declares RMSNorm. plus_one: multiplies by 1 + weight. rounds_last: rounds to the compute dtype last."""

    eps: float
    plus_one: bool = False
    rounds_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Declares causal grouped-query attention.

    window: a query at position i sees keys j with 0 <= i - j < window; None: all j <= i. scale: multiplies q k^T.
    biases: the projections that have one. fused: q, k and v are the rows of one matrix, ``qkv_proj``. qk_norm: RMSNorm
    of q and k, over each head or over the width of all heads. softcap c: scores s become c tanh(s / c). sinks: a
    learned score per head that takes part in every softmax and has no value. gated: a sigmoid of a second half of each
    head's rows in ``q_proj`` multiplies the head's output.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    scale: float
    window: int | None = None
    biases: tuple[Projection, ...] = ()
    fused: bool = False
    qk_norm: Literal["head", "width"] | None = None
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Declares causal multi-head latent attention, with keys and values of rank ``kv_rank``.

    q_rank: rank of the queries; None for a full matrix. plain_dim: dimensions of a head of q and k without positions;
    those of ``rotary`` come in addition, and all heads share them in k. interleaved: positions turn neighbouring pairs.
    bias: whether projections from and to the residual stream have one; a full q projection has none. norm: of the
    latent vectors.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    plain_dim: int
    value_dim: int
    rotary: Rotary
    scale: float
    norm: Norm
    interleaved: bool = True
    bias: bool = False

    @property
    def window(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """Declares linear attention by a gated delta rule, whose state runs from token to token.

    heads: of q and k, each shared by consecutive value heads. kernel: tokens that the causal convolution over q, k and
    v sees. norm: of each value head, before its gate.
    """

    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm: Norm
    rotary: None = None
    window: None = None


@dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """Declares down(act(gate(x)) * up(x)). fused: gate and up are the rows of one matrix, ``gate_up_proj``."""

    size: int
    activation: str
    bias: bool = False
    fused: bool = False


@dataclass(frozen=True, kw_only=True)
class ClampedMlp:
    """Declares an expert of gpt-oss: down((up(x) + 1) * gate(x) * sigmoid(alpha gate(x))), with biases.

    gate is clamped from above at ``limit``, up to +-``limit``. They are the even and odd columns of one matrix (in,
    out).
    """

    size: int
    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Declares a router that first chooses ``chosen`` of ``groups`` groups of experts.

    best: how many of a group's highest scores are summed to rank the groups.
    """

    groups: int
    chosen: int
    best: int


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Declares ``chosen`` of ``experts`` gated experts per token, weighted by a softmax over all experts.

    normalised: weights of the chosen experts are divided by their sum. factor: then multiplies them. router: its name.
    router_bias: whether it has a bias. router_stable: whether its matrix product is in the stable dtype. corrected:
    sigmoids replace the softmax, and a bias is added for the choice only; the bias is a buffer that the trainer may
    update from the load of experts. shared: an expert for every token; with ``shared_gate``, a sigmoid weights it.
    """

    experts: int
    chosen: int
    expert: GatedMlp | ClampedMlp
    normalised: bool
    router: str = "gate"
    router_bias: bool = False
    router_stable: bool = False
    corrected: bool = False
    grouped: Grouped | None = None
    factor: float = 1.0
    shared: GatedMlp | None = None
    shared_gate: bool = True

    @property
    def shared_name(self) -> str:
        return "mlp.shared_expert" if self.shared_gate else "mlp.shared_experts"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Declares adapters: each linear layer in ``targets`` gets two matrices of this ``rank``.

    Their product times ``scale`` is added to the weight.
    """

    rank: int
    scale: float
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Names the norms of a layer by their weights, before and after attention and the feed-forward.

    A norm after a block applies before the sum with the residual stream.
    """

    before_attention: str | None = None
    after_attention: str | None = None
    before_feed_forward: str | None = None
    after_feed_forward: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        places = (self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward)
        return tuple(name for name in places if name is not None)


PRE = Placement(before_attention="input_layernorm", before_feed_forward="post_attention_layernorm")
POST = Placement(after_attention="post_attention_layernorm", after_feed_forward="post_feedforward_layernorm")
SANDWICH = Placement(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Declares one layer. Another kind of attention or feed-forward needs a class of its own."""

    attention: Attention | LatentAttention | GatedDeltaNet
    feed_forward: GatedMlp | MixtureOfExperts
    norms: Placement = PRE


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Declares a causal decoder.

    norm: of all norms of the model. embedding_scale: multiplies the embeddings. final_softcap c: logits become
    c tanh(logits / c). padding_token: its embedding gets no gradient as an input (torch.nn.Embedding's padding_idx,
    which transformers always sets). value_head: a linear layer without bias maps the last hidden state to one number
    per token, instead of logits. lora: adapters, or None. router_loss: the factor of the load-balancing loss in the
    loss of an optimizer step. mtp: the layers of modules for multi-token prediction, which an objective may train.
    not_judged: features of the published training that nothing here computes.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    tied: bool
    padding_token: int | None
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    value_head: bool = False
    lora: Lora | None = None
    router_loss: float = 0.0
    mtp: tuple[Layer, ...] = ()
    not_judged: tuple[str, ...] = ()

    @property
    def routers(self) -> tuple[MixtureOfExperts, ...]:
        """Returns the mixtures of experts, layer by layer; empty for a model without any."""
        return tuple(u.feed_forward for u in (*self.layers, *self.mtp) if isinstance(u.feed_forward, MixtureOfExperts))


CORRECTION = "e_score_correction_bias"  # the only buffer of a model; it is loaded and not trained


def parameter_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of all parameters and buffers, in the model's order."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for i, layer in enumerate((*a.layers, *a.mtp)):
        own = _layer_shapes(layer, a.hidden_size)
        if i >= len(a.layers):
            own |= {f"{name}.weight": (a.hidden_size,) for name in ("enorm", "hnorm", "shared_head.norm")}
            own["eh_proj.weight"] = (a.hidden_size, 2 * a.hidden_size)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (a.hidden_size,)
    if a.value_head:
        shapes["score.weight"] = (1, a.hidden_size)
    elif not a.tied:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes


def _layer_shapes(layer: Layer, hidden: int) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of a layer's parameters, in the model's order, without ``model.layers.N.``."""
    match layer.attention:
        case Attention() as a:
            mixer = _attention_shapes(a, hidden)
        case LatentAttention() as a:
            mixer = _latent_shapes(a, hidden)
        case GatedDeltaNet() as a:
            mixer = _delta_shapes(a, hidden)
    return {
        **mixer,
        **_feed_forward_shapes(layer.feed_forward, hidden),
        **{f"{name}.weight": (hidden,) for name in layer.norms.names},
    }


def _attention_shapes(a: Attention, hidden: int) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = a.heads * a.head_dim, a.kv_heads * a.head_dim
    q_rows = 2 * q_size if a.gated else q_size
    rows = {"qkv": q_rows + 2 * kv_size} if a.fused else {"q": q_rows, "k": kv_size, "v": kv_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in {**{name: (n, hidden) for name, n in rows.items()}, "o": (hidden, q_size)}.items():
        shapes[f"self_attn.{name}_proj.weight"] = size
        if name in a.biases:
            shapes[f"self_attn.{name}_proj.bias"] = size[:1]
    if a.sinks:
        shapes["self_attn.sinks"] = (a.heads,)
    if a.qk_norm:
        widths = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (q_size, kv_size)
        shapes |= {f"self_attn.{x}_norm.weight": (width,) for x, width in zip("qk", widths, strict=True)}
    return shapes


def _latent_shapes(a: LatentAttention, hidden: int) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = a.heads * (a.plain_dim + a.rotary.dims), a.heads * (a.plain_dim + a.value_dim)
    low_rank = {"kv_a_proj_with_mqa": (a.kv_rank + a.rotary.dims, hidden), "kv_b_proj": (kv_size, a.kv_rank)}
    if a.q_rank is None:
        matrices = {"q_proj": (q_size, hidden), **low_rank}
    else:
        matrices = {"q_a_proj": (a.q_rank, hidden), "q_b_proj": (q_size, a.q_rank), **low_rank}
    matrices["o_proj"] = (hidden, a.heads * a.value_dim)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in matrices.items():
        shapes[f"self_attn.{name}.weight"] = size
        if a.bias and name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            shapes[f"self_attn.{name}.bias"] = size[:1]
    shapes["self_attn.kv_a_layernorm.weight"] = (a.kv_rank,)
    return shapes if a.q_rank is None else {**shapes, "self_attn.q_a_layernorm.weight": (a.q_rank,)}


def _delta_shapes(a: GatedDeltaNet, hidden: int) -> dict[str, tuple[int, ...]]:
    keys, values = a.heads * a.key_dim, a.value_heads * a.value_dim
    return {
        "linear_attn.dt_bias": (a.value_heads,),
        "linear_attn.A_log": (a.value_heads,),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, a.kernel),
        "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * a.value_heads, hidden),
        "linear_attn.norm.weight": (a.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _feed_forward_shapes(part: GatedMlp | MixtureOfExperts, hidden: int) -> dict[str, tuple[int, ...]]:
    if isinstance(part, GatedMlp):
        return _gated_shapes(part, hidden, "mlp")
    shapes: dict[str, tuple[int, ...]] = {f"mlp.{part.router}.weight": (part.experts, hidden)}
    if part.corrected:
        shapes[f"mlp.{part.router}.{CORRECTION}"] = (part.experts,)
    if part.router_bias:
        shapes[f"mlp.{part.router}.bias"] = (part.experts,)
    shapes |= {f"mlp.experts.{name}": (part.experts, *size) for name, size in expert_shapes(part.expert, hidden)}
    if part.shared:
        shapes |= _gated_shapes(part.shared, hidden, part.shared_name)
        if part.shared_gate:
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def expert_shapes(expert: GatedMlp | ClampedMlp, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    """Returns names and shapes of one expert, without the dimension that counts experts."""
    into, size = 2 * expert.size, expert.size
    if isinstance(expert, GatedMlp):
        return [("gate_up_proj", (into, hidden)), ("down_proj", (hidden, size))]
    biases: list[tuple[str, tuple[int, ...]]] = [("gate_up_proj_bias", (into,)), ("down_proj_bias", (hidden,))]
    return [("gate_up_proj", (hidden, into)), ("down_proj", (size, hidden)), *biases]


def _gated_shapes(mlp: GatedMlp, hidden: int, name: str) -> dict[str, tuple[int, ...]]:
    into = {"gate_up_proj": 2 * mlp.size} if mlp.fused else {"gate_proj": mlp.size, "up_proj": mlp.size}
    sizes = {**{part: (rows, hidden) for part, rows in into.items()}, "down_proj": (hidden, mlp.size)}
    shapes: dict[str, tuple[int, ...]] = {}
    for part, size in sizes.items():
        shapes[f"{name}.{part}.weight"] = size
        if mlp.bias:
            shapes[f"{name}.{part}.bias"] = size[:1]
    return shapes
