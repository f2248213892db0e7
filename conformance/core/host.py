"""Locates fixtures, models, data sets and the cache on this host, and measures its free memory and disk.

The fixtures are next to ``conformance`` in a checkout, and inside it in an installed wheel.
Models and data sets of the Hugging Face Hub are found by name: in the hub's cache first, else by a download if allowed.

This module imports nothing slow, because the pytest plugin uses it before its workers start.
"""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from conformance.core.errors import UsageError, did_you_mean, one_line, shown
from conformance.core.io import unfiltered_errors

_PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = _PACKAGE.parent  # for an installed wheel, the folder that holds the packages
FIXTURES = _PACKAGE / "_fixtures" if (_PACKAGE / "_fixtures").is_dir() else CHECKOUT / "fixtures"


def resolve(path: str) -> Path:
    """Returns the absolute path for a user's path, which is relative to the working directory or to the fixtures.

    Raises UsageError if neither exists.
    """
    try:
        for candidate in (Path(path).expanduser(), FIXTURES / path):
            if candidate.exists():
                return candidate.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, an unknown user, a name that is too long
        raise UsageError(f"{shown(path)} cannot be used as a path: {one_line(error)}") from None
    known = [f"{folder}/{file.name}" for folder in ("models", "data") for file in (FIXTURES / folder).glob("*")]
    where = f"neither here ({Path.cwd()}) nor among the fixtures ({FIXTURES})"
    near = next((f"did you mean {name!r}?" for name in known if Path(name).stem == path), did_you_mean(path, known))
    raise UsageError(f"there is no {shown(path)}, {where}; {near}".rstrip("; "))


def cache_folder() -> Path:
    """Returns the folder in which records are kept across runs."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "backend-parity"
    return Path(os.environ.get("PARITY_CACHE") or default)


@dataclass(frozen=True, kw_only=True)
class HostResources:
    """Holds free bytes. cache: for the oracle's cache; None if it is on the file system of the output."""

    memory: float
    disk: float
    cache: float | None


def host_resources_of(out: Path) -> HostResources:
    """Measures this machine now; ``out`` need not exist yet."""
    folder, cache = free_of(out), free_of(cache_folder())
    own_disk = folder.stat().st_dev != cache.stat().st_dev
    return HostResources(
        memory=available_memory(),
        disk=shutil.disk_usage(folder).free,
        cache=shutil.disk_usage(cache).free if own_disk else None,
    )


def free_of(path: Path) -> Path:
    """Returns the nearest existing folder at or above ``path``, whose file system will hold it."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def available_memory() -> int:
    """Returns the bytes of memory available without swapping, by the kernel's estimate (MemAvailable)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


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
        with unfiltered_errors():
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
        with unfiltered_errors():
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
