"""Declares the parts that a decoder is made of. An architecture is a choice of parts and sizes; nothing here computes.

conformance/oracle computes each part. Each layer has its own parts, so layers of one model may differ.
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
    learned score per head that takes part in every softmax and has no value.
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

    attention: Attention | LatentAttention
    feed_forward: GatedMlp | MixtureOfExperts
    norms: Placement = PRE


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Declares a causal decoder.

    norm: of all norms of the model. embedding_scale: multiplies the embeddings. final_softcap c: logits become
    c tanh(logits / c). padding_token: its embedding gets no gradient as an input (torch.nn.Embedding's padding_idx,
    which transformers always sets). value_head: a linear layer without bias maps the last hidden state to one number
    per token, instead of logits. lora: adapters, or None. router_loss: the factor of the load-balancing loss in the
    loss of an optimizer step. not_judged: features of the published training that nothing here computes.
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
    not_judged: tuple[str, ...] = ()

    @property
    def routers(self) -> tuple[MixtureOfExperts, ...]:
        """Returns the mixtures of experts, layer by layer; empty for a model without any."""
        return tuple(u.feed_forward for u in self.layers if isinstance(u.feed_forward, MixtureOfExperts))
