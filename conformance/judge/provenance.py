"""Checks that the records being compared belong together: all phases of a cell in order, and its oracle.

A comparison of the wrong records proves nothing, however well they agree: a record compared with itself conforms, and
so does an exact record by the tolerance of fp32. So before anything is compared, the headers are checked against the
cell's id, the oracle's records against what an oracle writes, and both against what the comparison takes for granted.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError

from conformance.judge.observable_errors import is_lost
from conformance.numerics.sketch import is_projected, key_of
from conformance.records.header_checks import CHOICES, FLOAT64, check_cell, check_oracle, noise_runs, second_class
from conformance.records.record_format import AGAIN, RecordError
from conformance.records.step_tensors import Record, StepRecord, file_sha256, read_record
from conformance.results.requirements import TO
from conformance.spec.batch import Batch, read_batches
from conformance.spec.known_defects import Defect
from conformance.spec.objectives import all_observables
from conformance.spec.observables import ROUTING, Observable
from conformance.spec.scenario import Scenario

LAYOUT = "dp1"  # of the oracle, which is one process
MASTERS = (torch.float32, torch.float64)  # of weights that are trained, in every precision
PROJECTED_ALIKE = 1e-12  # relative difference of two projections of the same tensor: sums in another order


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a cell is judged by. ``noise`` are the oracle's runs in the cell's precision; none in the exact tier.
    ``batches``: below it, of a mixture of experts, the frozen batches with the choices that ranks were given; or none.
    """

    legs: tuple[Record, ...]
    oracle: Record
    noise: tuple[Record, ...]
    batches: tuple[Batch, ...]


def read_records(cell: str, legs: Sequence[Path], oracle: Path, *, defects: tuple[Defect, ...] = ()) -> Records:
    """Read the records of the cell with this id: of its legs, in order, and of its oracle in the folder ``oracle``,
    which has these ``defects``.

    Raises RecordError for one that cannot be trusted, and where they do not belong together.
    """
    records = tuple(read_record(leg) for leg in legs)
    if not records:
        raise RecordError(f"{cell} has no record; {AGAIN}")
    scenarios = [_scenario(record) for record in records]
    for record, scenario in zip(records, scenarios, strict=True):
        check_cell(record.path, record.header, cell=cell)
        if scenario != scenarios[0]:
            raise RecordError(f"{record.path} is of another scenario than the legs before it; {AGAIN}")
    _check_id(cell, records, scenarios[0])
    _check_order(records, scenarios[0])
    for record in records:
        _check_leg(record, is_first=record is records[0])
    for before, after in pairwise(records):
        _check_handover(before, after)
    reference = _read_oracle(oracle, FLOAT64, scenarios[0], defects)
    for record in records:
        if record.observables != reference.observables:
            raise RecordError(f"{record.path} observes something else than its oracle {reference.path}; {AGAIN}")
    return Records(
        legs=records,
        oracle=reference,
        noise=_read_noise(oracle, scenarios[0], reference, defects),
        batches=read_choices(reference, scenarios[0]),
    )


def _scenario(record: Record) -> Scenario:
    """The scenario in the header; the record has to be of all that it declares, and of nothing else."""
    try:
        scenario = record.scenario
        # Which model it was is in no header, but read_records holds the cell's observables against the oracle's.
        routed = any(map(_is_routing, record.observables))
        declared = all_observables(scenario.objective, scaled=scenario.judged_loss_scale is not None, routed=routed)
    except Exception as error:  # the objective may be a class of somebody else, and a header may name anything
        raise RecordError(f"the scenario of {record.path} cannot be read ({error}); {AGAIN}") from None
    if record.observables != declared:
        raise RecordError(
            f"{record.path} observes something else than this version of the suite does for its objective; {AGAIN}, or "
            f"judge it with the version that wrote it"
        )
    _check_shapes(record)
    return scenario


def _check_leg(record: Record, *, is_first: bool) -> None:
    """What only a cell's record says: how its optimizer began, what each rank did, and in which precision."""
    ranks, layout = record.footer.get("evidence", ()), record.layout
    if len(ranks) != layout.world_size:
        raise RecordError(
            f"{record.path} has the evidence of {len(ranks)} ranks, and {layout} has another number; {AGAIN}"
        )
    if not isinstance(record.header.get("backend", {}).get("name"), str):
        raise RecordError(f"{record.path} does not say which backend wrote it; {AGAIN}")
    if not isinstance(record.header["backend"].get("default_zero", ""), int | None):
        raise RecordError(f"{record.path} does not say which ZeRO stage the backend has by default; {AGAIN}")
    if (optimizer := record.header.get("optimizer")) not in (("new",) if is_first else ("new", "loaded")):
        raise RecordError(f"{record.path} says of its optimizer {optimizer!r}, which cannot be; {AGAIN}")
    loads = ("", *(() if is_first else ("merge",))) if optimizer == "new" else ("checkpoint", "state")
    if record.header.get("loads") not in loads:
        raise RecordError(f"{record.path} says that it loads {record.header.get('loads')!r}, which cannot be; {AGAIN}")
    if "leaks" not in record.footer:
        raise RecordError(f"{record.path} does not say what was left in a lower precision; {AGAIN}")


def _check_handover(before: Record, after: Record) -> None:
    """Both legs say of every rank in which state its random generators were, where training goes on."""
    if after.header["optimizer"] == "new":
        return
    for record, step in ((before, (before.loaded, *before.steps)[-1]), (after, after.loaded)):
        ranks, told = len(record.footer["evidence"]), len(step.line.get("generators", ()))
        if told != ranks:
            raise RecordError(
                f"{record.path} tells the generators of {told} ranks at step {step.step}, and has {ranks}; {AGAIN}"
            )


def _check_id(cell: str, records: Sequence[Record], scenario: Scenario) -> None:
    """The parts of the id that say what was trained and how, against the headers."""
    name, _, _, layouts, precision, *rest = [*cell.split("/"), "", "", "", ""]
    seeded = not scenario.seed or f"seed{scenario.seed}" in rest
    if (scenario.name, scenario.precision) != (name, precision) or not seeded:
        trained = f"{scenario.name} in {scenario.precision} with seed {scenario.seed}"
        raise RecordError(f"{records[0].path} trains {trained}, and the cell is {cell}; {AGAIN}")
    asked = layouts.split(TO)
    if len(asked) not in (1, len(records)):
        raise RecordError(f"{cell} has {len(asked)} legs, and {len(records)} records of them are there; {AGAIN}")
    for place, record in enumerate(records):
        if (found := record.header.get("layout")) != (layout := asked[place % len(asked)]):
            raise RecordError(f"{record.path} is of layout {found}, and this leg of {cell} of {layout}; {AGAIN}")
        try:
            record.layout  # noqa: B018 - raises for a text that is no layout
        except ValueError as error:
            raise RecordError(f"{record.path}: {error}") from None


def _check_order(records: Sequence[Record], scenario: Scenario) -> None:
    """Each leg goes on where the one before it ended, and there is a step at all."""
    done = 0
    for record in records:
        if (first := record.loaded.step + 1) != done:
            raise RecordError(f"{record.path} begins with step {first}, and {done} is next; put its legs in order")
        done += len(record.steps)
    if not 0 < done <= scenario.steps:
        raise RecordError(f"{records[0].path.parent} has {done} steps, and its scenario {scenario.steps}; {AGAIN}")


def _read_oracle(folder: Path, precision: str, scenario: Scenario, defects: tuple[Defect, ...]) -> Record:
    """The oracle's record in a precision, with everything that the comparison takes for granted."""
    record = read_record(folder / precision)
    check_oracle(record.path, record.header, precision=precision, defects=defects)
    if record.header.get("layout") != LAYOUT:
        raise RecordError(f"{record.path} is not of layout {LAYOUT}, which the oracle has; {AGAIN}")
    if _same(_scenario(record)) != _same(scenario):
        raise RecordError(f"{record.path} and the cell are of different scenarios; judge each by its own oracle")
    if len(record.steps) != scenario.steps or record.loaded.step != -1:
        raise RecordError(f"{record.path} has {len(record.steps)} steps of {scenario.steps}; {AGAIN}")
    for step in (record.loaded, *record.steps):
        if lacking := next(_lacking(step, record.observables), ""):
            raise RecordError(f"{record.path} has {lacking} at step {step.step}; {AGAIN}")
    return record


def read_choices(oracle: Record, scenario: Scenario) -> tuple[Batch, ...]:
    """The batches with the choices of the oracle's routers, where cells are given these."""
    if scenario.tier.is_exact or not any(_is_routing(o) for o in oracle.observables):
        return ()
    file = oracle.path / CHOICES
    try:
        if file_sha256(file) != oracle.lines.footer.get("choices"):
            raise RecordError(f"{file} was changed after the run, and ranks were given its choices; {AGAIN}")
        batches = tuple(read_batches(file))
    except (OSError, SafetensorError, KeyError, ValueError, AssertionError) as error:
        raise RecordError(f"{file} cannot be read ({error!r}), and ranks were given its choices; {AGAIN}") from None
    if [batch.step for batch in batches] != [step.step for step in oracle.steps]:
        raise RecordError(f"{file} has other steps than {oracle.path}; {AGAIN}")
    return batches


def _is_routing(observable: Observable) -> bool:
    return observable.key.rpartition(".")[2] == ROUTING


def _same(scenario: Scenario) -> Scenario:
    """What of a scenario the oracle's numbers depend on."""
    return replace(scenario.reference, name="any", precision="exact")


def _lacking(step: StepRecord, observables: Sequence[Observable]) -> Iterator[str]:
    """What an oracle has, and this step of one has not."""
    shapes = step.shapes()
    for o in observables:
        if not o.applies(step.step) or is_lost(o, step):
            continue
        held = _under(o.key, shapes)
        if o.kind in ("scalar", "setting"):
            numbers = {key: step.value(key) for key in (o.key, o.scale or o.key)}
            yield from (f"{k}={v}" for k, v in numbers.items() if v is None or not math.isfinite(v))
        elif o.kind == "rows" and held:
            if not all(row.isdecimal() and len(shape) == 1 for row, shape in held.items()):
                yield f"rows of {o.key} that are none"
            elif not any(targets for (targets,) in held.values()):
                yield f"no target in its rows of {o.key}"
            if o.scale and _under(o.scale, shapes).keys() != held.keys():
                yield f"other rows of {o.scale} than of {o.key}"
        elif o.kind == "tensors" and (not held or any(0 in shape for shape in held.values())):
            yield f"nothing in its tensors of {o.key}"


def _under(key: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors of one observable, by name without its key."""
    prefix = f"{key}/"
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def second_class_of(oracle: Record) -> str:
    """Whose implementation computed an oracle's record; empty if it is the oracle's own. Raises RecordError."""
    whose = second_class(oracle.header)
    if not isinstance(whose, str):
        raise RecordError(f"{oracle.path} names a second-class oracle that is no text; {AGAIN}")
    return whose


def _check_shapes(record: Record) -> None:
    """A weight has one shape, as loaded and after every step, with something in it."""
    loaded = record.loaded.shapes()
    if empty := [name for name, shape in loaded.items() if 0 in shape]:
        raise RecordError(f"{record.path} has nothing in {empty[0]} as loaded; {AGAIN}")
    for step in record.steps:
        for name, shape in step.shapes().items():
            if loaded.get(name, shape) != shape:
                raise RecordError(
                    f"{record.path} has {name} in shape {shape} after step {step.step}, and was loaded with "
                    f"{loaded[name]}; {AGAIN}"
                )


def _read_noise(folder: Path, scenario: Scenario, oracle: Record, defects: tuple[Defect, ...]) -> tuple[Record, ...]:
    """The oracle's runs in the cell's precision, which begin where the float64 run begins.

    The further ones are only made where a cell differs by the first (conformance.runner.session).
    """
    first, further = noise_runs(scenario.precision)[:1], noise_runs(scenario.precision)[1:]
    made = (*first, *(name for name in further if os.path.lexists(folder / name)))  # also a link to nowhere
    noise = tuple(_read_oracle(folder, name, scenario, defects) for name in made)
    for run in noise:
        check_start(run, oracle)
    return noise


def check_start(noise: Record, oracle: Record) -> None:
    """Raises RecordError where a run in a lower precision has loaded other weights than the float64 run.

    Weights that are trained are held in float32 at least; those of a frozen model may be rounded, where it is declared.
    """
    may_be_rounded = {o.key for o in oracle.observables if o.when == "loaded" and o.rounded}
    with noise.loaded.open() as own, oracle.loaded.open() as reference:
        names = set(own.keys())
        if other := names ^ set(reference.keys()):
            raise RecordError(f"only one of {noise.path} and {oracle.path} has loaded {min(other)}; {AGAIN}")
        for name in sorted(names):
            tensor, exact, rounded = own.get_tensor(name), reference.get_tensor(name), key_of(name) in may_be_rounded
            if is_projected(name, names):
                # Of rounded weights, whose projections are others, the sample is compared.
                same = rounded or (tensor - exact).norm() <= PROJECTED_ALIKE * exact.norm()
            else:
                same = (rounded or tensor.dtype in MASTERS) and torch.equal(tensor, exact.to(tensor.dtype))
            if not same:
                raise RecordError(f"{noise.path} has loaded another {name} than {oracle.path}; {AGAIN}")
