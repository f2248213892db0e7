"""Handles LoRA adapters with peft: in a Hugging Face model, in the names of its parameters, and in files.

A model's folder has its adapter in the folder ADAPTER, in peft's format. peft replaces each adapted linear layer by its
own module, which changes names: ``q_proj.weight`` becomes ``q_proj.base_layer.weight``, and its adapter is
``q_proj.lora_A.default.weight``. All other code uses the names in files, without these two parts.

A training begins with an adapter in a folder beside the log, which every backend loads. A is drawn as peft draws it,
uniform within 1 / sqrt(inputs), and B is 0 (Hu et al., arXiv 2106.09685, section 4.1), so the first policy is the base.
The numbers of a tensor depend on the seed and its name alone.
"""

import hashlib
import importlib.util
import math
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from conformance.backends.protocol import NamedTensors, Support, Supported, Unsupported
from conformance.core.errors import UsageError
from conformance.core.io import read_json
from conformance.models.folders import adapter_config, write_adapter_files
from conformance.spec.scenario import (
    CONFIG_FILE,
    FILE_PREFIX,
    PARTS,
    WEIGHTS_FILE,
    LoraConfig,
    OptimizerConfig,
    Scenario,
    is_adapter,
)
from impl.models.lazy_weights import WRAPPED, Cast, Stored, UnreadWeights, published_buffers

_OF_TARGET = (".lora_A.weight", ".lora_B.weight", ".weight")  # the others end with the last one, so it is last
NAME = "default"  # peft's name for the only adapter of a model
INSTALL = "pip install 'backend-parity[lora]'"


def is_installed() -> bool:
    return importlib.util.find_spec("peft") is not None


def adapter_support(scenario: Scenario) -> Support:
    """Returns whether the adapters of a scenario are supported, as far as this does not depend on the backend."""
    if scenario.lora and not is_installed():
        return Unsupported(f"adapters need the package peft; run: {INSTALL}")
    return Supported()


def load_adapter(model: torch.nn.Module, folder: Path) -> Any:
    """Adds the adapter in ``folder`` to ``model``, in place and in the model's dtype; returns peft's PeftModel of it.

    Only the adapter requires gradients then. If the model has no numbers yet (impl.models.loading.empty_model), neither
    has the adapter. Raises UsageError without peft.
    """
    if not is_installed():
        raise UsageError(f"adapters need the package peft; run: {INSTALL}")
    import peft

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        # By default, peft reads files onto the first GPU, on every rank.
        adapted = peft.PeftModel.from_pretrained(
            model, str(folder), adapter_name=NAME, is_trainable=True, autocast_adapter_dtype=False, torch_device="cpu"
        )
    unread: UnreadWeights | None = getattr(model, "unread", None)
    if unread:
        unread.files.append(folder / WEIGHTS_FILE)
        adapters = {name: parameter for name, parameter in named_parameters(model) if is_adapter(name)}
        assert all(parameter.is_meta for parameter in adapters.values())
        unread.origins |= {name: Cast(Stored(FILE_PREFIX + name), p.dtype) for name, p in adapters.items()}
    return adapted


def is_adapted(module: torch.nn.Module) -> bool:
    """Returns whether peft has put this module in the place of a linear layer."""
    return hasattr(module, "base_layer")


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields the parameters of a model under the names that they have in files, without what adapters and wrappers
    add."""
    for name, parameter in model.named_parameters():
        for part in PARTS:
            name = name.replace(f".{part}.{NAME}.", f".{part}.")
        yield name.replace(".base_layer.", ".").replace(WRAPPED, ""), parameter


def trained_names(model: torch.nn.Module, config: OptimizerConfig) -> frozenset[str]:
    """Returns the names of the trained parameters: those of the adapter, if any, that ``config`` does not freeze.

    The model's own code may freeze others (impl.models.loading).
    """
    untrained: frozenset[str] = getattr(model, "untrained", frozenset())
    names = [name for name, _ in named_parameters(model) if name not in untrained]
    candidates = [name for name in names if is_adapter(name)] or names
    return frozenset(name for name in candidates if config.trains(name))


def write_adapter(folder: Path, source: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Writes an adapter with these weights in peft's format, with the configuration of the one in ``source``."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / CONFIG_FILE, folder / CONFIG_FILE)
    save_file({FILE_PREFIX + name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS_FILE)


def merge_adapter(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of the whole ``model`` with the adapter in ``folder`` merged; in one process."""
    merged = load_adapter(model, folder).merge_and_unload()
    return {name: p.detach() for name, p in merged.named_parameters()} | published_buffers(merged)


def merged_weights(weights: NamedTensors, lora: LoraConfig, targets: Collection[str]) -> NamedTensors:
    """Yields the weights of a model with adapters on ``targets`` as those of a model without adapters.

    The three tensors of each target are replaced by W + scale B A in the wider dtype. Tensors come one after another.
    """
    scale = lora.lora_alpha / (lora.r**0.5 if lora.use_rslora else lora.r)
    waiting: dict[str, dict[str, torch.Tensor]] = {target: {} for target in targets}
    for name, tensor in weights:
        module = next((name.removesuffix(end) for end in _OF_TARGET if name.endswith(end)), "")
        if module not in waiting:
            yield name, tensor
            continue
        parts = waiting[module]
        parts[name.removeprefix(module)] = tensor.clone()  # the next gather may overwrite it
        if len(parts) == len(_OF_TARGET):
            a, b, base = (parts[end] for end in _OF_TARGET)
            product = b @ a
            yield f"{module}.weight", base.to(torch.promote_types(base.dtype, product.dtype)) + scale * product
            del waiting[module]
    assert not waiting, f"no adapter of {', '.join(waiting)} among the weights"


def adapter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of the adapter in ``folder``, by name; only the header of its file is read."""
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as tensors:
        return {
            name.removeprefix(FILE_PREFIX): tuple(tensors.get_slice(name).get_shape())
            for name in tensors.keys()  # noqa: SIM118
        }


def adapter_shapes_of(lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of A (r, in) and B (out, r) for each target of a model with these parameters.

    Raises UsageError for a target that the model does not have.
    """
    found: dict[str, tuple[int, ...]] = {}
    for target in lora.targets(shapes):
        rows, columns = shapes[f"{target}.weight"]
        found |= {f"{target}.lora_A.weight": (lora.r, columns), f"{target}.lora_B.weight": (rows, lora.r)}
    return found


def write_start(folder: Path, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> None:
    """Writes the initial adapter of a model with these parameters into the new folder ``folder``; in one process."""
    tensors = {name: _drawn(name, shape, seed) for name, shape in adapter_shapes_of(lora, shapes).items()}
    shutil.rmtree(folder, ignore_errors=True)
    write_adapter_files(folder, lora, lora.targets(shapes), tensors)


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (2 * drawn - 1) / math.sqrt(shape[1])


def check_same(folder: Path, lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UsageError if a training resumes with an adapter of other settings; a checkpoint knows only its sizes."""
    initial, requested = read_json(folder / CONFIG_FILE), adapter_config(lora, lora.targets(shapes))
    if changed := [name for name, value in requested.items() if initial.get(name) != value]:
        raise UsageError(
            f"the training began with {', '.join(f'{name}={initial.get(name)}' for name in changed)} ({folder}), but "
            f"{', '.join(f'{name}={requested[name]}' for name in changed)} is requested; resume with the initial values"
        )
