"""megatron-core: a checkpoint cannot be loaded into new optimizers that are built on torch's AdamW and SGD.

Two ranks, CPU; megatron-core uses torch's optimizers without Transformer Engine and Apex. Exit code 0: defect present,
and the remedy reads back what was written. 1: gone, or one of the two packages is installed. See
megatron-checkpoint-torch-optimizers.md.
"""

import sys
from collections.abc import Callable
from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

STEPS, ANY_LAYOUT = 3, {"distrib_optim_sharding_type": "fully_reshardable"}


class Training:
    """Linear layers with megatron-core's optimizer; for AdamW, it is the distributed optimizer."""

    def __init__(self, kind: str, *, steps: int = 0) -> None:
        torch.manual_seed(0)
        self.adam, self.model = kind == "adam", torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        config: Any = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        reduction = DistributedDataParallelConfig(use_distributed_optimizer=self.adam)
        ddp = DistributedDataParallel(config, reduction, self.model)
        settings = OptimizerConfig(optimizer=kind, lr=1e-2, clip_grad=0.0, use_distributed_optimizer=self.adam)
        (self.optimizer,) = get_megatron_optimizer(settings, [ddp]).chained_optimizers
        for _ in range(steps):
            ddp.zero_grad_buffer()
            torch.Tensor.mean(ddp(torch.linspace(-1, 1, 32).view(4, 8)).square()).backward()
            ddp.finish_grad_sync()
            self.optimizer.step()

    def sharded(self, options: dict[str, str], *, is_loading: bool = False) -> Any:
        """The state dict that dist_checkpointing is given, for writing or for loading."""
        rank, names = torch.distributed.get_rank(), self.model.named_parameters()
        model = {n: ShardedTensor.from_rank_offsets(n, p, replica_id=(0, 0, rank)) for n, p in names}
        return self.optimizer.sharded_state_dict(model, is_loading, metadata=options)

    def read(self, saved: Any) -> None:
        """Load ``saved`` as dist_checkpointing and its caller do, without files."""
        self.sharded(ANY_LAYOUT, is_loading=True)
        found = dict_list_map_outplace(lambda x: x.data.clone() if isinstance(x, ShardedTensor) else x, saved)
        for group in found.get("param_groups", []):
            group["params"] = group["params"].unwrap()  # parameters of this process, which no checkpoint has
        self.optimizer.load_state_dict(found)

    def complete(self) -> None:
        """REMEDY: give every parameter an initial state, and the library the step that it asks for on loading."""
        inner, own = self.optimizer.optimizer, getattr(self.optimizer, "_set_main_param_and_optimizer_states", None)
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            names = ("exp_avg", "exp_avg_sq") if self.adam else ("momentum_buffer",)
            inner.state[parameter] = {name: torch.zeros_like(parameter) for name in names}
            if self.adam:
                inner.state[parameter]["step"] = torch.tensor(0.0)
        self.optimizer.init_state_fn = lambda *_: None
        if own:
            step = {"step": torch.tensor(float(STEPS))}
            self.optimizer._set_main_param_and_optimizer_states = lambda p, tensors: own(p, tensors | step)

    def numbers(self) -> torch.Tensor:
        inner = self.optimizer.optimizer
        states = [inner.state[p] for group in inner.param_groups for p in group["params"]]
        return torch.cat([state[name].flatten() for state in states for name in sorted(state)])


def said(attempt: Callable[..., Any], *arguments: Any) -> str:
    try:
        attempt(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return "no error"


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    adam, sgd = Training("adam", steps=STEPS), Training("sgd", steps=STEPS)
    new, right = {"AdamW": Training("adam"), "SGD": Training("sgd")}, {"AdamW": adam.numbers(), "SGD": sgd.numbers()}
    saved = {"AdamW": adam.sharded(ANY_LAYOUT), "SGD": sgd.sharded(ANY_LAYOUT)}
    told = {
        "AdamW, written as by default": said(adam.sharded, {}),
        "AdamW, read by a new optimizer": said(new["AdamW"].read, saved["AdamW"]),
        "AdamW, read by one that has made steps": said(adam.read, saved["AdamW"]),
        "SGD, read by a new optimizer": said(new["SGD"].read, saved["SGD"]),
    }
    for name, one in new.items():
        one.complete()
        error = said(one.read, saved[name])
        told[f"{name}, REMEDY"] = f"{error}, off by {float((one.numbers() - right[name]).abs().max()):.1e}"
    if rank == 0:
        print(*(f"{what}: {error}" for what, error in told.items()), sep="\n")
    errors = " ".join(error.partition(":")[0] for error in told.values())
    return errors == "CheckpointingException AssertionError KeyError TypeError" + " no error, off by 0.0e+00" * 2


if __name__ == "__main__":
    if distrib_optimizer.HAVE_APEX_OR_TE:
        sys.exit("not reproduced: with Transformer Engine or Apex their optimizers are taken")
    on_cpu.two_ranks(present)
