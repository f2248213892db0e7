"""Configures LoRA (Hu et al., arXiv 2106.09685): which linear layers get an adapter, and its size.

An adapter of a linear layer W is two matrices, A (r, in) and B (out, r), and the layer computes W x + scale B A x. Only
the policy's adapters are trained. Names of options and files are peft's: a model's folder has its adapter in the folder
ADAPTER, as ``adapter_config.json`` and ``adapter_model.safetensors``.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError

ADAPTER = "adapter"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."  # precedes the parameter's name in WEIGHTS_FILE
PARTS = ("lora_A", "lora_B")
ALL_LINEAR = "all-linear"
LINEAR = "_proj.weight"  # suffix of the names of linear layers inside a model's layers
Size = Annotated[int, Field(strict=True, ge=1, le=2**16)]
Target = Annotated[str, Field(pattern=r"^[\w.]+$", max_length=200)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    """Sets rank ``r`` and scale: lora_alpha / r, or lora_alpha / sqrt(r) with ``use_rslora`` (arXiv 2312.03732).

    ``target_modules``: last parts of the names of linear layers, such as ``q_proj`` or ``layers.0.mlp.up_proj``, or
    ``all-linear``. There is no dropout, because no two frameworks draw the same numbers.
    """

    r: Size
    lora_alpha: Size
    target_modules: Literal["all-linear"] | Annotated[tuple[Target, ...], Field(min_length=1)]
    use_rslora: Annotated[bool, Field(strict=True)] = False

    @property
    def names_layers(self) -> bool:
        """Tells whether a target names a layer by number, so that layers may differ."""
        return self.target_modules != ALL_LINEAR and any(
            part.isdecimal() for target in self.target_modules for part in target.split(".")
        )

    def targets(self, parameters: Iterable[str]) -> tuple[str, ...]:
        """Returns the linear layers that get an adapter in a model with these parameters, without ``.weight``.

        Raises UsageError for a target that is not inside the model's layers, and for experts that the folder stores
        separately: models stack them, and adapters for stacked experts are not implemented.
        """
        inside = [n.removesuffix(".weight") for n in parameters if ".layers." in n and n.endswith(LINEAR)]
        linear = [name for name in inside if ".experts." not in name]
        ends = inside if self.target_modules == ALL_LINEAR else self.target_modules
        if experts := [name for name in inside if name not in linear and any(_matches(name, end) for end in ends)]:
            known = dict.fromkeys(name.rpartition(".")[2] for name in linear if ".self_attn." in name)
            raise UsageError(
                f"lora.target_modules requests adapters of experts, such as {experts[0]}, which are unsupported; name "
                f"linear layers outside of experts, such as {', '.join(known)}"
            )
        if self.target_modules == ALL_LINEAR:
            return tuple(linear)
        for target in self.target_modules:
            if not any(_matches(name, target) for name in linear):
                known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
                raise UsageError(
                    f"lora.target_modules names {target!r}, which matches no linear layer inside the model's layers; "
                    f"use some of {', '.join(known)}, or {ALL_LINEAR!r}"
                )
        return tuple(name for name in linear if any(_matches(name, target) for target in self.target_modules))


def _matches(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def is_adapter(name: str) -> bool:
    """Tells whether a parameter belongs to an adapter."""
    return name.endswith(tuple(f".{part}.weight" for part in PARTS))
