"""A rank of a training as a process of its own: ``torchrun -m impl.train.worker CONFIG.json``.

The file holds what impl.train.config.to_json gives.
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
from conformance.core.io import read_json
from impl.train.config import from_json
from impl.train.loop import train

USAGE_ERROR = 2  # the exit code


def main(path: str) -> int:
    """Train as the file says, in the process group of torchrun's environment variables; returns the exit code."""
    try:
        config = from_json(read_json(Path(path)), source=path)
        if config.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if config.device == "cpu" else "nccl")
        transformers.utils.logging.disable_progress_bar()  # of loading weights, a bar for each rank
        train(config)
        dist.destroy_process_group()
    except UsageError as error:
        # Where the first rank fails alike, torchrun ends this one before it says the same again.
        time.sleep(0 if os.environ.get("RANK", "0") == "0" else 2)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    return 0


def leave(status: int) -> NoReturn:
    """End this process with an exit code, after what was registered for its end, and without Python's finalization.

    A thread of a library that asks for Python's lock while Python is finalized is unwound through C++ code that allows
    no unwinding: a rank that had done all its work ended by SIGABRT then ("terminate called without an active
    exception"; seen once, on a machine with a load of 20).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
