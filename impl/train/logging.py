"""Reports the numbers of each step: in the log, to trackers, and on the terminal. Only the first rank reports.

The log has JSON lines. The first line has the options and versions, every other line a step. A step's line has ``step``
(updates done, from 1) and numbers by their names in verl and TRL; docs/guides/training.md lists them. A training that
resumes from a checkpoint removes the lines of later steps, so that no step is there twice.

Trackers come from optional packages, which are imported on request.
"""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
import torch.distributed as dist
from tqdm import tqdm

import conformance
from conformance.backends.protocol import find_backend
from conformance.core.errors import UsageError, one_line
from conformance.core.io import check_file, no_link
from conformance.core.packages import package_version
from impl.interface.distributed import FileFailure, on_all_ranks
from impl.train.config import Tracker, TrainConfig, to_json

Numbers = Mapping[str, float | None]


class RunLog:
    """Writes the lines of one training, on the first rank. Infinite numbers and NaN become "inf" and "nan".

    ``file``: unbuffered. A step's line raises FileFailure if the disk is full.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, step: int, numbers: Numbers) -> None:
        self._line({"step": step, **{name: _finite(number) for name, number in numbers.items()}})

    def _line(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(values).encode() + b"\n"
        try:
            while line := line[self._file.write(line) :]:
                pass
        except OSError as error:
            raise FileFailure(f"writing the log {self._file.name}: {one_line(error)}") from None


@contextlib.contextmanager
def open_log(path: Path, header: Mapping[str, Any], *, done: int, resumes: bool) -> Iterator[RunLog]:
    """Begins a log, or continues one after the update ``done``; its first line then stays.

    If a training resumes but there was no checkpoint yet, the existing log is kept as ``LOG.before``. Raises UsageError
    if a training that does not resume finds a log: nothing is overwritten.
    """
    if path.exists() and not resumes:
        raise UsageError(f"{path} is the log of another training; give a new path, or resume with load_checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = lines_until(path, done) if done and path.exists() else []
    if path.exists() and not done:
        path.replace(path.with_name(path.name + ".before"))
    draft = path.with_name(path.name + ".partial")
    draft.unlink(missing_ok=True)  # a link is replaced
    draft.write_text("".join(lines or [json.dumps({"run": header}) + "\n"]), encoding="utf-8")
    draft.replace(path)
    with open(path, "ab", buffering=0, opener=no_link) as file:
        yield RunLog(file)


def lines_until(path: Path, step: int) -> list[str]:
    """Returns the lines of a log up to an update. An incomplete line of a crash is left out, with all that follow."""
    check_file(path)
    lines = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            values = _values(line)
            if values is None or values.get("step", 0) > step:
                break
            lines.append(line)
    return lines


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the header and the steps' lines of a log. Raises UsageError for a file that is not a log."""
    check_file(path)
    lines = [_values(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines or lines[0] is None or "run" not in lines[0] or None in lines[1:]:
        raise UsageError(f"{path} is not the log of a training, or it is damaged")
    header: dict[str, Any] = lines[0]["run"]
    return header, [line for line in lines[1:] if line]


def _values(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _finite(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else str(number)


class Follower(Protocol):
    def write(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


def follow(trackers: Sequence[Tracker], log: Path, header: Mapping[str, Any], *, step: int) -> list[Follower]:
    """Opens the requested trackers of a training whose next update is ``step`` + 1. Their folders lie beside the log.

    Raises UsageError that names the extra whose package is missing.
    """
    kinds: dict[Tracker, Callable[[Path, Mapping[str, Any], int], Follower]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
    }
    return [kinds[name](log, header, step) for name in trackers]


class TensorBoard:
    """Writes event files into the folder LOG.tensorboard."""

    def __init__(self, log: Path, header: Mapping[str, Any], step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from None
        self._writer: Any = SummaryWriter(str(log) + ".tensorboard", purge_step=step + 1)

    def write(self, step: int, numbers: Numbers) -> None:
        for name, number in numbers.items():
            if number is not None:
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes a run of wandb, whose environment variables decide the destination."""

    def __init__(self, log: Path, header: Mapping[str, Any], step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", error) from None
        self._run: Any = wandb.init(name=log.stem, dir=log.parent, config=dict(header))

    def write(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def _missing(package: str, error: ImportError) -> UsageError:
    return UsageError(
        f"the tracker {package} needs its package ({error}); run: pip install "
        f"'backend-parity[{package}]', or leave it out: the log has all numbers"
    )


SHOWN = {  # numbers of a log line that the terminal shows, with their formats
    "train/loss": ".4f",
    "actor/loss": ".4f",
    "critic/score/mean": ".3f",
    "train/grad_norm": ".3f",
    "actor/grad_norm": ".3f",
    "train/lr": ".2e",
    "actor/lr": ".2e",
    "perf/tokens_per_second": ",.0f",
    "perf/mfu": ".1%",
    "eval/loss": ".4f",
    "eval/reward": ".3f",
}


RESULTS = ("train/loss", "actor/loss", "critic/score/mean", "eval/loss", "eval/reward")


class Progress:
    """Shows a bar with the remaining time on a terminal, else lines; nothing on ranks without ``shown``.

    ``done`` of ``steps`` updates have been made before.
    """

    def __init__(self, *, steps: int, done: int, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        self._bar = tqdm(total=steps, initial=done, unit="step") if shown and sys.stderr.isatty() else None

    def step(self, step: int, numbers: Numbers) -> None:
        text = _to_text(numbers)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self.say(f"step {step}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text)
        elif self._shown:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _to_text(numbers: Numbers) -> str:
    values = {name: numbers.get(name) for name in SHOWN}
    return "  ".join(f"{name} {format(value, SHOWN[name])}" for name, value in values.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Reports to the log, the trackers and the terminal. ``log`` is None on the ranks that are silent."""

    log: RunLog | None
    followers: Sequence[Follower]
    progress: Progress
    last: dict[str, float | None] = field(default_factory=dict)  # the last value of every number

    def step(self, step: int, numbers: Numbers) -> None:
        self.last.update(numbers)
        if self.log is not None:
            self.log.write(step, numbers)
            for follower in self.followers:
                follower.write(step, numbers)
            self.progress.step(step, numbers)

    def say(self, text: str) -> None:
        self.progress.say(text)

    def result(self) -> str:
        """Returns the last losses and rewards, training and held out."""
        return _to_text({name: self.last.get(name) for name in RESULTS}) or "nothing was left to train"


@contextlib.contextmanager
def open_reporter(config: TrainConfig, *, done: int) -> Iterator[Reporter]:
    """Opens the reporter of a training after ``done`` updates; collective.

    Raises UsageError, on all ranks, for an existing log of another training and a tracker whose package is missing.
    """
    with contextlib.ExitStack() as stack:
        first, output, header = dist.get_rank() == 0, config.output, header_of(config)
        progress = Progress(steps=config.scenario.steps, done=done, shown=first)
        stack.callback(progress.close)

        def begin() -> tuple[RunLog | None, list[Follower]]:
            if not first:
                return None, []
            # The log comes first: if another training's log is there, that training's trackers are not touched either.
            log = stack.enter_context(open_log(output.log, header, done=done, resumes=output.load_checkpoint))
            followers = follow(output.trackers, output.log, header, step=done)
            for follower in followers:
                stack.callback(follower.close)
            return log, followers

        opened: list[tuple[RunLog | None, list[Follower]]] = []
        on_all_ranks(f"beginning the log {output.log}", lambda: opened.append(begin()))
        log, followers = opened[0]
        begins = "resuming" if done else "beginning"
        progress.say(f"{begins} at update {done} of {config.scenario.steps}; log: {output.log}")
        yield Reporter(log=log, followers=followers, progress=progress)


def header_of(config: TrainConfig) -> dict[str, Any]:
    """Returns the options, the configuration and the versions for the log's first line."""
    packages = find_backend(config.backend).load().describe().packages
    return {
        "options": dict(config.options),
        "config": to_json(config),
        "world_size": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        "versions": {"backend-parity": conformance.__version__, **{p: package_version(p) for p in packages}},
    }
