"""Finds models of the Hugging Face Hub by name: in its cache first, and by a download where that is allowed."""

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
    try:
        resolve(model)
        return model
    except UsageError as error:
        if not _NAME.fullmatch(model) or (FIXTURES / model.partition("/")[0]).is_dir():
            raise
        missing = error
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
