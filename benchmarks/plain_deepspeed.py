"""Times plain DeepSpeed ZeRO: torchrun plain_deepspeed.py MODEL --layout dp2.zero2. See throughput.py.

Gradients are reduced and added up in float32, as the reference backend does; DeepSpeed's default is bf16.
"""

import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from timing import measure, parse, random_rows


def main() -> None:
    options = parse(__doc__)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=True
    ).cuda()
    model.config.use_cache = False
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    engine = engine_of(model, rows=options.rows, stage=int(options.layout[-1]))
    vocabulary = model.config.vocab_size

    def step(number: int) -> float:
        rows = random_rows(vocabulary, rows=options.rows, seq=options.seq, step=number, rank=dist.get_rank()).cuda()
        return step_of(engine, rows)

    measure(step, options=options, data_ranks=dist.get_world_size())
    dist.destroy_process_group()


def engine_of(model: transformers.PreTrainedModel, *, rows: int, stage: int, **zero: int) -> Any:
    """Returns the engine of ZeRO's ``stage`` in bf16, with ``zero`` as further options of ZeRO."""
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True),
        config={
            "train_micro_batch_size_per_gpu": rows,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {"stage": stage, **zero},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )
    return engine


def step_of(engine: Any, rows: torch.Tensor) -> float:
    """Trains on rows of tokens and returns the loss."""
    loss = F.cross_entropy(engine(input_ids=rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    return float(loss)


if __name__ == "__main__":
    main()
