"""Hugging Face folders: as which class each one loads, and what a value model is; backends by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from fsdp2_tasks import value_folder
from safetensors.torch import load_file, save_file

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.spec.layout import Layout
from impl.interface.trainable import CONTEXTS, ContextConfig, get_context
from impl.models.loading import load_model

MODELS = FIXTURES / "models"
FAMILIES = ["pangu", "llama", "qwen3", "gemma3"]


@pytest.mark.parametrize(("model", "attention"), [("llama", "sdpa"), ("gemma2", "eager"), ("gpt-oss", "eager")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_precision_uses_the_same_attention(model: str, attention: str, dtype: torch.dtype) -> None:
    loaded = load_model(MODELS / model, dtype=dtype, attention=None)
    assert loaded.config._attn_implementation == attention


@pytest.mark.parametrize("model", FAMILIES)
def test_a_folder_loads_as_the_causal_model_that_it_declares(model: str) -> None:
    loaded = load_model(MODELS / model, dtype=torch.float64, attention="eager")
    assert type(loaded).__name__.endswith("ForCausalLM")
    assert loaded.training
    assert not loaded.config.use_cache
    assert next(loaded.parameters()).dtype == torch.float64


def test_a_model_without_a_head_for_text_falls_back_to_its_bare_class(tmp_path: Path) -> None:
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    assert type(load_model(tmp_path, dtype=torch.float32, attention="eager")).__name__ == "ViTModel"
    with pytest.raises(UsageError, match="transformers knows no causal language model for"):
        load_model(tmp_path, dtype=torch.float32, attention="eager", head="value")


def test_a_vision_language_model_loads_with_its_language_head(tmp_path: Path) -> None:
    text = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=32
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=31)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=torch.float32, attention="eager")
    assert type(loaded).__name__ == "LlavaForConditionalGeneration"


@pytest.mark.parametrize("model", FAMILIES)
def test_a_value_model_is_a_linear_on_the_last_hidden_state(model: str, tmp_path: Path) -> None:
    folder = value_folder(model, tmp_path / model)
    loaded = load_model(folder, dtype=torch.float64, attention="eager", head="value")
    assert type(loaded).__name__.endswith("ForTokenValues")
    assert loaded.training
    assert not loaded.config.use_cache
    weights = load_file(folder / "model.safetensors")
    assert dict(loaded.named_parameters()).keys() == weights.keys()

    tokens = torch.tensor([[5, 6, 7, 8]])
    base = transformers.AutoModel.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float64, attn_implementation="eager"
    )
    expected = base(input_ids=tokens).last_hidden_state @ weights["score.weight"].double().T
    torch.testing.assert_close(loaded(input_ids=tokens).logits, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("lacks", "kind"), [("score.weight", "missing keys"), (None, "unexpected keys")])
def test_weights_that_do_not_fit_a_value_model_are_refused(tmp_path: Path, lacks: str | None, kind: str) -> None:
    folder = value_folder("llama", tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    weights.pop(lacks) if lacks else weights.update({"lm_head.weight": torch.zeros(264, 64)})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=rf"do not fit LlamaForTokenValues: {kind} .*give the complete folder"):
        load_model(folder, dtype=torch.float32, attention="eager", head="value")


def test_a_language_model_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "llama", tmp_path / "llama")
    weights = load_file(MODELS / "llama" / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "llama" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"missing keys \['model.norm.weight'\]; a parameter must not keep random"):
        load_model(tmp_path / "llama", dtype=torch.float32, attention="eager")


def test_value_models_of_two_families_do_not_touch_each_others_classes(tmp_path: Path) -> None:
    before = transformers.LlamaForCausalLM._tp_plan
    load_model(value_folder("llama", tmp_path / "llama"), dtype=torch.float32, attention="eager", head="value")
    assert transformers.LlamaForCausalLM._tp_plan is before
    loaded = load_model(MODELS / "llama", dtype=torch.float32, attention="eager")
    assert loaded.get_output_embeddings() is not None
    assert "lm_head" in loaded.tp_plan
    assert json.loads((MODELS / "llama" / "config.json").read_text())["architectures"] == [type(loaded).__name__]


def test_an_unknown_backend_lists_the_known_ones() -> None:
    config = ContextConfig(layout=Layout(), precision="fp32", device="cpu", accumulation=1, packed=False)
    with pytest.raises(UsageError, match=f"unknown backend 'typo'; use one of {', '.join(CONTEXTS)}"):
        get_context("typo", config)
