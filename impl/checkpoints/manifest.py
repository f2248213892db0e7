"""Manifest of a checkpoint: what it is of, and the size and digest of every file. Knows neither ranks nor folders.

It is written last, and a checkpoint without it is half-written. It has a digest of itself, too: a number in it that is
wrong is found as the byte of a tensor is. A digest finds damage, no forger; what a forger may do is in pickles.py.

Verification of a checkpoint's folder, before anything of it is read for good; needs no ranks.

What is on disk is not believed: a crash may have cut it, a disk may have changed it, and somebody may have made it. So
there may only be the regular files that the manifest lists, of their sizes and digests, and no pickle that names more
than an honest one. All that is found is one UsageError that names the file.
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
    """What a checkpoint is of, or what is to go on from one.

    form: ``native``, in the backend's own files, or ``state``, which every backend reads. step: optimizer steps that
    are done. models: of each trained model, the shapes of the tensors in its folder. optimizer: its kind. data: where
    the training stands in its data, for a training that keeps count.
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FileEntry:
    size: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Manifest:
    """``files`` by their paths in the checkpoint's folder, with slashes, all but the manifest itself."""

    suite_version: str
    about: About
    files: dict[str, FileEntry]


_ADAPTER = TypeAdapter(Manifest)


def to_text(manifest: Manifest) -> str:
    """What the file holds; ``from_text`` reads it."""
    return _with_digest({"format": FORMAT, "version": VERSION, **_ADAPTER.dump_python(manifest, mode="json")})


def _with_digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, indent=1, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), **values}, indent=1, sort_keys=True)


def from_text(text: str, *, source: str) -> Manifest:
    """Read what ``to_text`` gave. Raises UsageError that names ``source`` for anything else, down to a single byte."""
    values = parse_json(text, source)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UsageError(f"{source} is no manifest of a checkpoint, or it is damaged; give another checkpoint")
    if values.get("version") != VERSION:
        raise UsageError(
            f"{source} is of version {shown(values.get('version'))} of the format, written by suite version "
            f"{shown(values.get('suite_version'))}; this version of the suite reads version {VERSION}"
        )
    values.pop("sha256", None)
    if _with_digest(values) != text:
        raise UsageError(f"{source} is damaged: it does not have the digest that it states; give another checkpoint")
    del values["format"], values["version"]
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        raise explain(error, source=source, what="manifest of a checkpoint") from None


def check_fits(found: About, wanted: About, *, source: str) -> None:
    """Raises UsageError where what is ``wanted`` cannot go on from what was ``found`` in the checkpoint ``source``."""
    if found.form != wanted.form:
        forms = {"native": "a backend's own checkpoint", "state": "a training state for all backends"}
        raise UsageError(f"{source} is {forms[found.form]}, and {forms[wanted.form]} is asked for; give one of these")
    if wanted.form == "native" and found.backend != wanted.backend:
        raise UsageError(
            f"{source} is of backend {shown(found.backend)}, and {wanted.backend} cannot read it; save a training "
            f"state, which every backend reads, or go on with the backend that wrote it"
        )
    # Files of a backend have the dtypes of its precision; of a training state, float64 would be rounded in silence.
    rounded = PRECISIONS[found.precision].is_exact and not PRECISIONS[wanted.precision].is_exact
    if found.precision != wanted.precision and (wanted.form == "native" or rounded):
        raise UsageError(
            f"{source} is of precision {found.precision}, and this training is {wanted.precision}; go on in "
            f"{found.precision}" + ("" if rounded else ", or save a training state")
        )
    if found.optimizer != wanted.optimizer:
        raise UsageError(
            f"{source} has the state of {shown(found.optimizer)}, and the optimizer is {wanted.optimizer}; use "
            f"the same one"
        )
    _check_models(found.models, wanted.models, source)


def _check_models(found: dict[str, Shapes], wanted: dict[str, Shapes], source: str) -> None:
    if found.keys() != wanted.keys():
        trained = ", ".join(sorted(found)) or "nothing"
        raise UsageError(f"{source} is of {trained}, and this training trains {', '.join(sorted(wanted))}")
    for model, shapes in wanted.items():
        names = sorted(shapes.keys() ^ found[model].keys())
        names = names or [name for name, shape in shapes.items() if found[model][name] != shape]
        if names:
            name, more = names[0], f", and {len(names) - 1} others" if len(names) > 1 else ""
            own, its = (_shape(of.get(name)) for of in (shapes, found[model]))
            raise UsageError(
                f"{source} is of another model: {model}'s {name} is {its} there and {own} in the model that was "
                f"given{more}; give the model that was trained"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


PARTIAL = ".partial"  # the end of a folder's name for as long as it is written, or removed
ADVICE = "give an earlier checkpoint"


def verify(folder: Path, wanted: About) -> Manifest:
    """All checks, in one process."""
    found = read_manifest(folder)
    check_fits(found.about, wanted, source=str(folder))
    check_names(folder, found)
    for name in found.files:
        check_file(folder, name, found.files[name])
    return found


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises UsageError for what is missing, half-written, damaged or too new."""
    unfinished = folder.with_name(folder.name + PARTIAL)
    if folder.name.endswith(PARTIAL):
        raise UsageError(f"{folder} is half-written: its save has not come to its end; {ADVICE}")
    if not folder.is_dir():
        if unfinished.is_dir():
            raise UsageError(f"there is no {folder}, and {unfinished} is half-written: {ADVICE}")
        raise UsageError(f"there is no checkpoint {folder}; check the path")
    file = folder / FILE
    try:
        regular_size(file)
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {FILE}: it is half-written or no checkpoint; {ADVICE}") from None
    return from_text(read_text(file, limit=64 * MIB), source=str(file))


def check_names(folder: Path, found: Manifest) -> None:
    """Raises UsageError where the folder has other files than the manifest, or of another size."""
    sizes = {name: regular_size(folder / name) for name in file_names(folder)}
    if missing := sorted(found.files.keys() - sizes.keys()):
        raise UsageError(f"{folder / missing[0]} is missing; {ADVICE}")
    if unknown := sorted(sizes.keys() - found.files.keys()):
        raise UsageError(
            f"{shown(str(folder / unknown[0]))} does not belong to the checkpoint: {FILE} does not list it; "
            f"take it away, or {ADVICE}"
        )
    for name, entry in found.files.items():
        if sizes[name] != entry.size:
            is_cut = "is truncated" if sizes[name] < entry.size else "is damaged"
            raise UsageError(f"{folder / name} {is_cut}: it has {sizes[name]} bytes instead of {entry.size}; {ADVICE}")


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Raises UsageError where the file is not what was written, or a pickle that is not to be read."""
    if digest(folder / name) != entry.sha256:
        raise UsageError(f"{folder / name} is damaged: its bytes are not those that were written; {ADVICE}")
    check_pickle(folder / name)


def share(names: Iterable[str], files: dict[str, int], *, rank: int, size: int) -> list[str]:
    """The files that a rank reads, so that each is read by one rank and all read about as much. ``files``: sizes."""
    return sorted(names, key=lambda name: (-files[name], name))[rank::size]


def file_names(folder: Path, *, below: str = "") -> Iterator[str]:
    """Paths of all files but the manifest, with slashes. Links are none of a folder's own and are not followed."""
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
    """Size of a file. Raises UsageError for a link, a pipe or the like, FileNotFoundError for nothing."""
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    what = "a link" if stat.S_ISLNK(status.st_mode) else "a folder, pipe, socket or device"
    raise UsageError(f"{shown(str(path))} is {what}, where a checkpoint has a file; {ADVICE}")


def digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {one_line(error)}") from None
