"""What a Hugging Face configuration says about a model, as far as Megatron's layers need it; imports no Megatron."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.role import Head
from conformance.validation import UsageError

# Families whose layers are built here: RMSNorm before attention and before a SwiGLU MLP, rotary positions, GQA.
# Each has the configuration's switch for biases on q, k, v and o (the MLP has none), the default of this switch, and
# whether q and k are normalised per head.
FAMILIES: dict[str, tuple[str, bool, bool]] = {
    "PanguEmbedded": ("bias", True, False),
    "Llama": ("attention_bias", False, False),
    "Qwen3": ("attention_bias", False, True),
}
HEADS: dict[str, Head] = {"ForCausalLM": "causal", "ForSequenceClassification": "value"}
ARCHITECTURES = {family + suffix: (family, head) for family in FAMILIES for suffix, head in HEADS.items()}
VOCABULARY_MULTIPLE = 128  # Megatron-LM's default: a rank's part of the vocabulary is a multiple of it
VALUE_HEAD = "score.weight"  # (1, hidden), in place of the language head: transformers' name for a scalar head


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes and switches of a model.

    bias: on q, k, v and o. head: logits over the vocabulary, or one value per token. padding_token: its embedding gets
    no gradient where the token is an input. attention_dropout: a probability; it is only run if it is switched off.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope_theta: float
    bias: bool
    qk_norm: bool
    tied: bool
    max_positions: int
    padding_token: int | None = None
    attention_dropout: float = 0.0
    head: Head = "causal"

    def padded_vocab(self, tp: int) -> int:
        multiple = VOCABULARY_MULTIPLE * tp
        return -(-self.vocab // multiple) * multiple


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a Hugging Face folder. Raises UsageError if it needs something that is not built in."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = next(iter(config.get("architectures") or ()), None)
    if name not in ARCHITECTURES:
        raise UsageError(
            f"{name} is not among the architectures that are built here on megatron-core "
            f"({', '.join(ARCHITECTURES)}); use fsdp2 or deepspeed"
        )
    family, head = ARCHITECTURES[name]
    bias, default, qk_norm = FAMILIES[family]
    ropes = [rope for key in ("rope_parameters", "rope_scaling") if (rope := config.get(key))]
    several = head == "value" and config.get("num_labels", len(config.get("id2label") or ()) or 1) != 1
    refused = {
        "scaled rotary positions": any(r.get("rope_type", r.get("type", "default")) != "default" for r in ropes),
        "a head with more than one value per token": several,
        "biases in the MLP": config.get("mlp_bias"),
        "a sliding window": config.get("use_sliding_window"),
        "an activation other than SiLU": config.get("hidden_act", "silu") != "silu",
    }
    if missing := [what for what, asked in refused.items() if asked]:
        raise UsageError(f"{' and '.join(missing)} not built in for megatron; use fsdp2 or deepspeed")
    try:
        return _shape(config, bias=bool(config.get(bias, default)), qk_norm=qk_norm, head=head)
    except KeyError as lacking:
        raise UsageError(f"{folder}/config.json does not say {lacking.args[0]}; add it") from None


def _shape(config: dict[str, Any], *, bias: bool, qk_norm: bool, head: Head) -> ModelShape:
    heads = config["num_attention_heads"]
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        eps=config["rms_norm_eps"],
        rope_theta=float(theta),
        bias=bias,
        qk_norm=qk_norm,
        # A value head has nothing to be tied to.
        tied=bool(config.get("tie_word_embeddings")) and head == "causal",
        max_positions=config["max_position_embeddings"],
        padding_token=config.get("pad_token_id"),
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        head=head,
    )
