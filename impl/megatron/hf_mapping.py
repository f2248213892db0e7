"""Maps Hugging Face tensors to the parameters of a rank in any Megatron layout and back, by arithmetic on row numbers.

A parameter of a Megatron rank consists of *parts*, each with rows or columns of one Hugging Face tensor. A part is a
list of *spans* of consecutive rows or columns. Loading, gathering and saving use the same spans, one parameter at a
time, so a rank reads only its own rows and columns from a file.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path

import torch

from conformance.core.errors import UsageError
from conformance.models.folders import weight_files, weight_shapes
from conformance.spec.scenario import OptimizerConfig
from impl.interface.sharded_safetensors import SliceReader
from impl.megatron.model_config import VALUE_HEAD, Latent, ModelShape
from impl.megatron.spans import Part, Rank, Span, stacked_shapes

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
HEAD = "output_layer.weight"
_LAYER = "decoder.layers."
CORRECTION = "mlp.router.expert_bias"  # a buffer that is added to the scores when experts are chosen
_EXPERT = re.compile(r"(.*mlp\.experts\.local_experts\.)(\d+)(\.linear_fc[12]\.(?:weight|bias))")
_ADAPTER = re.compile(r"(decoder\.layers\.\d{1,6})\.(?:self_attention|mlp)\.adapter_([a-z]{1,4}_proj)(?:\.lora_(a|b))?")
# The linear layer of a layer that computes a projection of Hugging Face.
LINEAR = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attention.linear_qkv"),
    "o_proj": "self_attention.linear_proj",
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp.linear_fc1"),
    "down_proj": "mlp.linear_fc2",
}
# The norms in front of linear layers, as TransformerEngine's layers hold them, and megatron-core's checkpoints.
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
# The parameters of a module for multi-token prediction beside those of its layer.
MODULE = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
INPUT, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"  # Hugging Face's names


def layer_parameters(shape: ModelShape, layer: int) -> tuple[str, ...]:
    """Lists Megatron's names of a layer's parameters, without the prefix ``decoder.layers.N.``.

    Experts have global numbers. A module for multi-token prediction is a layer behind the last one.
    """
    return (
        "input_layernorm.weight",
        *(_latent_parameters(shape, shape.latent) if shape.latent else _grouped_parameters(shape)),
        "self_attention.linear_proj.weight",
        *(["self_attention.linear_proj.bias"] if shape.output_bias else []),
        "pre_mlp_layernorm.weight",
        *_mlp_parameters(shape, layer),
        *_adapter_parameters(shape, layer),
        *(MODULE if layer >= shape.layers else ()),
    )


def _adapter_parameters(shape: ModelShape, layer: int) -> tuple[str, ...]:
    of_layer = shape.adapters.of_layer(layer) if shape.adapters else ()
    return tuple(f"{LINEAR[one].partition('.')[0]}.adapter_{one}.lora_{part}" for one in of_layer for part in "ab")


def _grouped_parameters(shape: ModelShape) -> tuple[str, ...]:
    return (
        "self_attention.linear_qkv.weight",
        *(["self_attention.linear_qkv.bias"] if shape.qkv_bias else []),
        *(["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"] if shape.qk_norm else []),
        *(["self_attention.core_attention.softmax_offset"] if shape.sinks else []),
    )


def _latent_parameters(shape: ModelShape, latent: Latent) -> tuple[str, ...]:
    return tuple(
        f"self_attention.{module}.{kind}"
        for module in latent.modules(hidden=shape.hidden, heads=shape.heads)
        for kind in (["weight", "bias"] if shape.qkv_bias and "down" in module else ["weight"])
    )


def _mlp_parameters(shape: ModelShape, layer: int) -> tuple[str, ...]:
    if shape.mixture is None or layer not in shape.mixture.layers:
        return ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
    gate = ("gate_weight",) if shape.mixture.shared_gate else ()
    shared = ("linear_fc1.weight", "linear_fc2.weight", *gate) if shape.mixture.shared else ()
    kinds = ("weight", "bias") if shape.mixture.clamped else ("weight",)
    experts = [f"linear_fc{i}.{kind}" for i in (1, 2) for kind in kinds]
    return (
        *(f"mlp.router.{kind}" for kind in kinds),
        *([CORRECTION] if shape.mixture.sigmoid else []),
        *(f"mlp.experts.local_experts.{n}.{name}" for name in experts for n in range(shape.mixture.experts)),
        *(f"mlp.shared_experts.{name}" for name in shared),
    )


def all_parameters(shape: ModelShape) -> tuple[str, ...]:
    """Lists Megatron's names, with global numbers of layers and experts, of all parameters but a tied head."""
    numbers = range(shape.layers + shape.mtp)
    layers = [f"{_LAYER}{i}.{name}" for i in numbers for name in layer_parameters(shape, i)]
    return (EMBEDDING, *layers, FINAL_NORM, *([] if shape.tied else [HEAD]))


def grouped_by_tensors(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Groups parameters that are parts of the same Hugging Face tensors: the experts of a layer."""

    def tensors(name: str) -> str:
        expert = _EXPERT.fullmatch(name)
        return expert.expand(r"\1\3") if expert else name

    yield from (tuple(group) for _, group in groupby(names, tensors))


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Raises UsageError if the tensors in a Hugging Face folder are not exactly those of the model.

    Loading would not notice extra tensors, because a rank reads only its own parts. The folder may contain a tied head
    if it is equal to the embedding.
    """
    single = Rank(rank=0, size=1)
    due = {part.name: part.shape for name in all_parameters(shape) for part in parts(name, shape, single)}
    found = stacked_shapes(weight_shapes(folder))
    if shape.tied and (head := found.pop(OUTPUT, None)):
        with SliceReader(weight_files(folder)) as read:
            if head != due[INPUT] or not torch.equal(read.whole(OUTPUT), read.whole(INPUT)):
                raise UsageError(f"{folder} ties {OUTPUT} to {INPUT} in its config.json, but holds another tensor")
    wrong = [f"{name} is missing" for name in due if name not in found]
    wrong += [f"{name} is not expected" for name in found if name not in due]
    wrong += [f"{n} has shape {found[n]} instead of {due[n]}" for n in due if n in found and found[n] != due[n]]
    if wrong:
        raise UsageError(f"the weights in {folder} do not fit its config.json: {'; '.join(wrong[:8])}")


def is_cut(name: str, shape: ModelShape) -> bool:
    """Whether tensor parallelism shards the parameter ``name``."""
    if is_of_experts(name) and shape.mixture is not None and shape.mixture.clamped:
        return False
    return bool(parts(name, shape, Rank(rank=0, size=1))[0].spans)


def is_of_experts(name: str) -> bool:
    """Whether ranks of expert parallelism hold different parameters of this kind."""
    return _EXPERT.fullmatch(name) is not None


def parts(name: str, shape: ModelShape, tp: Rank) -> tuple[Part, ...]:
    """Returns the parts of a parameter on one tensor-parallel rank.

    ``name``: Megatron's, with the global layer number.
    """
    if name == EMBEDDING or (name == HEAD and shape.tied):
        return (_vocabulary(INPUT, shape, tp),)
    if name == HEAD:
        value = shape.head == "value"
        return (Part(name=VALUE_HEAD, shape=(1, shape.hidden)) if value else _vocabulary(OUTPUT, shape, tp),)
    if name == FINAL_NORM:
        return (Part(name="model.norm.weight", shape=(shape.hidden,)),)
    number, _, kind = name.removeprefix(_LAYER).partition(".")
    prefix = f"model.layers.{number}."
    if found := _EXPERT.fullmatch(name):
        return (_of_expert(f"{prefix}mlp.experts.", int(found[2]), found[3], shape, tp),)
    if (found := _ADAPTER.fullmatch(name)) and shape.adapters:
        return (_of_adapter(base_part(name, shape, tp), found[3], shape.adapters.rank),)
    if shape.latent and kind.startswith("self_attention.") and "linear_proj" not in kind:
        return (_of_latent(prefix, kind, shape, shape.latent, tp),)
    return _LAYER_PARTS[kind](prefix, shape, tp)


def base_part(name: str, shape: ModelShape, tp: Rank) -> Part:
    """Returns the part of the frozen weight that an adapter is added to. ``name``: of the adapter or its matrix."""
    found = _ADAPTER.fullmatch(name)
    assert found, name
    weight = parts(f"{found[1]}.{LINEAR[found[2]]}.weight", shape, tp)
    return next(part for part in weight if part.name.endswith(f".{found[2]}.weight"))


def _of_adapter(base: Part, matrix: str, rank: int) -> Part:
    """Returns a rank's share of A (rank, in) or B (out, rank): the columns or rows that it has of the frozen weight."""
    rows, columns = base.shape
    shape, dim = ((rank, columns), 1) if matrix == "a" else ((rows, rank), 0)
    starts = accumulate((span.length for span in base.spans), initial=0)
    spans = tuple(span._replace(own=start) for span, start in zip(base.spans, starts, strict=False))
    name = f"{base.name.removesuffix('.weight')}.lora_{matrix.upper()}.weight"
    return Part(name=name, shape=shape, dim=dim, spans=spans) if dim == base.dim else Part(name=name, shape=shape)


def is_trained(name: str, shape: ModelShape, optimizer: OptimizerConfig) -> bool:
    """Whether the parameter ``name`` is trained: if there are adapters, only these; never a router's correction bias.

    Raises UsageError if ``optimizer`` freezes only some of its parts.
    """
    if name.endswith(CORRECTION) or (shape.adapters and not _ADAPTER.fullmatch(name)):
        return False
    wanted = {part.name: optimizer.trains(part.name) for part in parts(name, shape, Rank(rank=0, size=1))}
    if len(set(wanted.values())) > 1:
        raise UsageError(f"{', '.join(wanted)} are one parameter in Megatron; freeze all of them or none")
    return all(wanted.values())


def _vocabulary(name: str, shape: ModelShape, tp: Rank) -> Part:
    """Returns one rank's rows of a vocabulary matrix: [rank * n, (rank + 1) * n) without padding rows."""
    each = shape.padded_vocab(tp.size) // tp.size
    start = min(tp.rank * each, shape.vocab)
    count = min((tp.rank + 1) * each, shape.vocab) - start
    return Part(name=name, shape=(shape.vocab, shape.hidden), spans=(Span(start, 0, count),))


def qkv_spans(shape: ModelShape, tp: Rank) -> tuple[tuple[Span, ...], ...]:
    """Returns the spans of q, of k and of v in the fused parameter.

    Its rows are ordered by key-value head: first the query heads that share it, then its key, then its value.
    """
    group, size = shape.heads // shape.kv_heads, shape.head_dim
    kv_heads = shape.kv_heads // tp.size
    first = tp.rank * kv_heads
    stride = (group + 2) * size  # rows of one key-value head in the fused parameter
    q = tuple(Span((first + i) * group * size, i * stride, group * size) for i in range(kv_heads))
    k = tuple(Span((first + i) * size, i * stride + group * size, size) for i in range(kv_heads))
    v = tuple(Span((first + i) * size, i * stride + (group + 1) * size, size) for i in range(kv_heads))
    return q, k, v


# The following functions build the entries of _LAYER_PARTS.


def _qkv(kind: str) -> Callable[[str, ModelShape, Rank], tuple[Part, ...]]:
    """Builds the entry of a fused parameter: the weight or the bias (``kind``) of q_proj, k_proj and v_proj.

    It has one part if Hugging Face fuses them too (all of q, then of k, then of v), else three.
    """

    def qkv(prefix: str, shape: ModelShape, tp: Rank) -> tuple[Part, ...]:
        width = (shape.hidden,) if kind == "weight" else ()
        rows = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        spans = qkv_spans(shape, tp)
        if shape.fused:
            shifted = _concatenated(spans, rows)
            return (Part(name=f"{prefix}self_attn.qkv_proj.{kind}", shape=(sum(rows), *width), spans=shifted),)
        return tuple(
            Part(name=f"{prefix}self_attn.{x}_proj.{kind}", shape=(count, *width), spans=own)
            for x, count, own in zip("qkv", rows, spans, strict=True)
        )

    return qkv


def _of_latent(prefix: str, kind: str, shape: ModelShape, latent: Latent, tp: Rank) -> Part:
    """Returns a rank's share of a weight or bias of latent attention before the scores."""
    of, _, what = kind.removeprefix("self_attention.").partition(".")
    module = latent.modules(hidden=shape.hidden, heads=shape.heads)[of]
    each = module.size[0] // tp.size
    return Part(
        name=f"{prefix}self_attn.{module.name}.{what}",
        shape=module.size if what == "weight" else module.size[:1],
        spans=(Span(tp.rank * each, 0, each),) if module.cut else (),
    )


def _gate_and_up(module: str, size: Callable[[ModelShape], int]) -> Callable[[str, ModelShape, Rank], tuple[Part, ...]]:
    """Builds the entry of a fused parameter: a rank's rows of ``module``'s gate_proj, then its rows of up_proj.

    It has one part if Hugging Face fuses them too, else two.
    """

    def gate_and_up(prefix: str, shape: ModelShape, tp: Rank) -> tuple[Part, ...]:
        each, rows = size(shape) // tp.size, [size(shape)] * 2
        spans = tuple((Span(tp.rank * each, at * each, each),) for at in range(2))
        if shape.fused:
            full = (sum(rows), shape.hidden)
            shifted = _concatenated(spans, rows)
            return (Part(name=f"{prefix}{module}.gate_up_proj.weight", shape=full, spans=shifted),)
        return tuple(
            Part(name=f"{prefix}{module}.{x}_proj.weight", shape=(count, shape.hidden), spans=own)
            for x, count, own in zip(("gate", "up"), rows, spans, strict=True)
        )

    return gate_and_up


def _concatenated(spans: Sequence[tuple[Span, ...]], rows: Sequence[int]) -> tuple[Span, ...]:
    """Shifts the spans of several tensors into their concatenation; ``rows``: the number of rows of each tensor."""
    starts = (sum(rows[:at]) for at in range(len(rows)))
    return tuple(
        span._replace(full=start + span.full) for start, shifted in zip(starts, spans, strict=True) for span in shifted
    )


def _of_expert(prefix: str, number: int, kind: str, shape: ModelShape, tp: Rank) -> Part:
    """Returns a rank's share of one expert; a stacked gate_up_proj has first the rows of the gate, then of up."""
    assert shape.mixture is not None
    count, size = shape.mixture.experts, shape.mixture.size
    if shape.mixture.clamped:
        return _of_clamped_expert(prefix, number, kind, count=count, size=size, hidden=shape.hidden)
    each = size // tp.size
    first = tp.rank * each
    if kind == ".linear_fc1.weight":
        spans = (Span(first, 0, each), Span(size + first, each, each))
        return Part(name=f"{prefix}gate_up_proj", shape=(count, 2 * size, shape.hidden), spans=spans, expert=number)
    whole = (count, shape.hidden, size)
    return Part(name=f"{prefix}down_proj", shape=whole, dim=1, spans=(Span(first, 0, each),), expert=number)


def _of_clamped_expert(prefix: str, number: int, kind: str, *, count: int, size: int, hidden: int) -> Part:
    """Returns one expert of gpt-oss, which is not sharded.

    Its matrices are (in, out); even columns of the first one belong to the gate, odd ones to up.
    """
    both = (Span(0, 0, size, step=2), Span(1, size, size, step=2))
    parts: dict[str, tuple[str, tuple[int, ...], int, tuple[Span, ...]]] = {
        ".linear_fc1.weight": ("gate_up_proj", (hidden, 2 * size), 0, both),
        ".linear_fc1.bias": ("gate_up_proj_bias", (2 * size,), 0, both),
        ".linear_fc2.weight": ("down_proj", (size, hidden), 1, (Span(0, 0, size),)),
        ".linear_fc2.bias": ("down_proj_bias", (hidden,), 0, (Span(0, 0, hidden),)),
    }
    name, sizes, dim, spans = parts[kind]
    return Part(
        name=prefix + name, shape=(count, *sizes), dim=dim, spans=spans, expert=number, transposed=len(sizes) == 2
    )


def _router(kind: str) -> Callable[[str, ModelShape, Rank], tuple[Part, ...]]:
    """Builds the entry of the weight or the bias (``kind``) of a router, whole on every rank."""

    def router(prefix: str, shape: ModelShape, tp: Rank) -> tuple[Part, ...]:
        assert shape.mixture is not None
        name = "router" if shape.mixture.clamped else "gate"
        width = (shape.hidden,) if kind == "weight" else ()
        return (Part(name=f"{prefix}mlp.{name}.{kind}", shape=(shape.mixture.experts, *width)),)

    return router


def _sinks(prefix: str, shape: ModelShape, tp: Rank) -> tuple[Part, ...]:
    """Returns the sinks of a rank's heads."""
    each = shape.heads // tp.size
    return (Part(name=f"{prefix}self_attn.sinks", shape=(shape.heads,), spans=(Span(tp.rank * each, 0, each),)),)


def _shared(shape: ModelShape) -> int:
    assert shape.mixture is not None
    assert shape.mixture.shared is not None
    return shape.mixture.shared


def _gate_and_up_of_shared(prefix: str, shape: ModelShape, tp: Rank) -> tuple[Part, ...]:
    assert shape.mixture is not None
    return _gate_and_up(shape.mixture.shared_name, _shared)(prefix, shape, tp)


def _down_of_shared(prefix: str, shape: ModelShape, tp: Rank) -> tuple[Part, ...]:
    assert shape.mixture is not None
    return _columns(f"{shape.mixture.shared_name}.down_proj.weight", _shared)(prefix, shape, tp)


def _experts(shape: ModelShape) -> int:
    assert shape.mixture is not None
    return shape.mixture.experts


def _columns(name: str, width: Callable[[ModelShape], int]) -> Callable[[str, ModelShape, Rank], tuple[Part, ...]]:
    """Builds the entry of a rank's share of the columns of ``name``, a weight (hidden, width(shape))."""

    def columns(prefix: str, shape: ModelShape, tp: Rank) -> tuple[Part, ...]:
        each = width(shape) // tp.size
        full = (shape.hidden, width(shape))
        return (Part(name=prefix + name, shape=full, dim=1, spans=(Span(tp.rank * each, 0, each),)),)

    return columns


def _projection_of_module(prefix: str, shape: ModelShape, tp: Rank) -> tuple[Part, ...]:
    """Returns a rank's rows of the projection of an embedding and a hidden state."""
    each = shape.hidden // tp.size
    full = (shape.hidden, 2 * shape.hidden)
    return (Part(name=f"{prefix}eh_proj.weight", shape=full, spans=(Span(tp.rank * each, 0, each),)),)


def _whole(name: str, *sizes: Callable[[ModelShape], int]) -> Callable[[str, ModelShape, Rank], tuple[Part, ...]]:
    """Builds the entry of the tensor ``name`` of these sizes, whole on every rank."""
    return lambda prefix, shape, tp: (Part(name=prefix + name, shape=tuple(size(shape) for size in sizes)),)


# Megatron's name of a layer's parameter -> a function (prefix of the layer's Hugging Face names, shape of the model,
# tensor-parallel rank) -> parts of the parameter.
_LAYER_PARTS: dict[str, Callable[[str, ModelShape, Rank], tuple[Part, ...]]] = {
    "input_layernorm.weight": _whole("input_layernorm.weight", lambda shape: shape.hidden),
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _whole("self_attn.q_norm.weight", lambda shape: shape.head_dim),
    "self_attention.k_layernorm.weight": _whole("self_attn.k_norm.weight", lambda shape: shape.head_dim),
    "self_attention.core_attention.softmax_offset": _sinks,
    "self_attention.linear_proj.weight": _columns("self_attn.o_proj.weight", lambda shape: shape.attended),
    "self_attention.linear_proj.bias": _whole("self_attn.o_proj.bias", lambda shape: shape.hidden),
    "pre_mlp_layernorm.weight": _whole("post_attention_layernorm.weight", lambda shape: shape.hidden),
    "mlp.linear_fc1.weight": _gate_and_up("mlp", lambda shape: shape.ffn),
    "mlp.linear_fc2.weight": _columns("mlp.down_proj.weight", lambda shape: shape.ffn),
    "mlp.router.weight": _router("weight"),
    "mlp.router.bias": _router("bias"),
    CORRECTION: _whole("mlp.gate.e_score_correction_bias", _experts),
    "mlp.shared_experts.linear_fc1.weight": _gate_and_up_of_shared,
    "mlp.shared_experts.linear_fc2.weight": _down_of_shared,
    "enorm.weight": _whole("enorm.weight", lambda shape: shape.hidden),
    "hnorm.weight": _whole("hnorm.weight", lambda shape: shape.hidden),
    "eh_proj.weight": _projection_of_module,
    "final_layernorm.weight": _whole("shared_head.norm.weight", lambda shape: shape.hidden),
    "mlp.shared_experts.gate_weight": _whole(
        "mlp.shared_expert_gate.weight", lambda shape: 1, lambda shape: shape.hidden
    ),
}
