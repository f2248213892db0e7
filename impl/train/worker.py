"""Runs a rank of a training as a process: ``torchrun -m impl.train.worker CONFIG.json``.

The file holds the result of impl.train.config.to_json. A rank that waits too long for the others ends, and says who
waits for what; so does the training then.
"""

import atexit
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import transformers

from conformance.core.errors import UsageError
from conformance.core.io import read_json, visible_output
from impl.interface.distributed import FileFailure, limited_waits
from impl.train.config import from_json
from impl.train.loop import train

FAILED, USAGE_ERROR = 1, 2  # exit codes


def main(path: str) -> int:
    """Trains as the file says, in the process group of torchrun's environment variables; returns the exit code."""
    try:
        config = from_json(read_json(Path(path)), source=path)
        if config.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        transformers.utils.logging.disable_progress_bar()  # each rank would show a bar for loading weights
        with limited_waits(config.ddp_timeout, device=config.device):
            train(config)
    except (UsageError, FileFailure) as error:
        # If the first rank has the same error, torchrun ends this one before it repeats the message.
        time.sleep(0 if os.environ.get("RANK", "0") == "0" else 2)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR if isinstance(error, UsageError) else FAILED
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
