"""Train a scenario with the oracle, document by document, and write its record.

Serves claim 6: the float64 record is what every cell is compared with; the same run in a cell's precision shows the
error that this precision costs when nothing is wrong. Rows are never packed or padded here, so a packed row of a
backend is held against documents that cannot see each other.
"""

import contextlib
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import conformance
from conformance.batch import Batch
from conformance.oracle.architecture import Architecture, read_architecture
from conformance.oracle.forward import Policy, Weights, forward, load_weights
from conformance.oracle.training import clip, global_norm, make_optimizer, target_logprobs
from conformance.record.tensors import RecordWriter
from conformance.scenario import Scenario, scenario_to_json

PolicyName = Literal["float64", "exact", "fp32", "bf16", "fp16"]

POLICIES: dict[PolicyName, Policy] = {
    "float64": Policy(torch.float64, torch.float64),
    "exact": Policy(torch.float64, torch.float64),
    "fp32": Policy(torch.float32, torch.float32, fused=True),
    "bf16": Policy(torch.bfloat16, torch.float32, fused=True),
    "fp16": Policy(torch.float16, torch.float32, fused=True),
}
# Without it, gradients of a mean over thousands of tokens fall below float16's smallest number (6e-8). A power of two
# adds no rounding; 4096 keeps a factor of 16 to float16's largest number below GradScaler's initial 65536.
FP16_LOSS_SCALE = 2.0**12


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Forward and backward of one optimizer step: sum of -log p, unclipped gradients of the mean, log-probs by row."""

    loss_sum: float
    gradients: Weights
    logprobs: dict[int, Tensor]


def run_oracle(
    *,
    scenario: Scenario,
    model: Path,
    batches: list[Batch],
    out: Path,
    policy_name: PolicyName,
    device: str = "cpu",
) -> None:
    """Train ``scenario.steps`` steps of ``batches`` from the weights in ``model``; write a complete record at ``out``.

    ``policy_name`` is "float64" (or its alias "exact") for the reference, or the precision whose error is wanted:
    float32 master weights, gradients and optimizer, computed in float32, bfloat16 or float16. A precision's error is
    that of the kernels of ``device``, so it is measured where the cell runs.

    Raises ValueError for a model that the oracle does not know, too few batches, a step without target tokens, and
    gradients that are not finite.
    """
    policy = POLICIES[policy_name]
    probe = torch.zeros(1, dtype=policy.compute)
    assert probe.dtype == policy.compute, "inside exact_tier() a lower precision cannot be measured; run it outside"
    if len(batches) < scenario.steps:
        raise ValueError(f"scenario {scenario.name!r} has {scenario.steps} steps but only {len(batches)} batches")
    with torch.device(device) if device != "cpu" else contextlib.nullcontext():
        _run(scenario, model, batches, out, policy_name, device)


def _run(
    scenario: Scenario, model: Path, batches: list[Batch], out: Path, policy_name: PolicyName, device: str
) -> None:
    policy = POLICIES[policy_name]
    started = time.perf_counter()
    architecture = read_architecture(model)
    weights = {name: w.to(device) for name, w in load_weights(model, architecture, policy.stable).items()}
    optimizer = make_optimizer(scenario.optimizer)
    writer = RecordWriter(out, _header(scenario, policy_name, architecture))
    writer.step(-1, {}, _named("weight", weights))
    for step, batch in enumerate(batches[: scenario.steps]):
        step_started = time.perf_counter()
        observed = observe(batch, weights, architecture, policy)
        norm = global_norm(observed.gradients)
        lr = scenario.optimizer.lr * scenario.schedule.factor(step)
        weights = optimizer.step(weights, clip(observed.gradients, norm, scenario.optimizer.max_grad_norm), lr)
        values = {
            "loss": observed.loss_sum / batch.target_count,
            "loss_sum": observed.loss_sum,
            "token_count": batch.target_count,
            "grad_norm": norm,
            "lr": lr,
            "seconds": time.perf_counter() - step_started,
        }
        logprobs = {f"logprob/{row}": tensor for row, tensor in observed.logprobs.items()}
        writer.step(step, values, _named("gradient", observed.gradients) | _named("weight", weights) | logprobs)
    writer.finish({"seconds": time.perf_counter() - started})


def observe(batch: Batch, weights: Weights, architecture: Architecture, policy: Policy) -> Observed:
    """Run every document of ``batch`` forward and backward, adding gradients up in the dtype of ``weights``.

    Raises ValueError if the batch has no target token or a gradient is not finite.
    """
    if batch.target_count == 0:
        raise ValueError(f"step {batch.step} has no target token, so its mean loss is undefined; check the data")
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    scale = FP16_LOSS_SCALE if policy.compute == torch.float16 else 1.0
    loss_sum, logprobs = 0.0, {}
    for row in batch.rows:
        documents = []
        # A document without targets adds nothing to the loss, whatever it holds.
        for document in (d for d in row.documents if any(d.targets)):
            logits_TV = forward(torch.tensor(document.tokens), leaves, architecture, policy)
            documents.append(target_logprobs(logits_TV, document, policy))
            (-documents[-1].sum() * (scale / batch.target_count)).backward()
        if documents:
            logprobs[row.index] = torch.cat(documents).detach()
            loss_sum -= logprobs[row.index].sum().item()
    gradients = {name: leaf.grad / scale for name, leaf in leaves.items() if leaf.grad is not None}
    assert gradients.keys() == weights.keys()
    if wrong := [name for name, gradient in gradients.items() if not gradient.isfinite().all()]:
        raise ValueError(
            f"step {batch.step}: the gradient of {wrong[0]} and of {len(wrong) - 1} more is not finite in "
            f"{policy.compute}; lower the learning rate, or use a precision with a wider range"
        )
    return Observed(loss_sum=loss_sum, gradients=gradients, logprobs=logprobs)


def _header(scenario: Scenario, policy_name: PolicyName, architecture: Architecture) -> dict[str, Any]:
    policy = POLICIES[policy_name]
    return {
        "cell": "oracle",
        "backend": {"name": "oracle", "precision": policy_name},
        "scenario": scenario_to_json(scenario),
        "layout": "dp1",
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "backend-parity": conformance.__version__,
        },
        "resolved": {
            "compute_dtype": str(policy.compute),
            "stable_dtype": str(policy.stable),
            "master_dtype": str(policy.stable),
            "loss_scale": FP16_LOSS_SCALE if policy.compute == torch.float16 else 1.0,
            "micro_batch": "one document",
            "architecture": asdict(architecture),
        },
    }


def _named(kind: str, tensors: Weights) -> dict[str, Tensor]:
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}
