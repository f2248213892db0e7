"""Weights: the folder from which every backend and the oracle load a scenario's model.

Serves claim 6: weights come from a file, never from a seed per rank. Seed 0 is the model as it is; another seed is
another model of the same shape, so that nothing holds for one set of weights only.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from conformance.paths import resolve
from conformance.scenario import Scenario

NOISE = 0.05  # relative
INDEX = "model.safetensors.index.json"
NOT_COPIED = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "__pycache__", ".*")


def prepare_model(scenario: Scenario, out: Path) -> Path:
    """Fill the new or empty folder ``out`` with the scenario's model and return it.

    Configuration, tokenizer and code are copied. Weights are linked for seed 0; for other seeds every floating-point
    number is multiplied by 1 + noise, at most 5 % and decided by the seed and the tensor's name, and keeps its dtype.
    Raises ValueError for a model without config.json or without safetensors weights, and where ``out`` has files in it.
    """
    model = resolve(scenario.model)
    files = weight_files(model)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty, and nothing there is overwritten; give a new folder")
    twins = _twins(files) if scenario.seed else {}
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
    for file in files:
        if scenario.seed == 0:
            (out / file.name).symlink_to(file)
        else:
            _perturb(file, out / file.name, seed=scenario.seed, twins=twins)
    return out


def weight_files(model: Path) -> list[Path]:
    """The safetensors files that hold a Hugging Face folder's weights. Raises ValueError when it has none."""
    if not (model / "config.json").is_file():
        raise ValueError(f"{model} is not a Hugging Face model folder: it has no config.json")
    if (model / INDEX).is_file():
        index = json.loads((model / INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (model / name).is_file()]
    if missing and (model / INDEX).is_file():
        raise ValueError(f"{model} lacks {', '.join(missing)}, which {INDEX} names; download the folder again")
    if missing:
        raise ValueError(
            f"{model} has no model.safetensors and no {INDEX}; convert its weights with "
            f"transformers.AutoModelForCausalLM.from_pretrained({str(model)!r}).save_pretrained(NEW_FOLDER), "
            f"copy the tokenizer files there and use NEW_FOLDER as the model"
        )
    return [model / name for name in names]


def _twins(files: list[Path]) -> dict[str, str]:
    """Output embedding -> input embedding, where the files store both although the model ties them.

    They must stay equal: transformers does not tie a pair that differs in the file.
    """
    where = {name: file for file in files for name in _names(file)}
    head = next((name for name in where if name.endswith("lm_head.weight")), None)
    embedding = next((name for name in where if name.endswith("embed_tokens.weight")), None)
    if head is None or embedding is None:
        return {}
    equal = torch.equal(_tensor(where[head], head), _tensor(where[embedding], embedding))
    return {head: embedding} if equal else {}


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
    return tensor


def _perturb(source: Path, target: Path, *, seed: int, twins: dict[str, str]) -> None:
    with safe_open(source, framework="pt") as tensors:
        metadata = tensors.metadata()
    changed = {n: _noisy(_tensor(source, n), seed=seed, name=twins.get(n, n)) for n in _names(source)}
    save_file(changed, target, metadata=metadata)


def _noisy(tensor: torch.Tensor, *, seed: int, name: str) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    noise = 2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1
    return (tensor * (1 + NOISE * noise)).to(tensor.dtype)
