"""DeepSpeed cannot say how much memory a GPU has free where CUDA_VISIBLE_DEVICES names GPUs by UUID.

One process, without a GPU: it fails before the driver is asked. Exit code 0: it fails for a UUID and not for a
number. 1: not so. See deepspeed-visible-uuids.md.
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"  # importing DeepSpeed wants no GPU; the accelerator in question is made below

import deepspeed
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator


def index_of_first(visible: str) -> str:
    """NVML's number of the first visible GPU, as DeepSpeed finds it, or the message of its error."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        return str(CUDA_Accelerator()._get_nvml_gpu_id(0))
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    number, name = index_of_first("1,0"), index_of_first("GPU-ef3d7f1e-34e4-11d5-b6ce-b5194137708c")
    print(f"deepspeed {deepspeed.__version__}")
    print(f"CUDA_VISIBLE_DEVICES=1,0: {number}")
    print(f"CUDA_VISIBLE_DEVICES=GPU-...: {name}")
    present = number == "1" and name.startswith("invalid literal for int()")
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
