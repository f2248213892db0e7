"""The content of a backend's own checkpoint: a folder for each trained model, and the random generators of every rank.

Collective. The folder around it is impl.checkpoints.folder's, or one of a training (impl.checkpoints.training_folder).
"""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from impl.checkpoints import generators
from impl.checkpoints.folder import Draft, verified
from impl.checkpoints.manifest import About
from impl.strategy import Context, Trainable


def write(draft: Draft, context: Context, models: Mapping[str, Trainable]) -> None:
    """Write what ``writing`` gave: the training state of now, when the work is done."""
    states = generators.read_generators(context.library_generators())  # first: writing a model may draw numbers
    for name, trainable in models.items():
        trainable.save_ckpt(draft.path / name, draft.when)
    generators.write_file(draft.path, dist.get_rank(), states)


def read(folder: Path, wanted: About, context: Context, models: Mapping[str, Trainable]) -> About:
    """Restore the models, and in the same layout the generators; returns what the checkpoint is of.

    Raises UsageError where ``wanted`` cannot go on from it, or it is damaged; nothing has changed then.
    """
    found = verified(folder, wanted).about
    same_ranks = (found.layout, found.world_size) == (wanted.layout, wanted.world_size)
    states = generators.read_together(folder) if same_ranks else None
    for name, trainable in models.items():
        trainable.load_ckpt(folder / name)
    if states:
        context.set_library_generators(generators.set_generators(states))
    return found
