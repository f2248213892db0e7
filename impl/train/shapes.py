"""Names and shapes of a model's parameters, and how tensor parallelism cuts them, without its weights."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.inputs.model import EMBEDDING, HEAD
from conformance.inputs.random_model import random_model, shapes_of
from conformance.reading import read_json
from conformance.role import Head
from conformance.validation import UsageError
from impl.megatron.convert import all_parameters, parts
from impl.megatron.shape import VALUE_HEAD, ModelShape, read_shape
from impl.megatron.spans import Rank

Shapes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# By columns and by rows of Megatron's paper (Shoeybi et al., arXiv 1909.08053, section 3): dimensions of (out, in).
_CUT_OUT = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
_CUT_IN = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What activations depend on. ``queries`` and ``keys``: widths of all heads together."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    queries: int
    keys: int
    vocab: int


def read_sizes(folder: Path) -> Sizes:
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return Sizes(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=heads,
        queries=heads * width,
        keys=(config.get("num_key_value_heads") or heads) * width,
        vocab=config["vocab_size"],
    )


def parameter_shapes(folder: Path, head: Head) -> dict[str, tuple[int, ...]]:
    """Of the model that a folder makes with a head: those of its weights, also of such that are still to be drawn;
    else, of the architectures that impl/megatron/shape.py knows, those of its configuration. A tied head is left out.

    Raises UsageError for a folder with neither.
    """
    if any(folder.glob("*.safetensors")) or random_model(folder):
        tied = read_json(folder / "config.json").get("tie_word_embeddings", False)
        found = {n: s for n, s in shapes_of(folder).items() if not (n.endswith(HEAD) and tied)}
    else:
        found = _of_configuration(replace(read_shape(folder), head="causal"))
    if head == "causal":
        return found
    hidden = next(shape[1] for name, shape in found.items() if name.endswith(EMBEDDING))
    return {n: s for n, s in found.items() if not n.endswith(HEAD)} | {VALUE_HEAD: (1, hidden)}


def _of_configuration(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    if shape.mixture:
        raise UsageError("the sizes of experts are read from weights only; give a folder that has some")
    alone = Rank(rank=0, size=1)
    return {part.name: part.shape for name in all_parameters(shape) for part in parts(name, shape, alone)}


def layer_of(name: str) -> int | None:
    """The number of the layer that a parameter is of; None of embedding, last norm and head."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def cut(shapes: Shapes, tp: int, *, vocabulary: tuple[str, ...] = (EMBEDDING, HEAD)) -> dict[str, tuple[int, ...]]:
    """What the first tensor-parallel rank holds. ``vocabulary``: which of embedding and head are cut."""
    found = {}
    for name, shape in shapes.items():
        out = any(f".{one}." in name for one in _CUT_OUT) or name.endswith(vocabulary)
        inwards = any(f".{one}." in name for one in _CUT_IN) and len(shape) == 2
        dimension = 0 if out else 1 if inwards else None
        found[name] = tuple(-(-size // tp) if at == dimension else size for at, size in enumerate(shape))
    return found
