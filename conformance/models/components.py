"""Parts: what a decoder is made of. An architecture is a choice of parts and their numbers; nothing here computes.

Each part is computed in a file of its own, next to its paper: positions.py, norm.py, attention.py, feed_forward.py; and
layer.py puts them together. A layer has parts of its own, so layers of one model may differ.
"""

from dataclasses import dataclass
from typing import Literal

Projection = Literal["q", "k", "v", "o"]


@dataclass(frozen=True)
class Linear:
    """Position interpolation: every frequency is divided by ``factor``."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Llama 3.1's scaling: long wavelengths are stretched by ``factor``, short ones stay, with a slope between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN: frequencies that turn often enough within the original positions stay, slow ones are divided by ``factor``.

    attention_factor multiplies cos and sin; score_factor multiplies scores, in the code of DeepSeek only. truncate: the
    ends of the ramp are whole numbers.
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
    """Rotary positions. ``dims``: how many of a head's numbers, the first ones, are turned."""

    theta: float
    dims: int
    scaling: Linear | Llama3 | Yarn | None = None


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm. plus_one: multiplies by 1 + weight. rounds_last: rounds to the compute dtype after the weight."""

    eps: float
    plus_one: bool = False
    rounds_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Causal grouped-query attention.

    window: a query at position i sees keys j with 0 <= i - j < window; None: all of j <= i. scale multiplies q k^T.
    biases: the projections that have one. fused: q, k and v are the rows of one matrix, ``qkv_proj``. qk_norm: RMSNorm
    of q and k, over each head or over the width of all heads. softcap c: scores s become c tanh(s / c). sinks: a score
    per head that is learned, which takes part in every softmax and has no value.
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
    """Causal multi-head latent attention: keys and values of rank ``kv_rank``, queries of rank ``q_rank``, or whole.

    plain_dim: numbers of a head of q and k without positions, beside those of ``rotary``, which all heads' keys share.
    interleaved: positions turn pairs of neighbours. bias: of the projections from and to the residual stream; a whole
    q has none. norm: of the latent vectors.
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
    """down(act(gate(x)) * up(x)). fused: gate and up are the rows of one matrix, ``gate_up_proj``."""

    size: int
    activation: str
    bias: bool = False
    fused: bool = False


@dataclass(frozen=True, kw_only=True)
class ClampedMlp:
    """down((up(x) + 1) * gate(x) * sigmoid(alpha gate(x))), gate up to ``limit`` and up within it, all with biases.

    An expert of gpt-oss: of one matrix (in, out), the even columns are the gate's, the odd ones those of up.
    """

    size: int
    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A router that chooses ``chosen`` of so many ``groups`` of experts first.

    best: how many of a group's highest scores are added up, by which groups are chosen.
    """

    groups: int
    chosen: int
    best: int


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """``chosen`` of so many ``experts`` for each token, each of them gated, weighted by a softmax over all experts.

    normalised: the weights of the chosen experts are divided by their sum; then they are multiplied by ``factor``.
    router: the router's name; with ``router_bias``, it has one. router_stable: its logits are computed in the stable
    dtype as well. corrected: sigmoids instead of the softmax, and experts are chosen by these with a bias. It is a
    buffer: it is not trained, and whoever trains sets it from how often experts are chosen, or leaves it. shared: an
    expert that every token goes through, with ``shared_gate`` weighted by a sigmoid of its own.
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
    """Adapters: of each linear layer in ``targets``, by its name, two matrices of this ``rank``, whose product is added
    times ``scale``."""

    rank: int
    scale: float
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a layer has norms, by the names of their weights: before and after attention and the feed-forward.

    What comes after is normed before it is added to the residual stream.
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
    """One layer. Attention or a feed-forward of another kind is another class beside these two."""

    attention: Attention | LatentAttention
    feed_forward: GatedMlp | MixtureOfExperts
    norms: Placement = PRE


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A causal decoder.

    norm: of all norms of the model. embedding_scale multiplies the embeddings. final_softcap c: logits become
    c tanh(logits / c). As an input, padding_token gives no gradient to its embedding (torch.nn.Embedding's padding_idx,
    which transformers always sets). value_head: one number per token, by a linear without bias on the last hidden
    state, instead of logits. lora: the adapters; None without any. router_loss: what the load-balancing loss of all
    routers is multiplied by, before it is added to the loss of an optimizer step (routing.py).
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

    @property
    def routers(self) -> tuple[MixtureOfExperts, ...]:
        """The mixtures of experts, layer by layer; empty for a model without any."""
        return tuple(u.feed_forward for u in self.layers if isinstance(u.feed_forward, MixtureOfExperts))
