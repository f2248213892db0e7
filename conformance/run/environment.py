"""Environment: what a reader needs in order to see the same numbers, and what a model's configuration says of its
sizes.
"""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from conformance.run.task import package_version
from conformance.validation import UsageError

PACKAGES = ("torch", "transformers", "ring-flash-attn", "deepspeed", "megatron-core")  # whose versions a summary keeps


def environment() -> dict[str, Any]:
    """Versions and hardware, as JSON values."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "cuda": torch.version.cuda,
        **{name: package_version(name) for name in PACKAGES},
    }


def _gpus() -> list[str]:
    """Name and driver of each GPU of the host, asked without creating a CUDA context in this process."""
    if not torch.cuda.device_count():
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()


def model_sizes(model: Path) -> dict[str, int]:
    """Attention heads, key-value heads and layers of a Hugging Face folder, as Layout.validate takes them."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    if "num_attention_heads" not in config:
        raise UsageError(f"{model}/config.json does not say num_attention_heads; this is no model that the suite knows")
    heads = config["num_attention_heads"]
    return {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "layers": config["num_hidden_layers"],
    }
