"""The values of a Hugging Face ``config.json``, each read in its type, and which of them were read.

Serves claim 6: no key that changes the mathematics is ever ignored. A key that is neither read by the model's family
nor listed in INERT is an error, so a new feature stops the oracle instead of making it wrong in silence.
"""

from typing import Any

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
NULLABLE = ("pad_token_id", "q_lora_rank", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
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
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "num_experts_per_tok": 2**12,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "decoder_sparse_step": 2**12,
    "router_aux_loss_coef": 1e3,
    "n_routed_experts": 2**12,
    "n_shared_experts": 2**12,
    "n_group": 2**12,
    "topk_group": 2**12,
    "first_k_dense_replace": 2**12,
    "q_lora_rank": 2**18,
    "kv_lora_rank": 2**18,
    "qk_nope_head_dim": 2**14,
    "qk_rope_head_dim": 2**14,
    "v_head_dim": 2**14,
    "original_max_position_embeddings": 2**31,
    "sliding_window": 2**31,
    "sliding_window_pattern": 2**12,
    "_sliding_window_pattern": 2**12,
    "rms_norm_eps": 1.0,
}
LARGEST_NUMBER = 1e12  # where nothing else is said: bases, scales


class Config:
    """Values of a config.json, and which of them were read."""

    def __init__(
        self, values: dict[str, Any], source: str, *, disable_dropout: bool, inert: tuple[str, ...] = INERT
    ) -> None:
        self._values = values
        self._source = source
        self._disable_dropout = disable_dropout
        self._read: set[str] = set(inert)

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

        Those in NULLABLE may be null, which says that there is none.
        """
        for key in keys:
            if key not in self._values or (self._values[key] is None and key not in NULLABLE):
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
                f"implement them in conformance/oracle, otherwise add them to INERT in config.py"
            )

    def inside(self, values: dict[str, Any], name: str) -> "Config":
        """The same for an object among the values."""
        return Config(values, f"{self._source}, in {name}:", disable_dropout=self._disable_dropout, inert=())

    def error(self, message: str) -> UsageError:
        return UsageError(f"{self._source} {message}")
