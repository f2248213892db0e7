"""Measures the host's time for a step of DeepSpeed.

torchrun --standalone --nproc-per-node 2 host_time.py MODEL LAYOUT [--plain]

MODEL: a Hugging Face folder with layers so small that their computation hardly counts, such as random_model.py writes
from the configuration of openPangu-Embedded-1B with hidden_size 64, intermediate_size 128, 4 heads, 2 key-value heads
and vocab_size 600. It is trained in bf16 on a CPU over gloo, where the main thread of a rank runs forward and backward
passes; with --plain by plain_deepspeed.py's program. Prints a line of JSON of rank 0: the median and the least
processor time of ten steps, and the number of Python function calls in one more step, which does not depend on other
work on the machine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from ours import ADAMW, random_batch
from plain_deepspeed import engine_of, step_of
from timing import WARM_UP, random_rows

from conformance.spec.layout import Layout
from conformance.spec.offline import Sft
from conformance.spec.scenario import ScheduleConfig
from impl.engine.trainer import train_step
from impl.interface.trainable import ContextConfig, get_context

TOKENS, STEPS = 8, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("layout", type=Layout.parse)
    parser.add_argument("--plain", action="store_true", help="the plain program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = (plain if options.plain else ours)(options.model, options.layout)
    seconds = []
    for number in range(WARM_UP + STEPS):
        began = time.thread_time()
        step(number)
        seconds.append(time.thread_time() - began)
    calls = python_calls(lambda: step(WARM_UP + STEPS))
    if dist.get_rank() == 0:
        timed = [round(each(seconds[WARM_UP:]), 4) for each in (median, min)]
        print(json.dumps({"layout": str(options.layout), "median_s": timed[0], "least_s": timed[1], "calls": calls}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as ranks of a training do (impl/train/launch.py)


def python_calls(step: Callable[[], object]) -> int:
    """Counts the Python functions that this thread calls while ``step`` runs."""
    count = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    step()
    sys.setprofile(None)
    return count


def ours(model: Path, layout: Layout) -> Callable[[int], object]:
    config = ContextConfig(
        layout=layout, precision="bf16", device="cpu", accumulation=1, packed=False, trust_remote_code=True
    )
    context = get_context("deepspeed", config)
    context.setup_distributed()
    policy = context.new_trainable("causal")
    policy.prepare(policy.load_model(model), ADAMW, ScheduleConfig())

    def step(number: int) -> None:
        batch = random_batch(model, layout, rows=1, seq=TOKENS, step=number)
        train_step(context, {"policy": policy}, Sft(), batch, on_gradients=lambda model: None, with_rows=False)

    return step


def plain(folder: Path, layout: Layout) -> Callable[[int], object]:
    """Makes the step of plain_deepspeed.py for a CPU; in so small a model ZeRO-3 shards the same parameters as ours."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=True)
    model.config.use_cache = False
    model.train()
    if "ckpt" in layout.options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    whole = max(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    engine = engine_of(model, rows=1, stage=layout.zero or 0, stage3_param_persistence_threshold=whole)

    def step(number: int) -> None:
        step_of(engine, random_rows(model.config.vocab_size, rows=1, seq=TOKENS, step=number, rank=dist.get_rank()))

    return step


if __name__ == "__main__":
    main()
