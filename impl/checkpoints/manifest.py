"""Describes a checkpoint in a manifest with the size and digest of every file, and verifies its folder by it.

The manifest is written last; a checkpoint without it is half-written. It also has a digest of itself. Digests detect
damage, but no forgery (see safe_pickle.py).

The folder is verified before it is used, without ranks: a crash may have truncated a file, a disk may have changed it,
and anyone may have made it. It may contain only regular files that the manifest lists, with their sizes and digests,
and no pickle with names that honest checkpoints do not need. Each problem is a UsageError that names the file.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError, explain, one_line, shown
from conformance.core.io import MIB, parse_json, read_text
from conformance.spec.precision import PRECISIONS, PrecisionName
from impl.checkpoints.safe_pickle import check_pickle
from impl.checkpoints.training_state import DataPosition

FORMAT, VERSION, FILE = "backend-parity checkpoint", 1, "checkpoint.json"
Form = Literal["native", "state"]
Shapes = dict[str, tuple[NonNegativeInt, ...]]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class About:
    """Describes the training of a checkpoint, or a training that resumes from one.

    form: ``native``, in the backend's own files, or ``state``, which every backend reads. step: finished optimizer
    steps. models: for each trained model, the shapes of the tensors in its folder. optimizer: its kind. data: position
    in the data, if the training counts documents. settings: the optimizer, schedule, objective and frozen
    models, which a training that resumes from the checkpoint must have as well.
    """

    form: Form
    backend: str
    layout: str
    precision: PrecisionName
    objective: str
    optimizer: str
    step: NonNegativeInt
    world_size: PositiveInt
    models: dict[str, Shapes]
    data: DataPosition | None = None
    settings: dict[str, dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FileEntry:
    size: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Manifest:
    """Lists all ``files`` but the manifest itself, by their paths in the checkpoint's folder, with slashes."""

    suite_version: str
    about: About
    files: dict[str, FileEntry]


_ADAPTER = TypeAdapter(Manifest)


def to_text(manifest: Manifest) -> str:
    """Returns the text of the file; ``from_text`` reads it."""
    return _with_digest({"format": FORMAT, "version": VERSION, **_ADAPTER.dump_python(manifest, mode="json")})


def _with_digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, indent=1, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), **values}, indent=1, sort_keys=True)


def from_text(text: str, *, source: str) -> Manifest:
    """Reads the result of ``to_text``. Raises UsageError that names ``source`` if a single byte differs."""
    values = parse_json(text, source)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UsageError(f"{source} is not the manifest of a checkpoint, or it is damaged; give another checkpoint")
    if values.get("version") != VERSION:
        raise UsageError(
            f"{source} has format version {shown(values.get('version'))}, written by suite version "
            f"{shown(values.get('suite_version'))}; this version of the suite reads version {VERSION}"
        )
    values.pop("sha256", None)
    if _with_digest(values) != text:
        raise UsageError(f"{source} is damaged: its digest does not fit its content; give another checkpoint")
    del values["format"], values["version"]
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        raise explain(error, source=source, what="manifest of a checkpoint") from None


def check_fits(found: About, wanted: About, *, source: str) -> None:
    """Raises UsageError if ``wanted`` cannot resume from the checkpoint ``source`` that ``found`` describes."""
    if found.form != wanted.form:
        forms = {"native": "a backend's own checkpoint", "state": "a training state for all backends"}
        raise UsageError(f"{source} is {forms[found.form]}, but {forms[wanted.form]} is required; give one")
    if wanted.form == "native" and found.backend != wanted.backend:
        raise UsageError(
            f"{source} was written by backend {shown(found.backend)}, and {wanted.backend} cannot read it; save a "
            f"training state, which every backend reads, or resume with the backend that wrote it"
        )
    # Files of a backend have the dtypes of its precision. A training state in float64 would be rounded silently.
    rounded = PRECISIONS[found.precision].is_exact and not PRECISIONS[wanted.precision].is_exact
    if found.precision != wanted.precision and (wanted.form == "native" or rounded):
        raise UsageError(
            f"{source} has precision {found.precision}, but this training has {wanted.precision}; resume in "
            f"{found.precision}" + ("" if rounded else ", or save a training state")
        )
    if found.optimizer != wanted.optimizer:
        raise UsageError(
            f"{source} has the state of {shown(found.optimizer)}, but the optimizer is {wanted.optimizer}; use "
            f"the same one"
        )
    _check_models(found.models, wanted.models, source)


def _check_models(found: dict[str, Shapes], wanted: dict[str, Shapes], source: str) -> None:
    if found.keys() != wanted.keys():
        trained = ", ".join(sorted(found)) or "nothing"
        raise UsageError(f"{source} has the models {trained}, but this training trains {', '.join(sorted(wanted))}")
    for model, shapes in wanted.items():
        names = sorted(shapes.keys() ^ found[model].keys())
        names = names or [name for name, shape in shapes.items() if found[model][name] != shape]
        if names:
            name, more = names[0], f", and {len(names) - 1} others differ" if len(names) > 1 else ""
            own, saved = (_shape(of.get(name)) for of in (shapes, found[model]))
            raise UsageError(
                f"{source} is of another model: {model}'s {name} is {saved} there and {own} in the given model{more}; "
                f"give the model that was trained"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


PARTIAL = ".partial"  # suffix of a folder while it is being written or removed
ADVICE = "give an earlier checkpoint"


def verify(folder: Path, wanted: About) -> Manifest:
    """Runs all checks in one process; returns the manifest. Raises UsageError."""
    found = read_manifest(folder)
    check_fits(found.about, wanted, source=str(folder))
    check_names(folder, found)
    for name in found.files:
        check_file(folder, name, found.files[name])
    return found


def verify_part(folder: Path) -> None:
    """Verifies the files below ``folder`` by the manifest of the checkpoint around it. Does nothing without one.

    Raises UsageError.
    """
    part = folder.resolve()
    for whole in (part, *part.parents)[:3]:  # a model's folder, and DeepSpeed's folder of files in it
        file = whole / FILE
        if file.is_file() and FORMAT in read_text(file, limit=64 * MIB):
            found = read_manifest(whole)
            check_names(whole, found)
            for name, entry in found.files.items():
                if (whole / name).is_relative_to(part):
                    check_file(whole, name, entry)


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint. Raises UsageError if it is missing, half-written, damaged or too new."""
    unfinished = folder.with_name(folder.name + PARTIAL)
    if folder.name.endswith(PARTIAL):
        raise UsageError(f"{folder} is half-written: its save did not finish; {ADVICE}")
    if not folder.is_dir():
        if unfinished.is_dir():
            raise UsageError(f"there is no {folder}, and {unfinished} is half-written: {ADVICE}")
        raise UsageError(f"there is no checkpoint {folder}; check the path")
    file = folder / FILE
    try:
        regular_size(file)
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {FILE}: it is half-written or not a checkpoint; {ADVICE}") from None
    return from_text(read_text(file, limit=64 * MIB), source=str(file))


def check_names(folder: Path, found: Manifest) -> None:
    """Raises UsageError if names or sizes of files in the folder differ from the manifest."""
    sizes = {name: regular_size(folder / name) for name in file_names(folder)}
    if missing := sorted(found.files.keys() - sizes.keys()):
        raise UsageError(f"{folder / missing[0]} is missing; {ADVICE}")
    if unknown := sorted(sizes.keys() - found.files.keys()):
        raise UsageError(
            f"{shown(str(folder / unknown[0]))} does not belong to the checkpoint: {FILE} does not list it; "
            f"remove it, or {ADVICE}"
        )
    for name, entry in found.files.items():
        if sizes[name] != entry.size:
            problem = "is truncated" if sizes[name] < entry.size else "is damaged"
            raise UsageError(f"{folder / name} {problem}: it has {sizes[name]} bytes instead of {entry.size}; {ADVICE}")


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Raises UsageError if the bytes of the file have changed, or if it is a pickle that must not be read."""
    if digest(folder / name) != entry.sha256:
        raise UsageError(f"{folder / name} is damaged: its bytes have changed since it was written; {ADVICE}")
    check_pickle(folder / name)


def share(names: Iterable[str], files: dict[str, int], *, rank: int, size: int) -> list[str]:
    """Returns the files that a rank reads: one rank per file, similar work for all ranks. ``files``: sizes."""
    return sorted(names, key=lambda name: (-files[name], name))[rank::size]


def file_names(folder: Path, *, below: str = "") -> Iterator[str]:
    """Yields the paths of all files but the manifest, with slashes. Links are not followed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {one_line(error)}") from None
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from file_names(folder / entry.name, below=f"{below}{entry.name}/")
        elif below or entry.name != FILE:
            yield below + entry.name


def regular_size(path: Path) -> int:
    """Returns the size of a file. Raises UsageError for links, pipes etc., FileNotFoundError if it is missing."""
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    kind = "a link" if stat.S_ISLNK(status.st_mode) else "a folder, pipe, socket or device"
    raise UsageError(f"{shown(str(path))} is {kind}, but a checkpoint has a file there; {ADVICE}")


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {one_line(error)}") from None
