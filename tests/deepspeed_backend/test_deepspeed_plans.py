"""Which models AutoTP is told how to cut: those whose own plan leaves out layers, if LAYERS knows these."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

pytest.importorskip("deepspeed")
from impl.deepspeed.config import plans_the_head_alone

SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
HEAD = {"lm_head": "colwise_rep"}


@pytest.mark.parametrize(
    ("kind", "config", "base", "own", "told"),
    [
        (LlamaForCausalLM, LlamaConfig(**SIZES), LlamaConfig.base_model_tp_plan, HEAD, False),
        (LlamaForCausalLM, LlamaConfig(**SIZES), None, HEAD, True),
        (LlamaForCausalLM, LlamaConfig(**SIZES), None, None, False),  # AutoTP goes by names then
        (Phi3ForCausalLM, Phi3Config(**SIZES, pad_token_id=0), None, HEAD, False),  # fused matrices
        (GPT2LMHeadModel, GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16), None, None, False),
    ],
)
def test_autotp_is_told_where_a_plan_names_the_head_alone(
    monkeypatch: pytest.MonkeyPatch, kind: Any, config: Any, base: Any, own: Any, told: bool
) -> None:
    monkeypatch.setattr(kind, "_tp_plan", own, raising=False)
    config.base_model_tp_plan = base
    with torch.device("meta"):
        assert plans_the_head_alone(kind(config)) is told
