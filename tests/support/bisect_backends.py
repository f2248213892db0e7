"""Plants a defect in one module of a backend, for tests of `parity bisect`.

``bisect_backends:BACKEND KIND ROLE MODULE`` is the adapter BACKEND (module:Class). Its Hugging Face module MODULE of
the model ROLE has a defect of this KIND in the traced step, on the last rank that runs it, or on all ranks if the kind
is in ``OF_ALL_RANKS``.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.backends.protocol import BackendEntry, BackendInfo, Support, Supported, Traced, find_backend
from conformance.spec.batch import Batch
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.engine.adapter import ReferenceBackend

FAMILIES = ("llama", "qwen3", "gemma3", "pangu")
MODULES = (
    "model.embed_tokens",
    "model.layers.0.input_layernorm",
    "model.layers.1.self_attn",
    "model.layers.1.self_attn.o_proj",
    "model.layers.0.post_attention_layernorm",
    "model.layers.1.mlp",
    "model.layers.0.mlp.down_proj",
    "model.norm",
    "lm_head",
)
PLANTED = [
    (kind, module)
    for module in MODULES
    for kind in ("forward", "backward")
    if (kind, module) != ("backward", MODULES[0])
]
OFF = 1 + 1e-6


class ScaledGradient(torch.autograd.Function):
    """The identity, of which the gradient is off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * OFF


def _scaled(x: Tensor) -> Tensor:
    scaled: Tensor = ScaledGradient.apply(x)  # type: ignore[no-untyped-call]
    return scaled


def _of_first_tensor(values: tuple[Any, ...], change: Any) -> tuple[Any, ...]:
    at = next(i for i, value in enumerate(values) if isinstance(value, Tensor))
    return (*values[:at], change(values[at]), *values[at + 1 :])


def forward(module: torch.nn.Module) -> None:
    """What comes out is off."""

    def after(_: Any, __: Any, result: Any) -> Any:
        return result * OFF if isinstance(result, Tensor) else _of_first_tensor(result, lambda x: x * OFF)

    module.register_forward_hook(after)


def backward(module: torch.nn.Module) -> None:
    """What comes out is right, and the gradient of what goes in is off."""

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(value, Tensor) for value in args):
            return _of_first_tensor(args, _scaled), kwargs
        return args, kwargs | {"hidden_states": _scaled(kwargs["hidden_states"])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def silent(module: torch.nn.Module) -> None:
    """What comes out is right, and no gradient comes back to what goes in."""

    def before(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _of_first_tensor(args, Tensor.detach)

    module.register_forward_pre_hook(before)


def _left_out(module: torch.nn.Module, name: str) -> None:
    """Inside of the module, Megatron's function of this name in its layers does nothing."""
    from megatron.core.tensor_parallel import layers

    function = getattr(layers, name)
    module.register_forward_pre_hook(lambda *_: setattr(layers, name, lambda x, **_: x))
    module.register_forward_hook(lambda *_: setattr(layers, name, function))


def unsummed_output(module: torch.nn.Module) -> None:
    """Of Megatron's row-parallel projection: what comes out is not summed over tensor-parallel ranks."""
    _left_out(module, "reduce_from_tensor_model_parallel_region")


def unsummed_gradient(module: torch.nn.Module) -> None:
    """Of Megatron's MLP: what comes out is right, and the gradient of what goes in is not summed over these ranks."""
    projection: Any = module.linear_fc1
    projection.allreduce_dgrad = False
    _left_out(projection, "copy_to_tensor_model_parallel_region")


DEFECTS = {"forward": forward, "backward": backward, "silent": silent}
OF_ALL_RANKS = {"unsummed_output": unsummed_output, "unsummed_gradient": unsummed_gradient}


def entry(backend: BackendEntry, kind: str, module: str, role: str = "policy") -> BackendEntry:
    """The backend with a defect."""
    return BackendEntry(name=backend.name, target=f"bisect_backends:{backend.target} {kind} {role} {module}")


class Bare:
    """A backend as small as the protocol lets it be."""

    @classmethod
    def describe(cls) -> BackendInfo:
        return BackendInfo(name="bare")

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        return Supported()


def __getattr__(name: str) -> type[ReferenceBackend]:
    if name.count(" ") != 3:
        raise AttributeError(name)
    backend, kind, role, module = name.split(" ")
    base: Any = find_backend(backend).load()

    def traced(self: Any, model: str, batch: Batch) -> Traced:
        """Plants the defect: it has to be there before the suite's own hooks are."""
        said: Traced = base.traced(self, model, batch)
        if model != role:
            return said
        own = {one.name: one.module for one in said.modules}
        holders = [rank for rank, names in enumerate(self.context.all_gather([*own])) if module in names]
        if kind in OF_ALL_RANKS:
            OF_ALL_RANKS[kind](own[module])
        elif dist.get_rank() == holders[-1]:
            DEFECTS[kind](own[module])
        return said

    return type("Defective", (base,), {"traced": traced})
