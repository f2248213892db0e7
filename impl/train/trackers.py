"""Trackers: where the numbers of a training go besides its log. Optional packages, imported when they are asked for."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from conformance.validation import UsageError
from impl.train.config import Tracker
from impl.train.run_log import Numbers


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
