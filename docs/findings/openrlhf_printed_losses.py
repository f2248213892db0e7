"""OpenRLHF: the losses that it prints are not those that it trains.

Two ranks for SFTTrainer.fit, one for ActorPPOTrainer.ppo_train, CPU; models and engines are stand-ins, loops, losses
and means are OpenRLHF's. Exit code 0: defect present (fit logs the share of rank 0, ppo_train weighs micro-batches by
their tokens twice). 1: gone. See openrlhf-printed-losses.md.
"""

import os
import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace as Options
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

for name in (
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils.distributed",
    "vllm",
    "vllm.inputs",
    "vllm.utils",
):
    sys.modules.setdefault(name, MagicMock(spec_set=None, __spec__=ModuleSpec(name, None)))  # imported, and not called
import openrlhf.trainer.sft_trainer as sft  # noqa: E402
from openrlhf.models import PolicyLoss  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer  # noqa: E402


class Strategy:
    """The part of DeepspeedStrategy that the loops use, without an engine: nothing is updated."""

    ring_attn_group = None

    def __init__(self, args: Any, accumulation: int) -> None:
        self.args, self.accumulated_gradient = args, accumulation

    def all_reduce(self, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: self.all_reduce(value) for key, value in data.items()}
        tensor = torch.tensor(float(data)) / (dist.get_world_size() if dist.is_initialized() else 1)
        if dist.is_initialized():
            dist.all_reduce(tensor)
        return tensor.item()

    def is_rank_0(self) -> bool:
        return False

    def get_grad_norm(self, model: Any) -> float:
        return 0.0

    def backward(self, *_: Any) -> None: ...

    def optimizer_step(self, *_: Any, **__: Any) -> None: ...


class Model(torch.nn.Module):
    """Every log-prob of rank 0 is -1, of rank 1 -3."""

    model = Options(global_steps=1)

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens: torch.Tensor, **_: Any) -> Any:
        return torch.full((len(tokens), tokens.shape[1] - 1), -1.0 - 2 * dist.get_rank()), None


def fit(rank: int, port: int, printed: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    logger = Options(wandb=Options(key=None, run_name=""), tensorboard_dir=None, logging_steps=1)
    args = Options(model=Options(aux_loss_coef=0), ds=Options(packing_samples=False), logger=logger)
    args.train, args.eval, args.ckpt = Options(batch_size=2), Options(steps=-1), Options(save_steps=-1)
    loader = MagicMock(__len__=lambda _: 1, __iter__=lambda _: iter([(torch.ones(1, 1, 5).long(),) * 3]))
    schedule = Options(get_last_lr=lambda: [0.0])
    trainer = sft.SFTTrainer(Model(), Strategy(args, 1), None, loader, None, schedule, max_epochs=1)
    trainer.save_logs_and_checkpoints = lambda _args, _step, _bar, logs, _states: printed.put((rank, logs))
    trainer.fit(args)
    dist.destroy_process_group()


def policy_loss() -> float:
    """Two micro-batches of one step: a token with the loss -1, and three with the loss -3."""
    rows = [Experience(action_mask=torch.ones(1, n), advantages=torch.full((1, n), float(n)), info={}) for n in (1, 3)]
    for row in rows:
        row.action_log_probs = torch.zeros_like(row.advantages)
        row.sequences = row.attention_mask = torch.ones(1, row.advantages.shape[1] + 1)
    trainer: Any = ActorPPOTrainer.__new__(ActorPPOTrainer)
    trainer.args = Options(train=Options(dynamic_batch_enable=False), ds=Options(tensor_parallel_size=2))
    trainer.args.actor, trainer.args.algo = Options(entropy_coef=None), Options(kl=Options(use_loss=False))
    trainer.strategy, trainer.aux_loss, trainer.ema_model, trainer.max_epochs = (
        Strategy(trainer.args, 2),
        False,
        None,
        1,
    )
    trainer.actor = MagicMock(side_effect=lambda s, mask, **_: (torch.zeros_like(mask), None))
    trainer.actor_loss_fn, trainer.dataloader_pin_memory, trainer.actor_optim = PolicyLoss(), False, None
    trainer.actor_scheduler = Options(get_last_lr=lambda: [0.0])
    buffer = types.new_class("Buffer", (list,))(rows)
    buffer.sample_batch_size, buffer.collate_fn = 1, lambda batch: batch[0]
    trainer.replay_buffer = buffer
    return float(trainer.ppo_train(0.0)["policy_loss"])


if __name__ == "__main__":
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    printed = mp.get_context("spawn").SimpleQueue()
    mp.spawn(fit, (29533, printed), nprocs=2)
    logs = dict(printed.get() for _ in range(2))
    print(
        f"SFTTrainer.fit: ranks with the losses 1 and 3, mean 2; rank 0 logs loss_mean {logs[0]['loss_mean']:g}, ",
        end="",
    )
    print(f"rank 1 {logs[1]['loss_mean']:g}; gpt_loss, which is reduced, {logs[0]['gpt_loss']:g}")
    loss = policy_loss()
    print(f"ActorPPOTrainer.ppo_train: four tokens, mean loss (-1 - 3 * 3) / 4 = -2.5; policy_loss {loss:g}")
    sys.exit(0 if abs(logs[0]["loss_mean"] - 1) < 1e-6 and abs(loss + 3.5) < 1e-6 else 1)
