"""The checkpoints of one training: a folder for each, a file that names the last one, and no more than are kept.

``ROOT/step-000012/`` is a checkpoint (impl/checkpoints/folder.py), ``ROOT/latest`` holds the name of the last one.
It is replaced when the checkpoint has its name, and older ones go only after that: at every moment the one that
``latest`` names is whole.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conformance.reading import read_text
from conformance.validation import UsageError, shown
from impl.checkpoints.folder import Draft, flush_folder, write_durably, writing
from impl.checkpoints.manifest import About
from impl.checkpoints.verify import PARTIAL, regular_size
from impl.checkpoints.writing import AT_ONCE, Behind, Writing
from impl.together import on_first

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
