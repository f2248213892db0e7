"""Prepare: makes the frozen inputs of a scenario, once per output folder; all cells and the oracle share them."""

import dataclasses
import fnmatch
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from conformance.core.errors import UsageError
from conformance.core.io import complete_or_nothing, locked
from conformance.core.paths import resolve
from conformance.data.documents import build_batches
from conformance.data.rollouts import build_rollouts
from conformance.models.folder_checks import check_model_folder, runs_code
from conformance.models.folders import prepare_model
from conformance.models.synthetic import draw_weights, random_model
from conformance.oracle.role_model import Decoder, read_decoder
from conformance.spec.batch import Batch, write_batches
from conformance.spec.objectives import objective_to_json
from conformance.spec.roles import POLICY
from conformance.spec.scenario import Scenario, scenario_to_json


@dataclass(frozen=True, kw_only=True)
class FrozenInputs:
    """The inputs of every backend and of the oracle: a Hugging Face folder for each role, by the role's name, and the
    file of frozen batches."""

    models: dict[str, Path]
    batches: Path


def prepare_inputs(scenario: Scenario, root: Path, *, draws: bool = True) -> FrozenInputs:
    """Make the scenario's inputs under ``root/inputs``, unless they are there already. ``draws``: weights of a random
    model (conformance.models.synthetic), too, which takes as much time and disk as they are large.

    Raises UsageError for a model or data set that cannot be used, and for a ``root`` inside the model's folder. The
    model's folder is checked before any of its code is run and before any of its files is copied.
    """
    source, folder = resolve(scenario.model), root / "inputs"
    check_model_folder(source)
    if folder.resolve().is_relative_to(source):
        raise UsageError(f"{root} lies inside the model folder {source}, which is copied there; give another --out")
    drawn = random_model(source)
    runs_code(source, trusted=scenario.trust_remote_code)
    # A model that no oracle can compute cannot be judged, so it is refused here.
    disable, trusted = scenario.objective.disable_dropout, scenario.trust_remote_code
    decoder = read_decoder(source, disable_dropout=disable, trusted=trusted)
    check_trained(scenario, decoder)
    models = {}
    with locked(folder / "lock"):
        for role in scenario.objective.roles:
            name = f"{scenario.model_name}{'-' * bool(role.prefix)}{role.prefix}"
            adapted = [] if scenario.lora is None else [dataclasses.asdict(scenario.lora)]
            model = folder / f"{name}-{short_key(scenario.model, scenario.seed, role.head, *adapted)}"
            if not model.exists():
                if not drawn:
                    decoder.check_weights(source)
                with complete_or_nothing(model) as unfinished:
                    if drawn:
                        shutil.copytree(source, unfinished)
                    else:
                        prepare_model(scenario, role, unfinished)
            if drawn and draws:
                draw_weights(drawn, scenario, role, model)
            models[role.name] = model
        asked = scenario_to_json(scenario)
        used = {name: asked[name] for name in ("data", "steps", "seed", "model")}
        batches = folder / f"batches-{short_key(used, objective_to_json(scenario.objective))}.safetensors"
        if not batches.exists():
            with complete_or_nothing(batches) as file:
                write_batches(file, scenario.objective.annotate(batches_of(scenario, source)))
    return FrozenInputs(models=models, batches=batches)


def batches_of(scenario: Scenario, model: Path) -> list[Batch]:
    """Build the batches of a scenario for the Hugging Face folder ``model``, from samples or roll-outs."""
    build = {"samples": build_batches, "rollouts": build_rollouts}[scenario.objective.reads]
    return build(scenario, model)


def check_trained(scenario: Scenario, decoder: Decoder) -> None:
    """Raises UsageError for adapters that the model cannot have, for a z-loss where it has no routers, if a pattern of
    frozen parameters matches no parameter that would be trained without it, and if no parameter is left to train."""
    if scenario.router_z_loss and not decoder.routers:
        raise UsageError(
            f"router_z_loss={scenario.router_z_loss:g} is for mixtures of experts that the oracle computes "
            f"(docs/explanations/mixture-of-experts.md), and {scenario.model_name} is none; set it to 0, or give another model"
        )
    for role in scenario.objective.roles:
        if not role.trained:
            continue
        names = decoder.parameter_names(role.head)
        if scenario.lora and role == POLICY:
            names = decoder.adapted(scenario.lora).adapter_names
        for pattern in scenario.optimizer.frozen:
            if not fnmatch.filter(names, pattern):
                raise UsageError(
                    f"optimizer.frozen names {pattern!r}, which no parameter of {scenario.model_name} that is trained "
                    f"matches; names look like {', '.join([*names][:3])}"
                )
        if not any(scenario.trains(role, name) for name in names):
            raise UsageError(f"optimizer.frozen leaves nothing of {role.name} to train; freeze less")


def short_key(*parts: object) -> str:
    """Ten hexadecimal digits of a digest of JSON values, for the names of files and folders."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]
