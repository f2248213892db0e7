"""Checks the content of a user's model folder, and decides whether its Python code may run.

An unusable folder is reported in one line, before anything is copied, loaded or run. Every call of transformers with a
folder gets its ``trust_remote_code`` from ``runs_code``.
"""

import contextlib
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from conformance.core.errors import UsageError, shown
from conformance.core.host import FIXTURES
from conformance.core.io import check_file, is_file, read_json
from conformance.spec.scenario import ADAPTER

Files = tuple[tuple[Path, int], ...]
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
NOT_COPIED = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "__pycache__", ".*", ADAPTER)
# folder_code() of the bundled openPangu model. A copy with other Python code or another auto_map has another digest.
BUNDLED_CODE = "57290f782b6e10d3da0f048d0ba6c6f8c43f72f7a6af07160c95951649608e54"


def check_model_folder(model: Path) -> None:
    """Raises UsageError if ``model`` is not a Hugging Face model folder, or contains something that cannot be copied.

    Symbolic links may only lead to files of the folder, or of the same repository in Hugging Face's cache. Otherwise
    other files of this machine could get into the output.
    """
    if not (model / CONFIG).exists():
        raise UsageError(f"{model} is not a Hugging Face model folder: it has no {CONFIG}")
    roots = [model.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    if roots[0].parent == FIXTURES / "models":
        roots.append(roots[0].parent)  # one tokenizer file serves all models
    for file in _files(model):
        if file.is_symlink():
            _check_link(file, roots)
        try:
            check_file(file)
        except FileNotFoundError:
            raise UsageError(f"{file} is a broken link; remove it, or download the folder again") from None


def files_of(model: Path) -> Files:
    """Returns the files of a model folder with their modification times, as a key for caches."""
    return tuple((file, file.stat().st_mtime_ns) for file in sorted(_files(model)) if file.exists())


def _files(model: Path) -> Iterator[Path]:
    """Yields all files and symbolic links of the folder that are copied or linked."""
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


def runs_code(folder: Path, *, trusted: bool, tokenizer: bool = False) -> bool:
    """Returns ``trust_remote_code`` for transformers: whether its model, or ``tokenizer``, runs code of the folder.

    ``trusted``: the user has allowed it. A model never runs code if transformers has a class of its own for it. Raises
    UsageError if the folder has code that would run and that the user has not allowed, and if it lacks such code.
    """
    references = _references(folder)
    if replaced_code(folder):
        del references[CONFIG]
    for file, named in references.items():
        _check_code_files(folder, file, named)
    if references and not (trusted or folder_code(folder) == BUNDLED_CODE):
        raise UsageError(
            f"{folder / next(iter(references))} names Python code of the folder (auto_map), and loading the model "
            f"would run it; read the code, and add --trust-remote-code if you trust it"
        )
    return bool(references) if tokenizer else CONFIG in references


def _check_code_files(folder: Path, file: str, references: object) -> None:
    """Raises UsageError if an ``auto_map`` names a module that the folder lacks, apart from other repositories."""
    values = references.values() if isinstance(references, dict) else [references]
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    for name in (name for name in names if isinstance(name, str) and "--" not in name):
        module = f"{name.split('.')[0]}.py"
        if not is_file(folder / module):
            raise UsageError(
                f"{folder} lacks {shown(module)}, which {file} names in auto_map; download it into the folder"
            )


def replaced_code(folder: Path) -> str:
    """Names the model type whose code in the folder transformers' own class replaces; empty if the folder has none."""
    if CONFIG not in _references(folder):
        return ""
    kind = read_json(folder / CONFIG).get("model_type")
    if not isinstance(kind, str) or not _is_named_by_transformers(kind):
        return ""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # takes seconds
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return kind if kind in CONFIG_MAPPING_NAMES and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else ""


@cache
def _is_named_by_transformers(kind: str) -> bool:
    """Returns whether the files with transformers' tables of model types, which are not imported, name ``kind``."""
    found = find_spec("transformers")
    files = Path(found.origin).parent.glob("models/auto/*.py") if found and found.origin else ()
    return any(f'"{kind}"' in file.read_text(encoding="utf-8") for file in files)


def code_remarks(folder: Path) -> tuple[str, ...]:
    """Remarks for a verdict that the folder's model code was not run, if transformers' own class replaced it."""
    kind = replaced_code(folder)
    return (f"the folder's Python code (auto_map): transformers' own class of {kind} took its place",) if kind else ()


def folder_code(folder: Path) -> str:
    """Returns a hexadecimal SHA-256 of a folder's Python files and the ``auto_map`` of its configuration files."""
    digests = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.py"))
        if file.is_file()
    }
    return hashlib.sha256(json.dumps([digests, _references(folder)], sort_keys=True).encode()).hexdigest()


def _references(folder: Path) -> dict[str, object]:
    """Returns the ``auto_map`` of each configuration file that has one, by the file's name."""
    files = [name for name in (CONFIG, TOKENIZER_CONFIG) if (folder / name).exists()]
    found = {name: read_json(folder / name).get("auto_map") for name in files}
    return {name: references for name, references in found.items() if references}


@contextlib.contextmanager
def listed_ties() -> Iterator[None]:
    """Lets transformers 5 tie weights that a folder's code lists (``_tied_weights_keys``), as transformers 4 did.

    Published code, such as openPangu's, lists the weights that are tied to the input embedding. transformers 5 needs a
    dictionary.
    """
    from transformers import PreTrainedModel  # takes a while to import

    expand = PreTrainedModel.get_expanded_tied_weights_keys

    def expanded(model: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(listed := model._tied_weights_keys, list | tuple | set):
            embedding = model.get_input_embeddings()
            source = next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)
            model._tied_weights_keys = {name: source for name in listed if name.endswith("weight") and name != source}
        return expand(model, *arguments, **options)

    with mock.patch.object(PreTrainedModel, "get_expanded_tied_weights_keys", expanded):
        yield
