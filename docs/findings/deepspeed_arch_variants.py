"""DeepSpeed cannot build an operator where TORCH_CUDA_ARCH_LIST names a variant of an architecture, such as 9.0a.

One process, without a GPU or a compiler: it fails before the compiler is called. Exit code 0: it fails for 9.0a and not
for 9.0. 1: not so. See deepspeed-arch-variants.md.
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"  # importing DeepSpeed wants no GPU

import deepspeed
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder


def flags_of(architectures: str) -> str:
    """Returns the compiler's flags for the architectures, or the message of DeepSpeed's error."""
    os.environ["TORCH_CUDA_ARCH_LIST"] = architectures
    builder = FusedAdamBuilder()
    builder.jit_mode = True
    try:
        builder.compute_capability_args()
    except ValueError as error:
        return str(error)
    return os.environ["TORCH_CUDA_ARCH_LIST"]


if __name__ == "__main__":
    number, variant = flags_of("9.0"), flags_of("9.0a")
    print(f"deepspeed {deepspeed.__version__}")
    print(f"TORCH_CUDA_ARCH_LIST=9.0: {number}")
    print(f"TORCH_CUDA_ARCH_LIST=9.0a: {variant}")
    present = number.startswith("9.0") and variant.startswith("invalid literal for int()")
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
