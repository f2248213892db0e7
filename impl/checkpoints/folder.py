"""Writes, verifies and removes the folders of checkpoints; a crash never leaves a checkpoint that is incomplete.

An asynchronous save writes in a thread of every rank, while the training continues. The threads write copies that were
made when the save was called. They communicate over a separate process group; over
the training's group, their messages could be confused with those of the training.

A folder is written under a temporary name, and renamed when all its files are on disk. All ranks share its file system.

A training has a checkpoint in each ``ROOT/step-000012/``, and the name of the last one in ``ROOT/latest``. ``latest``
is replaced after the new checkpoint is renamed, and older checkpoints are removed after that. So the checkpoint that
``latest`` names is complete at every moment.
"""

import contextlib
import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

import conformance
from conformance.core.errors import UsageError, one_line, shown
from conformance.core.io import no_link, read_text
from impl.checkpoints import manifest
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
from impl.checkpoints.training_state import load_own_generators, read_generators, save_generators, set_generators
from impl.interface.distributed import FileFailure, Group, agree, on_all_ranks, on_first
from impl.interface.trainable import AT_ONCE, Context, Trainable, Writing

_ROOM = 2**16  # bytes; a disk with less is full: a library's buffer did not fit


class Behind:
    """Collects work, and does it in a thread from ``start`` on. ``doing``: description of the work for messages.

    The process does not end before the thread does, so a finished training leaves a complete checkpoint.
    """

    copies = True
    group: Group = None

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._work: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name=doing)
        self._error: BaseException | None = None

    def add(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def start(self) -> None:
        self.group = dist.new_group(backend="gloo")  # for tensors in the memory of the host
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        dist.destroy_process_group(self.group)
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while self._work:
                work = self._work.pop(0)  # frees the memory of the copies after they are written
                on_all_ranks(self._doing, work, group=self.group)
        except BaseException as error:  # after any error, wait must not treat the checkpoint as complete
            self._error = error


@dataclass(frozen=True)
class Draft:
    """Holds a checkpoint that is being written.

    ``path``: the empty folder that all ranks write into. ``when``: collects the work of writing.
    """

    path: Path
    when: Writing


@contextlib.contextmanager
def writing(folder: Path, about: About, *, when: Writing = AT_ONCE) -> Iterator[Draft]:
    """Yields a draft; it becomes the checkpoint ``folder`` when all work in ``when`` is done. Collective.

    If anything fails on any rank, all ranks raise, and there is no checkpoint.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    doing = f"writing the checkpoint {folder}"
    on_first(doing, lambda: _begin(folder, partial))
    failed = None
    try:
        yield Draft(partial, when)
    except Exception as error:
        failed = _explained(error, partial)
    agree(doing, failed)
    when.add(lambda: _complete(partial, folder, about, doing, when.group))


def verified(folder: Path, wanted: About) -> Manifest:
    """Verifies all files of a checkpoint, and that ``wanted`` can resume from it; returns the manifest. Collective.

    Each file is read by one rank only. Raises UsageError before anything of the checkpoint is used.
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

    on_all_ranks(doing, own_files)
    return found


def write_native(draft: Draft, context: Context, models: Mapping[str, Trainable]) -> None:
    """Adds the trained models, in the backend's own files, and each rank's generators to a checkpoint; collective."""
    states = read_generators(context.library_generators())  # first: writing a model may draw random numbers
    for name, trainable in models.items():
        trainable.save_ckpt(draft.path / name, draft.when)
    save_generators(draft.path, dist.get_rank(), states)


def read_native(folder: Path, wanted: About, context: Context, models: Mapping[str, Trainable]) -> About:
    """Restores the models, and in the same layout the generators; returns the checkpoint's description. Collective.

    Raises UsageError, before anything changes, if ``wanted`` cannot resume from the checkpoint or if it is damaged.
    """
    found = verified(folder, wanted).about
    same_ranks = (found.layout, found.world_size) == (wanted.layout, wanted.world_size)
    states = load_own_generators(folder) if same_ranks else None
    for name, trainable in models.items():
        trainable.load_ckpt(folder / name)
    if states:
        context.set_library_generators(set_generators(states))
    return found


def _explained(error: Exception, folder: Path, *, doing: str = "") -> Exception:
    """Returns the error of a save; FileFailure if the disk is full, which libraries report in words of their own."""
    with contextlib.suppress(OSError):  # the folder was removed
        disk = os.statvfs(folder)
        if not isinstance(error, UsageError | OSError) and disk.f_bavail * disk.f_frsize < _ROOM:
            return FileFailure(f"{doing}{os.strerror(errno.ENOSPC)} ({one_line(error)})")
    return error


def _begin(folder: Path, partial: Path) -> None:
    if folder.exists():
        raise UsageError(f"{folder} exists, and no checkpoint is overwritten; give another folder")
    if partial.exists():  # from an interrupted save
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _complete(partial: Path, folder: Path, about: About, doing: str, group: Group) -> None:
    """Turns the files that all ranks have written into a checkpoint; collective."""

    def sizes() -> dict[str, int]:
        return {name: (partial / name).stat().st_size for name in file_names(partial)}

    names = on_first(doing, sizes, group=group)
    own = share(names, names, rank=dist.get_rank(), size=dist.get_world_size())
    entries = on_all_ranks(doing, lambda: {name: _flushed(partial / name) for name in own}, group=group)
    files = {name: entry for part in entries for name, entry in part.items()}
    on_first(doing, lambda: _finish(partial, folder, about, files), group=group)


def _flushed(path: Path) -> FileEntry:
    """Flushes a file to disk, and returns its size and digest."""
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
    """Writes a file, and flushes it to disk."""
    with open(path, "w", encoding="utf-8", opener=no_link) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flushes the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LATEST = "latest"
_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


@dataclass(kw_only=True)
class TrainingFolder:
    """Manages the checkpoints of one training in ``root``; only one training may write there at a time.

    ``keep``: number of checkpoints that stay. ``asynchronous``: a save returns when the training state has been copied
    into the memory of the host; all writing happens while the training continues. The next save waits for the previous
    one. Call ``finish`` at the end of the training.
    """

    root: Path
    keep: int = 2
    asynchronous: bool = False
    _last: Writing = field(default=AT_ONCE, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UsageError(f"keep={self.keep} leaves no checkpoint to resume from; keep 1 or more")

    @contextlib.contextmanager
    def writing(self, about: About) -> Iterator[Draft]:
        """Yields a draft for the checkpoint of ``about.step``; collective.

        Raises the error of the previous asynchronous save.
        """
        self.finish()
        name = checkpoint_name(about.step)
        on_first(f"removing unfinished checkpoints in {self.root}", lambda: self._remove_unfinished(name))
        when = Behind(f"writing the checkpoint {self.root / name}") if self.asynchronous else AT_ONCE
        with writing(self.root / name, about, when=when) as draft:
            yield draft
        doing = f"naming {self.root / name} the latest"
        when.add(lambda: on_first(doing, lambda: self._name_latest(name), group=when.group))
        when.start()
        self._last = when

    def finish(self) -> None:
        """Waits for the last save, and raises its error on all ranks; collective."""
        last, self._last = self._last, AT_ONCE
        try:
            last.wait()
        except Exception as error:
            raise _explained(error, self.root, doing=f"writing a checkpoint into {self.root}: ") from None

    def latest(self) -> Path:
        """Returns the last complete checkpoint. Raises UsageError that lists the folders found, if there is none."""
        file = self.root / LATEST
        try:
            regular_size(file)
            name = read_text(file, limit=1000).strip()
        except FileNotFoundError:
            found = ", ".join(sorted(folder.name for folder in self.root.glob("step-*"))) or "none"
            raise UsageError(
                f"{self.root} has no file {LATEST!r}, so no checkpoint was finished there; folders of checkpoints: "
                f"{found} ({PARTIAL} is half-written)"
            ) from None
        if not _NAME.fullmatch(name):
            raise UsageError(f"{file} must contain the name of a checkpoint, got {shown(name)}; give a folder")
        return self.root / name

    def _remove_unfinished(self, name: str) -> None:
        """Removes checkpoints that earlier runs have left half-written, or not yet named in ``latest``."""
        self.root.mkdir(parents=True, exist_ok=True)
        named = (self.root / LATEST).exists() and self.latest().name
        if (self.root / name).exists() and name != named:  # a crash came between renaming it and writing ``latest``
            _remove(self.root / name)
        for unfinished in self.root.glob(f"step-*{PARTIAL}"):
            shutil.rmtree(unfinished)

    def _name_latest(self, name: str) -> None:
        unfinished = self.root / f"{LATEST}{PARTIAL}"
        write_durably(unfinished, name)
        unfinished.replace(self.root / LATEST)
        flush_folder(self.root)
        # Checkpoints of later steps stay: this training may have resumed from an earlier one.
        steps = {int(match[1]): folder for folder in self.root.iterdir() if (match := _NAME.fullmatch(folder.name))}
        own = int(name.removeprefix("step-"))
        for step in sorted((step for step in steps if step < own), reverse=True)[self.keep - 1 :]:
            _remove(steps[step])


def _remove(folder: Path) -> None:
    """Removes a checkpoint; renames it first, so that after a crash it counts as half-written."""
    doomed = folder.with_name(folder.name + PARTIAL)
    folder.rename(doomed)
    shutil.rmtree(doomed)
