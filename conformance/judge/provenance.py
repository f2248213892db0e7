"""Checks that the records being compared belong together: all phases of a cell in order, and its oracle.

A comparison of the wrong records proves nothing, however well they agree: a record compared with itself conforms, and
so does an exact record by the tolerance of fp32. So before anything is compared, the headers are checked against the
cell's id, the oracle's records against the format of an oracle, and both against the assumptions of the comparison.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError

from conformance.judge.measurements import is_lost
from conformance.numerics.sketch import is_projected, key_of
from conformance.records.record_format import AGAIN, RecordError
from conformance.records.step_tensors import Record, StepRecord, file_sha256, read_record
from conformance.results.requirements import TO
from conformance.results.trust import check_cell, check_oracle, second_class
from conformance.spec.batch import CHOICES, Batch, read_batches
from conformance.spec.known_defects import Defect
from conformance.spec.objectives import all_observables
from conformance.spec.observables import ROUTING, Observable, is_unread
from conformance.spec.precision import FLOAT64, noise_runs
from conformance.spec.scenario import Scenario

LAYOUT = "dp1"  # layout of the oracle, which is one process
MASTERS = (torch.float32, torch.float64)  # dtypes of trained weights, in every precision
PROJECTED_ALIKE = 1e-12  # relative difference of two projections of one tensor, from the order of summation


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records by which a cell is judged. ``noise``: the oracle's runs in its precision; none in the exact tier.
    ``batches``: below it, for a mixture of experts, the frozen batches with the expert choices for the ranks; or
    none."""

    phases: tuple[Record, ...]
    oracle: Record
    noise: tuple[Record, ...]
    batches: tuple[Batch, ...]


def read_records(cell: str, phases: Sequence[Path], oracle: Path, *, defects: tuple[Defect, ...] = ()) -> Records:
    """Reads the records of the cell with this id: of its phases, in order, and of its oracle in the folder ``oracle``,
    which has these ``defects``.

    Raises RecordError for a record that cannot be trusted, and if the records do not belong together.
    """
    records = tuple(read_record(phase) for phase in phases)
    if not records:
        raise RecordError(f"{cell} has no record; {AGAIN}")
    scenarios = [_scenario(record) for record in records]
    for record, scenario in zip(records, scenarios, strict=True):
        check_cell(record.path, record.header, cell=cell)
        if scenario != scenarios[0]:
            raise RecordError(f"{record.path} has another scenario than the previous phases; {AGAIN}")
    _check_id(cell, records, scenarios[0])
    _check_order(records, scenarios[0])
    for record in records:
        _check_phase(record, is_first=record is records[0])
    for before, after in pairwise(records):
        _check_handover(before, after)
    reference = _read_oracle(oracle, FLOAT64, scenarios[0], defects)
    for record in records:
        if record.observables != reference.observables:
            raise RecordError(f"{record.path} observes something else than its oracle {reference.path}; {AGAIN}")
    return Records(
        phases=records,
        oracle=reference,
        noise=_read_noise(oracle, records, reference, defects),
        batches=read_choices(reference, scenarios[0]),
    )


def _scenario(record: Record) -> Scenario:
    """Returns the scenario in the header. The record must contain exactly the declared observables."""
    try:
        scenario = record.scenario
        # No header names the model, but read_records compares the cell's observables with the oracle's.
        routed = any(map(is_routing, record.observables))
        declared = all_observables(scenario.objective, scaled=scenario.judged_loss_scale is not None, routed=routed)
    except Exception as error:  # the objective may be a foreign class, and a header may name anything
        raise RecordError(f"the scenario of {record.path} cannot be read ({error}); {AGAIN}") from None
    if record.observables != declared:
        raise RecordError(
            f"{record.path} observes something else than this version of the suite does for its objective; {AGAIN}, or "
            f"judge it with the version that wrote it"
        )
    _check_shapes(record)
    return scenario


def _check_phase(record: Record, *, is_first: bool) -> None:
    """Checks what only a cell's record contains: the start of its optimizer, the evidence of each rank, the leaks."""
    ranks, layout = record.footer.get("evidence", ()), record.layout
    if len(ranks) != layout.world_size:
        raise RecordError(
            f"{record.path} has the evidence of {len(ranks)} ranks, but {layout} has {layout.world_size}; {AGAIN}"
        )
    if not isinstance(record.header.get("backend", {}).get("name"), str):
        raise RecordError(f"{record.path} does not say which backend wrote it; {AGAIN}")
    if not isinstance(record.header["backend"].get("default_zero", ""), int | None):
        raise RecordError(f"{record.path} does not say which ZeRO stage the backend has by default; {AGAIN}")
    if (optimizer := record.header.get("optimizer")) not in (("new",) if is_first else ("new", "loaded")):
        raise RecordError(f"{record.path} has the impossible optimizer state {optimizer!r}; {AGAIN}")
    loads = ("", *(() if is_first else ("merge",))) if optimizer == "new" else ("checkpoint", "state")
    if record.header.get("loads") not in loads:
        raise RecordError(f"{record.path} cannot have loaded {record.header.get('loads')!r}; {AGAIN}")
    unread = [[is_unread(kind, step.line) for step in record.steps] for kind in ("weight", "gradient")]
    if [False, *unread[0]] != [*unread[1], False] or sum(unread[0]) > 1:
        raise RecordError(
            f"{record.path} leaves unread more than the weights after one step and the gradients of the next; {AGAIN}"
        )
    if "leaks" not in record.footer:
        raise RecordError(f"{record.path} does not say what was left in a lower precision; {AGAIN}")


def _check_handover(before: Record, after: Record) -> None:
    """Checks that both phases have the random generator states of every rank, if training is resumed."""
    if after.header["optimizer"] == "new":
        return
    for record, step in ((before, (before.loaded, *before.steps)[-1]), (after, after.loaded)):
        ranks, observed = len(record.footer["evidence"]), len(step.line.get("generators", ()))
        if observed != ranks:
            raise RecordError(
                f"{record.path} has the generators of {observed} of {ranks} ranks at step {step.step}; {AGAIN}"
            )


def _check_id(cell: str, records: Sequence[Record], scenario: Scenario) -> None:
    """Checks the parts of the id that name the training against the headers."""
    name, _, _, layouts, precision, *rest = [*cell.split("/"), "", "", "", ""]
    seeded = not scenario.seed or f"seed{scenario.seed}" in rest
    if (scenario.name, scenario.precision) != (name, precision) or not seeded:
        trained = f"{scenario.name} in {scenario.precision} with seed {scenario.seed}"
        raise RecordError(f"{records[0].path} trains {trained}, but the cell is {cell}; {AGAIN}")
    requested = layouts.split(TO)
    if len(requested) not in (1, len(records)):
        raise RecordError(f"{cell} has {len(requested)} phases, but {len(records)} records; {AGAIN}")
    for place, record in enumerate(records):
        if (found := record.header.get("layout")) != (layout := requested[place % len(requested)]):
            raise RecordError(f"{record.path} has layout {found}, but this phase of {cell} has {layout}; {AGAIN}")
        try:
            record.layout  # noqa: B018 - raises for an invalid layout
        except ValueError as error:
            raise RecordError(f"{record.path}: {error}") from None


def _check_order(records: Sequence[Record], scenario: Scenario) -> None:
    """Checks that each phase starts where the previous one ended, and that there is at least one step."""
    done = 0
    for record in records:
        if (first := record.loaded.step + 1) != done:
            raise RecordError(f"{record.path} begins with step {first}, but {done} is next; put its phases in order")
        done += len(record.steps)
    if not 0 < done <= scenario.steps:
        raise RecordError(f"{records[0].path.parent} has {done} steps, but its scenario has {scenario.steps}; {AGAIN}")


def _read_oracle(folder: Path, precision: str, scenario: Scenario, defects: tuple[Defect, ...]) -> Record:
    """Reads the oracle's record in a precision, and checks everything that the comparison takes for granted."""
    record = read_record(folder / precision)
    check_oracle(record.path, record.header, precision=precision, defects=defects)
    if record.header.get("layout") != LAYOUT:
        raise RecordError(f"{record.path} does not have the oracle's layout {LAYOUT}; {AGAIN}")
    if _same(_scenario(record)) != _same(scenario):
        raise RecordError(f"{record.path} and the cell are of different scenarios; judge each by its own oracle")
    if len(record.steps) != scenario.steps or record.loaded.step != -1:
        raise RecordError(f"{record.path} has {len(record.steps)} steps of {scenario.steps}; {AGAIN}")
    for step in (record.loaded, *record.steps):
        if lacking := next(_lacking(step, record.observables), ""):
            raise RecordError(f"{record.path} has {lacking} at step {step.step}; {AGAIN}")
    return record


def read_choices(oracle: Record, scenario: Scenario) -> tuple[Batch, ...]:
    """Reads the batches with the choices of the oracle's routers, if cells receive these choices."""
    if scenario.tier.is_exact or not any(is_routing(o) for o in oracle.observables):
        return ()
    file = oracle.path / CHOICES
    try:
        if file_sha256(file) != oracle.lines.footer.get("choices"):
            raise RecordError(f"{file} was changed after the run, but ranks used its choices; {AGAIN}")
        batches = tuple(read_batches(file))
    except (OSError, SafetensorError, KeyError, ValueError, AssertionError) as error:
        raise RecordError(f"{file} cannot be read ({error!r}), but ranks used its choices; {AGAIN}") from None
    steps = [step.step for step in oracle.steps]  # the last rollout may have batches beyond them
    if [batch.step for batch in batches[: len(steps)]] != steps:
        raise RecordError(f"{file} has other steps than {oracle.path}; {AGAIN}")
    return batches


def is_routing(observable: Observable) -> bool:
    """Whether it is the weights of the experts that a model's routers choose."""
    return observable.key.rpartition(".")[2] == ROUTING


def _same(scenario: Scenario) -> Scenario:
    """Returns the part of a scenario that the oracle's numbers depend on."""
    return replace(scenario.reference, name="any", precision="exact")


def _lacking(step: StepRecord, observables: Sequence[Observable]) -> Iterator[str]:
    """Yields what this step of an oracle's record lacks."""
    shapes = step.shapes()
    for o in observables:
        if not o.applies(step.step) or is_lost(o, step):
            continue
        recorded = _under(o.key, shapes)
        if o.kind in ("scalar", "setting"):
            numbers = {key: step.value(key) for key in (o.key, o.scale or o.key)}
            yield from (f"{k}={v}" for k, v in numbers.items() if v is None or not math.isfinite(v))
        elif o.kind == "rows" and recorded:
            if not all(row.isdecimal() and len(shape) == 1 for row, shape in recorded.items()):
                yield f"invalid rows of {o.key}"
            elif not any(targets for (targets,) in recorded.values()):
                yield f"no target in its rows of {o.key}"
            if o.scale and _under(o.scale, shapes).keys() != recorded.keys():
                yield f"other rows of {o.scale} than of {o.key}"
        elif o.kind == "tensors" and (not recorded or any(0 in shape for shape in recorded.values())):
            yield f"nothing in its tensors of {o.key}"


def _under(key: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of one observable, by name without its key."""
    prefix = f"{key}/"
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def second_class_of(oracle: Record) -> str:
    """Returns whose implementation computed an oracle's record; empty for the oracle's own. Raises RecordError."""
    author = second_class(oracle.header)
    if not isinstance(author, str):
        raise RecordError(f"{oracle.path} names a second-class oracle that is not a string; {AGAIN}")
    return author


def not_judged_of(oracle: Record) -> list[str]:
    """Returns the features of the published training that an oracle's record names as not judged. Raises RecordError.

    Records of earlier versions name none.
    """
    resolved = oracle.header.get("resolved")
    features = resolved.get("not_judged", []) if isinstance(resolved, dict) else []
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise RecordError(f"{oracle.path} names features that are not judged other than by strings; {AGAIN}")
    return features


def code_of(phases: Sequence[Record]) -> str:
    """Returns the code of their libraries that the phases of a cell ran, by part, such as the class of the optimizer.

    Backends need not name it. Raises RecordError if a name is not a string.
    """
    found: dict[str, None] = {}
    for phase in phases:
        resolved = phase.header.get("resolved")
        models = [resolved, *resolved.values()] if isinstance(resolved, dict) else []
        for code in (model["code"] for model in models if isinstance(model, dict) and "code" in model):
            if not isinstance(code, dict) or not all(isinstance(name, str) for name in code.values()):
                raise RecordError(f"{phase.path} names the code that ran other than by strings; {AGAIN}")
            found[", ".join(f"{part} {name}" for part, name in code.items() if name)] = None
    return "; ".join(found)


def _check_shapes(record: Record) -> None:
    """Checks that each weight has one nonempty shape, as loaded and after every step."""
    loaded = record.loaded.shapes()
    if empty := [name for name, shape in loaded.items() if 0 in shape]:
        raise RecordError(f"{record.path} has nothing in {empty[0]} as loaded; {AGAIN}")
    for step in record.steps:
        for name, shape in step.shapes().items():
            if loaded.get(name, shape) != shape:
                raise RecordError(
                    f"{record.path} has {name} in shape {shape} after step {step.step}, but loaded it with "
                    f"{loaded[name]}; {AGAIN}"
                )


def _read_noise(
    folder: Path, phases: Sequence[Record], oracle: Record, defects: tuple[Defect, ...]
) -> tuple[Record, ...]:
    """Reads the oracle's runs in the cell's precision, which begin where the float64 run begins.

    Further runs exist only where a cell differs by the first one (conformance.runner.session).
    """
    scenario = phases[0].scenario
    first, *of_any = noise_runs(scenario.precision) or ("",)
    of_ranks = noise_runs(scenario.precision, min(phase.layout.data for phase in phases))[1:]
    further = [name for name in (*of_ranks, *of_any) if os.path.lexists(folder / name)]  # a broken link counts as well
    made = [name for name in (first, *further[:1]) if name]
    noise = tuple(_read_oracle(folder, name, scenario, defects) for name in made)
    for run in noise:
        check_start(run, oracle)
    return noise


def check_start(noise: Record, oracle: Record) -> None:
    """Raises RecordError if a run in a lower precision has loaded other weights than the float64 run.

    Trained weights are held in float32 at least; those of a frozen model may be rounded, where this is declared.
    """
    may_be_rounded = {o.key for o in oracle.observables if o.when == "loaded" and o.rounded}
    with noise.loaded.open() as own, oracle.loaded.open() as reference:
        names = set(own.keys())
        if other := names ^ set(reference.keys()):
            raise RecordError(f"only one of {noise.path} and {oracle.path} has loaded {min(other)}; {AGAIN}")
        for name in sorted(names):
            tensor, exact, rounded = own.get_tensor(name), reference.get_tensor(name), key_of(name) in may_be_rounded
            if is_projected(name, names):
                # Rounding changes the projections, so rounded weights are compared by their sample.
                same = rounded or (tensor - exact).norm() <= PROJECTED_ALIKE * exact.norm()
            else:
                same = (rounded or tensor.dtype in MASTERS) and torch.equal(tensor, exact.to(tensor.dtype))
            if not same:
                raise RecordError(f"{noise.path} has loaded different values of {name} than {oracle.path}; {AGAIN}")
