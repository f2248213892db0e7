"""DeepSpeed: at ZeRO-1 and 2 the optimizer state of all parameter groups but the first cannot be read.

One rank, CPU, the usual two groups (weight decay for matrices, none for biases). Exit code 0: defect present, and
linking the state again mends it. 1: gone. See deepspeed-optimizer-state.md.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state  # noqa: E402

BETA = 0.9


def trained(stage: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """An engine after one step, and the first moments that AdamW must have after it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(BETA, 0.99))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    moments = {name: (1 - BETA) * safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
    engine.step()
    return engine, moments


def read(engine: Any) -> dict[str, torch.Tensor | str]:
    found: dict[str, torch.Tensor | str] = {}
    for name, parameter in engine.module.named_parameters():
        try:
            found[name] = safe_get_full_optimizer_state(parameter, "exp_avg")
        except ValueError as error:
            found[name] = f"ValueError: {error}"
    return found


def wrong(found: dict[str, torch.Tensor | str], right: dict[str, torch.Tensor]) -> list[str]:
    return [n for n, t in found.items() if isinstance(t, str) or float((t - right[n]).norm() / right[n].norm()) > 1e-6]


if __name__ == "__main__":
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    present = True
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}; exp_avg after one step of AdamW")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed()
        for stage in (1, 2, 3):
            engine, right = trained(stage)
            found = read(engine)
            bad = wrong(found, right)
            print(f"ZeRO-{stage}: {4 - len(bad)} of 4 right; {', '.join(f'{n} ({found[n]})' for n in bad) or 'all'}")
            if stage < 3:
                engine.optimizer._hp_optimizer_states_linked = False
                engine.optimizer._lazy_init_hp_params_optimizer_state()
                mended = wrong(read(engine), right)
                print(f"  REMEDY linked again: {4 - len(mended)} of 4 right")
                present = present and bad == ["0.bias", "1.bias"] and not mended
        dist.destroy_process_group()
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
