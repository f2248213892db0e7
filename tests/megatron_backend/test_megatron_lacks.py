"""Parts of models that megatron-core does not have: the refusal names them, and the installed version still lacks them.

Where a part has come, its test fails, and a family may be built on it. A part that came under a name that is not looked
for here is not noticed.
"""

import importlib.util
import inspect
import re
import sys
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from cells import needs

from conformance.backends.protocol import BrokenBackend, MissingExtra, registered_backends
from conformance.core import packages
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from impl.megatron.model_config import LACKING, read_shape
from impl.models import support

pytestmark = needs("megatron-core")
READS_0_16 = pytest.mark.skipif(
    not support.is_older("megatron-core", 0, 17), reason="reads sources of megatron-core 0.16; later ones differ"
)
AFTER = "norms of what attention and MLP give, before it is added"
SCALED = "embeddings times the root of their width"


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("gemma2", ("soft-capped scores and logits", AFTER, SCALED)),
        ("gemma3", ("positions of two bases", AFTER, SCALED)),
        ("olmo2", ("norms of q and k over all heads", AFTER)),
    ],
)
def test_a_refusal_names_every_part_that_is_missing(model: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=re.escape(f"does not have: {', '.join(parts)}; use fsdp2 or deepspeed")):
        read_shape(FIXTURES / "models" / model)
    assert model.capitalize() in LACKING


def test_scores_and_logits_are_not_capped() -> None:
    """The one mention is the argument of a kernel, which is always 0."""
    from megatron.core import transformer

    sources = [file.read_text() for file in Path(transformer.__path__[0]).parent.rglob("*.py")]
    said = [
        line.strip() for source in sources for line in source.splitlines() if re.search("soft_?cap|logit_?cap", line)
    ]
    assert said == ['"softcap": 0.0,']


def test_layers_have_no_norm_after_attention_or_mlp() -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    norms = {field.name for field in fields(TransformerLayerSubmodules) if "norm" in field.name}
    assert norms == {"input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"}


@READS_0_16
def test_norms_of_q_and_k_are_of_one_head() -> None:
    from megatron.core.transformer.attention import SelfAttention

    sizes = re.findall(r"submodules\.[qk]_layernorm,\s+hidden_size=([\w.]+)", inspect.getsource(SelfAttention))
    assert sizes == ["self.hidden_size_per_attention_head"] * 2


def test_positions_have_one_base() -> None:
    from megatron.core.models.gpt import GPTModel

    assert [name for name in inspect.signature(GPTModel).parameters if "base" in name] == ["rotary_base"]


@READS_0_16
def test_embeddings_are_not_scaled() -> None:
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

    forward = inspect.getsource(LanguageModelEmbedding.forward)
    assert not re.search(r"scale|multiplier|\*[^*]|\bmul\b", forward.split('"""')[2])


def test_newer_library_is_unsupported_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "package_version", lambda name: "0.20.1")
    monkeypatch.delitem(sys.modules, "impl.megatron.adapter", raising=False)
    with pytest.raises(
        MissingExtra, match=r"0\.20\.1 is installed, and only 0\.16, .* supported; .*--python megatron="
    ):
        registered_backends()["megatron"].load()


def test_triton_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the supported versions, 0.18 and later import it on a CPU, too, whose torch does not bring it."""
    monkeypatch.setattr(packages, "package_version", lambda name: "0.19.2")
    monkeypatch.setattr(support, "is_older", lambda *_: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    monkeypatch.delitem(sys.modules, "impl.megatron.adapter", raising=False)
    with pytest.raises((MissingExtra, BrokenBackend), match="triton"):
        registered_backends()["megatron"].load()


def test_submodules_of_both_forms_of_specs_are_found() -> None:
    """Up to 0.17 the spec of a mixture of experts is a ModuleSpec, from 0.18 on a partial."""
    from megatron.core.transformer import ModuleSpec

    from impl.megatron.releases import submodules

    parts = object()
    assert submodules(ModuleSpec(module=object, submodules=parts)) is parts
    assert submodules(partial(print, submodules=parts)) is parts
