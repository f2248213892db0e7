"""Runs trainings in ranks, as tasks for the tests of training."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from conformance.runtime import RankContext
from impl.train.config import from_json
from impl.train.loop import train


def run_training(
    context: RankContext, *, config: dict[str, Any], stop: tuple[int, int, str] | None = None
) -> list[str]:
    """Train as configured. ``stop``: a rank, the update after whose line it gets a signal, and the signal's name.

    Returns nothing; what a training says is in its log.
    """
    trained = from_json(config)
    if stop and context.rank == stop[0]:
        _, step, name = stop
        threading.Thread(target=_signal_after, args=(trained.output.log, step, name), daemon=True).start()
    train(trained)
    return []


def _signal_after(log: Path, step: int, name: str) -> None:
    while not log.exists() or f'"step": {step},' not in log.read_text(encoding="utf-8"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.Signals[name])
