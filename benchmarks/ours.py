"""Times optimizer steps of a reference backend in bf16: torchrun ours.py MODEL --backend B --layout L.

See throughput.py.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from timing import BATCHES, measure, parse, random_rows

from conformance.spec.batch import Batch, Document, Row
from conformance.spec.layout import Layout
from conformance.spec.offline import Sft
from conformance.spec.scenario import OptimizerConfig, ScheduleConfig
from impl.engine.trainer import train_step
from impl.interface.trainable import ContextConfig, get_context

# The default of torch's AdamW, which the plain programs use.
ADAMW = OptimizerConfig(name="adamw", lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, max_grad_norm=1.0)


def main() -> None:
    options = parse(__doc__)
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    layout = Layout.parse(options.layout)
    parts = options.rows if layout.pp > 1 else 1  # a pipeline gets one row after the other
    context = get_context(
        options.backend,
        ContextConfig(
            layout=layout, precision="bf16", device=device, accumulation=parts, packed=False, trust_remote_code=True
        ),
    )
    context.setup_distributed()
    policy = context.new_trainable("causal")
    policy.prepare(policy.load_model(options.model), ADAMW, ScheduleConfig())
    batches = [
        random_batch(options.model, layout, rows=options.rows, seq=options.seq, step=step) for step in range(BATCHES)
    ]

    def step(number: int) -> float:
        models, given = {"policy": policy}, batches[number % BATCHES]
        metrics = train_step(context, models, Sft(), given, on_gradients=lambda model: None, with_rows=False)
        return metrics.values["loss"]

    measure(step, options=options, data_ranks=layout.dp)
    context.teardown()
    dist.destroy_process_group()


def random_batch(model: Path, layout: Layout, *, rows: int, seq: int, step: int) -> Batch:
    """Returns the random tokens of a step; all but the first of a row are targets. rows: of each data rank."""
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokens = [random_rows(vocabulary, rows=rows, seq=seq, step=step, rank=rank) for rank in range(layout.dp)]
    documents = [Document(tuple(row), (False, *(True,) * (seq - 1))) for row in torch.cat(tokens).tolist()]
    return Batch(step=step, max_len=seq, rows=tuple(Row(i, (document,)) for i, document in enumerate(documents)))


if __name__ == "__main__":
    main()
