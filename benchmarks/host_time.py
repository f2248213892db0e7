"""What a step of DeepSpeed costs the host: torchrun --standalone --nproc-per-node 2 host_time.py MODEL LAYOUT

MODEL: a Hugging Face folder with layers that are so small that what they compute hardly counts, such as random_model.py
writes from the configuration of openPangu-Embedded-1B with hidden_size 64, intermediate_size 128, 4 heads, 2 key-value
heads and vocab_size 600. Trained in bf16 on a CPU over gloo, where the main thread of a rank runs forward and backward
passes. Prints its processor time for a step of the first rank, as a line of JSON: the median of ten, and the least.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from ours import ADAMW
from timing import WARM_UP, random_rows

from conformance.batch import Batch, Document, Row
from conformance.layout import Layout
from conformance.objective import Sft
from conformance.scenario import ScheduleConfig
from impl.strategy import ContextConfig, get_context
from impl.trainer import train_step

TOKENS, VOCABULARY, STEPS = 8, 600, 10


def main(model: Path, layout: Layout) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = ContextConfig(
        layout=layout, precision="bf16", device="cpu", accumulation=1, packed=False, trust_remote_code=True
    )
    context = get_context("deepspeed", config)
    context.setup_distributed()
    policy = context.new_trainable("causal")
    policy.prepare(policy.load_model(model), ADAMW, ScheduleConfig())
    seconds = []
    for number in range(WARM_UP + STEPS):
        tokens = [random_rows(VOCABULARY, rows=1, seq=TOKENS, step=number, rank=rank) for rank in range(layout.dp)]
        documents = [Document(tuple(row), (False, *(True,) * (TOKENS - 1))) for row in torch.cat(tokens).tolist()]
        rows = tuple(Row(i, (document,)) for i, document in enumerate(documents))
        batch = Batch(step=number, max_len=TOKENS, rows=rows)
        began = time.thread_time()
        train_step(context, {"policy": policy}, Sft(), batch, on_gradients=lambda model: None, with_rows=False)
        seconds.append(time.thread_time() - began)
    if dist.get_rank() == 0:
        timed = seconds[WARM_UP:]
        print(json.dumps({"layout": str(layout), "median_s": round(median(timed), 4), "least_s": round(min(timed), 4)}))
    context.teardown()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as ranks of a training do (impl/train/process.py)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Layout.parse(sys.argv[2]))
