"""Devices: on which GPUs the oracle keeps a model, and how many bytes it needs of them.

Of a model of P trained parameters in float64: weights 8 P, gradients 8 P, and if there is a step after the first one
16 P for AdamW's moments or 8 P for a momentum. Gradients and updates are made tensor by tensor, so no further copy of
the model is ever held. Each GPU needs room for one document beside that: its activations, the largest tensor a few
times while it is updated, and on the first one the logits a few times. That is what SPARE is for.

Decoder: the model of one role as the oracle runs it.

Serves claim 6. A model_type of architecture.py is computed from the papers (``Written``). For any other causal language
model, transformers' own implementation in a single process takes this place (transformers_decoder.py): a second-class
oracle, which sees what a backend does to the model, and nothing that transformers itself gets wrong. Losses,
optimizers, clipping and advantages are the oracle's own in both cases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from conformance.models.components import Architecture, MixtureOfExperts
from conformance.models.families import is_written, read_architecture
from conformance.models.folders import elements_of, weight_shapes
from conformance.models.parameter_shapes import parameter_shapes
from conformance.oracle.decoder import (
    adapter_shapes,
    check_shapes,
    forward,
    is_buffer,
    load_adapter,
    load_weights,
    lora_of,
    merged,
)
from conformance.oracle.feed_forward import Routing, routing_of
from conformance.oracle.primitives import NO_TAP, Policy, Tap
from conformance.oracle.variant import HONEST, Variant, Weights
from conformance.spec.batch import Document
from conformance.spec.lora import LoraConfig
from conformance.spec.roles import Head
from conformance.spec.scenario import Scenario

SPARE = 0.3  # share of a GPU's free memory


def bytes_needed(scenario: Scenario, models: Mapping[str, Path], policy: Policy) -> int:
    """Of weights, gradients and optimizer states of all models."""
    moments = {"adamw": 2, "sgd": 1}[scenario.optimizer.name] if scenario.steps > 1 else 0
    total = 0
    for role in scenario.objective.roles:
        elements = elements_of({role.name: models[role.name]})
        total += elements * (policy.stable.itemsize * (2 + moments) if role.trained else policy.compute.itemsize)
    return total


def devices_for(device: str, needed: int) -> list[str]:
    """``device``, or of the GPUs from this one on as few as have room for a model, which they share equally.

    Those with the most free memory are taken, because another program may have filled some. If all together have not
    enough room, all are given, and the run will say that memory is short.
    """
    first = torch.device(device)
    if first.type == "cpu":
        return [device]
    gpus = range(first.index or 0, torch.cuda.device_count())
    room = {gpu: torch.cuda.mem_get_info(gpu)[0] * (1 - SPARE) for gpu in gpus}
    emptiest = sorted(gpus, key=lambda gpu: -room[gpu])  # equal ones stay in their order
    enough = (count for count in range(1, len(gpus) + 1) if count * room[emptiest[count - 1]] >= needed)
    return [f"cuda:{gpu}" for gpu in sorted(emptiest[: next(enough, len(gpus))])]


class Decoder(Protocol):
    """A causal decoder with a head for logits or, as a value model, for one number per token.

    vocab_size, padding_token: of its configuration. window: of the layers with the shortest one; None without any.
    second_class: whose implementation it is; empty if it is written from the papers. router_loss: the factor of its
    routers' load-balancing loss.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def padding_token(self) -> int | None: ...

    @property
    def window(self) -> int | None: ...

    @property
    def second_class(self) -> str: ...

    @property
    def router_loss(self) -> float: ...

    @property
    def routers(self) -> tuple[MixtureOfExperts, ...]:
        """In the order of its layers; empty if nothing is known of its routers, or it has none."""
        ...

    def routing(self, document: Document, key: str) -> Routing | None:
        """For the forward pass of a document that is recorded under ``key``; None without ``routers``."""
        ...

    def parameter_names(self, head: Head) -> tuple[str, ...]:
        """The names of all parameters with this head, in the model's order, without those of adapters."""
        ...

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the parameters of its adapters; empty without any."""
        ...

    def adapted(self, lora: LoraConfig) -> "Decoder":
        """The same with adapters. Raises UsageError where it can have none, or not these."""
        ...

    def merged(self, weights: Weights) -> Weights:
        """The weights of a model without adapters that computes the same."""
        ...

    def check_weights(self, folder: Path) -> None:
        """Raises UsageError if the weights in a Hugging Face folder are not those of the model."""
        ...

    def varied(self, variant: Variant) -> "Decoder":
        """The same with an architecture that is wrong on purpose, if the variant has one."""
        ...

    def load(
        self, folder: Path, dtype: torch.dtype, variant: Variant, *, trained: bool, devices: Sequence[str]
    ) -> Weights:
        """All parameters in ``dtype``, as the variant loads them, over ``devices`` if it can. Raises UsageError as
        ``check_weights``."""
        ...

    def forward(
        self,
        tokens: Tensor,
        weights: Weights,
        policy: Policy,
        variant: Variant = HONEST,
        tap: Tap = NO_TAP,
        routing: Routing | None = None,
    ) -> Tensor:
        """Logits (T, V), or values (T, 1), of one document ``tokens`` (T,) int64 in ``policy.compute``."""
        ...

    def described(self) -> dict[str, Any]:
        """What it computes, as JSON values for a record's header."""
        ...


@dataclass(frozen=True, kw_only=True)
class Written:
    """The decoder of forward.py; see Decoder for the contract of each method."""

    architecture: Architecture
    second_class: str = ""

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    @property
    def padding_token(self) -> int | None:
        return self.architecture.padding_token

    @property
    def window(self) -> int | None:
        return min((w for layer in self.architecture.layers if (w := layer.attention.window)), default=None)

    def parameter_names(self, head: Head) -> tuple[str, ...]:
        shapes = parameter_shapes(replace(self.architecture, value_head=head == "value"))
        return tuple(name for name in shapes if not is_buffer(name))

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(self._adapter_shapes())

    def _adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        lora = self.architecture.lora
        return adapter_shapes(lora, parameter_shapes(self.architecture)) if lora else {}

    def adapted(self, lora: LoraConfig) -> "Written":
        part = lora_of(lora, parameter_shapes(self.architecture))
        return replace(self, architecture=replace(self.architecture, lora=part))

    def merged(self, weights: Weights) -> Weights:
        assert self.architecture.lora
        return merged(weights, self.architecture.lora)

    def check_weights(self, folder: Path) -> None:
        check_shapes(weight_shapes(folder), self.architecture, str(folder))

    def varied(self, variant: Variant) -> "Written":
        return replace(self, architecture=variant.architecture(self.architecture))

    def load(
        self, folder: Path, dtype: torch.dtype, variant: Variant, *, trained: bool, devices: Sequence[str]
    ) -> Weights:
        weights = load_weights(folder, self.architecture, dtype, devices)
        if adapters := self._adapter_shapes():
            weights |= {name: w.to(devices[0]) for name, w in load_adapter(folder, adapters, dtype).items()}
        return variant.loaded(weights, self.architecture, trained=trained)

    @property
    def router_loss(self) -> float:
        return self.architecture.router_loss

    @property
    def routers(self) -> tuple[MixtureOfExperts, ...]:
        return self.architecture.routers

    def routing(self, document: Document, key: str) -> Routing | None:
        return routing_of(document, len(self.routers), self.routers[0].chosen, key) if self.routers else None

    def forward(
        self,
        tokens: Tensor,
        weights: Weights,
        policy: Policy,
        variant: Variant = HONEST,
        tap: Tap = NO_TAP,
        routing: Routing | None = None,
    ) -> Tensor:
        return forward(tokens, weights, self.architecture, policy, variant, tap, routing)

    def described(self) -> dict[str, Any]:
        return asdict(self.architecture)


def read_decoder(folder: Path, *, disable_dropout: bool = False, trusted: bool = False) -> Decoder:
    """The decoder of the Hugging Face folder ``folder``, for an objective with this ``disable_dropout``.

    ``trusted``: the folder's Python code may be run, which only a second-class oracle does. Raises UsageError for a
    folder that cannot be read and for what neither the oracle nor transformers can compute.
    """
    if is_written(folder):
        return Written(architecture=read_architecture(folder, disable_dropout=disable_dropout))
    # Importing transformers takes seconds, for which most runs of the oracle have no need.
    from conformance.oracle.transformers_reference import TransformersDecoder

    return TransformersDecoder(folder, disable_dropout=disable_dropout, trusted=trusted)


def is_routed(folder: Path) -> bool:
    """Whether the model has routers that are judged: those of a mixture of experts that the oracle computes.

    Reads the model's configuration once, and again only when the file has changed.
    """
    file = folder / "config.json"
    stat = file.stat() if file.exists() else None
    return _is_routed(folder, stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=64)
def _is_routed(folder: Path, version: object) -> bool:
    return is_written(folder) and bool(read_architecture(folder, disable_dropout=True).routers)
