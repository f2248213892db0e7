"""Estimates the bytes that a rank holds of a model, from shapes, the layout and the tensors that each backend keeps.

Each backend has its own formula (``states_of``). The result is for the rank that holds most: when the model's gradients
are ready, which is the peak, and while another model is trained. Tests compare it with the storages of ranks
(tests/train/test_train_memory.py).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.core.host import resolve
from conformance.core.io import read_json
from conformance.models.folders import EMBEDDING, HEAD
from conformance.models.synthetic import shapes_of
from conformance.spec.layout import Layout
from conformance.spec.observables import POLICY, Role
from conformance.spec.precision import PRECISIONS, Precision
from conformance.spec.scenario import Scenario
from impl.models.lora import adapter_shapes_of

Shapes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# Column- and row-parallel matrices of Megatron (Shoeybi et al., arXiv 1909.08053, section 3): dimensions of (out, in).
_CUT_OUT = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
_CUT_IN = ("o_proj", "down_proj")


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a folder's weights, including weights still to be drawn; a tied head is left out."""
    tied = read_json(folder / "config.json").get("tie_word_embeddings", False)
    return {n: s for n, s in shapes_of(folder).items() if not (n.endswith(HEAD) and tied)}


def layer_of(name: str) -> int | None:
    """Returns the number of a parameter's layer; None for embedding, last norm and head."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def cut(shapes: Shapes, tp: int, *, vocabulary: tuple[str, ...] = (EMBEDDING, HEAD)) -> dict[str, tuple[int, ...]]:
    """Returns the shapes on the first tensor-parallel rank. ``vocabulary``: which of embedding and head are sharded."""
    found = {}
    for name, shape in shapes.items():
        out = any(f".{one}." in name for one in _CUT_OUT) or name.endswith(vocabulary)
        inwards = any(f".{one}." in name for one in _CUT_IN) and len(shape) == 2
        dimension = 0 if out else 1 if inwards else None
        found[name] = tuple(-(-size // tp) if at == dimension else size for at, size in enumerate(shape))
    return found


@dataclass(frozen=True, kw_only=True)
class States:
    """Holds the bytes of one model on one rank.

    weights: the weights that compute, or the sharded masters from which they are gathered.
    gradients: when they are ready.
    freed: the part of the gradients that the update frees, before another model has any.
    optimizer: masters in addition to the weights, and both moments of AdamW.
    passing: temporary layers and buckets.
    update: the temporary copy of a moment that AdamW makes for all parameters at once.
    host: the states that ``offload`` moves to the host, with their buffers there.
    loading: a temporary buffer in the host's memory while the model is moved to a GPU.
    """

    weights: int
    gradients: int = 0
    freed: int = 0
    optimizer: int = 0
    passing: int = 0
    update: int = 0
    host: int = 0
    loading: int = 0

    @property
    def ready(self) -> int:
        """Returns the bytes that are held when the gradients are ready."""
        return self.weights + self.gradients + self.optimizer

    @property
    def lasting(self) -> int:
        """Returns the bytes that are held all the time, also while other models are trained."""
        return self.ready - self.freed

    def __add__(self, other: "States") -> "States":
        """Adds the states of a frozen base and of its adapters."""
        return States(**{part: size + getattr(other, part) for part, size in vars(self).items()})


StatesOf = Callable[[Layout, Precision, Shapes, bool], States]  # of a model that is trained with AdamW, or frozen


def states_of_role(states_of: StatesOf, scenario: Scenario, layout: Layout, role: Role, shapes: Shapes) -> States:
    """Estimates the model of a role with these parameters; with ``lora``, a frozen policy and its adapters."""
    adapted = scenario.lora if role == POLICY else None
    tier = PRECISIONS[scenario.precision]
    states = states_of(layout, tier, shapes, role.trained and adapted is None)
    if adapted is None:
        return states
    return states + states_of(layout, tier, adapter_shapes_of(adapted, shapes), True)


def host_bytes(states_of: StatesOf, scenario: Scenario, layout: Layout) -> int:
    """Estimates the bytes of host memory that a rank holds for its models while it computes on a GPU.

    They are the offloaded states of all models, and the largest buffer that loading one of them needs. Critics are
    counted with the language head that they do not have. Raises UsageError for a folder without a model.
    """
    shapes = weight_shapes(resolve(scenario.model))
    states = [states_of_role(states_of, scenario, layout, role, shapes) for role in scenario.objective.roles]
    return sum(one.host for one in states) + max(one.loading for one in states)


def largest_layer(shapes: Shapes) -> int:
    layers: dict[int, int] = {}
    for name, shape in shapes.items():
        if (layer := layer_of(name)) is not None:
            layers[layer] = layers.get(layer, 0) + elements({name: shape})
    return max(layers.values(), default=0)
