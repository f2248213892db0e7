"""From what a ``config.json`` says of rotary positions to a Rotary, in every spelling of transformers.

transformers 5 writes ``rope_parameters``, flat or nested per kind of layer; before, there were ``rope_theta``,
``rope_scaling`` and ``partial_rotary_factor`` at the top. The older keys count where ``rope_parameters`` is silent.
"""

import math
from collections.abc import Callable
from typing import Any

from conformance.oracle.config import Config
from conformance.oracle.parts import Linear, Llama3, Rotary, Yarn
from conformance.validation import shown

FULL, SLIDING = "full_attention", "sliding_attention"
ALL = ("default", "linear", "llama3", "yarn")


def rotary(config: Config, *, head_dim: int, types: tuple[str, ...] = ALL, partial: bool = False) -> Rotary:
    """The rotary positions of a model whose layers all have the same.

    ``types``: the rope_types that the family's code has. ``partial``: whether it reads ``partial_rotary_factor``.
    """
    scaling = config.take("rope_scaling", None)
    values = _object(config, config.take("rope_parameters", {}) if scaling is None else scaling, "rope_parameters")
    if kinds := values.keys() & {FULL, SLIDING}:
        raise config.error(f"gives {', '.join(sorted(kinds))} rope_parameters of their own; these layers share them")
    older = {"rope_theta": config.take("rope_theta", None)}
    if partial:
        older["partial_rotary_factor"] = config.take("partial_rotary_factor", None)
    return _rotary(config, values, older, "rope_parameters", head_dim=head_dim, types=types, partial=partial)


def rotary_by_kind(config: Config, *, head_dim: int, older: dict[str, float | None]) -> dict[str, Rotary]:
    """The rotary positions for each kind of layer; ``older``: the bases that the top-level keys give for each."""
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
            config, of_kind, spelled, kind, head_dim=head_dim, types=("default", "linear"), partial=False
        )
    return found


def _object(config: Config, value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise config.error(f"sets {what}={shown(value)}; it has to be an object")
    return value


def _rotary(
    config: Config,
    values: dict[str, Any],
    older: dict[str, Any],
    name: str,
    *,
    head_dim: int,
    types: tuple[str, ...],
    partial: bool,
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
    theta = config.positive(rope.take("rope_theta"), "rope_theta")
    share = rope.number("partial_rotary_factor", None) or 1.0
    if share > 1.0 or (share < 1.0 and not partial):
        raise config.error(f"sets partial_rotary_factor={share:g}; the oracle computes 1 for this model")
    dims = int(head_dim * share)
    if dims % 2:
        raise config.error(f"gives heads of {head_dim} numbers and turns {dims}; rotary positions turn pairs of them")
    found = Rotary(theta, dims, _SCALINGS[kind](rope) if kind in _SCALINGS else None)
    rope.finish()
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
    """The attention factor is 0.1 ln(factor) + 1 (arXiv 2309.00071 equation 22) where the file does not say it.

    DeepSeek's files give it in two parts: that of the numbers with positions over that of all, which multiplies scores.
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
