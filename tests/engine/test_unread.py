"""Models that are built from headers of files: their numbers are those that transformers loads, region by region."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conformance.core.host import FIXTURES
from impl.interface import sharded_safetensors
from impl.interface.sharded_safetensors import SliceReader, chunks, fill
from impl.models.lazy_weights import Computed, Unread, UnreadWeights, _Headers, _Whole
from impl.models.loading import empty_model, load_model

MODELS = FIXTURES / "models"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss"])
def test_a_model_is_bit_by_bit_what_transformers_loads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_safetensors, "CHUNK", 1000)
    monkeypatch.setattr(sharded_safetensors, "MAPPED", 10_000)
    right = AutoModelForCausalLM.from_pretrained(MODELS / family, dtype=torch.float64)
    found = load_model(MODELS / family, dtype=torch.float64, attention="eager")
    for kind in ("named_parameters", "named_buffers"):
        theirs, own = (dict(getattr(model, kind)()) for model in (right, found))
        assert own.keys() == theirs.keys()
        assert all(torch.equal(own[name], theirs[name].to(own[name])) for name in own), kind


@pytest.mark.parametrize("family", ["llama", "mixtral"])  # mixtral's experts are stacked and joined
def test_weights_are_cast_on_the_device_that_gets_them(family: str) -> None:
    """A device without numbers stands for a GPU. A host takes seconds to cast a billion numbers."""
    model = empty_model(MODELS / family, dtype=torch.float64, attention="eager")
    unread: UnreadWeights = model.unread
    with unread.opened("meta") as read, torch.no_grad():
        for name, parameter in model.named_parameters():
            region = read.region(name, [0] * parameter.dim(), parameter.shape)
            assert (region.device.type, region.dtype, region.shape) == ("meta", torch.float64, parameter.shape), name


def test_what_needs_whole_tensors_is_computed_on_the_host_and_sent_strip_by_strip(tmp_path: Path) -> None:
    save_file({"a": torch.randn(4, 6)}, path := tmp_path / "model.safetensors")
    devices: list[str] = []

    def computed(tensor: torch.Tensor) -> torch.Tensor:
        devices.append(tensor.device.type)
        return tensor.cumsum(0)

    origin = Computed(computed, (_Whole(_Headers(path).get_slice("a").origin, (4, 6)),), {}, None)
    with UnreadWeights(files=[path], origins={"made": origin}).opened("meta") as read:
        region = read.region("made", [1, 2], [3, 4])
    assert (devices, region.device.type, region.shape) == (["cpu"], "meta", (3, 4))


def test_a_model_without_numbers_has_its_buffers_and_takes_no_memory() -> None:
    model = empty_model(MODELS / "qwen3-moe", dtype=torch.float64, attention="eager")
    assert all(parameter.is_meta and type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert all(not buffer.is_meta for buffer in model.buffers())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("equal", [True, False])
def test_two_tensors_that_the_configuration_ties_are_tied_if_they_are_equal(tmp_path: Path, equal: bool) -> None:
    shutil.copytree(MODELS / "qwen3", folder := tmp_path / "qwen3")
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    head = embedding.clone() if equal else embedding + 1
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    found = load_model(folder, dtype=torch.float32, attention="eager")
    own, source = found.get_output_embeddings().weight, found.get_input_embeddings().weight
    assert (own is source) == equal
    assert torch.equal(own, head.float())
    assert torch.equal(source, embedding.float())


def test_regions_of_what_functions_of_torch_make_of_unread_tensors(tmp_path: Path) -> None:
    parts = {name: torch.randn(4, 6) for name in "abc"}
    save_file(parts, tmp_path / "model.safetensors")
    unread = [_Headers(tmp_path / "model.safetensors").get_slice(name) for name in "abc"]

    def made(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        stacked = torch.stack([one.to("cpu", dtype=torch.float64) for one in tensors], dim=0)
        return [
            stacked,
            torch.cat([stacked, stacked + 1], dim=1),  # the second is computed
            torch.cat(tensors, dim=-1),
            torch.stack(tensors, dim=1),
            tensors[0].chunk(2)[1],
            tensors[1].transpose(0, 1).contiguous(),
        ]

    with SliceReader([tmp_path / "model.safetensors"]) as read:
        for right, found in zip(made(list(parts.values())), made(list(unread)), strict=True):
            assert isinstance(found, Unread)
            assert found.is_meta
            start = [size // 3 for size in right.shape]
            shape = [size - 1 - at for size, at in zip(right.shape, start, strict=True)]
            region = right[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
            assert torch.equal(found.origin.region(read, start, shape), region)


@pytest.mark.parametrize("limit", [1, 5, 12, 30, 1000])
def test_strips_are_a_region_in_order_and_none_is_larger_than_the_limit(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_safetensors, "CHUNK", limit)
    whole = torch.arange(7 * 8 * 9).view(7, 8, 9)
    start, shape = [1, 2, 3], [5, 4, 6]
    region = whole[1:6, 2:6, 3:9]
    found = []
    for begin, size in chunks(start, shape):
        found.append(whole[tuple(slice(at, at + n) for at, n in zip(begin, size, strict=True))].flatten())
        assert found[-1].numel() <= max(limit, 6)
    assert torch.equal(torch.cat(found), region.flatten())
    filled = torch.zeros_like(region)
    fill(filled, "", start, lambda _, at, n: whole[tuple(slice(a, a + b) for a, b in zip(at, n, strict=True))])
    assert torch.equal(filled, region)
    assert not list(chunks([0], [0]))
    assert [*chunks([], [])] == [([], [])]
