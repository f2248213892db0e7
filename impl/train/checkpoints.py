"""Checkpoints of a training: where it is written, and where it goes on. The folder is docs/checkpoints.md's."""

from dataclasses import dataclass, replace
from pathlib import Path

from conformance.validation import UsageError
from impl.adapter import StrategyBackend
from impl.checkpoints import native
from impl.checkpoints.training_folder import LATEST, TrainingFolder
from impl.checkpoints.verify import read_manifest
from impl.data_position import DataPosition
from impl.together import on_first
from impl.train.config import OutputConfig, TrainConfig
from impl.train.experience import check_goes_on


def found_checkpoint(config: TrainConfig) -> tuple[Path, int] | None:
    """The checkpoint that a training is to go on from, and the updates that it has; None to begin with the first.

    Collective. Raises UsageError where checkpoints are in the way of a training that begins, and where a training could
    not go on with the roll-outs of the one before.
    """
    output = config.output
    root = output.ckpt_path
    if root is None:
        if output.load_checkpoint:
            raise UsageError("load_checkpoint goes on from a checkpoint in ckpt_path; give it, too")
        return None

    def first() -> tuple[Path, int] | None:
        if not (root / LATEST).exists():
            return None
        if not output.load_checkpoint:
            raise UsageError(
                f"{root} holds checkpoints of another training; go on with load_checkpoint, or give a new ckpt_path"
            )
        folder = TrainingFolder(root=root).latest()
        about = read_manifest(folder).about
        if config.rollout is not None and about.data is not None:
            check_goes_on(config.scenario, config.rollout, step=about.step, position=about.data)
        return folder, about.step

    return on_first(f"looking for checkpoints in {root}", first)


def training_folder(output: OutputConfig) -> TrainingFolder | None:
    if output.ckpt_path is None:
        return None
    return TrainingFolder(root=output.ckpt_path, keep=output.keep, asynchronous=output.async_save)


@dataclass(frozen=True)
class Checkpoints:
    """Those of one training; ``folder``: where they are written, if anywhere. All methods are collective."""

    backend: StrategyBackend
    folder: TrainingFolder | None

    def save(self, position: DataPosition) -> None:
        """Write a checkpoint of now; the data behind ``position`` has been trained on."""
        assert self.folder
        about = replace(self.backend.about("native"), data=position)
        with self.folder.writing(about) as draft:
            native.write(draft, self.backend.context, self.backend.trained)

    def finish(self) -> None:
        """Return when the last checkpoint is whole; raises what writing it failed with."""
        if self.folder:
            self.folder.finish()

    def load(self, folder: Path, start: DataPosition) -> DataPosition:
        """Go on from a checkpoint; returns where it stands in the data. ``start``: where this training would begin.

        Raises UsageError where this training cannot go on from it; nothing has changed then.
        """
        before = on_first(f"reading {folder}", lambda: read_manifest(folder).about.data)
        if before is None:
            raise UsageError(f"{folder} does not say where it stands in the data; give a checkpoint of a training")
        start.check_same_data(before)
        found = native.read(folder, self.backend.about("native"), self.backend.context, self.backend.trained)
        self.backend.step = found.step
        return before
