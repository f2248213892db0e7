"""Times plain FSDP2 as in PyTorch's tutorial: torchrun plain_fsdp2.py MODEL. See throughput.py."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from timing import measure, parse, random_rows
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    options = parse(__doc__)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=True
    ).cuda()
    model.config.use_cache = False
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    vocabulary = model.config.vocab_size

    def step(number: int) -> float:
        rows = random_rows(vocabulary, rows=options.rows, seq=options.seq, step=number, rank=dist.get_rank()).cuda()
        logits = model(rows).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    measure(step, options=options, data_ranks=dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
