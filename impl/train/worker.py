"""Runs a rank of a training as a process: ``torchrun -m impl.train.worker CONFIG.json``.

The file holds the result of impl.train.config.to_json.
"""

import atexit
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import transformers

from conformance.core.errors import UsageError
from conformance.core.io import read_json, visible_output
from impl.train.config import from_json
from impl.train.loop import train

USAGE_ERROR = 2  # the exit code


def main(path: str) -> int:
    """Trains as the file says, in the process group of torchrun's environment variables; returns the exit code."""
    try:
        config = from_json(read_json(Path(path)), source=path)
        if config.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if config.device == "cpu" else "nccl")
        transformers.utils.logging.disable_progress_bar()  # each rank would show a bar for loading weights
        train(config)
        dist.destroy_process_group()
    except UsageError as error:
        # If the first rank has the same error, torchrun ends this one before it repeats the message.
        time.sleep(0 if os.environ.get("RANK", "0") == "0" else 2)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    return 0


def leave(status: int) -> NoReturn:
    """Ends this process with an exit code, after its registered exit functions, without Python's finalization.

    A thread of a library that requests Python's lock during finalization is unwound through C++ code that forbids
    unwinding. A rank that had done all its work then ended by SIGABRT ("terminate called without an active exception";
    observed once, on a machine with a load of 20).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    with visible_output():
        leave(main(sys.argv[1]))
