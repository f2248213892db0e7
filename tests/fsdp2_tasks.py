"""Tasks that tests/test_fsdp2.py runs in ranks: models side by side against plain Hugging Face models and autograd.

The reference is one process, float64, one document at a time, without padding, packing or any code of impl/.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from conformance.batch import Batch, Document, Row
from conformance.layout import Layout
from conformance.paths import FIXTURES
from conformance.run.exact import exact_tier
from conformance.scenario import OptimizerConfig, Precision, ScheduleConfig
from conformance.world import RankContext
from impl.collate import MicroBatch, collate
from impl.outputs import Outputs
from impl.strategy import Context, ContextConfig, Trainable, get_context
from impl.trainer import target_rows

ROWS, ACCUMULATION = 4, 2
TEMPERATURE = 0.7
OPTIMIZER = OptimizerConfig(name="adamw", lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
SCHEDULE = ScheduleConfig(name="linear", warmup_steps=0, total_steps=4)


def value_folder(model: str, out: Path) -> Path:
    """A value model on the layers of a fixture: no language head, and a score from a seed."""
    source = FIXTURES / "models" / model
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    config = json.loads((source / "config.json").read_text())
    architecture = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    config |= {"architectures": [architecture], "num_labels": 1, "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config))
    weights = {n: w for n, w in load_file(source / "model.safetensors").items() if n.startswith("model.")}
    noise = torch.randn(1, config["hidden_size"], generator=torch.Generator().manual_seed(5))
    save_file({**weights, "score.weight": 0.2 * noise}, out / "model.safetensors", metadata={"format": "pt"})
    return out


def batch(*, packed: bool, rows: int = ROWS) -> Batch:
    """Documents of odd lengths; about half of their tokens are targets. ``weight`` is a column of numbers per token."""
    numbers = random.Random(3)

    def document(length: int) -> Document:
        tokens = tuple(numbers.randrange(3, 264) for _ in range(length))
        targets = (False, *(numbers.random() < 0.6 for _ in range(length - 2)), True)
        return Document(tokens, targets, {"weight": tuple(numbers.uniform(0.5, 1.5) for _ in range(length))})

    lengths = [[11, 6, 20], [25, 3], [33], [9, 17]] if packed else [[23], [31], [12], [18]]
    return Batch(0, 48, tuple(Row(i, tuple(map(document, lengths[i % len(lengths)]))) for i in range(rows)))


def loss_of(outputs: Outputs, weight: Tensor) -> Tensor:
    """A loss, before it is divided, that depends on everything that was asked for. All tensors have the same shape."""
    loss = torch.zeros(())
    if outputs.logprobs is not None:
        loss = loss - (outputs.logprobs * weight).sum()
    if outputs.entropy is not None and outputs.logprobs is not None:
        loss = loss + 0.3 * (outputs.entropy * outputs.logprobs.exp() * weight).sum()
    if outputs.values is not None:
        loss = loss + ((outputs.values - weight).square() * weight).sum()
    return loss


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Outputs at the targets by row, gradients, weights before and after the update, and the norm of the gradients."""

    rows: dict[str, dict[int, Tensor]]
    gradients: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    norm: float


def plain_reference(folder: Path, *, head: str, want: Sequence[str], step: Batch) -> Reference:
    """One step of a plain model in this process."""
    score = None
    loader = transformers.AutoModel if head == "value" else transformers.AutoModelForCausalLM
    model = loader.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64, attn_implementation="eager")
    parameters = dict(model.named_parameters())
    if head == "value":
        parameters = {f"model.{name}": parameter for name, parameter in parameters.items()}
        score = torch.nn.Parameter(load_file(folder / "model.safetensors")["score.weight"].double())
        parameters["score.weight"] = score
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    count = sum(row.target_count for row in step.rows)
    rows: dict[str, dict[int, list[Tensor]]] = {name: {row.index: [] for row in step.rows} for name in want}
    for row in step.rows:
        for document in row.documents:
            at = torch.tensor([i for i, target in enumerate(document.targets) if target])
            tokens = torch.tensor(document.tokens)
            weight = torch.tensor(document.columns["weight"])[at]
            output = model(input_ids=tokens[None], use_cache=False)
            if score is not None:
                found = Outputs(values=(output.last_hidden_state[0, at - 1] @ score.T)[:, 0])
            else:
                logp = torch.log_softmax(output.logits[0, at - 1] / TEMPERATURE, dim=-1)
                entropy = -(logp.exp() * logp).sum(-1) if "entropy" in want else None
                found = Outputs(logprobs=logp[torch.arange(len(at)), tokens[at]], entropy=entropy)
            (loss_of(found, weight) / count).backward()
            for name in want:
                rows[name][row.index].append(getattr(found, name).detach())
    gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), OPTIMIZER.max_grad_norm).item()
    torch.optim.AdamW(
        [{"params": [p for p in parameters.values() if (p.ndim >= 2) == cut], "weight_decay": 0.1 * cut} for cut in (0, 1)],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    ).step()
    joined = {name: {index: torch.cat(parts) for index, parts in of.items()} for name, of in rows.items()}
    after = {name: parameter.detach() for name, parameter in parameters.items()}
    return Reference(rows=joined, gradients=gradients, before=before, after=after, norm=norm)


def open_context(
    context: RankContext, layout: str, *, backend: str = "fsdp2", precision: Precision = "exact", packed: bool = True
) -> Context:
    config = ContextConfig(
        layout=Layout.parse(layout),
        precision=precision,
        device=context.device,
        accumulation=ACCUMULATION,
        packed=packed,
    )
    opened = get_context(backend, config)
    opened.setup_distributed()
    return opened


def load(context: Context, folder: Path, head: Any, *, trained: bool) -> Trainable:
    trainable = context.new_trainable(head)
    trainable.prepare(trainable.load_model(folder), OPTIMIZER if trained else None, SCHEDULE)
    return trainable


def errors_of_models(
    context: RankContext, *, layout: str, models: dict[str, dict[str, Any]], packed: bool, backend: str = "fsdp2"
) -> dict[str, dict[str, float]]:
    """Largest relative errors of outputs, gradients and updates of each model.

    Every model is run before any gradient is looked at, and all of them lie in one context. ``models``: by name, its
    ``folder``, ``head``, ``want`` and whether it is ``trained``.
    """
    step = batch(packed=packed)
    with exact_tier():
        opened = open_context(context, layout, backend=backend, packed=packed)
        trainables = {
            name: load(opened, Path(model["folder"]), model["head"], trained=model["trained"])
            for name, model in models.items()
        }
        micro_batches = opened.setup_dataloader(step)
        inputs = [collate(rows, multiple_of=opened.sequence_multiple).to(context.device) for rows in micro_batches]
        count = opened.all_reduce(sum(row.target_count for rows in micro_batches for row in rows))
        found = {}
        for name, model in models.items():
            trained, want = model["trained"], frozenset(model["want"])
            found[name] = trainables[name].forward_backward(
                inputs,
                want=want,
                temperature=TEMPERATURE,
                loss=(lambda index, outputs: _masked_loss(outputs, inputs[index]) / count) if trained else None,
            )
        errors: dict[str, dict[str, float]] = {}
        for name, model in models.items():
            reference = plain_reference(
                Path(model["folder"]), head=model["head"], want=model["want"], step=step
            )
            errors[name] = {}
            for output in model["want"]:
                mine = {}
                for rows, micro_batch, outputs in zip(micro_batches, inputs, found[name], strict=True):
                    mine |= target_rows(rows, micro_batch, getattr(outputs, output))
                    padding = getattr(outputs, output)[~micro_batch.real]
                    assert not padding.any(), f"{output} in padding"
                errors[name][output] = _error(mine, {i: reference.rows[output][i] for i in mine})
            errors[name] |= _training_errors(trainables[name], reference, trained=model["trained"])
        for trainable in trainables.values():
            trainable.teardown()
        opened.teardown()
    return errors


def _masked_loss(outputs: Outputs, inputs: MicroBatch) -> Tensor:
    targets = inputs.targets
    return loss_of(outputs.each(lambda tensor: tensor[targets]), inputs.columns["weight"][targets])


def _training_errors(trainable: Trainable, reference: Reference, *, trained: bool) -> dict[str, float]:
    if not trained:
        return {"frozen": _worst(trainable.named_tensors("weight"), reference.before)}
    trainable.finish_gradients()
    errors = {"gradients": _worst(trainable.named_tensors("gradient"), reference.gradients)}
    norm = trainable.optimizer_step()
    changes = {name: after - reference.before[name] for name, after in reference.after.items()}
    updated = ((name, weight.cpu() - reference.before[name]) for name, weight in trainable.named_tensors("weight"))
    errors["update"] = _worst(updated, changes)
    return errors if norm is None else errors | {"norm": abs(norm / reference.norm - 1)}


def _worst(found: Iterable[tuple[str, Tensor]], expected: Mapping[str, Tensor]) -> float:
    """Largest relative error of a tensor; the names have to be the same."""
    errors = {}
    for name, tensor in found:
        difference = (tensor.cpu() - expected[name]).norm().item()
        errors[name] = difference / (expected[name].norm().item() or 1.0)
    assert errors.keys() == expected.keys(), errors.keys() ^ expected.keys()
    return max(errors.values())


def _error(found: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> float:
    both = [torch.cat([rows[index] for index in sorted(rows)]) for rows in (found, expected)]
    return ((both[0] - both[1]).norm() / both[1].norm()).item()
