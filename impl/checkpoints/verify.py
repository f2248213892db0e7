"""Verification of a checkpoint's folder, before anything of it is read for good; needs no ranks.

What is on disk is not believed: a crash may have cut it, a disk may have changed it, and somebody may have made it. So
there may only be the regular files that the manifest lists, of their sizes and digests, and no pickle that names more
than an honest one. All that is found is one UsageError that names the file.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from conformance.reading import MIB, read_text
from conformance.validation import UsageError, one_line, shown
from impl.checkpoints import manifest
from impl.checkpoints.manifest import About, FileEntry, Manifest
from impl.checkpoints.pickles import check_pickle

PARTIAL = ".partial"  # the end of a folder's name for as long as it is written, or removed
ADVICE = "give an earlier checkpoint"


def verify(folder: Path, wanted: About) -> Manifest:
    """All checks, in one process."""
    found = read_manifest(folder)
    manifest.check_fits(found.about, wanted, source=str(folder))
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
    file = folder / manifest.FILE
    try:
        regular_size(file)
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {manifest.FILE}: it is half-written or no checkpoint; {ADVICE}") from None
    return manifest.from_text(read_text(file, limit=64 * MIB), source=str(file))


def check_names(folder: Path, found: Manifest) -> None:
    """Raises UsageError where the folder has other files than the manifest, or of another size."""
    sizes = {name: regular_size(folder / name) for name in file_names(folder)}
    if missing := sorted(found.files.keys() - sizes.keys()):
        raise UsageError(f"{folder / missing[0]} is missing; {ADVICE}")
    if unknown := sorted(sizes.keys() - found.files.keys()):
        raise UsageError(
            f"{shown(str(folder / unknown[0]))} does not belong to the checkpoint: {manifest.FILE} does not list it; "
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
        elif below or entry.name != manifest.FILE:
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
