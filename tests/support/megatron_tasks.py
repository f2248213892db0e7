"""Runs contexts and trainables without the engine, as tasks for tests/megatron_backend/test_megatron_models.py."""

import contextlib
import gc
import math
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron_reference as plain
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor

from conformance.core.errors import UsageError
from conformance.core.process import thread_count
from conformance.numerics.float64_tier import exact_tier
from conformance.runtime import RankContext
from conformance.spec.layout import Layout
from conformance.spec.observables import Head, StateKind
from conformance.spec.precision import PrecisionName
from conformance.worker.evidence import Watch
from conformance.worker.transformer_engine import HISTORIES, TRANSFORMER_ENGINE
from impl.interface.micro_batches import MicroBatch, OutputName, Outputs, collate
from impl.interface.trainable import Context, ContextConfig, Trainable, get_context
from impl.megatron.context import MegatronContext
from impl.megatron.model import MegatronModel

ACCUMULATION = 4
WANTED: dict[str, frozenset[OutputName]] = {
    "reference": frozenset({"logprobs", "entropy"}),
    "policy": frozenset({"logprobs", "entropy"}),
    "critic": frozenset({"values"}),
}


def context_config(rank: RankContext, layout: str, precision: PrecisionName) -> ContextConfig:
    """PyTorch's ring takes rows of one document only; all others get packed ones."""
    return ContextConfig(
        layout=Layout.parse(layout),
        precision=precision,
        device=rank.device,
        accumulation=ACCUMULATION,
        packed="torchcp" not in layout,
    )


@contextlib.contextmanager
def opened(rank: RankContext, layout: str, precision: PrecisionName = "exact") -> Iterator[MegatronContext]:
    """A context that is set up, and torn down at the end."""
    with exact_tier() if precision == "exact" else contextlib.nullcontext():
        context = MegatronContext(context_config(rank, layout, precision))
        context.setup_distributed()
        try:
            yield context
        finally:
            context.teardown()


def new(context: MegatronContext, folder: str, *, head: Head = "causal", optimizer: str = "adamw") -> MegatronModel:
    """A model that is trained, or frozen where ``optimizer`` is empty."""
    trainable = context.new_trainable(head)
    trainable.prepare(trainable.load_model(Path(folder)), plain.OPTIMIZERS.get(optimizer), plain.SCHEDULE)
    return trainable


def micro_batches(context: Context, step: int) -> list[MicroBatch]:
    batch = plain.make_batch(step, packed=context.config.packed)
    return [
        collate(rows, multiple_of=context.sequence_multiple).to(context.config.device)
        for rows in context.setup_dataloader(batch)
    ]


def run_sft(context: Context, model: Trainable, step: int, *, scale: float = 1.0) -> None:
    """Gradients of the mean of -log p over the target tokens of a step, times ``scale``."""
    count = plain.make_batch(step).target_count

    def loss(_: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return -outputs.logprobs.sum() * scale / count

    model.forward_backward(micro_batches(context, step), want=frozenset({"logprobs"}), loss=loss)
    model.finish_gradients()


def train(context: Context, model: Trainable, step: int, *, scale: float = 1.0) -> float | None:
    """A step of supervised fine-tuning; returns the norm of its gradients."""
    run_sft(context, model, step, scale=scale)
    return model.optimizer_step()


def weights_of(model: Trainable) -> dict[str, Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in model.named_tensors("weight")}


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative error; NaN and infinity are infinite."""
    error = float((found.detach() - expected.detach()).norm() / (expected.detach().norm() or 1.0))
    return error if math.isfinite(error) else math.inf


class Comparison:
    """Three models in a context against three in transformers: the worst relative error of each thing.

    Gradients and updates are compared parameter by parameter, outputs micro-batch by micro-batch.
    """

    def __init__(self, context: MegatronContext, folders: dict[str, str], optimizer: str) -> None:
        self.context, self.optimizer = context, optimizer
        self.expected = plain.Reference(folders, optimizer)
        self.models = {
            name: new(context, folders[name], head=head, optimizer=optimizer if name in plain.TRAINED else "")
            for name, head in plain.HEADS.items()
        }
        self.start = {
            name: {n: parameter.detach().clone() for n, parameter in model.named_parameters()}
            for name, model in self.expected.models.items()
        }
        self.worst: dict[str, float] = defaultdict(float)

    def note(self, key: str, found: Tensor, expected: Tensor) -> None:
        self.worst[key] = max(self.worst[key], relative(found, expected))

    def weights(self) -> None:
        """Frozen weights, and how far trained ones have moved; replicas."""
        for name, model in self.models.items():
            start, end = self.start[name], dict(self.expected.models[name].named_parameters())
            found = weights_of(model)
            assert found.keys() == end.keys(), found.keys() ^ end.keys()
            for parameter, weight in found.items():
                origin = start[parameter] if name in plain.TRAINED else torch.zeros(())
                self.note(f"{name} weights", weight - origin, end[parameter] - origin)
            self._replicas(name, dict_of_shards(model, "weight"))

    def gradients(self, name: str) -> None:
        expected = {n: parameter.grad for n, parameter in self.expected.models[name].named_parameters()}
        found = dict(self.models[name].named_tensors("gradient"))
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        for parameter, gradient in found.items():
            self.note(f"{name} gradients", gradient, expected[parameter])
        self._replicas(name, dict_of_shards(self.models[name], "gradient"))

    def _replicas(self, name: str, own: dict[Any, Tensor]) -> None:
        for theirs in self.context.all_gather(own):
            for place in own.keys() & theirs.keys():
                self.note(f"{name} replicas", theirs[place], own[place])

    def forward(self, name: str, inputs: list[MicroBatch], *, want: frozenset[OutputName]) -> list[Outputs]:
        found = self.models[name].forward_backward(inputs, want=want, temperature=plain.TEMPERATURE, loss=None)
        self.outputs(name, inputs, found, want)
        return found

    def outputs(self, name: str, inputs: list[MicroBatch], found: list[Outputs], want: frozenset[OutputName]) -> None:
        for micro_batch, outputs in zip(inputs, found, strict=True):
            with torch.no_grad():
                expected = vars(self.expected.outputs(name, micro_batch))
            assert {key for key, numbers in vars(outputs).items() if numbers is not None} == want
            for key in want:
                numbers = getattr(outputs, key)
                assert numbers.shape == micro_batch.tokens.shape
                assert not numbers.requires_grad
                self.note(f"{name} {key}", numbers, expected[key])

    def step(self, step: int) -> None:
        """Forward only, each model trained, and their updates in another order."""
        batch = plain.make_batch(step, packed=self.context.config.packed)
        inputs = micro_batches(self.context, step)
        known = self.forward("reference", inputs, want=WANTED["reference"])
        self.forward("critic", inputs, want=WANTED["critic"])  # old values, and some of the old policy's outputs
        self.forward("policy", inputs, want=frozenset({"entropy"}))
        losses = {
            "policy": lambda i, outputs: plain.policy_loss(outputs, known[i], inputs[i], batch),
            "critic": lambda i, outputs: plain.critic_loss(outputs, inputs[i], batch),
        }
        for name, loss in losses.items():
            want = WANTED[name]
            found = self.models[name].forward_backward(inputs, want=want, temperature=plain.TEMPERATURE, loss=loss)
            self.outputs(name, inputs, found, want)
        norms = self.expected.backward(batch)
        for name in plain.TRAINED:
            self.models[name].finish_gradients()
            self.gradients(name)
        self.weights()  # reading them before an update must change nothing
        for name in reversed(plain.TRAINED):
            lr = self.models[name].learning_rate()
            assert math.isclose(lr, plain.OPTIMIZERS[self.optimizer].lr * plain.SCHEDULE.factor(step))
            norm = self.models[name].optimizer_step()
            assert norm is not None
            self.note(f"{name} norm", torch.tensor(norm), torch.tensor(norms[name]))
        self.expected.update(norms, step)


def dict_of_shards(model: MegatronModel, kind: Any) -> dict[Any, Tensor]:
    return {(shard.name, shard.region): shard.tensor.detach().clone() for shard in model.local_shards(kind)}


def three_models(rank: RankContext, *, layout: str, folders: dict[str, str], optimizer: str) -> dict[str, float]:
    """Two steps of policy and critic beside a frozen reference, against transformers: the worst errors."""
    with opened(rank, layout) as context:
        compared = Comparison(context, folders, optimizer)
        for step in range(2):
            compared.step(step)
        compared.weights()
        for model in compared.models.values():
            model.teardown()
    return dict(compared.worst)


def frozen_and_trained(
    rank: RankContext, *, layout: str, folders: dict[str, str], precision: PrecisionName
) -> dict[str, float]:
    """Largest differences of outputs between a frozen model and one that is to be trained, of the same folder."""
    differences: dict[str, float] = {}
    with opened(rank, layout, precision) as context:
        inputs = micro_batches(context, 0)
        for name in ("policy", "critic"):
            head, want = plain.HEADS[name], WANTED[name]
            results = []
            for optimizer in ("", "adamw"):
                model = new(context, folders[name], head=head, optimizer=optimizer)
                results.append(model.forward_backward(inputs, want=want, loss=None))
                if not optimizer:
                    file = load_file(Path(folders[name]) / "model.safetensors")
                    rounded = {n: w.to(model.model_config.params_dtype) for n, w in file.items()}
                    kept = weights_of(model)
                    assert all(torch.equal(w, rounded[n].to(w.dtype)) for n, w in kept.items())
                model.teardown()
            for key in want:
                pairs = [(getattr(a, key), getattr(b, key)) for a, b in zip(*results, strict=True)]
                assert all(a.dtype.itemsize >= 4 for a, _ in pairs)
                differences[key] = max(float((a - b).abs().max()) for a, b in pairs)
    return differences


def overflow(rank: RankContext, *, layout: str, folders: dict[str, str]) -> tuple[float | None, bool]:
    """The norm of gradients that overflow in fp16, and whether any weight has changed."""
    with opened(rank, layout, "fp16") as context:
        model = new(context, folders["policy"])
        before = weights_of(model)
        norm = train(context, model, 0, scale=1e30)
        after = weights_of(model)
        model.teardown()
    return norm, any(not torch.equal(after[name], weight) for name, weight in before.items())


def in_turn(rank: RankContext, *, layout: str, others: list[str], folders: dict[str, str]) -> list[dict[str, Any]]:
    """One step and a teardown in one layout after another; says what is held after each."""
    held = []
    for one in (layout, *others):
        generator = torch.get_rng_state()
        variables = library_variables()
        with opened(rank, one, "fp32") as context:
            models = [new(context, folders["policy"]), new(context, folders["reference"], optimizer="")]
            train(context, models[0], 0)
            chunks = [weakref.ref(model.chunks[0]) for model in models]
            for model in models:
                model.teardown()
        gc.collect()
        held.append(
            {
                "groups": len(dist.distributed_c10d._world.pg_map),
                "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
                "threads": thread_count(),
                "environment": sorted(name for name in os.environ if name.startswith("NVTE")),
                "cuda": torch.cuda.current_device.__module__,
                "models_alive": [chunk() is not None for chunk in chunks],
                "generator_moved": not torch.equal(generator, torch.get_rng_state()),
                "variables": sorted(name for name, v in library_variables().items() if variables.get(name) is not v),
            }
        )
    return held


def library_variables() -> dict[str, Any]:
    """Global variables of megatron-core's modules that keep its groups and generators."""
    from megatron.core.tensor_parallel import random

    return {
        f"{module.__name__}.{name}": v
        for module in (parallel_state, random)
        for name, v in vars(module).items()
        if not name.startswith("__")
    }


def two_contexts(rank: RankContext, *, layout: str, other: str, folders: dict[str, str]) -> dict[str, Any]:
    """Two contexts of one layout; the first is left before the second trains. What ``other`` says meanwhile."""
    refused = ""
    with opened(rank, layout) as second:
        with opened(rank, layout) as first:
            alone = new(first, folders["policy"])
            groups = len(dist.distributed_c10d._world.pg_map)
            try:
                MegatronContext(context_config(rank, other, "exact")).setup_distributed()
            except UsageError as error:
                refused = str(error)
            alone.teardown()
        between = len(dist.distributed_c10d._world.pg_map)
        norm = train(second, new(second, folders["policy"]), 0)
    return {"groups": [groups, between, len(dist.distributed_c10d._world.pg_map)], "norm": norm, "refused": refused}


def save(rank: RankContext, *, layout: str, folders: dict[str, str], out: str) -> None:
    """Write three models as they were loaded; the reference frozen."""
    with opened(rank, layout, "fp32") as context:
        for name, head in plain.HEADS.items():
            model = new(context, folders[name], head=head, optimizer="adamw" if name in plain.TRAINED else "")
            model.save_model(Path(out) / name, dtype="masters")
            model.teardown()


def optimizer_state(rank: RankContext, *, layout: str, folders: dict[str, str]) -> dict[str, float]:
    """Largest error, by state, of AdamW's moments after one step: they follow from its clipped gradients."""
    config = plain.OPTIMIZERS["adamw"]
    assert config.max_grad_norm is not None
    errors: dict[str, float] = {}
    with opened(rank, layout) as context:
        model = new(context, folders["policy"])
        run_sft(context, model, 0)
        gradients = {name: gradient.clone() for name, gradient in model.named_tensors("gradient")}
        norm = model.optimizer_step()
        assert norm is not None
        clip = min(1.0, config.max_grad_norm / (norm + 1e-6))
        first, second = config.betas
        moments: tuple[tuple[StateKind, float, int], ...] = (("exp_avg", first, 1), ("exp_avg_sq", second, 2))
        for key, beta, power in moments:
            state = dict(model.named_tensors(key))
            assert state.keys() == gradients.keys()
            expected = {name: (1 - beta) * (clip * g) ** power for name, g in gradients.items()}
            errors[key] = max(relative(state[name], moment) for name, moment in expected.items())
        model.teardown()
    return errors


def fsdp2_around(rank: RankContext, *, layout: str, plain_layout: str, folders: dict[str, str]) -> bool:
    """Whether a step of FSDP2 gives the same bits before and after one of Megatron."""

    def step() -> dict[str, Tensor]:
        context = get_context("fsdp2", context_config(rank, plain_layout, "fp32"))
        context.setup_distributed()
        model = context.new_trainable("causal")
        model.prepare(model.load_model(Path(folders["policy"])), plain.OPTIMIZERS["adamw"], plain.SCHEDULE)
        train(context, model, 0)
        after = weights_of(model)
        model.teardown()
        context.teardown()
        return after

    before = step()
    with opened(rank, layout, "fp32") as context:
        model = new(context, folders["policy"])
        train(context, model, 0)
        model.teardown()
    after = step()
    return all(torch.equal(after[name].view(torch.int32), bits.view(torch.int32)) for name, bits in before.items())


def magnitudes_that_pass(context: RankContext, *, parts: int) -> dict[str, list[int]]:
    """Which magnitudes in a history pass as those of an operand of two rows, whose largest numbers are 2 and 8. Each
    rank has cast one row and gathered both, or has cast both."""
    rows = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(torch.float8_e4m3fn).view(torch.uint8)
    passed: dict[str, list[int]] = {}
    for name in ("gathered input", "input", "weight", "gathered weight"):
        for magnitude in (1, 2, 4, 8):
            buffers = {"forward": [torch.tensor([[magnitude], [0.0], [0.0], [0.0]])]}, {"forward": [torch.ones(1)]}
            manager = SimpleNamespace(
                global_amax_history_buffer=buffers[0],
                global_scale_buffer=buffers[1],
                reduce_and_update_fp8_tensors=None,
            )
            library: Any = SimpleNamespace(generic_gemm=lambda *_: [torch.zeros(2, 2)])
            known = {TRANSFORMER_ENGINE: library, HISTORIES: SimpleNamespace(FP8GlobalStateManager=manager)}
            with mock.patch.dict(sys.modules, known), (watch := Watch(sequence_parts=parts)).step():
                dist.all_gather_into_tensor(gathered := torch.empty_like(rows), rows[context.rank][None])
                data = gathered if name.startswith("gathered") else rows
                x = SimpleNamespace(_data=data, _transpose=None, _scale_inv=torch.ones(1), _fp8_dtype="E4M3")
                x.size = data.size
                library.generic_gemm(x, True, x, False, *[None] * 7, False)
            is_own = next(cast[4] for cast in watch.library.casts if cast[0] == name.split()[-1])
            passed.setdefault(name, []).extend([magnitude] * is_own)
    return passed
