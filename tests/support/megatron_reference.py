"""Trains policy, critic and frozen reference in transformers in one process, with torch's optimizers and autograd.

tests/support/megatron_tasks.py compares with it. Rows run one by one, without padding or code of impl/megatron.
"""

from pathlib import Path

import torch
from torch import Tensor

from conformance.spec.batch import Batch, Document, Row
from conformance.spec.observables import Head
from conformance.spec.scenario import OptimizerConfig, ScheduleConfig
from impl.interface.micro_batches import MicroBatch, Outputs, collate
from impl.models.loading import load_model

OPTIMIZERS = {
    "adamw": OptimizerConfig(name="adamw", lr=1e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5),
    "sgd": OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, max_grad_norm=0.5),
}
SCHEDULE = ScheduleConfig(name="linear", total_steps=5)
TEMPERATURE = 0.7
HEADS: dict[str, Head] = {"reference": "causal", "policy": "causal", "critic": "value"}
TRAINED = ("policy", "critic")


def make_batch(step: int, *, packed: bool = True) -> Batch:
    """8 rows of documents of all lengths; some tokens are no targets. Tokens below 8 are special, as padding is.

    Rows that are not packed hold one document.
    """
    random = torch.Generator().manual_seed(step)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    def document() -> Document:
        length = number(2, 12)
        targets = (False, *(number(0, 4) > 0 for _ in range(length - 1)))
        return Document(tuple(number(8, 264) for _ in range(length)), targets)

    rows = tuple(Row(index, tuple(document() for _ in range(number(1, 4) if packed else 1))) for index in range(8))
    return Batch(step, 64, rows)


def policy_loss(outputs: Outputs, reference: Outputs, inputs: MicroBatch, batch: Batch) -> Tensor:
    """Depends on everything that a language model gives; each token counts for another number."""
    assert outputs.logprobs is not None
    assert outputs.entropy is not None
    assert reference.logprobs is not None
    assert reference.entropy is not None
    ratio = (outputs.logprobs - reference.logprobs) * (1 + _number_of(inputs))
    terms = ratio.square() - outputs.logprobs + 0.3 * outputs.entropy * reference.entropy
    return (terms * inputs.targets).sum() / batch.target_count


def critic_loss(outputs: Outputs, inputs: MicroBatch, batch: Batch) -> Tensor:
    """Depends on the value at every token, and on padding if that is not 0."""
    assert outputs.values is not None
    return (outputs.values - _number_of(inputs)).square().sum() / batch.target_count


def _number_of(inputs: MicroBatch) -> Tensor:
    """A number between -1 and 1 for each token, (rows, length), 0 in padding."""
    return inputs.tokens.to(torch.get_default_dtype()).sin().where(inputs.real, 0)


class Reference:
    """``models``: in float64, by role; their gradients are those of the last step, unclipped until ``update``."""

    def __init__(self, folders: dict[str, str], optimizer: str) -> None:
        self.models = {
            name: load_model(Path(folders[name]), dtype=torch.float64, attention="eager", head=head)
            for name, head in HEADS.items()
        }
        self.config = OPTIMIZERS[optimizer]
        self.optimizers = {name: self._optimizer(self.models[name]) for name in TRAINED}

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        config = self.config
        if config.name == "sgd":
            return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
        groups = [
            {"params": [p for p in model.parameters() if (p.dim() > 1) == matrix], "weight_decay": decay}
            for matrix, decay in ((True, config.weight_decay), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    def outputs(self, name: str, inputs: MicroBatch) -> Outputs:
        logits = self.models[name](input_ids=inputs.tokens, position_ids=inputs.positions, use_cache=False).logits
        if HEADS[name] == "value":
            return Outputs(values=logits[..., 0].where(inputs.real, 0))
        logp = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        of_labels = logp.gather(-1, inputs.labels.clamp(min=0)[..., None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return Outputs(logprobs=of_labels.where(inputs.targets, 0), entropy=entropy.where(inputs.targets, 0))

    def backward(self, batch: Batch) -> dict[str, float]:
        """Gradients of a step, and their norms."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        for row in batch.rows:
            inputs = collate([row])
            with torch.no_grad():
                reference = self.outputs("reference", inputs)
            policy_loss(self.outputs("policy", inputs), reference, inputs, batch).backward()
            critic_loss(self.outputs("critic", inputs), inputs, batch).backward()
        return {
            name: float(torch.stack([p.grad.norm() for p in self.models[name].parameters()]).norm()) for name in TRAINED
        }

    def update(self, norms: dict[str, float], step: int) -> None:
        assert self.config.max_grad_norm is not None
        for name, optimizer in self.optimizers.items():
            for parameter in self.models[name].parameters():
                parameter.grad *= min(1.0, self.config.max_grad_norm / (norms[name] + 1e-6))
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * SCHEDULE.factor(step)
            optimizer.step()
