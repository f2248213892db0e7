"""Plans a training for ``--dry-run``: ranks, rows, models, and the memory that a rank needs.

Activations that are kept for the backward pass are estimated by the terms of Korthikanti et al., arXiv 2205.05198,
section 4 (the inputs that each operator keeps), for layers with RMSNorm, grouped queries and SwiGLU instead of theirs,
without dropout, and with an attention kernel that keeps no scores. Sections 4.2.1 and 4.2.2 describe what tensor and
sequence parallelism shard, section 5 what remains with recomputation.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from conformance.core.errors import UsageError, shown
from conformance.core.io import read_json
from conformance.models.folders import EMBEDDING, HEAD
from conformance.models.synthetic import random_model
from conformance.spec.layout import AXES, OPTIONS, Layout
from conformance.spec.observables import POLICY, Head, Role
from conformance.spec.precision import PRECISIONS, PrecisionName
from impl.deepspeed.config import states_of as deepspeed_states
from impl.engine.memory_estimate import Shapes, States, StatesOf, elements, states_of_role, weight_shapes
from impl.fsdp2.adapter import states_of as fsdp2_states
from impl.megatron.adapter import states_of as megatron_states
from impl.megatron.hf_mapping import all_parameters, parts
from impl.megatron.model_config import VALUE_HEAD, VOCABULARY_MULTIPLE, ModelShape, read_shape
from impl.megatron.spans import Rank
from impl.train.config import TrainConfig

STATES_OF: dict[str, StatesOf] = {"deepspeed": deepspeed_states, "fsdp2": fsdp2_states, "megatron": megatron_states}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Holds the sizes that activations depend on. ``queries``, ``keys``: the widths of all heads together."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    queries: int
    keys: int
    vocab: int


def read_sizes(folder: Path) -> Sizes:
    """Reads the sizes from a Hugging Face folder. Raises UsageError if its configuration lacks one."""
    config = read_json(folder / "config.json")
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if type(value) is not int or value < 1:
            raise UsageError(f"{folder}/config.json: {key} must be a positive whole number, got {shown(value)}")
        return value

    heads = size("num_attention_heads")
    width = size("head_dim", size("hidden_size") // heads)
    return Sizes(
        layers=size("num_hidden_layers"),
        hidden=size("hidden_size"),
        ffn=size("intermediate_size"),
        heads=heads,
        queries=heads * width,
        keys=size("num_key_value_heads", heads) * width,
        vocab=size("vocab_size"),
    )


def parameter_shapes(folder: Path, head: Head) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a folder's model with this head; a tied head is left out.

    They are those of its weights, including weights still to be drawn. Without weights they follow from the
    configuration, if impl/megatron/model_config.py knows the architecture. Raises UsageError for a folder with neither.
    """
    if any(folder.glob("*.safetensors")) or random_model(folder):
        found = weight_shapes(folder)
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


def states_of(backend: str, layout: Layout, precision: PrecisionName, shapes: Shapes, *, trained: bool) -> States:
    """Estimates a model that is trained with AdamW, or a frozen model."""
    return STATES_OF[backend](layout, PRECISIONS[precision], shapes, trained)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Holds the bytes of activations on a rank.

    kept: an upper bound for all layers.
    layer: the layer that is recomputed; 0 without recomputation.
    logits: all copies of the logits that the loss holds at the same time.
    """

    kept: int
    layer: int
    logits: int


def activations_of(
    backend: str, layout: Layout, sizes: Sizes, *, compute: int, tokens: int, micro_batches: int, entropy: bool
) -> Activations:
    """Estimates activations.

    tokens: of a micro-batch on a context-parallel rank.
    compute: bytes of a number.
    """
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
    """Estimates the bytes of the loss (impl/models/outputs.py).

    They are the logits, the softmax in float32 or wider (twice with entropy), and the gradient, which shares the
    softmax's memory if it has the same dtype.
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


GIB = 2**30
_AXES = {
    "dp": "data-parallel",
    "tp": "tensor-parallel",
    "sp": "context-parallel",
    "ulysses": "Ulysses",
    "pp": "pipeline",
}


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Holds the memory of one role; ``activations`` of a frozen model are those of its logits alone."""

    role: Role
    parameters: int
    states: States
    activations: Activations


def memory_of(config: TrainConfig) -> list[ModelMemory]:
    """Estimates the memory of each role's model on the rank that needs most."""
    scenario, layout = config.scenario, config.layout
    rows = scenario.data.rows // (layout.dp * scenario.accumulation)
    found = []
    for role in scenario.objective.roles:
        folder = config.models[role.name]
        shapes = parameter_shapes(folder, role.head)
        activations = activations_of(
            config.backend,
            layout,
            read_sizes(folder),
            compute=scenario.tier.compute.bytes,
            tokens=rows * scenario.data.max_len // (layout.sp * layout.ulysses),
            micro_batches=scenario.accumulation,
            entropy=scenario.objective.kind != "sft",
        )
        if not role.trained:
            activations = Activations(kept=0, layer=activations.layer, logits=activations.logits)
        if role.head == "value":
            activations = Activations(kept=activations.kept, layer=activations.layer, logits=0)
        states = states_of_role(STATES_OF[config.backend], scenario, layout, role, shapes)
        found.append(ModelMemory(role=role, parameters=elements(shapes), states=states, activations=activations))
    return found


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Holds the bytes of the sampling engine in every rank.

    weights: a whole replica of the policy.
    cache: keys and values of the responses that are sampled at once.
    """

    weights: int = 0
    cache: int = 0


def sampler_of(config: TrainConfig, models: list[ModelMemory]) -> Sampler:
    if config.rollout is None:
        return Sampler()
    policy = next(one for one in models if one.role == POLICY)
    sizes, compute = read_sizes(config.models[policy.role.name]), config.scenario.tier.compute.bytes
    prompts = min(config.rollout.at_once, config.rollout.prompts)
    tokens = prompts * config.rollout.n_samples_per_prompt * config.scenario.data.max_len
    return Sampler(weights=policy.parameters * compute, cache=tokens * sizes.layers * 2 * sizes.keys * compute)


def peak_of(models: list[ModelMemory], sampler: Sampler) -> int:
    """Returns the peak bytes: sampling, or the loss, the backward pass of a layer or the update of one model.

    The gradients of this model and the lasting bytes of all models are added.
    """
    lasting = sampler.weights + sum(one.states.lasting for one in models)
    moments = [
        one.states.freed
        + max(
            one.states.passing + one.activations.kept + max(one.activations.logits, one.activations.layer),
            one.states.update,
        )
        for one in models
    ]
    return lasting + max(sampler.cache, *moments)


def plan(config: TrainConfig) -> str:
    """Returns the plan as text; nothing is loaded."""
    scenario, layout, data = config.scenario, config.layout, config.scenario.data
    models = memory_of(config)
    sizes = [f"{getattr(layout, axis)} {_AXES[axis]}" for axis in AXES if axis in _AXES and getattr(layout, axis) > 1]
    rows = data.rows // (layout.dp * scenario.accumulation)
    lines = [
        f"training   {scenario.objective.kind} on {config.backend}, {scenario.precision}, {config.device}",
        f"ranks      {layout.world_size}{' = ' + ' x '.join(sizes) if sizes else ''}; layout {layout}",
        *(f"           {option}: {OPTIONS[option].meaning}" for option in layout.options),
        f"a step     {data.rows} rows of at most {data.max_len} tokens{', packed' if data.packed else ''} = "
        f"{layout.dp} data-parallel ranks x {scenario.accumulation} micro-batches x {rows} rows",
    ]
    if config.rollout is not None:
        each = data.rows * scenario.steps
        lines.append(
            f"rollout    {config.rollout.prompts} prompts x {config.rollout.n_samples_per_prompt} responses of at most "
            f"{config.rollout.max_new_tokens} tokens ({each} rows are trained on in all)"
        )
    lines.append(f"length     {scenario.steps} steps")
    lines += [
        f"{one.role.name:<10} {one.parameters / 1e9:.3g} B parameters, {'trained' if one.role.trained else 'frozen'} "
        f"({config.models[one.role.name]})"
        for one in models
    ]
    return "\n".join([*lines, "", *_table(models, sampler_of(config, models))])


def _table(models: list[ModelMemory], sampler: Sampler) -> list[str]:
    """Returns the lines of a table in GiB, with a column for each model."""
    rows = {
        "weights": [one.states.weights for one in models],
        "gradients": [one.states.gradients for one in models],
        "optimizer": [one.states.optimizer for one in models],
        "gathered and buckets": [one.states.passing for one in models],
        "activations kept": [one.activations.kept for one in models],
        "recomputed layer": [one.activations.layer for one in models],
        "logits and loss": [one.activations.logits for one in models],
        "update": [one.states.update for one in models],
        "on the host": [one.states.host for one in models],
    }
    head = f"{'GiB of the fullest rank':<24}" + "".join(f"{one.role.name:>12}" for one in models)
    body = [f"{name:<24}" + "".join(f"{size / GIB:>12.2f}" for size in sizes) for name, sizes in rows.items()]
    if sampler.weights:
        body.append(f"{'sampling':<24}{sampler.weights / GIB:>12.2f} replica, {sampler.cache / GIB:.2f} its cache")
    return [
        head,
        *body,
        f"peak, estimated: {peak_of(models, sampler) / GIB:.1f} GiB a rank; the first three rows are exact, the others "
        f"are estimates",
    ]
