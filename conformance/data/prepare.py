"""Makes the frozen inputs of a scenario once per output folder, for all its cells and the oracle."""

import dataclasses
import fnmatch
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from conformance.core.errors import UsageError
from conformance.core.host import resolve
from conformance.core.io import check_file, complete_or_nothing, locked
from conformance.data.documents import build_batches
from conformance.data.rollouts import build_rollouts, data_path, has_data
from conformance.models.folder_checks import check_model_folder, files_of, runs_code
from conformance.models.folders import check_finite, has_weights, prepare_model, weight_files
from conformance.models.synthetic import draw_weights, random_model
from conformance.oracle.role_model import Decoder, decoder_of
from conformance.records.step_tensors import input_sha256
from conformance.spec.batch import Batch, write_batches
from conformance.spec.objectives import objective_to_json
from conformance.spec.observables import POLICY
from conformance.spec.scenario import Scenario, scenario_to_json


@dataclass(frozen=True, kw_only=True)
class FrozenInputs:
    """Locates the inputs of every backend and of the oracle: a Hugging Face folder by role name, and frozen batches."""

    models: dict[str, Path]
    batches: Path


def prepare_inputs(scenario: Scenario, root: Path, *, draws: bool = True) -> FrozenInputs:
    """Makes the scenario's inputs under ``root/inputs``, unless they exist.

    ``draws``: whether to draw the weights of a random model (conformance.models.synthetic), which costs time and disk
    in proportion to its size. Raises UsageError for an unusable model or data set, and for a ``root`` inside the
    model's folder. The model's folder is checked before its code runs and before its files are copied.
    """
    source, decoder = checked_model(scenario, root)
    folder, drawn, models = root / "inputs", random_model(source), {}
    with locked(folder / "lock"):
        for role in scenario.objective.roles:
            name = f"{scenario.model_name}{'-' * bool(role.prefix)}{role.prefix}"
            adapted = [] if scenario.lora is None else [dataclasses.asdict(scenario.lora)]
            rounded = [] if scenario.tier.stored is None else [scenario.tier.stored.name]
            model = folder / f"{name}-{short_key(scenario.model, scenario.seed, role.head, *adapted, *rounded)}"
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
        values = scenario_to_json(scenario)
        used = {name: values[name] for name in ("data", "steps", "seed", "model")}
        batches = folder / f"batches-{short_key(used, objective_to_json(scenario.objective))}.safetensors"
        if not batches.exists():
            with complete_or_nothing(batches) as file:
                write_batches(file, scenario.objective.annotate(batches_of(scenario, source)))
    return FrozenInputs(models=models, batches=batches)


def checked_model(scenario: Scenario, root: Path) -> tuple[Path, Decoder]:
    """Checks the scenario's model; returns its folder and decoder. Raises UsageError for an unusable model, and for a
    ``root`` inside its folder."""
    source = resolve(scenario.model)
    check_model_folder(source)
    if (root / "inputs").resolve().is_relative_to(source):
        raise UsageError(f"{root} lies inside the model folder {source}, which is copied there; give another --out")
    runs_code(source, trusted=scenario.trust_remote_code)
    # A model that no oracle can compute cannot be judged, so it is rejected here.
    decoder = decoder_of(scenario, source)
    check_trained(scenario, decoder)
    return source, decoder


def batches_of(scenario: Scenario, model: Path) -> list[Batch]:
    """Builds the batches of a scenario for the Hugging Face folder ``model``, from what its objective reads."""
    return (build_rollouts if scenario.objective.reads == "rollouts" else build_batches)(scenario, model)


def check_trained(scenario: Scenario, decoder: Decoder) -> None:
    """Raises UsageError if the scenario's training options do not fit the model.

    That is: adapters that do not fit, a z-loss without routers, a rate of biases that no router has, a pattern of
    frozen parameters that matches no trained parameter, and no parameter left to train.
    """
    if scenario.router_z_loss and not decoder.routers:
        raise UsageError(
            f"router_z_loss={scenario.router_z_loss:g} is only for mixtures of experts that the oracle computes "
            f"(docs/explanations/mixture-of-experts.md), not for {scenario.model_name}; set it to 0, or give another "
            f"model"
        )
    if scenario.router_bias_rate and (scenario.lora or not any(part.corrected for part in decoder.routers)):
        lacking = "adapters leave the base as it is" if scenario.lora else f"{scenario.model_name} has no such bias"
        raise UsageError(
            f"router_bias_rate={scenario.router_bias_rate:g} moves the bias by which DeepSeek-V3's routers choose "
            f"experts, but {lacking}; set it to 0, or give another model"
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
                    f"optimizer.frozen names {pattern!r}, which matches no trained parameter of {scenario.model_name}; "
                    f"names look like {', '.join([*names][:3])}"
                )
        if not any(scenario.trains(role, name) for name in names):
            raise UsageError(f"optimizer.frozen leaves nothing of {role.name} to train; freeze less")


def input_digests(scenarios: Iterable[Scenario]) -> dict[str, str]:
    """Returns 16 hexadecimal digits of the SHA-256 of every file of the scenarios' models and data, by its name.

    A name is that of the model or data set, and below a folder the path there, because folders differ between
    machines. It is the whole path if two folders have the same name. Raises UsageError for an unusable folder,
    and for weights that are not finite: all of them are read here.
    """
    files: dict[Path, tuple[str, list[Path]]] = {}
    weights: set[Path] = set()
    for scenario in scenarios:
        if (model := resolve(scenario.model)) not in files:
            check_model_folder(model)
            weights |= set(weight_files(model) if has_weights(model) else ())
            files[model] = scenario.model_name, [file for file, _ in files_of(model)]
        if has_data(scenario) and (data := data_path(scenario)) not in files:
            found = sorted(data.rglob("*")) if data.is_dir() else [data]
            files[data] = data.name, [file for file in found if not file.is_dir()]
    counts, digests = Counter(name for name, _ in files.values()), dict[str, str]()
    for source, (name, found) in files.items():
        for file in found:
            check_file(file)
            if file in weights:
                check_finite(file)  # before the digest, which then finds what was read in the page cache
            label = Path(name if counts[name] == 1 else source, file.relative_to(source))
            digests[str(label)] = input_sha256(file)[:16]
    return digests


def short_key(*parts: object) -> str:
    """Returns ten hexadecimal digits of a digest of JSON values, for names of files and folders."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]
