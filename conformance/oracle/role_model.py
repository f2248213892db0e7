"""Loads the model of a role for the oracle, and chooses its GPUs.

Models of a family in conformance/models/families.py are computed from the papers (``Written``). For any other causal
language model, transformers' own implementation in a single process serves as a second-class oracle
(transformers_reference.py). It shows what a backend does to the model, but no mistake of transformers itself. Losses,
optimizers, clipping and advantages are the oracle's own in both cases.

Memory for P trained parameters in float64: weights 8 P bytes, gradients 8 P, and with more than one step 16 P for
AdamW's moments or 8 P for a momentum. Gradients are scaled and weights updated tensor by tensor, so there is never
another copy of the model. Each GPU also needs memory for one document: its activations, a few copies of the largest
tensor during its update, and on the first GPU a few copies of the logits. SPARE reserves it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from conformance.core.errors import UsageError
from conformance.models.components import Architecture, MixtureOfExperts, parameter_shapes
from conformance.models.families import has_routers, is_written, read_architecture
from conformance.models.folders import elements_of, weight_shapes
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
from conformance.oracle.primitives import HONEST, NO_TAP, Policy, Tap, Variant, Weights
from conformance.spec.batch import IMAGE, NO_COLUMNS, Columns, Document
from conformance.spec.observables import Head
from conformance.spec.scenario import LoraConfig, Scenario

SPARE = 0.3  # share of a GPU's free memory


def bytes_needed(scenario: Scenario, models: Mapping[str, Path], policy: Policy) -> int:
    """Returns the bytes of weights, gradients and optimizer states of all models."""
    moments = {"adamw": 2, "muon": 2, "sgd": 1}[scenario.optimizer.name] if scenario.steps > 1 else 0
    total = 0
    for role in scenario.objective.roles:
        elements = elements_of({role.name: models[role.name]})
        total += elements * (policy.stable.itemsize * (2 + moments) if role.trained else policy.compute.itemsize)
    return total


def devices_for(device: str, needed: int) -> list[str]:
    """Returns ``device``, or the smallest number of GPUs from it on that can share a model of ``needed`` bytes equally.

    GPUs with the most free memory are preferred, because another program may use some. If even all of them are too
    small, all are returned, and the run will fail with an out-of-memory error.
    """
    first = torch.device(device)
    if first.type == "cpu":
        return [device]
    gpus = range(first.index or 0, torch.cuda.device_count())
    free = {gpu: torch.cuda.mem_get_info(gpu)[0] * (1 - SPARE) for gpu in gpus}
    emptiest = sorted(gpus, key=lambda gpu: -free[gpu])  # equal ones stay in their order
    enough = (count for count in range(1, len(gpus) + 1) if count * free[emptiest[count - 1]] >= needed)
    return [f"cuda:{gpu}" for gpu in sorted(emptiest[: next(enough, len(gpus))])]


class Decoder(Protocol):
    """Runs a causal decoder with a head for logits or, as a value model, for one number per token.

    vocab_size, padding_token: of the configuration. window: the shortest of all layers; None without any.
    second_class: names the implementation; empty for a model that is written from the papers. not_judged: features of
    the published training that nothing computes. untrained: parameters that the model's code freezes. router_loss: the
    factor of the load-balancing loss. image_config: transformers' configuration of a model with an image tower; None
    without one.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def padding_token(self) -> int | None: ...

    @property
    def window(self) -> int | None: ...

    @property
    def image_config(self) -> Any: ...

    @property
    def second_class(self) -> str: ...

    @property
    def not_judged(self) -> tuple[str, ...]: ...

    @property
    def untrained(self) -> frozenset[str]: ...

    @property
    def router_loss(self) -> float: ...

    @property
    def routers(self) -> tuple[MixtureOfExperts, ...]:
        """Returns the routers in the order of the layers; empty if the model has none or they are unknown."""
        ...

    def routing(self, documents: Sequence[Document], key: str) -> Routing | None:
        """Returns the routing of a forward pass of documents, recorded under ``key``; None without ``routers``."""
        ...

    def parameter_names(self, head: Head) -> tuple[str, ...]:
        """Returns the names of all parameters with this head, in the model's order, without adapters."""
        ...

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Returns the names of the adapters' parameters; empty without any."""
        ...

    def adapted(self, lora: LoraConfig) -> "Decoder":
        """Returns this decoder with adapters. Raises UsageError if it does not support them."""
        ...

    def merged(self, weights: Weights) -> Weights:
        """Merges adapters into the weights, so that a model without adapters computes the same."""
        ...

    def check_weights(self, folder: Path) -> None:
        """Raises UsageError if the weights in a Hugging Face folder do not fit the model."""
        ...

    def varied(self, variant: Variant) -> "Decoder":
        """Returns this decoder with the variant's architecture, which may be wrong on purpose."""
        ...

    def load(
        self, folder: Path, dtype: torch.dtype, variant: Variant, *, trained: bool, devices: Sequence[str]
    ) -> Weights:
        """Reads all parameters in ``dtype``, as the variant loads them, spread over ``devices`` if possible.

        Raises UsageError as ``check_weights`` does.
        """
        ...

    def forward(
        self,
        tokens: Tensor,
        weights: Weights,
        policy: Policy,
        variant: Variant = HONEST,
        tap: Tap = NO_TAP,
        routing: Routing | None = None,
        lengths: Sequence[int] = (),
        columns: Columns = NO_COLUMNS,
    ) -> Tensor:
        """Returns logits (T, V), or values (T, 1), of one document ``tokens`` (T,) int64 in ``policy.compute``, or of
        several of these ``lengths``. ``columns``: those of the one document, which hold its images."""
        ...

    def described(self) -> dict[str, Any]:
        """Describes the model as JSON values for a record's header."""
        ...


@dataclass(frozen=True, kw_only=True)
class Written:
    """Runs the decoder of decoder.py; Decoder documents each method."""

    architecture: Architecture
    second_class: str = ""
    untrained: frozenset[str] = frozenset()
    image_config: None = None

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    @property
    def padding_token(self) -> int | None:
        return self.architecture.padding_token

    @property
    def not_judged(self) -> tuple[str, ...]:
        return self.architecture.not_judged

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

    def routing(self, documents: Sequence[Document], key: str) -> Routing | None:
        return routing_of(documents, len(self.routers), self.routers[0].chosen, key) if self.routers else None

    def forward(
        self,
        tokens: Tensor,
        weights: Weights,
        policy: Policy,
        variant: Variant = HONEST,
        tap: Tap = NO_TAP,
        routing: Routing | None = None,
        lengths: Sequence[int] = (),
        columns: Columns = NO_COLUMNS,
    ) -> Tensor:
        assert IMAGE not in columns, "batches have no images for this model"
        return forward(tokens, weights, self.architecture, policy, variant, tap, routing, lengths)

    def described(self) -> dict[str, Any]:
        return asdict(self.architecture)


def read_decoder(
    folder: Path,
    *,
    disable_dropout: bool = False,
    trusted: bool = False,
    assume_inert: Collection[str] = (),
    mtp_layers: int = 0,
) -> Decoder:
    """Returns the decoder of the Hugging Face folder ``folder``, for an objective with this ``disable_dropout``.

    ``trusted``: whether the folder's Python code may run, which only a second-class oracle needs. ``assume_inert``: see
    Scenario. ``mtp_layers``: see read_architecture.

    Raises UsageError for an unreadable folder and for a model that neither the oracle nor transformers can
    compute.
    """
    if is_written(folder):
        architecture = read_architecture(
            folder, disable_dropout=disable_dropout, assume_inert=assume_inert, mtp_layers=mtp_layers
        )
        return Written(architecture=architecture)
    if mtp_layers:
        raise UsageError(f"{folder} has no modules for multi-token prediction that the oracle knows; use a deepseek_v3")
    # Importing transformers takes seconds, and most runs do not need it.
    from conformance.oracle.transformers_reference import TransformersDecoder

    return TransformersDecoder(folder, disable_dropout=disable_dropout, trusted=trusted, assume_inert=assume_inert)


def decoder_of(scenario: Scenario, folder: Path) -> Decoder:
    """Returns the decoder of a folder with a model of ``scenario``. Raises UsageError as ``read_decoder`` does."""
    return read_decoder(
        folder,
        disable_dropout=scenario.objective.disable_dropout,
        trusted=scenario.trust_remote_code,
        assume_inert=scenario.assume_inert,
        mtp_layers=getattr(scenario.objective, "mtp_num_layers", 0),
    )


def is_routed(folder: Path) -> bool:
    """Tells whether the model has routers that are judged, in a mixture of experts computed from the papers.

    The result is cached until the configuration file changes.
    """
    file = folder / "config.json"
    stat = file.stat() if file.exists() else None
    return _is_routed(folder, stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=64)
def _is_routed(folder: Path, version: object) -> bool:
    return is_written(folder) and has_routers(folder)
