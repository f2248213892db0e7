"""Telling: the log, the trackers and what a user sees. The first rank tells; on the others this is silent."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import conformance
from conformance.backend import find_backend
from conformance.run.task import package_version
from impl.together import together
from impl.train.config import TrainConfig, to_json
from impl.train.progress import Progress
from impl.train.run_log import Numbers, RunLog, open_log
from impl.train.trackers import Follower, follow


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
