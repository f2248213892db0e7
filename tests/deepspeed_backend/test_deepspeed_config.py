"""What DeepSpeed is told beside its configuration: how AutoTP cuts a model, and what its check of first inputs gets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from impl.deepspeed.config import compare_in_host_memory, plans_the_head_alone

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
    """Models whose own plan leaves out layers, if LAYERS knows these."""
    monkeypatch.setattr(kind, "_tp_plan", own, raising=False)
    config.base_model_tp_plan = base
    with torch.device("meta"):
        assert plans_the_head_alone(kind(config)) is told


class OnGpu(torch.Tensor):
    """A tensor that is somewhere else, for a machine without a GPU."""

    def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_the_check_gets_copies_in_host_memory_and_the_model_does_not() -> None:
    """The check runs once, and the model sees what it saw before."""
    engine, checked, forwarded = SimpleNamespace(), list[Any](), list[Any]()

    class Model(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            forwarded.append((args, kwargs))

    def check(module: Any, args: Any, kwargs: Any) -> None:
        checked.append((args, kwargs))
        engine.first_dataloader_check.remove()  # as DeepSpeed's own does

    engine.module = Model()
    engine.first_dataloader_check = engine.module.register_forward_pre_hook(check, with_kwargs=True)
    compare_in_host_memory(engine)
    tokens = torch.arange(3).as_subclass(OnGpu)
    for _ in range(2):
        engine.module(tokens, mask=tokens, options={"cache": None, "positions": [tokens]})
    [((first,), kwargs)] = checked
    copies = [first, kwargs["mask"], *kwargs["options"]["positions"]]
    assert all(type(copy) is torch.Tensor and copy.equal(tokens) for copy in copies)
    assert kwargs["options"]["cache"] is None
    assert all(args[0] is tokens and kwargs["mask"] is tokens for args, kwargs in forwarded)
    assert len(forwarded) == 2
