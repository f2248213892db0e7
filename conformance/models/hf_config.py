"""Reads the values of a Hugging Face ``config.json`` in their types, and rejects keys that were not read.

No key that changes the mathematics is ever ignored. A key that the family does not read is judged by its meaning
(conformance.models.folder_checks), so a new feature stops the oracle instead of silently making it wrong.

Rotary positions are read in every spelling of transformers. transformers 5 writes ``rope_parameters``, flat or nested
per kind of layer; before, there were ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` at the top level.
The older keys count where ``rope_parameters`` lacks a value.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.models.components import Linear, Llama3, Rotary, Yarn
from conformance.models.folder_checks import QUANTIZED_ADVICE, meaning_of

NULLABLE = ("pad_token_id", "q_lora_rank", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
# Real models are far below these. A larger number is a mistake in the file, and would exhaust the memory.
LARGEST: dict[str, float] = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**14,
    "num_hidden_layers": 2**12,
    "num_nextn_predict_layers": 2**6,
    "max_window_layers": 2**12,
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "num_experts_per_tok": 2**12,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "linear_num_key_heads": 2**12,
    "linear_num_value_heads": 2**12,
    "linear_key_head_dim": 2**14,
    "linear_value_head_dim": 2**14,
    "linear_conv_kernel_dim": 2**6,
    "full_attention_interval": 2**12,
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
LARGEST_NUMBER = 1e12  # for other keys: bases, scales


class Config:
    """Reads values of a config.json, and remembers which keys were read.

    numbers: the sizes (int) and other numbers (float) that were read and may have other values; those of an object
    inside are named ``object.key``. not_judged: what ``finish`` finds in the file that no verdict covers.
    """

    def __init__(
        self, values: dict[str, Any], source: str, *, disable_dropout: bool, assume_inert: Collection[str] = ()
    ) -> None:
        self.numbers: dict[str, int | float] = {}
        self._values = values
        self._source = source
        self._disable_dropout = disable_dropout
        self._assumed = assume_inert
        self._read: set[str] = set()
        self.not_judged: list[str] = []

    @property
    def model_type(self) -> Any:
        return self._values["model_type"]

    def take(self, key: str, *default: Any) -> Any:
        """Returns the value of ``key``, or ``default`` if it is absent or null. Raises UsageError without either."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None and not default:
            raise self.error(f"has no {key!r}; add it")
        return default[0] if value is None else value

    def size(self, key: str, *default: int | None, least: int = 1) -> Any:
        """Reads a whole number up to LARGEST, or the default None. Raises UsageError for anything else."""
        value = self.take(key, *default)
        if value is not None and (type(value) is not int or not least <= value <= LARGEST[key]):
            raise self.error(f"sets {key}={shown(value)}; it must be a whole number from {least} to {LARGEST[key]}")
        if value is not None and self._values.get(key) is not None:
            self.numbers[key] = value
        return value

    def number(self, key: str, *default: None) -> Any:
        """Reads a positive number, or the default None. Raises UsageError for anything else."""
        value = self.take(key, *default)
        return None if value is None else self.positive(value, key)

    def positive(self, value: Any, what: str) -> float:
        """Returns ``value`` if it is a positive number up to LARGEST. Raises UsageError for anything else."""
        largest = LARGEST.get(what, LARGEST_NUMBER)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
            raise self.error(f"sets {what}={shown(value)}; it must be a number above 0 and at most {largest:g}")
        self.numbers[what] = float(value)
        return float(value)

    def flag(self, key: str, *default: bool) -> bool:
        """Reads true or false. Raises UsageError for anything else."""
        value = self.take(key, *default)
        if not isinstance(value, bool):
            raise self.error(f"sets {key}={shown(value)}; it must be true or false")
        return value

    def texts(self, key: str, default: list[str]) -> list[str]:
        """Reads a list of texts. Raises UsageError for anything else."""
        value = self.take(key, default)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(f"sets {key}={shown(value)}; it must be a list of texts")
        return value

    def demand(self, *keys: str) -> None:
        """Raises UsageError if a key is absent whose default in transformers is a fixed number.

        Keys in NULLABLE may be null, which switches the feature off.
        """
        for key in keys:
            if key not in self._values or (self._values[key] is None and key not in NULLABLE):
                raise self.error(f"does not say {key!r}; add it, otherwise transformers takes a number of its own")

    def must_be(self, key: str, value: Any) -> None:
        """Reads a feature with a single implemented setting. Raises UsageError for another setting."""
        self._read.add(key)
        if (found := self._values.get(key, value)) != value:
            raise self.error(f"sets {key}={shown(found)}; the oracle only computes {key}={value!r}")

    def check_dropout(self, key: str) -> None:
        """Raises UsageError for a dropout rate that is not a share, and for one that is not switched off."""
        self._read.add(key)
        share = self._values.get(key, 0.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise self.error(f"sets {key}={shown(share)}; it must be a number from 0 to 1")
        if share and not self._disable_dropout:
            raise self.error(
                f"sets {key}={shown(share)}; dropout is random, so each backend drops other values: set "
                f"{key} to 0.0 (objectives that read rollouts switch it off)"
            )

    def finish(self) -> None:
        """Judges the keys that were not read by their meaning.

        Raises UsageError for quantized weights, dropout, a key that contradicts another, and keys of unknown meaning.
        """
        if known := sorted(self._read & {*self._assumed} & self._values.keys()):
            raise self.error(f"has {known[0]}, which the oracle reads; leave out --assume-inert {known[0]}")
        unread = {key: value for key, value in self._values.items() if key not in self._read}
        meanings = {key: meaning_of(key, self._values, read=self._read) for key in sorted(unread)}
        unknown = []
        for key, meaning in meanings.items():
            entry = f"{key[:60]}={shown(unread[key])}"
            if meaning.kind == "random":
                self.check_dropout(key)
            elif meaning.kind == "quantized":
                raise self.error(f"sets {entry}: {QUANTIZED_ADVICE}")
            elif meaning.kind == "contradicts":
                raise self.error(f"sets {entry}, but {meaning.why}; correct one of them, or remove {key[:60]}")
            elif meaning.kind == "not judged":
                self.not_judged.append(f"{entry} ({meaning.why})")
            elif meaning.kind == "unknown" and key in self._assumed:
                self.not_judged.append(f"{entry} (assumed to be inert by --assume-inert)")
            elif meaning.kind == "unknown":
                unknown.append(f"{entry}, {meaning.why}" if meaning.why else entry)
        if unknown:
            raise self.error(
                f"has keys that the oracle does not know for this model: {'; '.join(unknown[:12])}; any of them may "
                f"change what is computed. If the model's authors say that a key changes nothing in a training, add "
                f"--assume-inert KEY, and the verdict will name it; otherwise see docs/guides/adding-a-model.md"
            )

    def inside(self, values: dict[str, Any], name: str) -> "Config":
        """Returns a Config for an object among the values."""
        config = Config(
            values, f"{self._source}, in {name}:", disable_dropout=self._disable_dropout, assume_inert=self._assumed
        )
        config.not_judged = self.not_judged
        return config

    def error(self, message: str) -> UsageError:
        return UsageError(f"{self._source} {message}")


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
ALL = ("default", "linear", "llama3", "yarn")


def rotary(config: Config, *, head_dim: int, types: tuple[str, ...] = ALL, partial: float | None = None) -> Rotary:
    """Reads the rotary positions of a model whose layers all share them.

    ``types``: the rope_types that the family's code has. ``partial``: its default of ``partial_rotary_factor``; None if
    it does not read it.
    """
    scaling = config.take("rope_scaling", None)
    values = _object(config, config.take("rope_parameters", {}) if scaling is None else scaling, "rope_parameters")
    if kinds := values.keys() & {FULL, SLIDING}:
        raise config.error(f"gives {', '.join(sorted(kinds))} rope_parameters of their own; these layers share them")
    older = {"rope_theta": config.take("rope_theta", None)}
    if partial is not None:
        older["partial_rotary_factor"] = config.take("partial_rotary_factor", None)
    return _rotary(config, values, older, "rope_parameters", head_dim=head_dim, types=types, partial=partial)


def rotary_by_kind(config: Config, *, head_dim: int, older: dict[str, float | None]) -> dict[str, Rotary]:
    """Reads the rotary positions for each kind of layer. ``older``: the bases that top-level keys give for each."""
    config.must_be("rope_scaling", None)
    values = _object(config, config.take("rope_parameters", {}), "rope_parameters")
    if not values.keys() & {FULL, SLIDING}:
        values = {FULL: values, SLIDING: values}
    if unknown := values.keys() - {FULL, SLIDING}:
        raise config.error(f"mixes {shown(sorted(unknown))} with kinds of layers in rope_parameters; put them inside")
    found = {}
    for kind, theta in older.items():
        of_kind = _object(config, values.get(kind) or {}, f"rope_parameters {kind}")
        spelled = {"rope_theta": theta}
        found[kind] = _rotary(
            config, of_kind, spelled, kind, head_dim=head_dim, types=("default", "linear"), partial=None
        )
    return found


def _object(config: Config, value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise config.error(f"sets {what}={shown(value)}; it must be an object")
    return value


def _rotary(
    config: Config,
    values: dict[str, Any],
    older: dict[str, Any],
    name: str,
    *,
    head_dim: int,
    types: tuple[str, ...],
    partial: float | None,
) -> Rotary:
    spelled = {**{key: value for key, value in older.items() if value is not None}, **values}
    rope = config.inside(spelled, name)
    if "rope_type" in spelled and spelled["rope_type"] is None:
        raise config.error('sets rope_type to null, which transformers does not know; set "default", or leave it out')
    kind = rope.take("rope_type", rope.take("type", "default"))
    if kind not in types:
        raise config.error(f"sets rope_type {shown(kind)}; the oracle computes {', '.join(types)} for this model")
    if spelled.get("rope_theta") is None:
        raise config.error(f"has no rope_theta for {name}; set it in rope_parameters")
    theta = rope.number("rope_theta")
    share = rope.number("partial_rotary_factor", None) or partial or 1.0
    if share > 1.0 or (share < 1.0 and partial is None):
        raise config.error(f"sets partial_rotary_factor={share:g}; the oracle computes 1 for this model")
    dims = int(head_dim * share)
    if dims % 2:
        raise config.error(
            f"rotates {dims} of the {head_dim} dimensions of a head; rotary positions need an even number"
        )
    found = Rotary(theta, dims, _SCALINGS[kind](rope) if kind in _SCALINGS else None)
    rope.finish()
    config.numbers |= {f"{name}.{key}": value for key, value in rope.numbers.items()}
    return found


def _linear(rope: Config) -> Linear:
    return Linear(rope.number("factor"))


def _llama3(rope: Config) -> Llama3:
    return Llama3(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_positions=rope.size("original_max_position_embeddings"),
    )


def _yarn(rope: Config) -> Yarn:
    """Reads YaRN; the attention factor defaults to 0.1 ln(factor) + 1 (arXiv 2309.00071 equation 22).

    DeepSeek's files give it as a quotient: that of the dimensions with positions over that of all, which scales scores.
    """
    factor = rope.number("factor")
    all_dims = rope.number("mscale_all_dim", None)
    size = _magnitude(factor)
    if (own := rope.number("mscale", None)) and all_dims:
        size = _magnitude(factor, own) / _magnitude(factor, all_dims)
    return Yarn(
        factor=factor,
        attention_factor=rope.number("attention_factor", None) or size,
        beta_fast=rope.number("beta_fast", None) or 32.0,
        beta_slow=rope.number("beta_slow", None) or 1.0,
        original_positions=rope.size("original_max_position_embeddings"),
        truncate=rope.flag("truncate", True),
        score_factor=_magnitude(factor, all_dims) ** 2 if all_dims else 1.0,
    )


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


_SCALINGS: dict[str, Callable[[Config], Linear | Llama3 | Yarn]] = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
