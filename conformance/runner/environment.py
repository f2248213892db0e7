"""Collects the versions and hardware that are needed to reproduce a run, and reads the sizes of a model."""

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import conformance
from conformance.core.errors import UsageError, shown
from conformance.core.io import read_json
from conformance.core.packages import is_installed, package_version
from conformance.results.baseline import CHANGED, COMMIT, RANKS_PER_GPU
from conformance.runtime.gpu_inventory import installed_gpus

PACKAGE = Path(conformance.__file__).parent
# Names of these numbers in configurations: first of most models, then of GPT-2, GPT-Neo, MPT and others.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_KINDS = ("layers_block_type", "layer_types")  # lists with an entry for each layer
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Prefixes of environment variables that change results of libraries or the communication of ranks.
VARIABLES = ("CUDA_", "CUBLAS_", "GLOO_", "MKL_", "NCCL_", "NVIDIA_TF32_", "OMP_", "PYTORCH_")
PACKAGES = ("torch", "transformers", "ring-flash-attn", "deepspeed", "megatron-core")  # listed in the summary
WHERE_INSTALLED = ("transformer-engine",)  # listed in the summary only if they are installed


def environment(*, ranks_per_gpu: int = 1) -> dict[str, Any]:
    """Returns versions and hardware as JSON values. ranks_per_gpu: how many ranks might share a GPU."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        **({RANKS_PER_GPU: ranks_per_gpu} if ranks_per_gpu > 1 else {}),
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        **{name: package_version(name) for name in (*PACKAGES, *filter(is_installed, WHERE_INSTALLED))},
        "backend-parity": conformance.__version__,
        COMMIT: commit(PACKAGE.parent),
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def _nccl() -> str | None:
    is_there = torch.distributed.is_nccl_available() and torch.cuda.device_count()
    return ".".join(map(str, torch.cuda.nccl.version())) if is_there else None


def commit(checkout: Path) -> str | None:
    """Returns the git commit of ``checkout``, with the suffix CHANGED if tracked files were changed; None if the folder
    is not a checkout."""
    if not (checkout / ".git").exists():  # installed from a wheel, perhaps inside of another repository
        return None
    describe = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--exclude=*", f"--dirty={CHANGED}"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def _gpus() -> list[str]:
    """Returns the name and driver of each GPU of the host, without creating a CUDA context in this process."""
    if not torch.cuda.device_count():
        return []
    return [f"{gpu.name}, {gpu.driver}" for gpu in installed_gpus()]


def model_sizes(model: Path) -> dict[str, int]:
    """Reads the numbers of heads, key-value heads, layers and experts from a Hugging Face folder, as arguments of
    Layout.validate. Raises UsageError if the configuration does not have them."""
    config = read_json(model / "config.json")
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    heads, layers, experts = (_first(config, keys) for keys in (_HEADS, _LAYERS, _EXPERTS))
    layers = layers or max(len(config.get(key) or ()) for key in _KINDS)
    for size, keys in ((heads, _HEADS), (layers, _LAYERS)):
        if not size:
            raise UsageError(f"{model}/config.json has none of {', '.join(keys)}; add one if this is a transformer")
    return {
        "heads": heads,
        "kv_heads": _first(config, _KV_HEADS) or (1 if config.get("multi_query") else heads),
        "layers": layers,
        "experts": experts,
    }


def _first(config: dict[str, Any], keys: Sequence[str]) -> int:
    """Returns the number under the first of the names that the configuration has; 0 if it has none.

    Raises UsageError for anything but a whole number.
    """
    key, value = next(((key, config[key]) for key in keys if config.get(key)), ("", 0))
    if type(value) is not int or value < 0:
        raise UsageError(f"config.json: {key} must be a positive whole number, got {shown(value)}")
    return value
