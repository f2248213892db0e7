"""Estimates the bytes that a rank holds of a model, from shapes, layout and the tensors that each backend keeps.

The estimate is for the rank that holds most, in two moments: when the model's gradients are ready, which is the peak,
and while another model is trained. Tests compare both with the storages of ranks (tests/train/test_train_memory.py).

Activations that are kept for the backward pass are estimated by the terms of Korthikanti et al., arXiv 2205.05198,
section 4 (the inputs that each operator keeps), for layers with RMSNorm, grouped queries and SwiGLU instead of theirs,
without dropout, and with an attention kernel that keeps no scores. Sections 4.2.1 and 4.2.2 describe what tensor and
sequence parallelism shard, section 5 what remains with recomputation.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.core.io import read_json
from conformance.core.paths import resolve
from conformance.models.folders import EMBEDDING, HEAD
from conformance.models.synthetic import shapes_of
from conformance.spec.layout import Layout
from conformance.spec.precision import PRECISIONS, Precision
from conformance.spec.roles import POLICY, Role
from conformance.spec.scenario import Scenario
from impl.models.lora import adapter_shapes_of

Shapes = Mapping[str, tuple[int, ...]]
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# Column- and row-parallel matrices of Megatron (Shoeybi et al., arXiv 1909.08053, section 3): dimensions of (out, in).
_CUT_OUT = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
_CUT_IN = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Holds the sizes that activations depend on. ``queries`` and ``keys``: widths of all heads together."""

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
    """Returns the shapes of the parameters of the model that a folder and a head make. A tied head is left out.

    They are those of the folder's weights, including weights that are still to be drawn. Without weights, they follow
    from the configuration, for the architectures that impl/megatron/model_config.py knows.

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
        raise UsageError("the sizes of experts are read from weights only; give a folder with weights")
    alone = Rank(rank=0, size=1)
    return {part.name: part.shape for name in all_parameters(shape) for part in parts(name, shape, alone)}


def layer_of(name: str) -> int | None:
    """Returns the number of the layer that a parameter belongs to; None for embedding, last norm and head."""
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

    weights: the weights that the model computes with, or the sharded masters that they are gathered from.
    gradients: the gradients when they are ready.
    freed: the part of the gradients that the update frees before another model has any.
    optimizer: masters beside the weights, and both moments of AdamW.
    passing: temporary memory: gathered layers and filled buckets.
    update: temporary memory of AdamW, a copy of a moment for all parameters at once.
    host: host memory that ``offload`` takes, with its buffers there.
    loading: a temporary buffer in host memory while the model is put on a GPU.
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
        """Adds a frozen base and its adapters, which are held side by side."""
        return States(**{part: size + getattr(other, part) for part, size in vars(self).items()})


def states_of(backend: str, layout: Layout, precision: PrecisionName, shapes: Shapes, *, trained: bool) -> States:
    """Estimates a model that is trained with AdamW, or a frozen model."""
    tier = PRECISIONS[precision]
    return {"fsdp2": _fsdp2, "deepspeed": _deepspeed, "megatron": _megatron}[backend](layout, tier, shapes, trained)


def states_of_role(backend: str, scenario: Scenario, layout: Layout, role: Role, shapes: Shapes) -> States:
    """Estimates a role's model with these parameters; with ``lora``, the policy is a frozen base and its adapters."""
    adapted = scenario.lora if role == POLICY else None
    tier = PRECISIONS[scenario.precision]
    states = states_of(layout, tier, shapes, role.trained and adapted is None)
    if adapted is None:
        return states
    return states + states_of(layout, tier, adapter_shapes_of(adapted, shapes), True)


def host_bytes(backend: str, scenario: Scenario, layout: Layout) -> int:
    """Estimates the bytes of host memory that a rank on a GPU needs for its models.

    They are the offloaded bytes of all models and the largest buffer that loading one of them needs. Critics are
    counted with the head that they do not have.

    Raises UsageError for an unusable model.
    """
    shapes = weight_shapes(resolve(scenario.model))
    states = [states_of_role(states_of, scenario, layout, role, shapes) for role in scenario.objective.roles]
    return sum(one.host for one in states) + max(one.loading for one in states)


def _fsdp2(layout: Layout, tier: Precision, shapes: Shapes, trained: bool) -> States:
    """Estimates FSDP2, whose parameters are the masters, sharded by rows over dp x sp.

    A block is gathered whole, and the next block beside it. Parameters outside of blocks stay gathered from the forward
    pass to the end of the backward pass.
    """
    full, compute, own = tier.master.bytes, tier.compute.bytes, cut(shapes, layout.tp)
    shards = layout.dp // layout.rep * layout.sp
    held = elements({name: (-(-shape[0] // shards), *shape[1:]) for name, shape in own.items()})
    outside = elements({name: shape for name, shape in own.items() if layer_of(name) is None})
    block = _largest_layer(own)
    passing = (outside + 2 * block) * compute * (1 if shards > 1 or tier.is_half else 0)
    lasting = (held * full, held * full * trained, 2 * held * full * trained)
    if "offload" in layout.options:
        return States(weights=0, passing=passing, host=sum(lasting))
    return States(
        weights=lasting[0],
        gradients=lasting[1],
        freed=lasting[1],  # zero_grad() after each update
        optimizer=lasting[2],
        passing=passing + (outside + block) * compute * trained,  # gradients before they are reduced
        update=held * full * trained,
    )


def _deepspeed(layout: Layout, tier: Precision, shapes: Shapes, trained: bool) -> States:
    """Estimates ZeRO (arXiv 1910.02054) by DeepSpeed's four optimizer classes, which keep different gradients."""
    full, compute, own = tier.master.bytes, tier.compute.bytes, cut(shapes, layout.tp, vocabulary=(HEAD,))
    count, pieces = elements(own), layout.dp * layout.sp * layout.ulysses
    stage, half = 3 if layout.zero is None else layout.zero, tier.is_half
    piece, offloads = -(-count // pieces), "offload" in layout.options
    if not trained and stage == 3:
        passing = min(count, LIVE) * compute
        if offloads:
            return States(weights=0, passing=passing, host=piece * compute)
        return States(weights=piece * compute, passing=passing)
    if not trained:
        return States(weights=count * compute)
    if stage == 0:
        masters = count * full if half else 0
        update = count * full * (2 if half else 1)  # gradients in full precision, and AdamW's copy
        return States(
            weights=count * compute,
            gradients=count * compute,
            freed=count * compute,
            optimizer=masters + 2 * count * full,
            update=update,
        )
    # ZeRO-1 in bf16 has its own class: whole gradients in float32, those of autograd beside them, and no bucket.
    has_own_class = stage == 1 and tier.compute == BF16 and not offloads
    gathered = min(count, LIVE) * compute if stage == 3 and pieces > 1 else 0
    bucket = 0 if has_own_class else BUCKET * (compute if stage == 2 else full)
    weights = (piece if stage == 3 else count) * compute
    gradients = count * (full + compute) if has_own_class else piece * full
    # That class frees autograd's gradients only, ZeRO-3 frees none; the class of ZeRO-1 and 2 allocates them per step.
    freed = count * compute if has_own_class else 0 if stage == 3 else gradients
    optimizer = 3 * piece * full  # there are masters beside the weights in every precision
    if offloads and stage == 3:
        # Gradients are summed in one buffer, and updated from another.
        return States(weights=0, passing=gathered + bucket, host=weights + 2 * gradients + optimizer)
    if offloads:
        # The host holds summed gradients and those of the masters, the rank's part of the parameters, which the update
        # writes, and the largest gradient in transfer; the device holds another one.
        transfer = max(map(math.prod, own.values())) * compute
        host = 2 * gradients + optimizer + piece * compute + transfer
        return States(weights=weights, passing=gathered + bucket + transfer, host=host)
    return States(
        weights=weights,
        gradients=gradients,
        freed=freed,
        optimizer=optimizer,
        passing=gathered + bucket,
        update=piece * full,
        loading=weights if stage == 3 else 0,  # the pieces of all parameters are collected on the host
    )


def _megatron(layout: Layout, tier: Precision, shapes: Shapes, trained: bool) -> States:
    """Estimates the Megatron stage that holds most, with a padded vocabulary.

    Gradients are in whole buffers of full precision. The distributed optimizer shards masters and moments over dp x sp.
    """
    full, compute = tier.master.bytes, tier.compute.bytes
    held = max(elements(stage) for stage in _stages(layout, shapes))
    if not trained:
        return States(weights=held * compute)
    piece = -(-held // (layout.dp * layout.sp)) if layout.zero == 1 else held
    masters = piece * full if tier.is_half else 0
    return States(
        weights=held * compute,
        gradients=held * full,
        optimizer=masters + 2 * piece * full,
        update=piece * full,
    )


def _stages(layout: Layout, shapes: Shapes) -> list[dict[str, tuple[int, ...]]]:
    """Returns the shapes on a rank of each stage; the last has the head, and the embedding that it is tied to."""
    multiple = VOCABULARY_MULTIPLE * layout.tp
    padded = {
        name: (-(-shape[0] // multiple) * multiple, *shape[1:]) if name.endswith((EMBEDDING, HEAD)) else shape
        for name, shape in shapes.items()
    }
    own = cut(padded, layout.tp)
    count = 1 + max(layer for name in own if (layer := layer_of(name)) is not None)
    cuts = stages(layers=count, pp=layout.pp, vpp=layout.vpp)
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(layout.pp)]
    tied = layout.pp > 1 and len(own) > 0 and not any(name.endswith((HEAD, VALUE_HEAD)) for name in own)
    for name, shape in own.items():
        layer = layer_of(name)
        first = layer is None and name.endswith(EMBEDDING)
        stage = 0 if first else layout.pp - 1 if layer is None else cuts.owner(layer)[0]
        found[stage][name] = shape
        if first and tied:
            found[-1][name] = shape
    return found


def _largest_layer(shapes: Shapes) -> int:
    layers: dict[int, int] = {}
    for name, shape in shapes.items():
        if (layer := layer_of(name)) is not None:
            layers[layer] = layers.get(layer, 0) + elements({name: shape})
    return max(layers.values(), default=0)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Holds bytes of activations.

    kept: an upper bound for all layers of a rank.
    layer: the layer that is recomputed, else 0.
    logits: all copies of the logits that the loss holds at the same time.
    """

    kept: int
    layer: int
    logits: int


def activations_of(
    backend: str, layout: Layout, sizes: Sizes, *, compute: int, tokens: int, micro_batches: int, entropy: bool
) -> Activations:
    """Estimates activations. ``tokens``: of a micro-batch and context-parallel rank. ``compute``: bytes per number."""
    own = tokens // layout.tp if "seqpar" in layout.options else tokens
    # Outside of tensor parallelism: norms and their outputs. Hugging Face's RMSNorm keeps its input in float32 and the
    # normalised values, torch's keeps its input.
    norm = max(4, compute) + compute if backend != "megatron" else compute
    outside = 2 * (norm + compute) * sizes.hidden
    # Inside: queries, keys, values, attention's output and a float32 per head; four times SwiGLU's width.
    inside = compute * (2 * sizes.queries + 2 * sizes.keys + 4 * sizes.ffn) + 4 * sizes.heads
    layer = outside * own + inside * tokens // layout.tp
    at_once = min(layout.pp, micro_batches)  # on the first stage: micro-batches in flight
    layers = -(-sizes.layers // layout.pp) * at_once
    again = "ckpt" in layout.options
    return Activations(
        kept=layers * (compute * sizes.hidden * own if again else layer),
        layer=layer if again else 0,
        logits=_logits(backend, layout, sizes, compute=compute, tokens=tokens, entropy=entropy),
    )


def _logits(backend: str, layout: Layout, sizes: Sizes, *, compute: int, tokens: int, entropy: bool) -> int:
    """Estimates the copies of logits in impl/models/outputs.py.

    They are the logits, the softmax in float32 or wider (twice with entropy), and the gradient, which takes the memory
    of the softmax if it has the same dtype.
    """
    width = sizes.vocab
    if backend == "megatron":
        multiple = VOCABULARY_MULTIPLE * layout.tp
        width = -(-sizes.vocab // multiple) * multiple // layout.tp
    elif "losspar" in layout.options:
        width = -(-sizes.vocab // layout.tp)
    wide = max(4, compute)
    gradient = compute if compute < 4 else 0
    return tokens * width * (compute + wide * (2 if entropy else 1) + gradient)
