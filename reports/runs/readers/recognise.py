"""Which format a file has, seen in its content, never in its name alone."""

from pathlib import Path

from conformance.record.files import Unreadable, read_file
from conformance.validation import UsageError, shown
from reports.runs.readers.console import CONSOLES, lines_of
from reports.runs.readers.json_lines import read_json
from reports.runs.readers.table import read_table
from reports.runs.readers.tensorboard import PATTERN, is_event_file, read_events
from reports.runs.run import Log

LONGEST = 2**30  # bytes of a log
LOOKED_FOR = (
    "JSON lines with a `step`, trainer_state.json, CSV with a header that has a `step`, TensorBoard event files, and"
    " the consoles of verl, torchtitan, Megatron, OpenRLHF and Hugging Face's Trainer"
)


def read_log(name: str) -> Log:
    """The log that the argument ``name`` names: a file, a folder of event files, or ``panel.csv#RUN``.

    Raises UsageError, with what was looked for and the first line, if no reader knows it.
    """
    path, chosen = Path(name), None
    if not path.exists() and "#" in name:
        before, _, chosen = name.rpartition("#")
        path = Path(before)
    if path.is_dir():
        return read_events({file.name: _read(file) for file in _event_files(path)})
    data = _read(path)
    if is_event_file(data[:12]):
        return read_events({path.name: data})
    text = data.decode(errors="replace")
    found = read_json(text) or read_table(text, name=str(path), chosen=chosen)
    if found is None:
        lines = lines_of(text)
        found = max((read(lines) for read in CONSOLES), key=lambda log: len(log.rows))
    if chosen is not None and found.format != "wandb CSV":
        raise UsageError(f"{path} is no panel of wandb with several runs; name it without #{chosen}")
    if not found.rows:
        first = next((line for line in text.splitlines() if line.strip()), "")
        raise UsageError(
            f"{path} is no training log that can be read; looked for: {LOOKED_FOR}. It begins {shown(first)}"
        )
    return found


def _read(path: Path) -> bytes:
    try:
        return read_file(path, limit=LONGEST)
    except FileNotFoundError:
        raise UsageError(f"there is no log {path}") from None
    except Unreadable as error:
        raise UsageError(str(error)) from None


def _event_files(folder: Path) -> list[Path]:
    """In the order of their names, which hold the time of their making."""
    files = sorted(folder.glob(PATTERN))
    if files:
        return files
    below = sorted({file.parent for file in folder.rglob(PATTERN)})
    if below:
        raise UsageError(f"{folder} holds several runs of TensorBoard; name one: " + " or ".join(map(str, below)))
    raise UsageError(f"{folder} holds neither TensorBoard's event files nor a record (record.jsonl); name a log")
