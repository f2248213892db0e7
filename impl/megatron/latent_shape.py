"""What a Hugging Face configuration says about latent attention, DeepSeek's; imports no Megatron."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

EPS = 1e-6  # of the norms of latent vectors: a number of transformers' own, whatever rms_norm_eps is


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Scaled positions (arXiv 2309.00071). size: of sines and cosines. all_dims: what scores are scaled by besides, in
    the words of DeepSeek's files (mscale_all_dim). truncate: bounds of pairs are whole numbers."""

    factor: float
    size: float
    all_dims: float
    beta_fast: float
    beta_slow: float
    original_positions: int
    truncate: bool


class Module(NamedTuple):
    """A module in front of the scores: its name at Hugging Face, the size of its weight, and whether tensor parallelism
    cuts its rows."""

    name: str
    size: tuple[int, ...]
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Latent attention (arXiv 2405.04434, section 2.1): ranks of queries (None: they have no latent vectors) and of
    keys and values; by head the numbers of a query that positions leave (``plain``) and turn, and those of a value.

    neighbours: positions turn pairs of numbers next to each other, not of the two halves. yarn: None without scaling.
    """

    q_rank: int | None
    kv_rank: int
    plain: int
    turned: int
    value: int
    neighbours: bool
    yarn: Yarn | None

    def modules(self, *, hidden: int, heads: int) -> dict[str, Module]:
        """By megatron-core's names."""
        queries = heads * (self.plain + self.turned)
        if self.q_rank is None:
            found = {"linear_q_proj": Module("q_proj", (queries, hidden), cut=True)}
        else:
            found = {
                "linear_q_down_proj": Module("q_a_proj", (self.q_rank, hidden)),
                "q_layernorm": Module("q_a_layernorm", (self.q_rank,)),
                "linear_q_up_proj": Module("q_b_proj", (queries, self.q_rank), cut=True),
            }
        return {
            **found,
            "linear_kv_down_proj": Module("kv_a_proj_with_mqa", (self.kv_rank + self.turned, hidden)),
            "kv_layernorm": Module("kv_a_layernorm", (self.kv_rank,)),
            "linear_kv_up_proj": Module("kv_b_proj", (heads * (self.plain + self.value), self.kv_rank), cut=True),
        }


def latent_of(config: dict[str, Any], rope: Mapping[str, Any], *, scaled: bool) -> Latent:
    """``rope``: what the configuration says of rotary positions. Raises KeyError for a key that is missing."""
    return Latent(
        q_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        plain=config["qk_nope_head_dim"],
        turned=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
        neighbours=bool(config.get("rope_interleave", True)),
        yarn=_latent_yarn(rope) if scaled else None,
    )


def _latent_yarn(rope: Mapping[str, Any]) -> Yarn:
    factor, own, all_dims = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim") or 0.0
    size = _magnitude(factor, own) / _magnitude(factor, all_dims) if own and all_dims else _magnitude(factor, 1.0)
    return Yarn(
        factor=float(factor),
        size=float(rope.get("attention_factor") or size),
        all_dims=float(all_dims),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        original_positions=rope["original_max_position_embeddings"],
        truncate=bool(rope.get("truncate", True)),
    )


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
