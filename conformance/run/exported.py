"""Exported folders: whether the settings that a backend writes beside the weights are the model's own.

Serves claim 7. The weights of such a folder are judged in the leg that begins with it, by its backend. A setting that
this backend does not read from there, another program does.
"""

from pathlib import Path
from typing import Any

from conformance.inputs.folder import CONFIG
from conformance.lora import ADAPTER, CONFIG_FILE
from conformance.reading import read_json

# Who wrote the folder, where the base was and in which dtype, and what is of generation alone.
OTHER = frozenset(
    (
        "_name_or_path",
        "base_model_name_or_path",
        "transformers_version",
        "peft_version",
        "dtype",
        "torch_dtype",
        "use_cache",
    )
)
UNORDERED = "target_modules"  # peft writes a set


def changed_settings(folder: Path, source: Path) -> list[str]:
    """Settings of ``source``, a Hugging Face folder with or without an adapter, that ``folder`` lacks or has otherwise,
    each as ``FILE: KEY``. What a library adds is not among them."""
    changed: list[str] = []
    for name in (CONFIG, f"{ADAPTER}/{CONFIG_FILE}"):
        if (source / name).is_file():
            before = read_json(source / name)
            after: dict[str, Any] = read_json(folder / name) if (folder / name).is_file() else {}
            kept = before.keys() - OTHER
            same = {key for key in kept if key in after and _meant(key, after[key]) == _meant(key, before[key])}
            changed += [f"{name}: {key}" for key in sorted(kept - same)]
    return changed


def _meant(key: str, value: Any) -> Any:
    return sorted(value) if key == UNORDERED and isinstance(value, list) else value
