"""LoRA (Hu et al., arXiv 2106.09685): which linear layers get an adapter, and how large.

An adapter of a linear layer W is two matrices, A (r, in) and B (out, r), and the layer computes W x + scale B A x.
Only adapters are trained; everything else of the policy stays what was loaded. Names of options and files are peft's:
a model's folder has its adapter in the folder ADAPTER, as ``adapter_config.json`` and ``adapter_model.safetensors``.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError

ADAPTER = "adapter"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."  # of the names in WEIGHTS_FILE, before the parameter's own
PARTS = ("lora_A", "lora_B")
ALL_LINEAR = "all-linear"
LINEAR = "_proj.weight"  # ends the names of linear layers inside of a model's layers
Size = Annotated[int, Field(strict=True, ge=1, le=2**16)]
Target = Annotated[str, Field(pattern=r"^[\w.]+$", max_length=200)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    """``r``: the rank. The scale is lora_alpha / r, or lora_alpha / sqrt(r) with ``use_rslora`` (arXiv 2312.03732).

    ``target_modules``: last parts of the names of linear layers, such as ``q_proj`` or ``layers.0.mlp.up_proj``, or
    ``all-linear``. There is no dropout, because its numbers are of no two frameworks the same.
    """

    r: Size
    lora_alpha: Size
    target_modules: Literal["all-linear"] | Annotated[tuple[Target, ...], Field(min_length=1)]
    use_rslora: Annotated[bool, Field(strict=True)] = False

    @property
    def names_layers(self) -> bool:
        """Whether a target is in a layer with a number, so that layers may differ."""
        return self.target_modules != ALL_LINEAR and any(
            part.isdecimal() for target in self.target_modules for part in target.split(".")
        )

    def targets(self, parameters: Iterable[str]) -> tuple[str, ...]:
        """The linear layers that get an adapter, of a model with these parameters, by their names without ``weight``.

        Raises UsageError for a target that the model does not have inside of its layers, and for experts that the
        folder holds one by one: models hold them stacked, and no adapter is built in for them.
        """
        inside = [n.removesuffix(".weight") for n in parameters if ".layers." in n and n.endswith(LINEAR)]
        linear = [name for name in inside if ".experts." not in name]
        ends = inside if self.target_modules == ALL_LINEAR else self.target_modules
        if meant := [name for name in inside if name not in linear and any(_is_meant(name, end) for end in ends)]:
            known = dict.fromkeys(name.rpartition(".")[2] for name in linear if ".self_attn." in name)
            raise UsageError(
                f"lora.target_modules asks for adapters of experts, such as {meant[0]}, which are not built in; name "
                f"linear layers outside of experts, as {', '.join(known)}"
            )
        if self.target_modules == ALL_LINEAR:
            return tuple(linear)
        for target in self.target_modules:
            if not any(_is_meant(name, target) for name in linear):
                known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
                raise UsageError(
                    f"lora.target_modules names {target!r}, and no linear layer inside of the model's layers is called "
                    f"so; use some of {', '.join(known)}, or {ALL_LINEAR!r}"
                )
        return tuple(name for name in linear if any(_is_meant(name, target) for target in self.target_modules))


def _is_meant(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter."""
    return name.endswith(tuple(f".{part}.weight" for part in PARTS))
