"""Slim: removes the tensors of cells that are no news, after everything was compared; without torch.

Of a model of 56 million parameters, two steps in float64 are 2.3 GB a cell. Whoever looks for a difference needs the
tensors of cells that differ or failed, and of their oracles. Of all others the lines remain, with the digests of what
was removed, and the verdict, which cannot be judged again.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from conformance.record.files import Unwritable
from conformance.record.results import Entry, inside, read_run, write_entry
from conformance.record.states import NO_FAULT


def slim(out: Path) -> None:
    """Remove the tensors of the cells of ``out`` that conform, partly or wholly, or differ as expected, and those of
    oracles that no other cell was judged by. Where cells are missing, because the run was stopped or has other shards,
    nothing is removed: they will be compared with those that are there.

    Raises UsageError for a folder that is not a run's output, and Unwritable.
    """
    run, listed = read_run(out)
    if not (run.finished and run.floor.whole) or run.floor.missing_shards:
        return
    entries = [entry for entry in listed if entry.records]
    for entry in entries:
        if entry.verdict.state in NO_FAULT:
            # First the word, then the deed: files that are missing without it would be damage. Of a cell that says so
            # there may be files all the same, where an earlier call was stopped.
            if not entry.slim:
                write_entry(out, replace(entry, slim=True))
            others = entry.other.records if entry.other else ()
            _remove(out, (out / entry.folder / record for record in (*entry.records, *others)))
    kept = {folder for entry in entries if entry.verdict.state not in NO_FAULT for folder in _oracles(out, entry)}
    for folder in {folder for entry in entries for folder in _oracles(out, entry)} - kept:
        _remove(out, folder.glob("*/"))


def _oracles(out: Path, entry: Entry) -> list[Path]:
    return [Path(os.path.normpath(out / entry.folder / path)) for path in (entry.oracle, entry.defective) if path]


def _remove(out: Path, records: Iterable[Path]) -> None:
    for record in records:
        for file in inside(out, record).glob("*.safetensors"):
            try:
                file.unlink()
            except OSError as error:
                raise Unwritable(f"{file} cannot be removed: {error.strerror}") from error
