"""Prints the plan of a training for ``--dry-run``: ranks, rows, models, and the memory that a rank needs."""

from dataclasses import dataclass

from conformance.spec.layout import AXES, OPTIONS
from conformance.spec.roles import POLICY, Role
from impl.engine.memory_estimate import States, elements, states_of_role
from impl.train.config import TrainConfig
from impl.train.memory_estimate import STATES_OF, Activations, activations_of, parameter_shapes, read_sizes

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
    cache: keys and values of the responses to one prompt, while it samples.
    """

    weights: int = 0
    cache: int = 0


def sampler_of(config: TrainConfig, policy: ModelMemory) -> Sampler:
    if config.rollout is None:
        return Sampler()
    sizes, compute = read_sizes(config.models[policy.role.name]), config.scenario.tier.compute.bytes
    tokens = config.rollout.n_samples_per_prompt * config.scenario.data.max_len
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
    policy = next(one for one in models if one.role == POLICY)
    return "\n".join([*lines, "", *_table(models, sampler_of(config, policy))])


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
