"""A scenario's weights: the model's own for seed 0, a reproducible neighbour of them for any other seed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conformance.paths import FIXTURES
from conformance.scenario import OptimizerConfig, Scenario
from conformance.inputs.model import INDEX, prepare_model

PANGU = FIXTURES / "models" / "pangu"
QWEN3 = FIXTURES / "models" / "qwen3"


def scenario(*, model: str = "models/pangu", seed: int = 0) -> Scenario:
    return Scenario(name="any", model=model, precision="fp32", optimizer=OptimizerConfig(name="sgd", lr=0.1), seed=seed)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The tiny Pangu in two files and an index, as large models come."""
    folder = tmp_path / "sharded"
    shutil.copytree(PANGU, folder)
    (folder / "model.safetensors").unlink()
    tensors = load_file(PANGU / "model.safetensors")
    shards = {
        "model-00001-of-00002.safetensors": list(tensors)[::2],
        "model-00002-of-00002.safetensors": list(tensors)[1::2],
    }
    for file, names in shards.items():
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, names in shards.items() for n in names}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_seed_0_keeps_the_weights(tmp_path: Path) -> None:
    out = prepare_model(scenario(), tmp_path / "new" / "model")
    assert (out / "model.safetensors").read_bytes() == (PANGU / "model.safetensors").read_bytes()


def test_configuration_tokenizer_and_code_come_along(tmp_path: Path) -> None:
    out = prepare_model(scenario(seed=1), tmp_path)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "modeling_openpangu_dense.py"):
        assert (out / file).read_bytes() == (PANGU / file).read_bytes()
    AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)


def test_another_seed_moves_every_tensor_by_a_few_percent(tmp_path: Path) -> None:
    before = load_file(PANGU / "model.safetensors")
    after = load_file(prepare_model(scenario(seed=1), tmp_path) / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in after.items():
        relative = tensor / before[name] - 1
        assert tensor.dtype == torch.float32
        assert relative.abs().max() <= 0.05 + 1e-6
        assert relative.std() > 0.02


def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        (prepare_model(scenario(seed=s), tmp_path / folder) / "model.safetensors").read_bytes()
        for folder, s in [("first", 1), ("again", 1), ("other", 2)]
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", [0, 1])
def test_sharded_weights_give_the_same_model(tmp_path: Path, sharded: Path, seed: int) -> None:
    out = prepare_model(scenario(model=str(sharded), seed=seed), tmp_path / "a")
    whole = load_file(prepare_model(scenario(seed=seed), tmp_path / "b") / "model.safetensors")
    pieces = [load_file(file) for file in sorted(out.glob("*.safetensors"))]
    assert [len(piece) for piece in pieces] == [15, 14]
    assert all(torch.equal(tensor, whole[name]) for piece in pieces for name, tensor in piece.items())
    AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)


def test_a_tied_pair_that_is_stored_twice_stays_equal(tmp_path: Path) -> None:
    shutil.copytree(QWEN3, tmp_path / "twice")
    tensors = load_file(QWEN3 / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "twice" / "model.safetensors", metadata={"format": "pt"})
    out = prepare_model(scenario(model=str(tmp_path / "twice"), seed=1), tmp_path / "out")
    after = load_file(out / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])


def test_dtypes_and_integers_are_kept(tmp_path: Path) -> None:
    shutil.copytree(QWEN3, tmp_path / "mixed")
    counter = torch.arange(4)
    tensors = {n: t.bfloat16() for n, t in load_file(QWEN3 / "model.safetensors").items()} | {"counter": counter}
    save_file(tensors, tmp_path / "mixed" / "model.safetensors", metadata={"format": "pt"})
    out = prepare_model(scenario(model=str(tmp_path / "mixed"), seed=1), tmp_path / "out")
    after = load_file(out / "model.safetensors")
    assert torch.equal(after.pop("counter"), counter)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


def test_the_users_weights_are_never_overwritten(tmp_path: Path) -> None:
    out = prepare_model(scenario(), tmp_path)
    with pytest.raises(ValueError, match="is not empty"):
        prepare_model(scenario(seed=1), out)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        prepare_model(scenario(model=str(tmp_path)), tmp_path / "out")


def test_weights_in_another_format_come_with_the_conversion(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(PANGU, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"convert its weights with .*save_pretrained\(NEW_FOLDER\)"):
        prepare_model(scenario(model=str(folder)), tmp_path / "out")


def test_a_missing_shard_is_named(tmp_path: Path, sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00002\.safetensors"):
        prepare_model(scenario(model=str(sharded)), tmp_path / "out")
