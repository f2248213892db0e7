"""From a Hugging Face ``config.json`` to the few numbers that decide what a decoder computes.

Serves claim 6: no key that changes the mathematics is ever ignored. A key that is neither read by the model's family
nor listed in INERT is an error, so a new feature stops the oracle instead of making it wrong in silence.

A fifth family is a function that returns an Architecture, and a line in FAMILIES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.reading import read_json
from conformance.validation import UsageError, shown

# Keys that do not change the forward pass of a training step.
INERT = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "model_type",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
# No model comes near these: a larger number is a mistake in the file, and would fill the memory before it is noticed.
LARGEST: dict[str, float] = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**14,
    "num_hidden_layers": 2**12,
    "max_window_layers": 2**12,
    "sliding_window": 2**31,
    "sliding_window_pattern": 2**12,
    "_sliding_window_pattern": 2**12,
    "rms_norm_eps": 1.0,
}
LARGEST_NUMBER = 1e12  # where nothing else is said: bases, scales
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Layer:
    """``window``: a query at position i sees keys j with 0 <= i - j < window; None: all of j <= i."""

    window: int | None
    rope_theta: float


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A causal decoder with rotary positions, RMSNorm, grouped-query attention and a gated MLP.

    attention_bias: biases on q, k, v and o. qk_norm: RMSNorm over each head of q and k. norm_plus_one: norms multiply
    by 1 + weight. sandwich_norms: a second norm after attention and after the MLP. attention_scale multiplies q k^T,
    embedding_scale the embeddings. final_softcap c: logits become c tanh(logits / c). As an input, padding_token gives
    no gradient to its embedding (torch.nn.Embedding's padding_idx, which transformers always sets). value_head: one
    number per token, by a linear without bias on the last hidden state, instead of logits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    norm_eps: float
    activation: str
    attention_scale: float
    tied: bool
    padding_token: int | None
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_plus_one: bool = False
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    value_head: bool = False


class Config:
    """Values of a config.json, and which of them were read."""

    def __init__(self, values: dict[str, Any], source: str, *, disable_dropout: bool) -> None:
        self._values = values
        self._source = source
        self._disable_dropout = disable_dropout
        self._read: set[str] = set(INERT)

    def take(self, key: str, *default: Any) -> Any:
        """The value of ``key``; ``default`` where it is absent or null. UsageError without either."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None and not default:
            raise self.error(f"has no {key!r}; add it")
        return default[0] if value is None else value

    def size(self, key: str, *default: int | None, least: int = 1) -> Any:
        """A whole number up to LARGEST, or the default None. UsageError for anything else."""
        value = self.take(key, *default)
        if value is not None and (type(value) is not int or not least <= value <= LARGEST[key]):
            raise self.error(f"sets {key}={shown(value)}; it has to be a whole number from {least} to {LARGEST[key]}")
        return value

    def number(self, key: str, *default: None) -> Any:
        """A positive number, or the default None. UsageError for anything else."""
        value = self.take(key, *default)
        return None if value is None else self.positive(value, key)

    def positive(self, value: Any, what: str) -> float:
        """``value``, which is a positive number up to LARGEST. UsageError for anything else."""
        largest = LARGEST.get(what, LARGEST_NUMBER)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
            raise self.error(f"sets {what}={shown(value)}; it has to be a number above 0 and at most {largest:g}")
        return float(value)

    def flag(self, key: str, *default: bool) -> bool:
        """True or false. UsageError for anything else."""
        value = self.take(key, *default)
        if not isinstance(value, bool):
            raise self.error(f"sets {key}={shown(value)}; it has to be true or false")
        return value

    def texts(self, key: str, default: list[str]) -> list[str]:
        """A list of texts. UsageError for anything else."""
        value = self.take(key, default)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(f"sets {key}={shown(value)}; it has to be a list of texts")
        return value

    def demand(self, *keys: str) -> None:
        """UsageError if a key is absent, for which transformers' default is a number and none that follows from others.

        Only ``pad_token_id`` may be null.
        """
        for key in keys:
            if key not in self._values or (self._values[key] is None and key != "pad_token_id"):
                raise self.error(f"does not say {key!r}; add it, or transformers takes a number of its own")

    def must_be(self, key: str, value: Any) -> None:
        """Read a feature that only has one implemented setting. UsageError for another."""
        self._read.add(key)
        if (found := self._values.get(key, value)) != value:
            raise self.error(f"sets {key}={shown(found)}; the oracle only computes {key}={value!r}")

    def check_dropout(self, key: str) -> None:
        """Read a share that training drops. UsageError for what is no share, and for one that is not switched off."""
        self._read.add(key)
        share = self._values.get(key, 0.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise self.error(f"sets {key}={shown(share)}; it has to be a number from 0 to 1")
        if share and not self._disable_dropout:
            raise self.error(
                f"sets {key}={shown(share)}; what is dropped is random, and another backend drops something else: set "
                f"{key} to 0.0 (objectives that read roll-outs switch it off)"
            )

    def finish(self) -> None:
        """UsageError if a key is left that nobody has read."""
        unread = sorted(key for key, value in self._values.items() if value is not None and key not in self._read)
        if unread:
            names = ", ".join(name[:60] for name in unread[:12])
            raise self.error(
                f"has keys that the oracle does not know for this model: {names}; if they change what is computed, "
                f"implement them in conformance/oracle, otherwise add them to INERT in architecture.py"
            )

    def error(self, message: str) -> UsageError:
        return UsageError(f"{self._source} {message}")


def read_architecture(model: Path, *, disable_dropout: bool = False) -> Architecture:
    """What the model in the Hugging Face folder ``model`` computes, for an objective with this ``disable_dropout``.

    Raises UsageError for a file that cannot be read, an unknown model_type, a missing key, a size that is none, and any
    setting that is not implemented.
    """
    file = model / "config.json"
    try:
        values = read_json(file)
    except FileNotFoundError:
        raise UsageError(f"{model} holds no config.json; give the folder of a Hugging Face model") from None
    config = Config(values, str(file), disable_dropout=disable_dropout)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise config.error(f"has model_type {shown(kind)}; the oracle knows {', '.join(FAMILIES)}")
    architecture = FAMILIES[kind](config)
    config.finish()
    if architecture.activation not in ACTIVATIONS:
        raise config.error(f"sets the activation {shown(architecture.activation)}; known are {', '.join(ACTIVATIONS)}")
    if architecture.heads % architecture.kv_heads:
        raise config.error(f"has {architecture.heads} heads, not a multiple of its {architecture.kv_heads} kv heads")
    if architecture.head_dim % 2:
        raise config.error(f"gives heads of {architecture.head_dim} numbers; rotary positions turn pairs of them")
    return architecture


def _llama(config: Config) -> Architecture:
    """Llama: arXiv 2302.13971 section 2.2; grouped-query attention: arXiv 2307.09288 appendix A.2."""
    config.must_be("pretraining_tp", 1)
    return Architecture(
        **_common(config, tied=False),
        layers=_layers(config, [FULL] * config.size("num_hidden_layers"), window=None, thetas=_one_theta(config)),
        activation=config.take("hidden_act"),
        attention_scale=_head_dim(config) ** -0.5,
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


def _pangu(config: Config) -> Architecture:
    """openPangu-Embedded, arXiv 2505.22375: Llama with biases on q, k, v and o and none in the MLP."""
    config.demand("num_key_value_heads", "pad_token_id")
    return Architecture(
        **_common(config, tied=False),
        layers=_layers(config, [FULL] * config.size("num_hidden_layers"), window=None, thetas=_one_theta(config)),
        activation=config.take("hidden_act"),
        attention_scale=_head_dim(config) ** -0.5,
        attention_bias=config.flag("bias"),
    )


def _qwen3(config: Config) -> Architecture:
    """Qwen3: arXiv 2505.09388 section 2: no QKV bias, RMSNorm on each head of q and k."""
    config.demand("num_key_value_heads", "head_dim")
    count = config.size("num_hidden_layers")
    windowed = config.flag("use_sliding_window", False)
    window = config.size("sliding_window", None) if windowed else None
    first = config.size("max_window_layers", count, least=0)
    kinds = config.texts("layer_types", [SLIDING if windowed and i >= first else FULL for i in range(count)])
    return Architecture(
        **_common(config, tied=False),
        layers=_layers(config, kinds, window=window, thetas=_one_theta(config)),
        activation=config.take("hidden_act"),
        attention_scale=_head_dim(config) ** -0.5,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
    )


def _gemma3(config: Config) -> Architecture:
    """Gemma 3 text: arXiv 2503.19786 section 2; final soft-capping as in Gemma 2, arXiv 2408.00118 section 2.

    attn_logit_softcapping is refused: transformers' Gemma 3 has the key and never applies it.
    """
    config.demand("num_key_value_heads", "head_dim", "pad_token_id")
    config.must_be("use_bidirectional_attention", False)
    config.must_be("attn_logit_softcapping", None)
    every = config.size("_sliding_window_pattern", config.size("sliding_window_pattern", 6))
    kinds = [FULL if (i + 1) % every == 0 else SLIDING for i in range(config.size("num_hidden_layers"))]
    return Architecture(
        **_common(config, tied=True),
        layers=_layers(
            config,
            config.texts("layer_types", kinds),
            window=config.size("sliding_window"),
            thetas={FULL: config.take("rope_theta", None), SLIDING: config.take("rope_local_base_freq", None)},
        ),
        activation=config.take("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        norm_plus_one=True,
        sandwich_norms=True,
        embedding_scale=config.size("hidden_size") ** 0.5,
        final_softcap=config.number("final_logit_softcapping", None),
    )


FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    "llama": _llama,
    "PanguEmbedded": _pangu,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
}


def _common(config: Config, *, tied: bool) -> dict[str, Any]:
    """What all families spell alike; ``tied`` is the family's default."""
    config.check_dropout("attention_dropout")
    return {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("hidden_size"),
        "intermediate_size": config.size("intermediate_size"),
        "heads": config.size("num_attention_heads"),
        "kv_heads": config.size("num_key_value_heads", config.size("num_attention_heads")),
        "head_dim": _head_dim(config),
        "norm_eps": config.number("rms_norm_eps"),
        "tied": config.flag("tie_word_embeddings", tied),
        "padding_token": _padding_token(config),
        "value_head": _has_value_head(config),
    }


def _padding_token(config: Config) -> int | None:
    """A token of the vocabulary; as of torch's padding_idx, a negative one counts from its end."""
    token, size = config.take("pad_token_id", None), config.size("vocab_size")
    if token is not None and (type(token) is not int or not -size <= token < size):
        raise config.error(f"sets pad_token_id={shown(token)}, which is no token of a vocabulary of {size}")
    return token


def _has_value_head(config: Config) -> bool:
    """Whether the folder is a value model: sequence classification with one label, read at every token."""
    names = config.texts("architectures", [])
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return False
    config.must_be("num_labels", 1)
    return True


def _head_dim(config: Config) -> int:
    return int(config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads")))


def _layers(
    config: Config, kinds: list[str], *, window: int | None, thetas: dict[str, float | None]
) -> tuple[Layer, ...]:
    """One Layer per entry of ``kinds`` (transformers' layer_types); ``thetas``: the older spelling's values."""
    if len(kinds) != (count := config.size("num_hidden_layers")):
        raise config.error(f"has {len(kinds)} layer_types for {count} layers")
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise config.error(f"has layer_types {sorted(unknown)}; the oracle knows {FULL}, {SLIDING}")
    if SLIDING in kinds and window is None:
        raise config.error("has sliding_attention layers but sets no sliding_window; set it, or use full_attention")
    rope_thetas = _rope_thetas(config, thetas)
    return tuple(Layer(window if kind == SLIDING else None, rope_thetas[kind]) for kind in kinds)


def _one_theta(config: Config) -> dict[str, float | None]:
    return dict.fromkeys((FULL, SLIDING), config.take("rope_theta", None))


def _rope_thetas(config: Config, older: dict[str, float | None]) -> dict[str, float]:
    """Base of the rotary frequencies for each kind of layer.

    transformers 5 writes ``rope_parameters``, flat or nested per kind of layer. ``older`` holds what the older
    top-level keys say; they count only where ``rope_parameters`` has no theta, as in transformers.
    """
    config.must_be("rope_scaling", None)
    parameters = config.take("rope_parameters", {})
    if not isinstance(parameters, dict):
        raise config.error(f"sets rope_parameters={shown(parameters)}; it has to be an object")
    if not parameters.keys() & {FULL, SLIDING}:
        parameters = {FULL: parameters, SLIDING: parameters}
    if unknown := parameters.keys() - {FULL, SLIDING}:
        raise config.error(f"mixes {sorted(unknown)} with the kinds of layers in rope_parameters; put them inside")
    thetas = {}
    for kind, older_theta in older.items():
        rope = parameters.get(kind) or {}
        if not isinstance(rope, dict):
            raise config.error(f"sets rope_parameters {kind}={shown(rope)}; it has to be an object")
        other = {"rope_type": "default", "partial_rotary_factor": 1.0} | rope
        if (theta := other.pop("rope_theta", older_theta)) is None:
            raise config.error(f"has no rope_theta for {kind}; set it in rope_parameters")
        thetas[kind] = config.positive(theta, "rope_theta")
        if other != {"rope_type": "default", "partial_rotary_factor": 1.0}:
            raise config.error(f"sets rope_parameters {shown(rope)}; the oracle only computes rope_type 'default'")
    return thetas
