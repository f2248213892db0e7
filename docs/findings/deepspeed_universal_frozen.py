"""DeepSpeed: a universal checkpoint does not restore frozen parameters, and under AutoTP it refuses to be made of them.

Two ranks, CPU, a small Llama with a frozen embedding and frozen output projections. Exit code 0: present, and the
remedies are right. 1: gone. See deepspeed-universal-frozen.md.
"""

import argparse
import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="localhost", WORLD_SIZE="2")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import transformers  # noqa: E402
from deepspeed.checkpoint import ds_to_universal  # noqa: E402

FROZEN = ("embed_tokens.weight", "o_proj.weight")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
TOKENS = torch.arange(32)[None] % 64


def engine_of(*, seed: int, stage: int, tp: int = 1, universal: bool = False) -> Any:
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(FROZEN))
    settings = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": tp}}
    settings |= {"zero_optimization": {"stage": stage}, "checkpoint": {"load_universal": universal}}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def saved(folder: str, **kind: Any) -> dict[str, torch.Tensor]:
    engine = engine_of(seed=1, **kind)
    engine.backward(engine(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss)
    engine.step()
    engine.save_checkpoint(folder, tag="native")
    return weights_of(engine)


def converted(folder: str, *, strict: bool = True) -> str:
    """What the conversion raises, told to all ranks; empty where it raises nothing."""
    said = [""]
    if dist.get_rank() == 0:
        folders = {"input_folder": f"{folder}/native", "output_folder": f"{folder}/universal"}
        flags = {"strict": strict, "inject_missing_state": True, "keep_temp_folder": False}
        workers = {"num_extract_workers": 1, "num_merge_workers": 1}
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                ds_to_universal.main(argparse.Namespace(**folders, **flags, **workers))
        except AssertionError as error:
            said = [str(error)]
    dist.broadcast_object_list(said)
    return said[0]


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed()
    lost: dict[str, list[str]] = {}
    for stage in (2, 3):
        right = saved(f"{folder}/{stage}", stage=stage)
        converted(f"{folder}/{stage}")
        for tag in ("native", "universal"):
            engine = engine_of(seed=2, stage=stage, universal=tag == "universal")  # of other weights
            engine.load_checkpoint(f"{folder}/{stage}", tag=tag)
            lost[f"ZeRO-{stage}, {tag}"] = [n for n, w in weights_of(engine).items() if not torch.equal(w, right[n])]
        if stage == 2:  # the remedy: from what the engine wrote, whose module has them whole
            module = torch.load(f"{folder}/2/native/mp_rank_00_model_states.pt", weights_only=False)["module"]
            for name, parameter in engine.module.named_parameters():
                parameter.data.copy_(parameter.data if parameter.requires_grad else module[name])
            lost["  REMEDY ZeRO-2"] = [n for n, w in weights_of(engine).items() if not torch.equal(w, right[n])]
    saved(f"{folder}/tp", stage=1, tp=2)
    said, remedied = converted(f"{folder}/tp"), converted(f"{folder}/tp", strict=False)
    if rank == 0:
        for name, names in lost.items():
            print(f"{name}: not restored: {', '.join(names) or 'none'}")
        print(f"AutoTP: {said}\n  REMEDY strict=False: {remedied or 'converts'}")
        frozen = {name: [n.endswith(FROZEN) for n in names] for name, names in lost.items()}
        wrong = all(frozen[name] == [True, True] * name.endswith("universal") for name in frozen)
        verdict.put(wrong and said.startswith("Unused patterns") and not remedied)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
