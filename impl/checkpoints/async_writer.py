"""Writes the files of a checkpoint behind the training, in a thread of every rank.

The files hold copies that were made when the save was called. The threads communicate over a process group of their
own, because messages over the training's group would be taken for the training's.
"""

import threading
from collections.abc import Callable

import torch.distributed as dist

from impl.interface.distributed import Group, together


class Behind:
    """Work is done in a thread, which ``start`` starts. ``doing`` says in a few words what is done, for messages.

    The process does not end before the thread does, so a training that has ended leaves a whole checkpoint.
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
        self.group = dist.new_group(backend="gloo")  # for what lies in the memory of the host
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        dist.destroy_process_group(self.group)
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while self._work:
                work = self._work.pop(0)  # what is written has to be given back
                together(self._doing, work, group=self.group)
        except BaseException as error:  # whatever it is, wait must not take the checkpoint for whole
            self._error = error
