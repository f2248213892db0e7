"""The log of a training: JSON lines. The first one says what was asked and with which versions, the others a step each.

A step's line has ``step`` (updates that are done, from 1) and numbers by name; docs/guides/training.md lists them. A
training that goes on from a checkpoint takes away the lines of later steps, so that no step stands there twice.

Trackers: where the numbers of a training go besides its log. Optional packages, imported when they are asked for.

Progress: what a user sees while a training runs: a bar with the time that is left on a terminal, else lines.

Telling: the log, the trackers and what a user sees. The first rank tells; on the others this is silent.
"""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
import torch.distributed as dist
from tqdm import tqdm

import conformance
from conformance.backends.protocol import find_backend
from conformance.core.errors import UsageError
from conformance.core.io import check_file
from conformance.core.packages import package_version
from impl.interface.distributed import together
from impl.train.config import Tracker, TrainConfig, to_json

Numbers = Mapping[str, float | None]


class RunLog:
    """Lines of one training; the first rank has it. Numbers that are not finite are the strings "inf" and "nan"."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, step: int, numbers: Numbers) -> None:
        self._line({"step": step, **{name: _finite(number) for name, number in numbers.items()}})

    def _line(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


@contextlib.contextmanager
def open_log(path: Path, header: Mapping[str, Any], *, done: int, resumes: bool) -> Iterator[RunLog]:
    """Begin a log, or go on with one behind the update ``done``; its first line then stays. Where a training resumes
    and there was no checkpoint yet, the log that is there is kept as ``LOG.before``.

    Raises UsageError where a training that does not resume finds a log there: nothing is overwritten.
    """
    if path.exists() and not resumes:
        raise UsageError(f"{path} is the log of another training; give a new one, or go on with load_checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = kept_lines(path, done) if done and path.exists() else []
    if path.exists() and not done:
        path.replace(path.with_name(path.name + ".before"))
    beside = path.with_name(path.name + ".partial")
    beside.write_text("".join(kept or [json.dumps({"run": header}) + "\n"]), encoding="utf-8")
    beside.replace(path)
    with path.open("a", encoding="utf-8") as file:
        yield RunLog(file)


def kept_lines(path: Path, step: int) -> list[str]:
    """The lines of a log up to an update. What a crash has cut is left out, with all that follows."""
    check_file(path)
    kept = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            values = _values(line)
            if values is None or values.get("step", 0) > step:
                break
            kept.append(line)
    return kept


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was asked, and the steps' lines. Raises UsageError for a file that is no log."""
    check_file(path)
    lines = [_values(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines or lines[0] is None or "run" not in lines[0] or None in lines[1:]:
        raise UsageError(f"{path} is no log of a training, or it is damaged")
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
    """What was asked for, of a training whose next update is ``step`` + 1. Folders lie beside the log.

    Raises UsageError that names the extra whose package is missing.
    """
    kinds: dict[Tracker, Callable[[Path, Mapping[str, Any], int], Follower]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
    }
    return [kinds[name](log, header, step) for name in trackers]


class TensorBoard:
    """Event files in the folder LOG.tensorboard."""

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
    """A run of wandb; where it goes to is decided by wandb's environment variables."""

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
        f"the tracker {package} needs the package of this name ({error}); run: pip install "
        f"'backend-parity[{package}]', or leave it out: the log has all numbers"
    )


SHOWN = {  # of a line of the log, with the format of each
    "loss": ".4f",
    "reward_mean": ".3f",
    "grad_norm": ".3f",
    "lr": ".2e",
    "tokens_per_second": ",.0f",
    "mfu": ".1%",
    "eval_loss": ".4f",
    "eval_reward": ".3f",
}


class Progress:
    """``done`` of ``steps`` updates have been made before. Quiet on all ranks but the one that says so."""

    def __init__(self, *, steps: int, done: int, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        self._bar = tqdm(total=steps, initial=done, unit="step") if shown and sys.stderr.isatty() else None

    def step(self, step: int, numbers: Numbers) -> None:
        told = _told(numbers)
        if self._bar is not None:
            self._bar.set_postfix_str(told, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self.say(f"step {step}/{self._steps}  {told}")

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text)
        elif self._shown:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _told(numbers: Numbers) -> str:
    held = {name: numbers.get(name) for name in SHOWN}
    return "  ".join(f"{name} {format(value, SHOWN[name])}" for name, value in held.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Telling:
    """``log`` is None on the ranks that are silent."""

    log: RunLog | None
    followers: Sequence[Follower]
    progress: Progress

    def step(self, step: int, numbers: Numbers) -> None:
        if self.log is not None:
            self.log.write(step, numbers)
            for follower in self.followers:
                follower.write(step, numbers)
            self.progress.step(step, numbers)

    def say(self, text: str) -> None:
        self.progress.say(text)


@contextlib.contextmanager
def telling(config: TrainConfig, *, done: int) -> Iterator[Telling]:
    """For a training of which ``done`` updates have been made before; collective.

    Raises UsageError, on all ranks, for a log that is in the way and a tracker whose package is missing.
    """
    with contextlib.ExitStack() as stack:
        first, output, header = dist.get_rank() == 0, config.output, header_of(config)
        progress = Progress(steps=config.scenario.steps, done=done, shown=first)
        stack.callback(progress.close)

        def begin() -> tuple[RunLog | None, list[Follower]]:
            if not first:
                return None, []
            # First the log: where that of another training is in the way, its trackers are not touched either.
            log = stack.enter_context(open_log(output.log, header, done=done, resumes=output.load_checkpoint))
            followers = follow(output.trackers, output.log, header, step=done)
            for follower in followers:
                stack.callback(follower.close)
            return log, followers

        kept: list[tuple[RunLog | None, list[Follower]]] = []
        together(f"beginning the log {output.log}", lambda: kept.append(begin()))
        log, followers = kept[0]
        progress.say(f"{'going on' if done else 'beginning'} at update {done} of {config.scenario.steps}")
        yield Telling(log=log, followers=followers, progress=progress)


def header_of(config: TrainConfig) -> dict[str, Any]:
    """What was asked, and the versions of what runs it."""
    packages = find_backend(config.backend).load().describe().packages
    return {
        "options": dict(config.options),
        "config": to_json(config),
        "world_size": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if config.device == "cuda" else "cpu",
        "versions": {"backend-parity": conformance.__version__, **{p: package_version(p) for p in packages}},
    }
