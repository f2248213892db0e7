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
POSITIONS = "rope_parameters"  # where transformers 5 writes what stood at the top before
MOVED = ("rope_theta", "partial_rotary_factor", "rope_scaling")


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
            same |= {key for key in kept.intersection(MOVED) - after.keys() if _is_among(key, before[key], after)}
            changed += [f"{name}: {key}" for key in sorted(kept - same)]
    return changed


def _meant(key: str, value: Any) -> Any:
    return sorted(value) if key == UNORDERED and isinstance(value, list) else value


def _is_among(key: str, value: Any, after: dict[str, Any]) -> bool:
    """Whether a setting of positions is among those that transformers 5 writes together."""
    together = after.get(POSITIONS)
    if not isinstance(together, dict):
        return False
    if key != "rope_scaling":
        return bool(together.get(key) == value)
    scaling = value or {"rope_type": "default"}
    return all(together.get({"type": "rope_type"}.get(name, name)) == number for name, number in scaling.items())
