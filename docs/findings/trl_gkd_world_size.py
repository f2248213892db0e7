"""TRL: GKDTrainer divides loss and gradients by the number of ranks.

Two CPU ranks under DDP, a tiny Llama and a frozen teacher; all else is GKDTrainer's. The same rows on one rank give the
right numbers. Exit code 0: defect present, and its remedy works. 1: gone. See trl-gkd-world-size.md.
"""

import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import __version__ as HF
from trl import __version__
from trl.experimental.gkd import GKDConfig, GKDTrainer

ROWS = [[1, 2, 3, 4, 5, 6], [1, 9, 8, 7, 6, 5], [1, 4, 4, 2, 9, 9], [1, 3, 5, 7, 9, 2]]


class Remedied(GKDTrainer):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.accelerator.num_processes  # as transformers' Trainer does


def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    tokens = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def rank_of(rank: int, ranks: int, port: int, folder: str, remedy: bool) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    students = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        students.append(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)))
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    args = GKDConfig(
        **{"output_dir": folder, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
        **{"lmbda": 0.0, "beta": 0.5, "max_steps": 1, "logging_steps": 1, "learning_rate": 1e-12},
        **{"per_device_train_batch_size": len(ROWS) // ranks, "gradient_checkpointing": False},
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = (Remedied if remedy else GKDTrainer)(
        *students,
        args,
        data_collator=collated,
        train_dataset=Dataset.from_list([{"input_ids": row, "labels": row} for row in ROWS]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1"),
    )
    trainer.train()
    if rank == 0:
        log = next(line for line in trainer.state.log_history if "loss" in line)
        Path(folder, "log").write_text(f"{log['loss']} {log['grad_norm']}")


def measured(ranks: int, *, remedy: bool = False) -> tuple[float, float]:
    """Returns the loss and the gradient norm that a step logs."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(rank_of, (ranks, port, folder, remedy), nprocs=ranks)
        loss, norm = Path(folder, "log").read_text().split()
    return float(loss), float(norm)


if __name__ == "__main__":
    one, two, mended = measured(1), measured(2), measured(2, remedy=True)
    print(f"TRL {__version__}, transformers {HF}; one rank: loss {one[0]:.5f}, gradient norm {one[1]:.5f}")
    print(f"two ranks: {two[0] / one[0]:.4f} times the loss, {two[1] / one[1]:.4f} times the norm")
    print(f"two ranks, with the remedy: {mended[0] / one[0]:.4f} and {mended[1] / one[1]:.4f} times")
    present = abs(two[1] / one[1] - 0.5) < 1e-3 and abs(mended[1] / one[1] - 1) < 1e-3
    sys.exit(0 if present else 1)
