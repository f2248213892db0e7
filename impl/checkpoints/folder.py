"""The folder of a checkpoint: written under another name, and given its own when all of it is on the disk; collective.

Whatever moment a crash takes, there is either no folder of this name or a whole one, and what was there before is
untouched. The folder lies where all ranks see it. Serves claims 5 and 9.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

import conformance
from conformance.validation import UsageError
from impl.checkpoints import manifest
from impl.checkpoints.manifest import About, FileEntry, Manifest
from impl.checkpoints.verify import PARTIAL, check_file, check_names, digest, file_names, read_manifest, share
from impl.checkpoints.writing import AT_ONCE, Writing
from impl.together import Group, agree, on_first, together


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written. ``path``: the empty folder that all ranks write into. ``when``: what takes
    the work of writing."""

    path: Path
    when: Writing


@contextlib.contextmanager
def writing(folder: Path, about: About, *, when: Writing = AT_ONCE) -> Iterator[Draft]:
    """Yields what is to be written; ``folder`` is the checkpoint when all work is done that ``when`` was given.

    Where anything fails on any rank, all ranks raise, and the checkpoint does not come to be.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    doing = f"writing the checkpoint {folder}"
    on_first(doing, lambda: _begin(folder, partial))
    failed = None
    try:
        yield Draft(partial, when)
    except Exception as error:
        failed = error
    agree(doing, failed)
    when.add(lambda: _complete(partial, folder, about, doing, when.group))


def verified(folder: Path, wanted: About) -> Manifest:
    """The manifest of a checkpoint from which ``wanted`` can go on, when all of its files are found to be whole.

    Each file is read by one rank, for all. Raises UsageError; until then nothing of the checkpoint has been used.
    """
    doing = f"verifying the checkpoint {folder}"

    def first() -> Manifest:
        found = read_manifest(folder)
        manifest.check_fits(found.about, wanted, source=str(folder))
        check_names(folder, found)
        return found

    found = on_first(doing, first)
    sizes = {name: entry.size for name, entry in found.files.items()}
    own = share(sizes, sizes, rank=dist.get_rank(), size=dist.get_world_size())

    def own_files() -> None:
        for name in own:
            check_file(folder, name, found.files[name])

    together(doing, own_files)
    return found


def _begin(folder: Path, partial: Path) -> None:
    if folder.exists():
        raise UsageError(f"{folder} is there already, and no checkpoint is overwritten; give another folder")
    if partial.exists():  # of a save that did not come to its end
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _complete(partial: Path, folder: Path, about: About, doing: str, group: Group) -> None:
    """Make a checkpoint of the files that all ranks have written; collective."""

    def sizes() -> dict[str, int]:
        return {name: (partial / name).stat().st_size for name in file_names(partial)}

    names = on_first(doing, sizes, group=group)
    own = share(names, names, rank=dist.get_rank(), size=dist.get_world_size())
    entries = together(doing, lambda: {name: _flushed(partial / name) for name in own}, group=group)
    files = {name: entry for part in entries for name, entry in part.items()}
    on_first(doing, lambda: _finish(partial, folder, about, files), group=group)


def _flushed(path: Path) -> FileEntry:
    """Have a file on the disk, and say what it is."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(size=path.stat().st_size, sha256=digest(path))


def _finish(partial: Path, folder: Path, about: About, files: dict[str, FileEntry]) -> None:
    written = Manifest(suite_version=conformance.__version__, about=about, files=files)
    write_durably(partial / manifest.FILE, manifest.to_text(written))
    for below, _, _ in os.walk(partial):
        flush_folder(Path(below))
    partial.rename(folder)
    flush_folder(folder.parent)


def write_durably(path: Path, text: str) -> None:
    """Write a file, and have it on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
