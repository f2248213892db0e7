"""DeepSpeed: a checkpoint that it cannot load raises errors that name no cause, in part after weights have changed.

One rank, CPU, torch's AdamW and SGD. Exit code 0: each case ends as the page says. 1: one does not. See
deepspeed-checkpoint-changes.md.
"""

import argparse
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
from deepspeed.checkpoint import ds_to_universal  # noqa: E402
from deepspeed.runtime.zero import GatheredParameters  # noqa: E402


def engine_of(stage: int, name: str = "AdamW") -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
        "zero_allow_untested_optimizer": True,
    }
    made = {"AdamW": torch.optim.AdamW(model.parameters()), "SGD": torch.optim.SGD(model.parameters(), momentum=0.9)}
    return deepspeed.initialize(model=model, optimizer=made[name], config=settings, dist_init_required=False)[0]


def saved(folder: str, stage: int, name: str = "AdamW") -> str:
    engine = engine_of(stage, name)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, tag="native")
    return folder


def weights(engine: Any) -> torch.Tensor:
    with GatheredParameters(list(engine.module.parameters()), enabled=hasattr(engine.module.weight, "ds_id")):
        return torch.cat([p.detach().flatten().clone() for p in engine.module.parameters()])


def loaded(folder: str, stage: int) -> str:
    """Load a checkpoint; returns the error that is raised, and whether the engine's weights have changed by then."""
    engine = engine_of(stage)
    before = weights(engine)
    try:
        engine.load_checkpoint(folder, tag="native")
    except Exception as error:
        changed = "changed" if not torch.equal(before, weights(engine)) else "as before"
        return f"weights {changed}, {type(error).__name__}({str(error)!r})"
    return "read"


def converted(folder: str) -> str:
    given: dict[str, Any] = {"input_folder": f"{folder}/native", "output_folder": f"{folder}/universal"}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    try:
        ds_to_universal.main(argparse.Namespace(**given, **workers, **flags))
    except Exception as error:
        return f"{type(error).__name__}({str(error)!r})"
    return "converted"


EXPECTED = {  # case -> how its result begins
    "ZeRO-2 to ZeRO-1": "read",
    "ZeRO-2 to ZeRO-3": "weights as before, AssertionError('')",
    "ZeRO-3 to ZeRO-2": "weights as before, AssertionError('')",
    "ZeRO-2 to ZeRO-0": "weights changed, AttributeError",
    "ZeRO-0 to ZeRO-2": "weights changed, FileNotFoundError",
    "universal, ZeRO-0, AdamW": "FileNotFoundError",
    "universal, ZeRO-2, SGD": "KeyError(\"'exp_avg'\")",
    "universal, ZeRO-3, SGD": "KeyError(\"'exp_avg'\")",
    "universal, ZeRO-2, AdamW": "converted",
}

if __name__ == "__main__":
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed()
        at = {stage: saved(f"{folder}/{stage}", stage) for stage in (0, 2, 3)}
        found = {f"ZeRO-{a} to ZeRO-{b}": loaded(at[a], b) for a, b in ((2, 1), (2, 3), (3, 2), (2, 0), (0, 2))}
        found["universal, ZeRO-0, AdamW"] = converted(at[0])
        for stage in (2, 3):
            found[f"universal, ZeRO-{stage}, SGD"] = converted(saved(f"{folder}/sgd{stage}", stage, "SGD"))
        found["universal, ZeRO-2, AdamW"] = converted(at[2])
        dist.destroy_process_group()
    for case, result in found.items():
        print(f"{case:26} {result.replace(folder, '...')}")
    present = all(found[case].startswith(start) for case, start in EXPECTED.items())
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
