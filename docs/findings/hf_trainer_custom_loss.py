"""transformers' Trainer trains with the accumulation count as a factor when a model computes its own mean loss.

If a model's forward accepts **kwargs, the Trainer assumes that its loss is normalised by ``num_items_in_batch``, and
does not divide by the accumulation. A forward that ignores the argument and returns its own mean is then not divided.

python docs/findings/hf_trainer_custom_loss.py   exit code 0: the defect is there, 1: it is gone
"""

import sys
import tempfile
from typing import Any

import torch
import transformers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast

ACCUMULATION = 3
CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, use_cache=False
)


class OwnLoss(LlamaForCausalLM):  # type: ignore[misc]
    """A model that computes its own mean loss, as many remote-code models do. Rows are equally long here."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
        kwargs.pop("num_items_in_batch", None)
        output = super().forward(input_ids=input_ids, **kwargs)
        output.loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return output


class Declared(OwnLoss):
    """The remedy: declare that the loss is not normalised by the step's tokens."""

    accepts_loss_kwargs = False


class Norm(TrainerCallback):  # type: ignore[misc]
    """Records the gradient norm just before the optimizer's step; clipping is off."""

    value = 0.0

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        self.value = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])).item()


def ratio(kind: type[OwnLoss]) -> float:
    """The gradient norm of one optimizer step under the Trainer, divided by that of all rows in one batch."""
    rows = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(ACCUMULATION)]
    torch.manual_seed(0)
    model = kind(CONFIG)
    batch = torch.stack([row["input_ids"] for row in rows])
    model(input_ids=batch, labels=batch).loss.backward()
    right = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()])).item()
    model.zero_grad()
    norm = Norm()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=1,
            max_grad_norm=0.0,
            optim="sgd",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[norm]).train()
    print(f"{kind.__name__}: gradient norm {right:.6f} is right, the Trainer's is {norm.value:.6f}")
    return float(norm.value / right)


def main() -> int:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    wrong, remedied = ratio(OwnLoss), ratio(Declared)
    print(f"with {ACCUMULATION} micro-batches {wrong:.4f} times the right gradient; declared: {remedied:.4f} times")
    return 0 if abs(wrong - ACCUMULATION) < 1e-3 and abs(remedied - 1) < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
