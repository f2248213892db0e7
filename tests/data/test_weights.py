"""A role's weights: the model's own for the policy of seed 0, a reproducible neighbour of them for any other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.models.families import read_architecture
from conformance.models.folders import INDEX, prepare_model, weight_files
from conformance.oracle.decoder import load_weights
from conformance.spec.observables import POLICY, Role
from conformance.spec.scenario import OptimizerConfig, Scenario

FAMILIES = ("pangu", "llama", "qwen3", "gemma3")
PANGU = FIXTURES / "models" / "pangu"
QWEN3 = FIXTURES / "models" / "qwen3"
REFERENCE = Role(name="reference", trained=False)
CRITIC = Role(name="critic", head="value")


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
    out = prepare_model(scenario(), POLICY, tmp_path / "new" / "model")
    assert (out / "model.safetensors").read_bytes() == (PANGU / "model.safetensors").read_bytes()


def test_configuration_tokenizer_and_code_come_along(tmp_path: Path) -> None:
    out = prepare_model(scenario(seed=1), POLICY, tmp_path)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "modeling_openpangu_dense.py"):
        assert (out / file).read_bytes() == (PANGU / file).read_bytes()
    AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)


def test_another_seed_moves_every_tensor_by_a_few_percent(tmp_path: Path) -> None:
    before = load_file(PANGU / "model.safetensors")
    after = load_file(prepare_model(scenario(seed=1), POLICY, tmp_path) / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in after.items():
        relative = tensor / before[name] - 1
        assert tensor.dtype == torch.float32
        assert relative.abs().max() <= 0.05 + 1e-6
        assert relative.std() > 0.02


def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        (prepare_model(scenario(seed=s), POLICY, tmp_path / folder) / "model.safetensors").read_bytes()
        for folder, s in [("first", 1), ("again", 1), ("other", 2)]
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", [0, 1])
def test_sharded_weights_give_the_same_model(tmp_path: Path, sharded: Path, seed: int) -> None:
    out = prepare_model(scenario(model=str(sharded), seed=seed), POLICY, tmp_path / "a")
    whole = load_file(prepare_model(scenario(seed=seed), POLICY, tmp_path / "b") / "model.safetensors")
    pieces = [load_file(file) for file in sorted(out.glob("*.safetensors"))]
    assert [len(piece) for piece in pieces] == [15, 14]
    assert all(torch.equal(tensor, whole[name]) for piece in pieces for name, tensor in piece.items())
    AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)


def test_a_tied_pair_that_is_stored_twice_stays_equal(tmp_path: Path) -> None:
    shutil.copytree(QWEN3, tmp_path / "twice")
    tensors = load_file(QWEN3 / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "twice" / "model.safetensors", metadata={"format": "pt"})
    out = prepare_model(scenario(model=str(tmp_path / "twice"), seed=1), POLICY, tmp_path / "out")
    after = load_file(out / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])


def test_dtypes_and_integers_are_kept(tmp_path: Path) -> None:
    shutil.copytree(QWEN3, tmp_path / "mixed")
    counter = torch.arange(4)
    tensors = {n: t.bfloat16() for n, t in load_file(QWEN3 / "model.safetensors").items()} | {"counter": counter}
    save_file(tensors, tmp_path / "mixed" / "model.safetensors", metadata={"format": "pt"})
    out = prepare_model(scenario(model=str(tmp_path / "mixed"), seed=1), POLICY, tmp_path / "out")
    after = load_file(out / "model.safetensors")
    assert torch.equal(after.pop("counter"), counter)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


# --- roles -----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def test_role_weights_differ_except_policy_of_seed_zero(tmp_path: Path) -> None:
    before = read(PANGU)
    roles = (POLICY, REFERENCE, Role(name="teacher", trained=False, noise=0.5))
    models = [read(prepare_model(scenario(seed=s), r, tmp_path / f"{r.name}-{s}")) for s in (0, 1) for r in roles]
    assert all(torch.equal(models[0][name], before[name]) for name in before)
    for i, model in enumerate(models):
        assert model.keys() == before.keys()
        for other in models[:i]:
            assert not any(torch.equal(model[name], other[name]) for name in before)
        noise = roles[i % 3].noise
        assert all((model[name] / before[name] - 1).abs().max() <= noise + 1e-6 for name in before)
    assert any((models[2][name] / before[name] - 1).abs().max() > 0.45 for name in before)


def test_a_role_has_the_same_model_every_time(tmp_path: Path) -> None:
    first, again = (
        (prepare_model(scenario(), CRITIC, tmp_path / out) / "model.safetensors").read_bytes() for out in ("a", "b")
    )
    assert first == again


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_model_has_one_number_per_token_instead_of_an_output_embedding(tmp_path: Path, family: str) -> None:
    source = FIXTURES / "models" / family
    out = prepare_model(scenario(model=f"models/{family}"), CRITIC, tmp_path / "critic")
    before, after = read(source), read(out)
    assert after.keys() - before.keys() == {"score.weight"}
    assert before.keys() - after.keys() <= {"lm_head.weight"}
    assert "lm_head.weight" not in after
    config = json.loads((out / "config.json").read_text())
    assert after["score.weight"].shape == (1, config["hidden_size"])
    assert after["score.weight"].std() > 0.05
    original = json.loads((source / "config.json").read_text())
    assert [name.removesuffix("ForCausalLM") for name in original["architectures"]] == [
        name.removesuffix("ForSequenceClassification") for name in config["architectures"]
    ]
    assert (config["num_labels"], config["tie_word_embeddings"]) == (1, False)
    changed = {key for key in config if config[key] != original.get(key)}
    assert changed <= {"architectures", "num_labels", "tie_word_embeddings"}
    for file in ("tokenizer.json", *(p.name for p in source.glob("*.py"))):
        assert (out / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_reads_a_value_model_as_it_was_made(tmp_path: Path, family: str) -> None:
    out = prepare_model(scenario(model=f"models/{family}"), CRITIC, tmp_path / "critic")
    architecture = read_architecture(out)
    assert architecture.value_head
    assert not architecture.tied
    weights = load_weights(out, architecture, torch.float64)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        name: tuple(tensor.shape) for name, tensor in read(out).items()
    }


def test_a_value_model_moves_away_from_the_policy_and_from_its_own_seed(tmp_path: Path) -> None:
    before = read(PANGU)
    first, second = (read(prepare_model(scenario(seed=s), CRITIC, tmp_path / str(s))) for s in (0, 1))
    for name in first:
        assert not torch.equal(first[name], second[name])
        assert name not in before or not torch.equal(first[name], before[name])


def test_a_value_model_of_sharded_weights_has_an_index_of_what_is_there(tmp_path: Path, sharded: Path) -> None:
    out = prepare_model(scenario(model=str(sharded)), CRITIC, tmp_path / "a")
    whole = read(prepare_model(scenario(), CRITIC, tmp_path / "b"))
    index = json.loads((out / INDEX).read_text())["weight_map"]
    held = {name: file.name for file in weight_files(out) for name in load_file(file)}
    assert index == held
    assert {file.name for file in out.glob("*.safetensors")} == set(index.values())
    pieces = read(out)
    assert pieces.keys() == whole.keys()
    assert all(torch.equal(pieces[name], whole[name]) for name in whole)


def test_a_value_model_of_a_tied_pair_that_is_stored_twice_keeps_the_embedding(tmp_path: Path) -> None:
    shutil.copytree(QWEN3, tmp_path / "twice")
    tensors = load_file(QWEN3 / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "twice" / "model.safetensors", metadata={"format": "pt"})
    out = read(prepare_model(scenario(model=str(tmp_path / "twice")), CRITIC, tmp_path / "out"))
    assert out.keys() == load_file(QWEN3 / "model.safetensors").keys() | {"score.weight"}


# --- messages --------------------------------------------------------------------------------------------------------


def test_the_users_weights_are_never_overwritten(tmp_path: Path) -> None:
    out = prepare_model(scenario(), POLICY, tmp_path)
    with pytest.raises(UsageError, match="is not empty"):
        prepare_model(scenario(seed=1), POLICY, out)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        prepare_model(scenario(model=str(tmp_path)), POLICY, tmp_path / "out")


def test_weights_in_another_format_come_with_the_conversion(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(PANGU, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"convert its weights with .*save_pretrained\(NEW_FOLDER\)"):
        prepare_model(scenario(model=str(folder)), POLICY, tmp_path / "out")


def test_a_missing_shard_is_named(tmp_path: Path, sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UsageError, match=r"lacks 'model-00002-of-00002\.safetensors"):
        prepare_model(scenario(model=str(sharded)), POLICY, tmp_path / "out")
