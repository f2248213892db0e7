"""Runs tasks of tests/support/worker_group_tasks.py, and checks whether processes have ended."""

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.core.process import process_state
from conformance.runtime import Outcome, Pool, WorkerGroupConfig

BUDGET_S = 20.0


def group_config(*, size: int, memory_limit_bytes: int | None = None) -> WorkerGroupConfig:
    return WorkerGroupConfig(
        size=size, device="cpu", preload=("worker_group_tasks",), memory_limit_bytes=memory_limit_bytes
    )


@dataclass(frozen=True)
class Runner:
    """Runs tasks of worker_group_tasks, or MODULE:TASK, in worker groups of a pool; logs go to a folder."""

    pool: Pool
    logs: Path

    def __call__(
        self,
        task: str,
        *,
        key: str = "test",
        size: int = 2,
        budget_s: float = BUDGET_S,
        memory: int | None = None,
        fresh: bool = False,
        keep: bool = True,
        **kwargs: Any,
    ) -> Outcome:
        return self.pool.run(
            key=key,
            config=group_config(size=size, memory_limit_bytes=memory),
            task=task if ":" in task else f"worker_group_tasks:{task}",
            kwargs=kwargs,
            log_dir=self.logs,
            budget_s=budget_s,
            fresh=fresh,
            keep=keep,
        )

    def pids(self, **worker_group: Any) -> list[int]:
        """The ranks' process ids."""
        return [result["rank"] for result in results(self("pids", **worker_group))]


def results(outcome: Outcome) -> list[Any]:
    assert outcome.state == "done", outcome.reason
    return outcome.results


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Fails if a descriptor is open afterwards that was not before; those of earlier tests may be closed meanwhile."""
    gc.collect()
    before = _descriptors()
    yield
    assert not _descriptors() - before


def _descriptors() -> set[tuple[str, str]]:
    """Numbers of descriptors with what they are open on: a number may be given to another file."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((path.name, str(path.readlink())))
    return found


def is_gone(pid: int) -> bool:
    """No such process, not even a zombie."""
    return process_state(pid) == ""


def is_dead_soon(pid: int) -> bool:
    """For a process whose forkserver is gone: whoever adopts it reaps it, sooner or later."""
    deadline = time.monotonic() + 60
    while process_state(pid) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    return process_state(pid) in ("", "Z")
