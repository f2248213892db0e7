"""Compares FSDP2 models in ranks with plain Hugging Face models and autograd.

The reference is one process, float64, one document at a time, without padding, packing or any code of impl/.
"""

import itertools
import json
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from conformance.core.host import FIXTURES
from conformance.numerics.float64_tier import exact_tier
from conformance.runtime import RankContext
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import OptimizerConfig, ScheduleConfig
from impl.engine.trainer import target_rows
from impl.fsdp2.dtensors import full_tensors
from impl.fsdp2.model_parallel import vocabulary_shard
from impl.interface.micro_batches import MicroBatch, Outputs, collate
from impl.interface.trainable import ContextConfig, get_context
from impl.models.outputs import token_statistics

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


def smaller_vocabulary(model: str, out: Path) -> Path:
    """A fixture without the last token of its vocabulary."""
    source = FIXTURES / "models" / model
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    weights = load_file(source / "model.safetensors")
    kept = {name: weight[:-1].clone() if name in vocabulary else weight for name, weight in weights.items()}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def batch(*, packed: bool, rows: int = ROWS) -> Batch:
    """Documents of odd lengths; about half of their tokens are targets. ``weight`` is a column of numbers per token."""
    numbers = random.Random(3)

    def document(length: int) -> Document:
        tokens = tuple(numbers.randrange(3, 263) for _ in range(length))
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
    assert OPTIMIZER.max_grad_norm is not None
    norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), OPTIMIZER.max_grad_norm).item()
    decayed = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    others = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    for group, decay in ((decayed, OPTIMIZER.weight_decay), (others, 0.0)):
        torch.optim.AdamW(group, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=decay).step()
    joined = {name: {index: torch.cat(parts) for index, parts in of.items()} for name, of in rows.items()}
    after = {name: parameter.detach() for name, parameter in parameters.items()}
    return Reference(rows=joined, gradients=gradients, before=before, after=after, norm=norm)


def open_context(
    context: RankContext,
    layout: str,
    *,
    backend: str = "fsdp2",
    precision: PrecisionName = "exact",
    packed: bool = True,
) -> Any:
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


def load(context: Any, folder: Path, head: Any, *, trained: bool) -> Any:
    trainable = context.new_trainable(head)
    trainable.prepare(trainable.load_model(folder), OPTIMIZER if trained else None, SCHEDULE)
    return trainable


def train(trainable: Any, step: Batch, *, want: Sequence[str]) -> float | None:
    """One optimizer step of one model; returns the norm of its gradients."""
    context = trainable.context
    micro_batches = context.setup_dataloader(step)
    inputs = [collate(rows, multiple_of=context.sequence_multiple).to(context.config.device) for rows in micro_batches]
    run(trainable, inputs, want=want, count=sum(row.target_count for row in step.rows))
    trainable.finish_gradients()
    norm: float | None = trainable.optimizer_step()
    return norm


def run(trainable: Any, inputs: Sequence[MicroBatch], *, want: Sequence[Any], count: int | None) -> list[Outputs]:
    """Forward and backward with ``loss_of``, divided by ``count``; forward only without it."""

    def loss(index: int, outputs: Outputs) -> Tensor:
        assert count is not None
        targets = inputs[index].targets
        at_targets = outputs.each(lambda tensor: tensor[targets])
        return loss_of(at_targets, inputs[index].columns["weight"][targets]) / count

    found: list[Outputs] = trainable.forward_backward(
        inputs, want=frozenset(want), temperature=TEMPERATURE, loss=None if count is None else loss
    )
    return found


def errors_of_models(
    context: RankContext, *, layout: str, models: dict[str, dict[str, Any]], packed: bool = True, backend: str = "fsdp2"
) -> dict[str, dict[str, float]]:
    """Largest relative errors of outputs, gradients and updates of each model.

    All models lie in one context of the backend. First all of them are only run forward, then those that are trained
    are run again, and only then gradients are looked at. ``models``: by name, its ``folder``, ``head``, ``want`` and
    whether it is ``trained``.
    """
    step = batch(packed=packed)
    count = sum(row.target_count for row in step.rows)
    with exact_tier():
        opened = open_context(context, layout, backend=backend, packed=packed)
        trainables = {
            name: load(opened, Path(model["folder"]), model["head"], trained=model["trained"])
            for name, model in models.items()
        }
        micro_batches = opened.setup_dataloader(step)
        inputs = [collate(rows, multiple_of=opened.sequence_multiple).to(context.device) for rows in micro_batches]
        found: dict[str, dict[str, list[Outputs]]] = {}
        for name, model in models.items():
            found[name] = {"forward": run(trainables[name], inputs, want=model["want"], count=None)}
        for name, model in models.items():
            if model["trained"]:
                found[name]["trained"] = run(trainables[name], inputs, want=model["want"], count=count)
        errors: dict[str, dict[str, float]] = {}
        for name, model in models.items():
            want = model["want"]
            reference = plain_reference(Path(model["folder"]), head=model["head"], want=want, step=step)
            errors[name] = _training_errors(trainables[name], reference, trained=model["trained"])
            for run_, outputs in found[name].items():
                assert all({k for k, v in vars(one).items() if v is not None} == set(want) for one in outputs)
                for output in want:
                    at_targets = _at_targets(micro_batches, inputs, outputs, output)
                    errors[name][f"{run_} {output}"] = _error(at_targets, reference.rows[output])
        for trainable in trainables.values():
            trainable.teardown()
        opened.teardown()
    return errors


def _at_targets(
    micro_batches: Sequence[Sequence[Row]], inputs: Sequence[MicroBatch], outputs: Sequence[Outputs], name: str
) -> dict[int, Tensor]:
    """An output at the targets, by row; in padding it has to be 0."""
    found: dict[int, Tensor] = {}
    for rows, micro_batch, one in zip(micro_batches, inputs, outputs, strict=True):
        tensor: Tensor = getattr(one, name)
        assert not tensor[~micro_batch.real].any(), f"{name} in padding"
        found |= target_rows(rows, micro_batch, tensor)
    return found


def _training_errors(trainable: Any, reference: Reference, *, trained: bool) -> dict[str, float]:
    if not trained:
        assert not trainable.model.training
        assert not any(parameter.requires_grad for parameter in trainable.model.parameters())
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
        errors[name] = difference / expected[name].norm().item()
    assert errors.keys() == expected.keys(), errors.keys() ^ expected.keys()
    return float(max(errors.values()))


def _error(found: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> float:
    """Of the rows that this rank has."""
    mine, theirs = (torch.cat([rows[index] for index in sorted(found)]) for rows in (found, expected))
    return float((mine - theirs).norm() / theirs.norm())


def low_precision(
    context: RankContext, *, layout: str, precision: PrecisionName, models: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """dtypes of outputs, and their errors relative to a plain model in float64."""
    step = batch(packed=True)
    opened = open_context(context, layout, precision=precision)
    micro_batches = opened.setup_dataloader(step)
    inputs = [collate(rows, multiple_of=opened.sequence_multiple).to(context.device) for rows in micro_batches]
    found: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        trainable = load(opened, Path(model["folder"]), model["head"], trained=model["trained"])
        outputs = run(trainable, inputs, want=model["want"], count=None)
        with exact_tier():
            reference = plain_reference(Path(model["folder"]), head=model["head"], want=model["want"], step=step)
        for output in model["want"]:
            at_targets = _at_targets(micro_batches, inputs, outputs, output)
            dtypes = {str(getattr(one, output).dtype) for one in outputs}
            found[f"{name} {output}"] = {"dtypes": sorted(dtypes), "error": _error(at_targets, reference.rows[output])}
    return found


def resume(
    context: RankContext, *, layout: str, precision: PrecisionName, models: dict[str, dict[str, Any]], out: str
) -> dict[str, dict[str, Any]]:
    """Of each trained model: whether a second step is the same in one go and from a checkpoint in fresh objects."""
    step, scale = batch(packed=True), 2.0**9
    trained = {name: model for name, model in models.items() if model["trained"]}
    results: dict[str, dict[str, Any]] = {}
    opened = open_context(context, layout, precision=precision)
    for name, model in trained.items():
        first = load(opened, Path(model["folder"]), model["head"], trained=True)
        train(first, step, want=model["want"])
        if first.scaler.is_enabled():
            first.scaler.update(scale)
        first.save_ckpt(Path(out) / name)
        norm = train(first, step, want=model["want"])
        second = load(opened, Path(model["folder"]), model["head"], trained=True)
        second.load_ckpt(Path(out) / name)
        lr, loss_scale = second.learning_rate(), second.scaler.get_scale()
        same_norm = train(second, step, want=model["want"]) == norm
        pairs = zip(first.named_tensors("weight"), second.named_tensors("weight"), strict=True)
        results[name] = {
            "lr": lr,
            "loss scale": loss_scale,
            "same": same_norm and all(torch.equal(one[1], other[1]) for one, other in pairs),
        }
    return results


def export(
    context: RankContext, *, layout: str, models: dict[str, dict[str, Any]], out: str
) -> dict[str, dict[str, Any]]:
    """Train one step, write each model, and load it again, by this backend and by hand."""
    results: dict[str, dict[str, Any]] = {}
    with exact_tier():
        opened = open_context(context, layout)
        for name, model in models.items():
            source, path = Path(model["folder"]), Path(out) / name
            trainable = load(opened, source, model["head"], trained=model["trained"])
            if model["trained"]:
                train(trainable, batch(packed=True), want=model["want"])
            trainable.save_model(path, dtype="masters")
            weights = {key: weight.cpu() for key, weight in trainable.named_tensors("weight")}
            stored = load_file(path / "model.safetensors")
            again = dict(load(opened, path, model["head"], trained=False).named_tensors("weight"))
            files = [{file.name for file in folder.iterdir()} - {"__pycache__"} for folder in (source, path)]
            before = load_file(source / "model.safetensors")
            results[name] = {
                "stored": weights.keys() == stored.keys() and all(torch.equal(weights[k], stored[k]) for k in stored),
                "loaded": all(torch.equal(weights[k], again[k].cpu()) for k in weights),
                "files": files[0] == files[1],
                "changed": any((weights[key] != before[key]).any().item() for key in weights),
            }
    return results


def offloaded(context: RankContext, *, layout: str, folder: str) -> dict[str, list[str]]:
    """The devices of a model's parameters and of its buffers, where ranks compute on "meta" instead of a GPU."""
    opened = open_context(context, layout)
    trainable = opened.new_trainable("causal")
    model = trainable.load_model(Path(folder))
    trainable._shard(model)  # still for the CPU: memory cannot be pinned without a GPU
    opened.config = replace(opened.config, device="meta")
    trainable._read_weights(model)
    return {
        "parameters": sorted({part.device.type for p in model.parameters() for part in (p, p.to_local())}),
        "buffers": sorted({buffer.device.type for buffer in model.buffers()}),
    }


def vocabulary_shards(context: RankContext, *, layout: str, vocabulary: int) -> dict[str, Any]:
    """Of logits that DTensor cut: where this rank's begin, how many it has, and the error of their statistics."""
    mesh = open_context(context, layout).mesh["tp"]
    numbers = torch.Generator().manual_seed(1)
    whole = torch.randn(2, 3, vocabulary, generator=numbers, dtype=torch.float64)
    labels = torch.randint(vocabulary, (2, 3), generator=numbers)
    cut = distribute_tensor(whole, mesh, [Shard(2)])
    held = vocabulary_shard(cut)
    size = held.logits.shape[-1]
    assert torch.equal(held.logits, whole[..., held.start : held.start + size])
    found = token_statistics(held.logits, labels, group=held.group, vocab_start=held.start)
    expected = token_statistics(whole, labels)
    errors = [(one - other).abs().max().item() for one, other in zip(found, expected, strict=True)]  # type: ignore[operator]
    return {"start": held.start, "size": size, "error": max(errors)}


def gathered_wrongly(context: RankContext, *, layout: str) -> list[str]:
    """Gathers uneven tensors in many placements, of FSDP2 over tensor parallelism too, and names those that are not
    the tensor that was cut."""
    mesh = open_context(context, layout=layout, precision="fp32").mesh["shard", "tp"]
    whole = torch.arange(5 * 11 * 3.0).view(5, 11, 3)
    axes = (Replicate(), Shard(0), Shard(1), Shard(2))
    cut: dict[str, Any] = {
        str(both): distribute_tensor(whole.clone(), mesh, both) for both in itertools.product(axes, axes)
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(37, 43), torch.nn.Linear(43, 1))
    wholes = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    cut |= {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = dict(zip(cut, full_tensors(list(cut.values())), strict=True))
    for tensor in cut.values():  # as an update would
        tensor.to_local().zero_()
    return [name for name, tensor in found.items() if not tensor.equal(wholes.get(name, whole))]
