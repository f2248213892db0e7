"""DeepSpeed on the CPU refuses float16 wherever oneDNN has no kernels for it, though torch computes in it there.

One process. oneDNN's environment variable limits it to the instruction set of a laptop; it is set for a new process,
because oneDNN reads it once. Exit code 0: refused, and the remedy trains. 1: not so. See deepspeed-cpu-fp16.md.
"""

import os
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict

EMULATED = "AVX2"  # no AVX512-FP16 and no AMX: most laptops, AMD's EPYC


def in_the_emulation() -> bool:
    """Whether, under the limit, DeepSpeed refuses float16 and the remedy trains."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="localhost", WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    import deepspeed
    import deepspeed.ops
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    deepspeed.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    half = torch.full((64, 64), 0.5, dtype=torch.float16)
    product = (half @ half)[0, 0].item()
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, oneDNN limited to {EMULATED}")
    print(f"torch multiplies float16 matrices: {product} (right: 16.0)")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed()
        refusal = train(deepspeed, torch)
        print(f"deepspeed: {refusal or 'trains'}")
        get_accelerator().is_fp16_supported = lambda: True  # the remedy
        again = train(deepspeed, torch)
        print(f"  REMEDY is_fp16_supported answers for torch: {again or 'trains'}")
        dist.destroy_process_group()
    return product == 16 and "not supported" in refusal and not again


def train(deepspeed: object, torch: object) -> str:
    """Make one fp16 step at ZeRO-2; returns the message of the error, or "" if there is none."""
    model = torch.nn.Linear(8, 1)  # type: ignore[attr-defined]
    settings = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    settings["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
    try:
        engine, *_ = deepspeed.initialize(  # type: ignore[attr-defined]
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        engine.backward(engine(torch.ones(1, 8, dtype=torch.float16)).sum())  # type: ignore[attr-defined]
        engine.step()
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": EMULATED}
        sys.exit(subprocess.run([sys.executable, __file__], env=environment, check=False).returncode)
    print("defect present" if (present := in_the_emulation()) else "defect not as described")
    sys.exit(0 if present else 1)
