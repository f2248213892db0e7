"""Trains a scenario with the oracle, document by document, and writes its record and the choices of its routers.

Below the exact tier, every backend replays the experts that the oracle's routers chose
(conformance.runner.oracle_jobs). A pass is identified by its recording key: an update, or a pass over a rollout
before its first update, by each model's own weights.

Every cell is compared with the float64 record. The same run in a cell's precision measures the error that this
precision causes when nothing is wrong. The oracle never packs or pads rows, so a packed row of a backend is compared
with documents that cannot attend to each other (conformance.oracle.step).
"""

import contextlib
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import conformance
from conformance.models.components import MixtureOfExperts
from conformance.models.families import UPDATES_OF_BIASES, is_written
from conformance.models.folders import elements_of
from conformance.numerics.float64_tier import exact_tier, settings_of
from conformance.numerics.sketch import kept, sketched_above
from conformance.oracle.decoder import is_buffer
from conformance.oracle.defects import variant_of
from conformance.oracle.objectives import rollout_functions_of
from conformance.oracle.optimizer import (
    AdamW,
    LossScale,
    StoredRounding,
    clip_factor,
    global_norm,
    make_optimizer,
    stacked,
)
from conformance.oracle.primitives import UNNAMED, UNNAMED_NORM, Policy, Tap, Variant, Weights
from conformance.oracle.role_model import Decoder, bytes_needed, decoder_of, devices_for, is_routed
from conformance.oracle.step import (
    EMBEDDING,
    Model,
    Observed,
    RowsByKey,
    annotated,
    observe,
    run_rollout_pass,
    with_columns,
)
from conformance.records.step_tensors import RecordWriter, file_sha256
from conformance.runtime import RankContext
from conformance.runtime.messages import mark
from conformance.spec.batch import CHOICES, Batch, Column, Document, Row, expert_column, read_batches, write_batches
from conformance.spec.known_defects import Defect, defects_to_json, parse_defects
from conformance.spec.objectives import all_observables
from conformance.spec.observables import OLD_ROUTING, POLICY, ROUTING, SHIFTED, SKIPPED, Role, model_key
from conformance.spec.precision import FLOAT64, PRECISIONS, noise_runs, parts_of_run, precision_of_run
from conformance.spec.scenario import Scenario, parse_scenario, scenario_to_json

# Of attention on GPUs. cuDNN would plan anew for each length of a document: on an H200 60 to 80 ms, and again backward.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NO_PASS = -1.0  # replaces an expert's number where the run ends before the pass


@dataclass
class Choices:
    """Collects the choices of a run on ``batches``.

    ``routers``: the same for all its models. ``of``: the chosen experts of each row, (T, routers, K), by step and key.
    """

    batches: Sequence[Batch]
    routers: Sequence[MixtureOfExperts]
    of: dict[tuple[int, str], dict[int, Tensor]] = field(default_factory=dict)

    def note(self, step: int, rows: RowsByKey) -> None:
        """Adds ``rows`` of a step, by key; observables other than routing are ignored."""
        for key, weights in rows.items():
            if self.routers and key.rpartition(".")[2] in (ROUTING, OLD_ROUTING):
                self.of[step, key] = {row: self._chosen(tensor) for row, tensor in weights.items()}

    def _chosen(self, weights: Tensor) -> Tensor:
        of_tokens = weights.view(-1, len(self.routers), self.routers[0].experts)
        return of_tokens.topk(self.routers[0].chosen, dim=-1).indices.cpu()  # unchosen experts have weight 0

    def write(self, path: Path) -> None:
        """Writes the batches with these columns."""
        keys = sorted({key for _, key in self.of})
        chosen = [replace(b, rows=tuple(self._row(b.step, row, keys) for row in b.rows)) for b in self.batches]
        write_batches(path, chosen)

    def _row(self, step: int, row: Row, keys: Sequence[str]) -> Row:
        parts: dict[str, Sequence[Tensor]] = {}
        for key in keys:
            known = self.of.get((step, key))
            if known:
                parts[key] = known[row.index].split([len(document.tokens) for document in row.documents])
        documents = []
        for number, document in enumerate(row.documents):
            own = {key: parts[key][number] for key in parts}
            documents.append(replace(document, columns={**document.columns, **self._columns(document, keys, own)}))
        return replace(row, documents=tuple(documents))

    def _columns(self, document: Document, keys: Sequence[str], chosen: Mapping[str, Tensor]) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        for key in keys:
            for layer in range(len(self.routers)):
                for slot in range(self.routers[0].chosen):
                    numbers = [NO_PASS] * len(document.tokens)
                    if key in chosen:
                        numbers = chosen[key][:, layer, slot].double().tolist()
                    columns[expert_column(layer, slot, key)] = tuple(numbers)
        return columns


def header(
    scenario: Scenario,
    precision: str,
    policy: Policy,
    *,
    settings: Mapping[str, str],
    decoders: Mapping[str, Decoder],
    loss_scale: float,
    defects: tuple[Defect, ...],
) -> dict[str, Any]:
    """Returns the header of the record, as JSON values for a RecordWriter.

    settings: the settings in force for kernels on GPUs. decoders: by role, with trained models last. loss_scale: of the
    trained models at the first step.
    """
    return {
        "cell": "oracle",
        "backend": {"name": "oracle", "precision": precision, "defects": defects_to_json(defects)},
        "scenario": scenario_to_json(scenario),
        "layout": "dp1",
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "backend-parity": conformance.__version__,
            **settings,
        },
        "resolved": {
            "compute_dtype": str(policy.compute),
            "stable_dtype": str(policy.stable),
            "master_dtype": str(policy.stable),
            "loss_scale": loss_scale,
            "micro_batch": "one document",
            "architecture": {name: decoder.described() for name, decoder in decoders.items()},
            "second_class": list(decoders.values())[-1].second_class,
            "not_judged": [
                feature
                for feature in list(decoders.values())[-1].not_judged
                if not (scenario.router_bias_rate and feature == UPDATES_OF_BIASES)
            ],
        },
    }


# The reference, and the noise runs of each precision: with the fused attention kernel and by the plain formula.
POLICIES: Mapping[str, Policy] = {
    FLOAT64: Policy(torch.float64, torch.float64),
    **{
        run: Policy(
            tier.compute.dtype,
            tier.master.dtype,
            fused=run == tier.name,
            stored=tier.stored.dtype if tier.stored else None,
            stochastic=tier.is_stochastic,
        )
        for tier in PRECISIONS.values()
        for run in noise_runs(tier.name)
    },
}


def run_oracle(
    *,
    scenario: Scenario,
    models: Mapping[str, Path],
    batches: list[Batch],
    out: Path,
    policy_name: str,
    restarts: Sequence[int] = (),
    merges: Sequence[int] = (),
    defects: tuple[Defect, ...] = (),
    device: str = "cpu",
    trusted: bool = False,
) -> None:
    """Trains ``scenario.steps`` steps of ``batches``, and writes a complete record to ``out``. ``models``: by role.

    policy_name: "float64" for the reference, or a precision whose error is measured: float32 master weights, gradients
    and optimizer, computed in float32, bfloat16 or float16, with torch's fused attention kernel or ("-plain") by the
    formula. The error is that of the kernels of ``device``, so it is measured where the cell runs, with the settings of
    its tier (float64_tier.settings_of). A model that is too large for one GPU is spread over several by layers.
    restarts: steps at which optimizer and schedule begin anew, because the cell resumes from exported weights.
    merges: steps at which the policy's adapter is merged into the base and then begins anew. defects: known defects to
    reproduce. trusted: whether the Python code of a model's folder may run (decoder_of).

    Raises ValueError for a model or an objective that the oracle does not know, too few batches, a step without target
    tokens, and gradients that are not finite.
    """
    policy = policy_of(policy_name, scenario, batches, device)
    probe = torch.zeros(1, dtype=policy.compute)
    assert probe.dtype == policy.compute, "inside exact_tier() a lower precision cannot be measured; run it outside"
    if len(batches) < scenario.steps:
        raise ValueError(f"scenario {scenario.name!r} has {scenario.steps} steps but only {len(batches)} batches")
    devices = devices_for(device, bytes_needed(scenario, models, policy))
    with contextlib.ExitStack() as stack:
        settings = stack.enter_context(settings_of(precision_of_run(policy_name), device))
        if device != "cpu":
            stack.enter_context(torch.device(devices[0]))  # tokens have to be where the embedding is
            stack.enter_context(sdpa_kernel(KERNELS))
        stack.enter_context(_tier(policy, models.values()))
        variant = variant_of(defects)
        roles, elements = scenario.objective.roles, elements_of(models)
        loaded = [_load(role, models[role.name], scenario, policy, variant, devices, trusted) for role in roles]
        _begin(scenario, loaded, policy, variant)
        above = sketched_above(scenario.sketch, elements)
        writer = RecordWriter(
            out,
            header(
                scenario,
                policy_name,
                policy,
                settings=settings,
                decoders={model.role.name: model.decoder for model in loaded},
                loss_scale=loaded[-1].scale(policy),  # frozen models come first, so the last one is trained
                defects=defects,
            ),
            observables=all_observables(
                scenario.objective,
                scaled=scenario.judged_loss_scale is not None,
                routed=is_routed(models[roles[0].name]),
            ),
        )
        started = time.perf_counter()
        # A defect changes the gradients but not ``shifted``, so a run with defects does not record it.
        shifts = policy.compute == torch.float64 and not defects
        choices = _train(scenario, loaded, batches, writer, policy, variant, restarts, merges, above, shifts)
        summary: dict[str, Any] = {"seconds": time.perf_counter() - started}
        if policy_name == FLOAT64 and choices.routers:
            choices.write(out / CHOICES)
            summary["choices"] = file_sha256(out / CHOICES)
        writer.finish(summary)


def policy_of(name: str, scenario: Scenario, batches: Sequence[Batch], device: str) -> Policy:
    """Returns the policy of a run.

    On a CPU the "-plain" noise run adds up the gradients of a micro-batch's embeddings at once: in half precision those
    of the rows that one data-parallel rank of the cell holds, in fp32, where it hardly matters, those of all rows. A
    rank that shares sequences with others holds fewer tokens, so its embeddings have wider bounds than need be. On a
    GPU, it has products of as many tokens as a micro-batch of one of two data-parallel ranks: there, rounding depends
    on the size of a product (docs/explanations/tolerances.md).
    """
    name, ranks = parts_of_run(name)
    policy = POLICIES[name]
    if policy.fused or policy.compute == torch.float64:
        return policy
    if device == "cpu":
        return replace(policy, lookups=scenario.accumulation * ranks)
    rows = max(1, len(batches[0].rows) // (2 * scenario.accumulation))
    return replace(policy, tokens=rows * max(batch.max_len for batch in batches))


def observe_step(
    *,
    scenario: Scenario,
    models: Mapping[str, Path],
    batches: Sequence[Batch],
    step: int,
    weights: Callable[[int, Role], Weights | None],
    taps: Mapping[str, Tap],
    defects: tuple[Defect, ...] = (),
) -> Observed:
    """Runs forward and backward of one step in float64, without an update. ``batches``: all up to this step.

    ``weights(step, role)``: the weights before a step, by name, or None for those of the folder. It is called for this
    step and for the first step of its rollout. ``taps`` observe every module of the models of these roles. ``defects``:
    those of the oracle that the cell was judged by.
    """
    policy, objective, variant = POLICIES[FLOAT64], scenario.objective, variant_of(defects)
    loaded = [_load(role, models[role.name], scenario, policy, variant, ["cpu"], False) for role in objective.roles]

    def as_before(number: int) -> None:
        for model in loaded:
            model.weights = weights(number, model.role) or model.weights

    batch = batches[step]
    if objective.reads == "rollouts":
        first = max(number for number, one in enumerate(batches[: step + 1]) if one.rollout)
        as_before(first)
        functions = rollout_functions_of(objective, variant)
        known = run_rollout_pass(batches[first].rollout, loaded, functions, policy, variant)
        batch = with_columns(batch, known[(step - first) % len(known)].batch)
    as_before(step)
    return observe(batch, loaded, objective, policy, variant, taps)


def _load(
    role: Role, folder: Path, scenario: Scenario, policy: Policy, variant: Variant, devices: Sequence[str], trust: bool
) -> Model:
    decoder = decoder_of(replace(scenario, trust_remote_code=trust), folder)
    if scenario.lora and role == POLICY:
        decoder = decoder.adapted(scenario.lora)
    decoder = decoder.varied(variant)
    # Trained weights are kept as masters, frozen weights in the compute dtype.
    dtype = policy.stable if role.trained else policy.compute
    weights = decoder.load(folder, dtype, variant, trained=role.trained, devices=devices)
    own = (name for name in weights if not is_buffer(name) and name not in decoder.untrained)
    trained = frozenset(name for name in own if scenario.trains(role, name.removeprefix(UNNAMED)))
    return Model(role=role, decoder=decoder, weights=weights, trained=trained, z_loss=scenario.router_z_loss)


def _tier(policy: Policy, folders: Iterable[Path]) -> contextlib.AbstractContextManager[None]:
    """Enters the exact tier for float64 if transformers, which rounds to float32 in places, is the oracle."""
    second_class = not all(map(is_written, folders))
    return exact_tier() if second_class and policy.compute == torch.float64 else contextlib.nullcontext()


def _begin(scenario: Scenario, models: Sequence[Model], policy: Policy, variant: Variant) -> None:
    """Creates new optimizers, and resets schedule and loss scale."""
    for model in (model for model in models if model.role.trained):
        half = policy.compute != torch.float64
        model.optimizers = {
            matrix: make_optimizer(scenario.optimizer, matrix, model.weights[parts[0]].ndim, variant, half=half)
            for matrix, parts in scenario.optimizer.matrices(sorted(model.trained)).items()
        }
        model.updates = 0
        config = scenario.judged_loss_scale
        model.loss_scale = LossScale(config) if config else None


def _train(
    scenario: Scenario,
    models: list[Model],
    batches: list[Batch],
    writer: RecordWriter,
    policy: Policy,
    variant: Variant,
    restarts: Sequence[int],
    merges: Sequence[int],
    above: float,
    shifts: bool,
) -> Choices:
    writer.loaded({name: t for model in models for name, t in _kept(model, "weight", model.weights, above).items()})
    adapters = {model.role.name: {n: model.weights[n] for n in model.decoder.adapter_names} for model in models}
    choices = Choices(batches, models[-1].decoder.routers)
    for step, annotation in enumerate(annotated(batches, models, scenario.objective, policy, variant)):
        choices.note(step, annotation.rows)
        if step >= scenario.steps:  # a mini-batch that is needed for advantages only
            continue
        step_started = time.perf_counter()
        if step in restarts:
            _begin(scenario, models, policy, variant)
        for model in (model for model in models if step in merges and adapters[model.role.name]):
            model.weights = model.decoder.merged(model.weights) | adapters[model.role.name]
        observed = observe(annotation.batch, models, scenario.objective, policy, variant, shifts=shifts)
        choices.note(step, observed.rows)
        values, tensors = dict(observed.values), dict[str, Tensor]()
        for key, rows in {**annotation.rows, **observed.rows}.items():
            tensors |= {f"{key}/{row}": tensor for row, tensor in rows.items()}
        for model in models:
            if not model.role.trained:
                continue
            gradients, prefix = observed.gradients[model.role.name], model.role.prefix
            per_rollout = getattr(scenario.objective, "steps_per_rollout", 1)
            moved = variant.schedule_step(model.updates, per_rollout)
            lr = scenario.optimizer.lr * scenario.schedule.factor(moved)
            values[model_key(prefix, "lr")] = lr
            if scenario.router_bias_rate:  # libraries move biases also at a step whose gradients overflow
                move_biases(model, observed.rows[model_key(prefix, ROUTING)], scenario.router_bias_rate)
            if model.loss_scale:
                settings = model.loss_scale.update(gradients, policy, step=step)
                values |= {model_key(prefix, key): number for key, number in settings.items()}
                if settings[SKIPPED]:
                    tensors |= _kept(model, "weight", model.weights, above)
                    continue
            norm = global_norm(gradients)
            values[model_key(prefix, "grad_norm")] = norm
            if unnamed := {name: g for name, g in gradients.items() if name.startswith(UNNAMED)}:
                values[model_key(prefix, UNNAMED_NORM)] = global_norm(unnamed)
            tensors |= _kept(model, "gradient", gradients, above)
            if model.role.name in observed.shifted:
                tensors[f"{model_key(prefix, SHIFTED)}/{EMBEDDING}"] = observed.shifted[model.role.name]
            factor = clip_factor(norm, scenario.optimizer.max_grad_norm)
            groups = scenario.optimizer.matrices(sorted(gradients))
            if policy.stored:
                keeps = StoredRounding(policy, seed=(scenario.seed, step, policy.fused))
                _update_stored(model, gradients, factor, lr, keeps)
            else:
                _update(model, groups, gradients, factor, lr, is_last=step == scenario.steps - 1)
            tensors |= _kept(model, "weight", model.weights, above)
        writer.step(values, tensors, seconds=time.perf_counter() - step_started)
    return choices


def _update(
    model: Model, groups: Mapping[str, Sequence[str]], gradients: Weights, factor: float, lr: float, *, is_last: bool
) -> None:
    """Updates the weights one after another; ``groups``: those that are one matrix to their optimizer, by its name.

    Each gradient is dropped after use, and each optimizer state after the last step: together they may be several times
    as large as the model.
    """
    for matrix, parts in groups.items():
        rows = [len(gradients[name]) for name in parts] if len(parts) > 1 else []
        weight, gradient = (stacked([of[name] for name in parts]) for of in (model.weights, gradients))
        for name in parts:
            del gradients[name]
        updated = model.optimizers[matrix].step({matrix: weight}, {matrix: gradient * factor}, lr)[matrix]
        model.weights |= zip(parts, updated.split(rows) if rows else [updated], strict=True)
        if is_last:
            del model.optimizers[matrix]
    model.updates += 1


def _update_stored(model: Model, gradients: Weights, factor: float, lr: float, stored: StoredRounding) -> None:
    """Updates weights without masters: clipped gradients, moments and weights are rounded once each."""
    for name, gradient in gradients.items():
        optimizer = model.optimizers[name]
        clipped = stored.nearest(gradient * factor)
        model.weights[name] = stored.weight(optimizer.step(model.weights, {name: clipped}, lr)[name])
        assert isinstance(optimizer, AdamW), "backends without masters train with AdamW only"
        for moments in optimizer.moments:
            moments[name] = stored.nearest(moments[name])
    model.updates += 1


def move_biases(model: Model, rows: Mapping[int, Tensor], rate: float) -> None:
    """Moves the bias of each expert by b_x <- b_x + u sign(mean load - load of x) (arXiv 2408.15664, algorithm 1).

    ``rows``: the factors of experts' outputs in the step, (T x routers x X,). A load counts all tokens of the step.
    """
    names = [name for name in model.weights if is_buffer(name)]  # in the order of the layers
    loads_RX = sum((row.view(-1, len(names), model.decoder.routers[0].experts) > 0).sum(dim=0) for row in rows.values())
    for name, load_X in zip(names, torch.as_tensor(loads_RX), strict=True):
        below = torch.sign(load_X.sum() - load_X * len(load_X))  # in integers: a load may equal the mean
        model.weights[name] = model.weights[name] + rate * below.to(model.weights[name])


def _kept(model: Model, kind: str, tensors: Weights, above: float) -> dict[str, Tensor]:
    """Returns what the record keeps of tensors that have a name in the model's folder."""
    key = model_key(model.role.prefix, kind)

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            if not name.startswith(UNNAMED):
                yield f"{key}/{name}", tensor
                mark()

    return kept(named(), above=above)


def run(
    rank: RankContext,
    *,
    scenario: dict[str, Any],
    models: dict[str, str],
    batches: str,
    out: str,
    policy: str,
    restarts: list[int],
    merges: list[int],
    defects: list[dict[str, Any]],
    trusted: bool,
) -> None:
    """Calls ``run_oracle`` in a worker group of one rank, with arguments that are given as JSON values."""
    rank.beat(policy)
    run_oracle(
        scenario=parse_scenario(scenario),
        models={role: Path(folder) for role, folder in models.items()},
        batches=read_batches(Path(batches)),
        out=Path(out),
        policy_name=policy,
        restarts=restarts,
        merges=merges,
        defects=parse_defects(defects),
        device=rank.device,
        trusted=trusted,
    )
