"""A model folder of somebody else: what it may hold, and whether its code may be run.

Serves claim 9: what cannot be used is refused in one line before anything is copied, loaded or run. Every place that
hands a folder to transformers asks ``runs_code`` what to say for ``trust_remote_code``, and none says it by itself.
"""

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from conformance.reading import check_file, read_json
from conformance.validation import UsageError

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
NOT_COPIED = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "__pycache__", ".*")
# What folder_code() gives for the shipped openPangu: a copy with other Python, or other references to it, is not it.
SHIPPED_CODE = "57290f782b6e10d3da0f048d0ba6c6f8c43f72f7a6af07160c95951649608e54"


def check_model_folder(model: Path) -> None:
    """Raises UsageError for what is no Hugging Face folder, or has something in it that cannot be copied.

    Links may only lead to files of the folder, or of the same repository in Hugging Face's cache: nothing else of the
    machine gets into the output.
    """
    if not (model / CONFIG).exists():
        raise UsageError(f"{model} is not a Hugging Face model folder: it has no {CONFIG}")
    roots = [model.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    for file in _files(model):
        if file.is_symlink():
            _check_link(file, roots)
        try:
            check_file(file)
        except FileNotFoundError:
            raise UsageError(f"{file} leads nowhere; remove it, or download the folder again") from None


def _files(model: Path) -> Iterator[Path]:
    """All that is copied or linked, folders aside."""
    left_out = [pattern for pattern in NOT_COPIED if pattern != "*.safetensors"]
    for folder, folders, files in os.walk(model):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        folders[:] = [name for name in folders if not _matches(name, left_out) and name not in links]
        for name in (*files, *links):
            if not _matches(name, left_out):
                yield Path(folder) / name


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _check_link(link: Path, roots: list[Path]) -> None:
    target = Path(os.path.realpath(link))
    if not any(target.is_relative_to(root) for root in roots):
        raise UsageError(f"{link} is a link that leaves the folder, to {target}; put a copy in its place")
    if target.is_dir():
        raise UsageError(f"{link} is a link to a folder; put a copy in its place")


def runs_code(folder: Path, *, trusted: bool) -> bool:
    """Whether transformers has to run Python of the folder, and may: what it gets as ``trust_remote_code``.

    ``trusted`` is what the user said. Raises UsageError where there is code that nobody trusts.
    """
    references = _references(folder)
    if not references:
        return False
    if trusted or folder_code(folder) == SHIPPED_CODE:
        return True
    raise UsageError(
        f"{folder / next(iter(references))} names Python code of the folder (auto_map), and loading the model would "
        f"run it; read the code, and add --trust_remote_code if you trust it"
    )


def folder_code(folder: Path) -> str:
    """A digest of a folder's Python files and of what its configuration names of them."""
    digests = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.py"))
        if file.is_file()
    }
    return hashlib.sha256(json.dumps([digests, _references(folder)], sort_keys=True).encode()).hexdigest()


def _references(folder: Path) -> dict[str, object]:
    """``auto_map`` of each file in which transformers looks for it, where it is there."""
    files = [name for name in (CONFIG, TOKENIZER_CONFIG) if (folder / name).exists()]
    found = {name: read_json(folder / name).get("auto_map") for name in files}
    return {name: references for name, references in found.items() if references}
