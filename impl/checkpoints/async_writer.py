"""Writes the files of a checkpoint in a thread of every rank, while the training continues.

The threads write copies that were made when the save was called. They communicate over a separate process group; over
the training's group, their messages could be confused with those of the training.
"""

import threading
from collections.abc import Callable

import torch.distributed as dist

from impl.interface.distributed import Group, on_all_ranks


class Behind:
    """Collects work, and does it in a thread from ``start`` on. ``doing``: description of the work for messages.

    The process does not end before the thread does, so a finished training leaves a complete checkpoint.
    """

    copies = True
    group: Group = None

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._work: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name=doing)
        self._error: BaseException | None = None

    def add(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def start(self) -> None:
        self.group = dist.new_group(backend="gloo")  # for tensors in the memory of the host
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        dist.destroy_process_group(self.group)
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while self._work:
                work = self._work.pop(0)  # frees the memory of the copies after they are written
                on_all_ranks(self._doing, work, group=self.group)
        except BaseException as error:  # after any error, wait must not treat the checkpoint as complete
            self._error = error
