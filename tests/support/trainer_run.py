"""Trains eight steps with Hugging Face's Trainer, logged every second one. Argument: the output folder."""

import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Numbers(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor([2.0 * index + 1])}


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.line(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


def main(folder: str) -> None:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        num_train_epochs=2,
        learning_rate=0.01,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model=Line(), args=arguments, train_dataset=Numbers(), eval_dataset=Numbers())
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main(sys.argv[1])
