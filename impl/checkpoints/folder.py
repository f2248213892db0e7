"""The folder of a checkpoint: written under another name, and given its own when all of it is on the disk; collective.

Whatever moment a crash takes, there is either no folder of this name or a whole one, and what was there before is
untouched. The folder lies where all ranks see it. Serves claims 5 and 9.

The checkpoints of one training: a folder for each, a file that names the last one, and no more than are kept.

``ROOT/step-000012/`` is a checkpoint (impl/checkpoints/folder.py), ``ROOT/latest`` holds the name of the last one.
It is replaced when the checkpoint has its name, and older ones go only after that: at every moment the one that
``latest`` names is whole.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

import conformance
from conformance.core.errors import UsageError, shown
from conformance.core.io import read_text
from impl.checkpoints import manifest
from impl.checkpoints.async_writer import Behind
from impl.checkpoints.manifest import (
    PARTIAL,
    About,
    FileEntry,
    Manifest,
    check_file,
    check_names,
    digest,
    file_names,
    read_manifest,
    regular_size,
    share,
)
from impl.interface.distributed import Group, agree, on_first, together
from impl.interface.protocol import AT_ONCE, Writing


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


LATEST = "latest"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(kw_only=True)
class TrainingFolder:
    """``keep``: how many checkpoints stay. One training writes into ``root`` at a time.

    ``asynchronous``: a save returns when the training state has been copied into the memory of the host, and what is
    left of it is done while the training goes on: all of writing, until ``latest`` names it. The next save waits for
    the one before; ``finish`` is for the end of the training.
    """

    root: Path
    keep: int = 2
    asynchronous: bool = False
    _last: Writing = field(default=AT_ONCE, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UsageError(f"keep={self.keep} leaves no checkpoint to go on from; keep 1 or more")

    @contextlib.contextmanager
    def writing(self, about: About) -> Iterator[Draft]:
        """As impl.checkpoints.folder.writing, for the checkpoint of ``about.step``; collective.

        Raises what an asynchronous save before failed with.
        """
        self.finish()
        name = f"step-{about.step:06d}"
        on_first(f"making room in {self.root}", lambda: self._make_room(name))
        when = Behind(f"writing the checkpoint {self.root / name}") if self.asynchronous else AT_ONCE
        with writing(self.root / name, about, when=when) as draft:
            yield draft
        doing = f"naming {self.root / name} the latest"
        when.add(lambda: on_first(doing, lambda: self._name_latest(name), group=when.group))
        when.start()
        self._last = when

    def finish(self) -> None:
        """Wait until the last save is done, and raise what it failed with, on all ranks; collective."""
        last, self._last = self._last, AT_ONCE
        last.wait()

    def latest(self) -> Path:
        """The last whole checkpoint. Raises UsageError that says what is there instead, if there is none."""
        file = self.root / LATEST
        try:
            regular_size(file)
            name = read_text(file, limit=1000).strip()
        except FileNotFoundError:
            there = ", ".join(sorted(folder.name for folder in self.root.glob("step-*"))) or "nothing"
            raise UsageError(
                f"{self.root} has no file {LATEST!r}, so no checkpoint was finished there; of checkpoints it holds "
                f"{there} ({PARTIAL} is half-written)"
            ) from None
        if not _NAME.fullmatch(name):
            raise UsageError(f"{file} holds {shown(name)} where the name of a checkpoint is due; give a folder")
        return self.root / name

    def _make_room(self, name: str) -> None:
        """Take away what saves of earlier runs have left half-written or unnamed."""
        self.root.mkdir(parents=True, exist_ok=True)
        named = (self.root / LATEST).exists() and self.latest().name
        if (self.root / name).exists() and name != named:  # a crash came between its name and ``latest``
            _remove(self.root / name)
        for unfinished in self.root.glob(f"step-*{PARTIAL}"):
            shutil.rmtree(unfinished)

    def _name_latest(self, name: str) -> None:
        unfinished = self.root / f"{LATEST}{PARTIAL}"
        write_durably(unfinished, name)
        unfinished.replace(self.root / LATEST)
        flush_folder(self.root)
        # Those of later steps are of a training that went on from an earlier one, and not for this one to remove.
        steps = {int(match[1]): folder for folder in self.root.iterdir() if (match := _NAME.fullmatch(folder.name))}
        own = int(name.removeprefix("step-"))
        for step in sorted((step for step in steps if step < own), reverse=True)[self.keep - 1 :]:
            _remove(steps[step])


def _remove(folder: Path) -> None:
    """Remove a checkpoint; what a crash leaves of it is half-written by its name."""
    doomed = folder.with_name(folder.name + PARTIAL)
    folder.rename(doomed)
    shutil.rmtree(doomed)
