"""Finds models and data sets of the Hugging Face Hub by name: in the cache first, else by a download if allowed."""

import re
import sys
from pathlib import Path

from conformance.core.errors import UsageError, one_line
from conformance.core.host import FIXTURES, resolve

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_NOT_NEEDED = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*/*"]  # other forms of the weights


def model_folder(model: str) -> str:
    """Returns the folder of a model: ``model`` itself if it exists, else that of ``ORG/NAME`` in the hub's cache.

    A model that is not in the cache is downloaded, unless HF_HUB_OFFLINE is set. Raises UsageError if that fails.
    """
    missing = _missing(model, model)
    if missing is None:
        return model
    from huggingface_hub import constants, snapshot_download  # takes a while to import
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, local_files_only=True, ignore_patterns=_NOT_NEEDED))
        if constants.HF_HUB_OFFLINE or any(folder.glob("*.safetensors")):
            return str(folder)
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            raise UsageError(
                f"{missing}; in the cache of the Hugging Face Hub ({constants.HF_HUB_CACHE}) there is no such model "
                f"either, and HF_HUB_OFFLINE is set: unset it, or run: hf download {model}"
            ) from None
    print(f"downloading {model} from the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        return str(snapshot_download(model, ignore_patterns=_NOT_NEEDED))
    except Exception as error:  # the hub's client and those below it raise errors of many types
        raise UsageError(f"{missing}; the Hugging Face Hub does not give it either: {one_line(error)}") from None


def dataset_folder(data: str) -> str:
    """Returns the path of a data set: ``data`` itself if it exists, else the cached folder of ``ORG/NAME[:CONFIG]``.

    A data set that is not in the cache of the package ``datasets`` is downloaded, unless HF_HUB_OFFLINE is set. Raises
    UsageError if that fails, and for one of several configurations without a name.
    """
    name, _, config = data.partition(":")
    missing = _missing(data, name)
    if missing is None:
        return data
    try:
        import datasets  # an optional package, slow to import
        from datasets.naming import camelcase_to_snakecase
    except ImportError:
        raise UsageError(f"{missing}; data sets of the hub need datasets: pip install 'backend-parity[data]'") from None
    owner, _, own = name.partition("/")
    folder = Path(datasets.config.HF_DATASETS_CACHE) / f"{owner}___{camelcase_to_snakecase(own)}"
    cached = sorted(folder.glob(f"{config or '*'}/*/*/dataset_info.json"), key=lambda file: file.stat().st_mtime)
    names = sorted({file.parents[2].name for file in cached})
    if len(names) > 1:
        raise UsageError(f"{name} has several configurations in the cache; give one of {', '.join(names)}: {name}:NAME")
    if cached:
        return str(cached[-1].parent)
    if datasets.config.HF_HUB_OFFLINE:
        raise UsageError(f"{missing}; {folder} does not hold it either, and HF_HUB_OFFLINE is set: unset it once")
    print(f"downloading {data} from the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        builder = datasets.load_dataset_builder(name, config or None)
        builder.download_and_prepare()
    except Exception as error:  # the hub's client and those below it raise errors of many types
        raise UsageError(f"{missing}; the Hugging Face Hub does not give it either: {one_line(error)}") from None
    return str(builder.cache_dir)


def _missing(path: str, name: str) -> UsageError | None:
    """Returns None if ``path`` exists, else the error that says so. Raises it if ``name`` is none of the hub."""
    try:
        resolve(path)
    except UsageError as error:
        if not _NAME.fullmatch(name) or (FIXTURES / name.partition("/")[0]).is_dir():
            raise
        return error
    return None
