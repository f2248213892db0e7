"""Tasks that tests/test_megatron_models.py runs in ranks, on contexts and trainables alone."""

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.batch import Batch, Document, Row
from conformance.layout import Layout
from conformance.objective import Head
from conformance.run.exact import exact_tier
from conformance.scenario import OptimizerConfig, Precision, ScheduleConfig
from conformance.world import RankContext
from conformance.world.process import thread_count
from impl.collate import MicroBatch, collate
from impl.megatron.context import MegatronContext
from impl.megatron.trainable import MegatronTrainable
from impl.models import load_model
from impl.outputs import Outputs, Wanted
from impl.strategy import ContextConfig

ADAMW = OptimizerConfig(name="adamw", lr=1e-3, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
SGD = OptimizerConfig(name="sgd", lr=1e-2, momentum=0.9, max_grad_norm=0.5)
SCHEDULE = ScheduleConfig(name="linear", total_steps=5)
ACCUMULATION = 4
TEMPERATURE = 0.7
VOCABULARY = 264


def make_batch(step: int) -> Batch:
    """16 rows of documents of all lengths; some tokens are no targets."""
    random = torch.Generator().manual_seed(step)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    def document() -> Document:
        length = number(2, 12)
        targets = (False, *(number(0, 4) > 0 for _ in range(length - 1)))
        return Document(tuple(number(8, VOCABULARY) for _ in range(length)), targets)

    rows = tuple(Row(index, tuple(document() for _ in range(number(1, 4)))) for index in range(16))
    return Batch(step, 64, rows)


@contextlib.contextmanager
def opened(rank: RankContext, layout: str, precision: Precision = "exact") -> Iterator[MegatronContext]:
    """A context that is set up and torn down."""
    config = ContextConfig(
        layout=Layout.parse(layout), precision=precision, device=rank.device, accumulation=ACCUMULATION, packed=True
    )
    with exact_tier() if precision == "exact" else contextlib.nullcontext():
        context = MegatronContext(config)
        context.setup_distributed()
        try:
            yield context
        finally:
            context.teardown()


def trainable(
    context: MegatronContext, folder: str, *, head: Head = "causal", optimizer: OptimizerConfig | None = ADAMW
) -> MegatronTrainable:
    made = context.new_trainable(head)
    made.prepare(made.load_model(Path(folder)), optimizer, SCHEDULE)
    return made


def micro_batches(context: MegatronContext, batch: Batch) -> list[MicroBatch]:
    return [collate(rows).to(context.config.device) for rows in context.setup_dataloader(batch)]


def sft_step(context: MegatronContext, model: MegatronTrainable, batch: Batch) -> float | None:
    """A step of supervised fine-tuning; returns the norm of its gradients."""
    model.forward_backward(
        micro_batches(context, batch),
        want=frozenset({"logprobs"}),
        loss=lambda index, outputs: -outputs.logprobs.sum() / batch.target_count,
    )
    model.finish_gradients()
    return model.optimizer_step()


def policy_loss(outputs: Outputs, reference: Outputs, inputs: MicroBatch, batch: Batch) -> torch.Tensor:
    """Depends on everything that a language model gives; each token counts for another number."""
    ratio = (outputs.logprobs - reference.logprobs) * (1 + inputs.tokens.to(ratio_dtype()).sin())
    terms = ratio.square() - outputs.logprobs + 0.3 * outputs.entropy * reference.entropy
    return (terms * inputs.targets).sum() / batch.target_count


def critic_loss(outputs: Outputs, inputs: MicroBatch, batch: Batch) -> torch.Tensor:
    """Depends on the value at every token, and on padding if that were not 0."""
    wanted = inputs.tokens.to(ratio_dtype()).sin().where(inputs.real, 0)
    return (outputs.values - wanted).square().sum() / batch.target_count


def ratio_dtype() -> torch.dtype:
    return torch.get_default_dtype()


class Reference:
    """The same three models in transformers, whole in one process, row by row, with torch's optimizers."""

    def __init__(self, folders: dict[str, str], optimizer: OptimizerConfig) -> None:
        heads: dict[str, Head] = {"policy": "causal", "reference": "causal", "critic": "value"}
        self.models = {
            name: load_model(Path(folders[name]), dtype=torch.float64, attention="eager", head=head)
            for name, head in heads.items()
        }
        self.config = optimizer
        self.optimizers = {name: self._optimizer(self.models[name]) for name in ("policy", "critic")}

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        if self.config.name == "sgd":
            return torch.optim.SGD(model.parameters(), lr=self.config.lr, momentum=self.config.momentum)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=self.config.lr,
            betas=self.config.betas,
            eps=self.config.eps,
        )

    def outputs(self, name: str, inputs: MicroBatch) -> Outputs:
        logits = self.models[name](input_ids=inputs.tokens, position_ids=inputs.positions, use_cache=False).logits
        if name == "critic":
            return Outputs(values=logits[..., 0].where(inputs.real, 0))
        logp = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        of_labels = logp.gather(-1, inputs.labels.clamp(min=0)[..., None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return Outputs(logprobs=of_labels.where(inputs.targets, 0), entropy=entropy.where(inputs.targets, 0))

    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """One step of policy and critic; the norms of their gradients, which are left unclipped in ``grad``."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        for row in batch.rows:
            inputs = collate([row])
            with torch.no_grad():
                reference = self.outputs("reference", inputs)
            policy_loss(self.outputs("policy", inputs), reference, inputs, batch).backward()
            critic_loss(self.outputs("critic", inputs), inputs, batch).backward()
        norms = {}
        for name, optimizer in self.optimizers.items():
            norms[name] = float(torch.stack([p.grad.norm() for p in self.models[name].parameters()]).norm())
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * SCHEDULE.factor(step)
        return norms

    def update(self, norms: dict[str, float]) -> None:
        for name, optimizer in self.optimizers.items():
            assert self.config.max_grad_norm is not None
            for p in self.models[name].parameters():
                p.grad *= min(1.0, self.config.max_grad_norm / (norms[name] + 1e-6))
            optimizer.step()


def three_models(
    rank: RankContext, *, layout: str, folders: dict[str, str], optimizer: str = "adamw", steps: int = 2
) -> dict[str, float]:
    """Policy, critic and frozen reference in one context, against transformers: largest relative error of each kind.

    The errors of gradients and updates are those of single parameters.
    """
    config = ADAMW if optimizer == "adamw" else SGD
    worst: dict[str, float] = {}
    with opened(rank, layout) as context:
        expected = Reference(folders, config)
        models = {
            "policy": trainable(context, folders["policy"], optimizer=config),
            "reference": trainable(context, folders["reference"], optimizer=None),
            "critic": trainable(context, folders["critic"], head="value", optimizer=config),
        }

        def note(key: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
            error = float((found.detach() - wanted.detach()).norm() / wanted.detach().norm().clamp(min=1e-300))
            worst[key] = max(worst.get(key, 0.0), error) if error == error else error

        def note_tensors(key: str, name: str, of: Callable[[Any], torch.Tensor]) -> None:
            wanted = {n: of(p) for n, p in expected.models[name].named_parameters()}
            found = dict(models[name].named_tensors("gradient" if key == "gradient" else "weight"))
            assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
            for n, tensor in found.items():
                note(f"{name} {key}", tensor, wanted[n])
            note_replicas(models[name], f"{name} replicas")

        def note_replicas(model: MegatronTrainable, key: str) -> None:
            for kind in ("weight", "gradient") if model.optimizer else ("weight",):
                mine = {(s.name, s.region): s.tensor.clone() for s in model.local_shards(kind)}
                everyone = context.all_gather(mine)
                for place, tensor in mine.items():
                    for theirs in everyone:
                        if place in theirs and tensor.numel():
                            note(key, theirs[place], tensor)

        def note_outputs(name: str, want: Wanted, inputs: list[MicroBatch], found: list[Outputs]) -> None:
            for micro_batch, outputs in zip(inputs, found, strict=True):
                with torch.no_grad():
                    wanted = expected.outputs(name, micro_batch)
                for key in ("logprobs", "entropy", "values"):
                    if key not in want:
                        assert getattr(outputs, key) is None
                        continue
                    number = getattr(outputs, key)
                    assert number.shape == micro_batch.tokens.shape
                    assert not number.requires_grad
                    note(f"{name} {key}", number, getattr(wanted, key))

        both: Wanted = frozenset({"logprobs", "entropy"})
        values: Wanted = frozenset({"values"})
        start = {name: {n: p.detach().clone() for n, p in m.named_parameters()} for name, m in expected.models.items()}
        for name in models:
            note_tensors("loaded", name, lambda p: p)
        for step in range(steps):
            batch = make_batch(step)
            inputs = micro_batches(context, batch)
            known = models["reference"].forward_backward(inputs, want=both, temperature=TEMPERATURE, loss=None)
            note_outputs("reference", both, inputs, known)
            # Forward only, of models that are trained as well, as for old log-probs and old values.
            some: Wanted = frozenset({"entropy"})
            old = models["policy"].forward_backward(inputs, want=some, temperature=TEMPERATURE, loss=None)
            note_outputs("policy", some, inputs, old)
            note_outputs("critic", values, inputs, models["critic"].forward_backward(inputs, want=values, loss=None))
            trained = models["policy"].forward_backward(
                inputs,
                want=both,
                temperature=TEMPERATURE,
                loss=lambda i, outputs: policy_loss(outputs, known[i], inputs[i], batch),
            )
            note_outputs("policy", both, inputs, trained)
            trained = models["critic"].forward_backward(
                inputs, want=values, loss=lambda i, outputs: critic_loss(outputs, inputs[i], batch)
            )
            note_outputs("critic", values, inputs, trained)
            norms = expected.train(batch, step)
            for name in ("policy", "critic"):
                models[name].finish_gradients()
                note_tensors("gradient", name, lambda p: p.grad)
                assert abs(models[name].learning_rate() - config.lr * SCHEDULE.factor(step)) < 1e-15
            for name in ("critic", "policy"):
                norm = models[name].optimizer_step()
                note(f"{name} norm", torch.tensor(norm), torch.tensor(norms[name]))
            expected.update(norms)
        for name in ("policy", "critic"):
            wanted = dict(expected.models[name].named_parameters())
            for n, tensor in models[name].named_tensors("weight"):
                note(f"{name} update", tensor - start[name][n], wanted[n] - start[name][n])
            note_replicas(models[name], f"{name} replicas")
        note_tensors("loaded", "reference", lambda p: p)
        for model in models.values():
            model.teardown()
    return worst
