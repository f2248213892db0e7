"""Gives the plain backend modules that can be hooked, for tests of bisection without a library.

The oracle's forward pass runs each of its modules through a torch module, a document at a time, so a document takes the
role of a micro-batch. ``plain_traced:Traceable`` is right; in the other classes, a module is wrong on the last rank.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from plain_backend import Plain, PlainContext, PlainTrainable
from torch import Tensor

from conformance.backends.protocol import BackendInfo, Traced, TracedModule
from conformance.oracle.decoder import forward
from conformance.oracle.primitives import Function, Policy, Tap, Weights
from conformance.spec.observables import Head
from conformance.spec.scenario import OptimizerConfig, ScheduleConfig
from impl.engine.adapter import RL_SEAMS, ReferenceBackend
from impl.interface.micro_batches import MicroBatch, token_numbers
from impl.interface.trainable import CONTEXTS

Defect = tuple[Callable[[torch.nn.Module], None], str]
OF_LAYER = (
    *("input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def doubled(module: torch.nn.Module) -> None:
    """What comes out is doubled."""
    module.register_forward_hook(lambda _, __, result: 2 * result)


def doubled_in_fp32(module: torch.nn.Module) -> None:
    """So it is in fp32 only."""
    module.register_forward_hook(lambda _, __, result: 2 * result if result.dtype == torch.float32 else None)


class Module(torch.nn.Module):
    """Runs a function of one document, (T, ...), on (1, T, ...)."""

    def forward(self, x: Tensor, function: Function) -> Tensor:
        return function(x[0])[None]


class Modules(Tap):
    """Runs every module of the oracle as one of torch's."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules

    def module(self, name: str, function: Function, x: Tensor) -> Tensor:
        result: Tensor = self.modules[name](x[None], function)[0]
        return result


class Dropless(dict[str, Tensor]):
    """Weights; nothing in them drops out."""

    def modules(self) -> tuple[torch.nn.Module, ...]:
        return ()


class TraceableTrainable(PlainTrainable):
    """See impl.interface.trainable.Trainable."""

    def __init__(self, head: Head, defect: Defect | None) -> None:
        super().__init__(head)
        self.defect = defect

    def load_model(self, path: Path) -> Weights:
        return Dropless(super().load_model(path))

    def prepare(self, model: Weights, optimizer: OptimizerConfig | None, schedule: ScheduleConfig) -> None:
        super().prepare(model, optimizer, schedule)
        layers = range(len(self.architecture.layers))
        names = ["model.embed_tokens", *(f"model.layers.{i}.{name}" for i in layers for name in OF_LAYER)]
        names += ["model.norm", "score" if self.head == "value" else "lm_head"]
        self.modules = {name: Module() for name in names}
        if self.defect and optimizer and 0 < dist.get_rank() == dist.get_world_size() - 1:
            plant, module = self.defect
            plant(self.modules[module])

    def _row(self, tokens: Tensor, positions: Tensor) -> Tensor:
        policy = Policy(torch.get_default_dtype(), torch.get_default_dtype())
        return torch.cat(
            [
                forward(document, self.weights, self.architecture, policy, tap=Modules(self.modules))
                for document in _documents(tokens, positions)
            ]
        )

    def traced(self, numbers: Sequence[MicroBatch]) -> Traced:
        tokens = [
            document[None]
            for one in numbers
            for row in zip(token_numbers(one), one.positions, strict=True)
            for document in _documents(*row)
        ]
        modules = tuple(TracedModule(name=name, module=module) for name, module in self.modules.items())
        return Traced(modules=modules, tokens=tuple(tokens))


def _documents(tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    return tokens.tensor_split((positions == 0).nonzero().flatten()[1:].tolist())


class TraceableContext(PlainContext):
    """See impl.interface.trainable.Context."""

    defect: ClassVar[Defect | None] = None

    def new_trainable(self, head: Head) -> TraceableTrainable:
        return TraceableTrainable(head, self.defect)


class WrongMlpContext(TraceableContext):
    defect = (doubled, "model.layers.1.mlp")


class WrongInFp32Context(TraceableContext):
    defect = (doubled_in_fp32, "model.layers.1.mlp")


class Traceable(Plain):
    info = BackendInfo(name="traceable", packages=("torch",))
    traced: Any = ReferenceBackend.traced
    seams: ClassVar[dict[str, str]] = {**Plain.seams, **RL_SEAMS}


class WrongMlp(Traceable):
    info = BackendInfo(name="wrong-mlp", packages=("torch",))


class WrongInFp32(Traceable):
    info = BackendInfo(name="wrong-in-fp32", packages=("torch",))


CONTEXTS |= {
    "traceable": "plain_traced:TraceableContext",
    "wrong-mlp": "plain_traced:WrongMlpContext",
    "wrong-in-fp32": "plain_traced:WrongInFp32Context",
}
