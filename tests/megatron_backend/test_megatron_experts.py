"""Megatron's mixtures of experts without ranks: what is read of configurations and folders, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance.backends.protocol import Unsupported
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.oracle.feed_forward import stacked
from conformance.spec.layout import Layout
from impl.convert.torch_distributed import named
from impl.interface.sharded_safetensors import SliceReader
from impl.megatron.hf_mapping import all_parameters, check_weights, grouped_by_tensors, parts
from impl.megatron.model_config import read_shape
from impl.megatron.moe_config import mixture_support
from impl.megatron.spans import Part, Rank, Span, reader
from impl.train.plan import parameter_shapes

FAMILIES = ("qwen3-moe", "qwen2-moe", "mixtral", "gpt-oss")
DEEPSEEK = ("deepseek-v2", "deepseek-v3")
WEIGHTS = "model.safetensors"


def folder(family: str) -> Path:
    return FIXTURES / "models" / family


def parts_of(family: str) -> list[Part]:
    shape = read_shape(folder(family))
    return [part for name in all_parameters(shape) for part in parts(name, shape, Rank(rank=1, size=2))]


@pytest.mark.parametrize("family", [*FAMILIES, *DEEPSEEK])
def test_experts_are_read_alike_where_they_are_apart_and_where_they_are_stacked(tmp_path: Path, family: str) -> None:
    full = stacked(load_file(folder(family) / WEIGHTS))
    save_file(full, tmp_path / WEIGHTS)
    shutil.copy(folder(family) / "config.json", tmp_path)
    for at in (folder(family), tmp_path):
        check_weights(at, read_shape(at))
        with SliceReader([at / WEIGHTS]) as files:
            for part in parts_of(family):
                for span in part.spans or (Span(0, 0, part.shape[0]),):
                    wanted = part.matrix(full[part.name]).narrow(part.dim, span.full, span.stop - span.full)
                    assert torch.equal(reader(files)(part, span.full, span.stop), wanted)


@pytest.mark.parametrize("family", [*FAMILIES, *DEEPSEEK])
def test_the_experts_of_a_layer_make_one_tensor_each(family: str) -> None:
    shape = read_shape(folder(family))
    assert shape.mixture is not None
    together = [names for names in grouped_by_tensors(all_parameters(shape)) if len(names) > 1]
    of_each = 4 if shape.mixture.clamped else 2  # biases, too
    assert [len(names) for names in together] == [shape.mixture.experts] * of_each * len(shape.mixture.layers)
    for names in together:
        found = [parts(name, shape, Rank(rank=0, size=1)) for name in names]
        assert len({part.name for of_expert in found for part in of_expert}) == 1
        assert [of_expert[0].expert for of_expert in found] == list(range(shape.mixture.experts))


def test_families_differ_in_what_is_normalised_shared_and_dense() -> None:
    qwen3, qwen2, mixtral, gpt_oss = (read_shape(folder(family)).mixture for family in FAMILIES)
    assert qwen3 is not None
    assert qwen2 is not None
    assert mixtral is not None
    assert gpt_oss is not None
    assert (qwen3.layers, qwen2.layers, mixtral.layers) == ((0, 2), (1,), (0, 1))
    assert (qwen3.normalised, qwen2.normalised, mixtral.normalised) == (True, False, True)
    assert (mixtral.clamped, gpt_oss.clamped) == (None, True)
    assert (qwen3.shared, qwen2.shared, mixtral.shared) == (None, 24, None)
    assert (qwen3.loss_factor, qwen2.loss_factor, mixtral.loss_factor) == (0.2, 0.0, 0.2)


@pytest.mark.parametrize(
    ("family", "layout", "size"), [("qwen3-moe", "tp3.seqpar", 16), ("qwen2-moe", "tp16.seqpar", 24)]
)
def test_experts_that_tp_does_not_divide_are_refused(family: str, layout: str, size: int) -> None:
    """The second has experts of 16, and a shared one of 24."""
    answer = mixture_support(read_shape(folder(family)).mixture, Layout.parse(layout))
    assert isinstance(answer, Unsupported)
    assert f"does not divide experts of {size}; use tp1" in answer.reason


def test_deepseek_v2_and_v3_differ_in_scores_factors_and_groups() -> None:
    v2, v3 = (read_shape(folder(family)).mixture for family in DEEPSEEK)
    assert v2 is not None
    assert v3 is not None
    assert (v2.sigmoid, v2.normalised, v2.factor, v2.groups) == (False, False, 3.5, (4, 2, 1))
    assert (v3.sigmoid, v3.normalised, v3.factor, v3.groups) == (True, True, 2.5, (4, 2, 2))
    assert (
        (v2.layers, v2.shared, v2.shared_name)
        == (v3.layers, v3.shared, v3.shared_name)
        == (
            (1,),
            32,
            "mlp.shared_experts",
        )
    )


@pytest.mark.parametrize("lost", ["experts.3.up_proj", "experts.7.down_proj"])
def test_a_lost_expert_is_told(tmp_path: Path, lost: str) -> None:
    tensors = load_file(folder("qwen3-moe") / WEIGHTS)
    save_file({n: t for n, t in tensors.items() if f"layers.2.mlp.{lost}." not in n}, tmp_path / WEIGHTS)
    with pytest.raises(UsageError, match=r"layers\.2\.mlp\.experts\.gate_up_proj (is missing|has shape)"):
        check_weights(tmp_path, read_shape(folder("qwen3-moe")))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "set it to 0.0"),
        ("qwen3-moe", {"num_experts": None}, "lacks the key num_experts"),
        ("qwen3-moe", {"norm_topk_prob": None}, "lacks the key norm_topk_prob"),
        ("qwen2-moe", {"shared_expert_intermediate_size": None}, "lacks the key shared_expert_intermediate_size"),
        ("qwen3-moe", {"router_aux_loss_coef": None}, "lacks the key router_aux_loss_coef"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "chooses 9 of 8 experts"),
        ("mixtral", {"num_experts_per_tok": 1}, "megatron-core cannot normalise one expert"),
        ("deepseek-v3", {"norm_topk_prob": False}, "do not support it with sigmoids; use fsdp2"),
        ("deepseek-v2", {"norm_topk_prob": True}, "do not support it with a softmax in groups; use fsdp2"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "use greedy or group_limited_greedy"),
        ("deepseek-v3", {"n_group": None}, "lacks the key n_group"),
        ("deepseek-v3", {"kv_lora_rank": None}, "lacks the key kv_lora_rank"),
        ("deepseek-v2", {"mlp_bias": True}, "biases in the MLP not built in"),
        ("deepseek-v2", {"rope_parameters": {"rope_type": "linear"}}, "scaled otherwise than by yarn not built in"),
    ],
)
def test_what_a_configuration_lacks_is_told(
    tmp_path: Path, family: str, changes: dict[str, object], message: str
) -> None:
    values = json.loads((folder(family) / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(UsageError, match=message):
        read_shape(tmp_path)


def test_what_is_not_built_in_for_experts_says_so(tmp_path: Path) -> None:
    shutil.copy(folder("qwen3-moe") / "config.json", tmp_path)
    with pytest.raises(UsageError, match="give a folder with weights"):
        parameter_shapes(tmp_path, "causal")
    with pytest.raises(UsageError, match="and export a training state or a Hugging Face folder"):
        named(tmp_path, folder("qwen3-moe"))
