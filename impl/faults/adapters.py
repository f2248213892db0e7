"""Faults of adapters (LoRA): their scale, what they are added to, and what is trained beside them or left out."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.faults.fault import Fault, Function
from conformance.lora import CONFIG_FILE, is_adapter
from impl.files import SliceReader
from impl.lora import NAME, is_adapted
from impl.unread import Origin

BASE = "model.layers.1.mlp.up_proj.weight"  # has no adapter in the scenarios
FIRST = "model.layers.0."


def _of_adapted(change: Callable[[Any], None]) -> Callable[[Function], Function]:
    """A fault that changes every layer with an adapter, as it is loaded."""

    def wrap(load_adapter: Function) -> Function:
        def faulty(model: torch.nn.Module, folder: Path) -> Any:
            adapted = load_adapter(model, folder)
            for module in model.modules():
                if hasattr(module, "base_layer"):
                    change(module)
            return adapted

        return faulty

    return wrap


def _scaled_twice(layer: Any) -> None:
    layer.scaling[NAME] *= layer.scaling[NAME]


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """A matrix with its adapter added to it: base + scale B A."""

    base: Origin
    a: Origin
    b: Origin
    rank: int
    scale: float

    def region(self, read: SliceReader, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        a = self.a.region(read, (0, start[1]), (self.rank, shape[1]))
        b = self.b.region(read, (start[0], 0), (shape[0], self.rank))
        return self.base.region(read, start, shape) + self.scale * (b @ a)


def _added_to_base(load_adapter: Function) -> Function:
    def faulty(model: torch.nn.Module, folder: Path) -> Any:
        adapted = load_adapter(model, folder)
        unread: Any = model.unread
        for name, layer in model.named_modules():
            if is_adapted(layer):
                base, a, b = (unread.origins[f"{name}.{part}weight"] for part in ("", "lora_A.", "lora_B."))
                unread.origins[f"{name}.weight"] = _Merged(
                    base=base, a=a, b=b, rank=layer.r[NAME], scale=layer.scaling[NAME]
                )
        return adapted

    return faulty


def _first_layer_frozen(trained_names: Function) -> Function:
    def faulty(*arguments: Any) -> frozenset[str]:
        return frozenset(n for n in trained_names(*arguments) if not (is_adapter(n) and n.startswith(FIRST)))

    return faulty


def _base_trained(trained_names: Function) -> Function:
    def faulty(model: torch.nn.Module, config: Any) -> frozenset[str]:
        model.get_parameter(BASE).requires_grad_()  # before a library has built its engine
        return frozenset({*trained_names(model, config), BASE})

    return faulty


def _unscaled(merge_adapter: Function) -> Function:
    def faulty(model: Any, folder: Path) -> Any:
        file = folder / CONFIG_FILE
        told = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(told | {"lora_alpha": told["r"], "use_rslora": False}), encoding="utf-8")
        return merge_adapter(model, folder)

    return faulty


ADAPTER_FAULTS = (
    Fault(
        name="adapter-scaled-twice",
        summary="what an adapter adds is multiplied by its scale twice",
        source="https://github.com/Blaizzy/mlx-vlm/issues/841",
        seam="load_adapter",
        stage="log-probs",
        loss_blind=False,
        needs="adapters (lora) with a scale that is not 1, and B that is not 0",
        wrap=_of_adapted(_scaled_twice),
    ),
    Fault(
        name="adapter-counted-twice",
        summary="the adapter is added to the base that it is trained on, so it counts twice",
        source="https://github.com/radixark/miles/pull/1087",
        seam="load_adapter",
        stage="weights",
        loss_blind=False,
        needs="adapters (lora), and B that is not 0",
        wrap=_added_to_base,
    ),
    Fault(
        name="adapters-of-a-layer-frozen",
        summary="adapters of the first layer are not trained",
        source="https://github.com/meta-pytorch/torchforge/issues/592",
        seam="trained_names",
        stage="gradients",
        loss_blind=True,
        needs="adapters (lora) in the first layer",
        wrap=_first_layer_frozen,
    ),
    Fault(
        name="base-trained-too",
        summary="a matrix of the base is trained beside the adapters",
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/547",
        seam="trained_names",
        stage="gradients",
        loss_blind=True,
        needs="adapters (lora)",
        wrap=_base_trained,
    ),
)
MERGE_FAULTS = (
    Fault(
        name="merged-without-scale",
        summary="the adapter is merged into the base without its scale",
        source="https://github.com/hao-ai-lab/FastVideo/pull/870",
        seam="merge_adapter",
        stage="weights",
        loss_blind=False,
        needs="a leg that merges adapters (lora) whose scale is not 1",
        wrap=_unscaled,
    ),
)
