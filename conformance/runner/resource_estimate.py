"""Estimate: bytes and seconds of cells, from shapes alone. docs/guides/real-data.md has the formulas and what was
measured.

On the CPU a backend is not asked: the numbers are those of one that cuts nothing over its data-parallel ranks, and no
better than a factor of 1.5. On GPUs they are of the host's memory, and the adapter tells what a rank holds there. P is
the number of parameters, V the vocabulary, b the bytes of a number in the cell's precision.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conformance.backends.protocol import BackendEntry
from conformance.backends.registry import Adapter, AskFailed, adapter_of
from conformance.core.errors import UsageError
from conformance.core.paths import resolve
from conformance.matrix.cell import Cell, Leg
from conformance.models.synthetic import is_large, shapes_of
from conformance.numerics.sketch import numbers_kept, sketched_above
from conformance.oracle.role_model import Decoder, read_decoder
from conformance.records.header_checks import FLOAT64, noise_runs
from conformance.runtime import Device
from conformance.spec.observables import unobserved_step
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import Scenario

FLOAT64_BYTES = 8  # of the oracle
IMPORTED = 350e6  # bytes: torch and a backend, once for all ranks that are forked from one process
RANK = 60e6  # bytes that a rank adds without a model
STATES = 4  # copies of what a rank trains: weights, gradients and two moments
PASSING = 2  # further whole copies: of what is loaded, gathered, or kept for the record
LOGITS = 5  # tensors of tokens x V at once: logits, their log-probs and exponentials, and gradients
ORACLE = 6  # copies, in float64: weights, gradients, moments, and what a step makes of them before it is written
JUDGE = 4.5  # copies, in float64: what rounding does to moments and weights, and the tensors that are compared
PIECES = 0.5e9  # bytes that oracle and judge hold in pieces below glibc's threshold, which are given back late
AT_ONCE = 0.5  # of their peaks that ranks hold while the oracle is at its own, or the oracle while ranks are
ON_GPU = 3e9  # bytes of the host's memory of a rank on a GPU: CUDA, libraries, and the part of a model that it reads
IDLE = 150e6  # bytes that a rank on the CPU holds on to between cells
OVERHEAD_S = 5.0  # of a cell: ranks, meshes, collectives
DISK_RATE = 100e6  # bytes per second that are written, hashed, copied and judged


@dataclass(frozen=True, kw_only=True)
class Size:
    """parameters: of all models of the objective together, with adapters; trained: those of them that get gradients;
    recorded: those of models that are trained, base and adapters, whose weights are recorded after every step. kept:
    numbers that a record keeps of a model, for each of its parameters: 1, or less where it keeps sketches."""

    parameters: int
    trained: int
    recorded: int
    vocabulary: int
    kept: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one cell. rank, oracle, judge: bytes of the memory of a rank, of the oracle's process and of this process,
    at their peaks. ranks: their largest number. idle: bytes of a rank between cells. record: bytes of the cell's
    records, with what legs hand over. references: bytes of each oracle record, by what it is of. operations:
    multiplications and additions of a step's forward and backward passes, of all ranks. steps: their number. at_once:
    whether ranks and oracle compute at the same time."""

    rank: float
    ranks: int
    idle: float
    oracle: float
    judge: float
    record: float
    references: Mapping[str, float]
    operations: float
    steps: int
    at_once: bool = True

    @property
    def host(self) -> float:
        """Bytes at the worst moment: ranks or oracle at their peak, or the judge beside ranks that wait."""
        less, more = sorted((self.ranks * self.rank, self.oracle))
        at_work = more + (AT_ONCE * less if self.at_once else 0.0)
        return 2 * IMPORTED + max(at_work, self.judge + (self.ranks + 1) * self.idle)

    @property
    def controller(self) -> float:
        """Bytes of a controller's host at the worst moment where ranks are on others: one cell is judged meanwhile."""
        less, more = sorted((self.judge, self.oracle))
        return IMPORTED + more + AT_ONCE * less

    def seconds(self, rates: Mapping[PrecisionName, float], precision: PrecisionName, *, processors: int) -> float:
        """Of training and oracle, one after another, at ``rates`` of operations per second of one processor."""
        work = self.steps * self.operations
        trained = work / rates[precision] / min(self.ranks, processors)
        reference = sum(work / rates["exact" if FLOAT64 in name else precision] for name in self.references)
        written = (self.record + 2 * sum(self.references.values())) / DISK_RATE
        return OVERHEAD_S + trained + reference + written


@dataclass(frozen=True, kw_only=True)
class Total:
    """Of all cells. host: bytes of memory at the worst moment, in ``worst``. disk: bytes of the output folder before
    tensors are removed. cache: bytes of the oracle's cache."""

    host: float
    worst: Cell
    disk: float
    cache: float


def size_of(scenario: Scenario) -> Size:
    """Of the models of a scenario; only headers of files are read. Raises UsageError for a model of no use."""
    model = resolve(scenario.model)
    shapes = shapes_of(model).values()
    count = sum(map(math.prod, shapes))
    disable, trusted = scenario.objective.disable_dropout, scenario.trust_remote_code
    decoder = read_decoder(model, disable_dropout=disable, trusted=trusted)
    roles = scenario.objective.roles
    above = sketched_above(scenario.sketch, count * len(roles))
    recorded = count * sum(role.trained for role in roles)
    adapters = _adapters(scenario, decoder, shapes_of(model))
    return Size(
        parameters=count * len(roles) + adapters,
        trained=recorded - count + adapters if scenario.lora else recorded,  # of the policy, adapters alone
        recorded=recorded + adapters,
        vocabulary=decoder.vocab_size,
        kept=sum(numbers_kept(shape, above=above) for shape in shapes) / count,
    )


def _adapters(scenario: Scenario, decoder: Decoder, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Parameters of the policy's adapters. Raises UsageError for targets that it does not have."""
    lora = scenario.lora
    if lora is None:
        return 0
    return sum(lora.r * sum(shapes[f"{target}.weight"]) for target in lora.targets(decoder.parameter_names("causal")))


def estimate(
    cell: Cell, size: Size, *, device: Device = "cpu", adapters: dict[BackendEntry, Adapter] | None = None
) -> Estimate:
    """On ``cuda``: of the host's memory alone; what a GPU has no room for is told by CUDA. There the adapters of the
    legs are asked, so they have to be such as can be imported; they are kept in ``adapters`` for the next cell, because
    a new one reads the versions of its packages. Raises UsageError for one that fails to answer."""
    adapters = {} if adapters is None else adapters
    scenario, data = cell.scenario, cell.scenario.data
    own = scenario.tier.master.bytes
    longest = data.max_len * size.vocabulary * FLOAT64_BYTES * LOGITS
    oracle = RANK + PIECES + ORACLE * size.trained * FLOAT64_BYTES + _frozen(size) * FLOAT64_BYTES + longest
    if device == "cuda":
        rank = ON_GPU + max(_on_host(leg, scenario, adapters) for leg in cell.legs)
        oracle = ON_GPU if is_large(scenario) else oracle
    else:
        rank = max(_rank(leg, scenario, size) for leg in cell.legs)
    return Estimate(
        rank=rank,
        ranks=cell.world_size,
        idle=ON_GPU if device == "cuda" else IDLE,
        oracle=oracle,
        at_once=not is_large(scenario),
        judge=PIECES + JUDGE * size.recorded * size.kept * FLOAT64_BYTES,
        record=sum(_record(leg, first, size, own) for leg, first in zip(cell.legs, cell.first_steps, strict=True)),
        references={
            f"{cell.oracle_request} {run}": (size.parameters + scenario.steps * (size.trained + size.recorded))
            * size.kept
            * (FLOAT64_BYTES if run == FLOAT64 else own)
            for run in (FLOAT64, *noise_runs(scenario.precision)[:1])
        },
        # Kaplan et al., arXiv 2001.08361, table 1; what is frozen has no gradients of weights.
        operations=(4.0 * size.recorded + 2.0 * size.trained) * data.rows * data.max_len,
        steps=scenario.steps,
    )


def total(cells: Sequence[tuple[Cell, Estimate]], *, workers: int = 1) -> Total:
    """Of the cells of one run, of which as many are run at once as there are ``workers``, the largest ones at the worst
    moment; cells that ask the same of an oracle share its records."""
    largest = sorted(cells, key=lambda one: one[1].host, reverse=True)[:workers]
    references: dict[str, float] = {}
    for _, of_cell in cells:
        references |= of_cell.references
    oracles = sum(references.values())
    return Total(
        host=sum(of_cell.host + _others(cells, cell) for cell, of_cell in largest),
        worst=largest[0][0],
        disk=sum(of_cell.record for _, of_cell in cells) + oracles,
        cache=oracles,
    )


def on_slots(cells: Sequence[tuple[Cell, Estimate]], slots: int) -> tuple[float, Cell]:
    """Bytes of a host at the worst moment: the largest ranks of as many cells side by side as fill ``slots``,
    and ranks of other worlds, which wait. Also the cell of the largest ranks."""
    left, held, at_work = slots, IMPORTED, set[tuple[str, int]]()
    largest = sorted(cells, key=lambda one: one[1].rank, reverse=True)
    for cell, of_cell in largest:
        held += min(left, of_cell.ranks) * of_cell.rank
        left -= min(left, of_cell.ranks)
        at_work.update((leg.backend.name, leg.layout.world_size) for leg in cell.legs)
        if not left:
            break
    idle = {
        (leg.backend.name, leg.layout.world_size): min(slots, leg.layout.world_size) * of_cell.idle
        for cell, of_cell in cells
        for leg in cell.legs
    }
    return held + sum(size for key, size in idle.items() if key not in at_work), largest[0][0]


def _others(cells: Iterable[tuple[Cell, Estimate]], worst: Cell) -> float:
    """Bytes of the ranks of other worlds, which wait for further cells: one world of a backend and size."""
    worlds: dict[tuple[str, int], float] = {}
    for cell, of_cell in cells:
        for leg in cell.legs:
            key = leg.backend.name, leg.layout.world_size
            worlds[key] = of_cell.idle * leg.layout.world_size
    for leg in worst.legs:
        worlds.pop((leg.backend.name, leg.layout.world_size), None)
    return sum(worlds.values())


def _rank(leg: Leg, scenario: Scenario, size: Size) -> float:
    layout, own = leg.layout, scenario.tier.master.bytes
    rows = -(-scenario.data.rows // (layout.data * scenario.accumulation))
    tokens = rows * -(-scenario.data.max_len // (layout.sp * layout.ulysses))
    states = STATES * size.trained / (layout.tp * layout.pp) + PASSING * size.recorded + _frozen(size)
    return RANK + states * own + LOGITS * tokens * size.vocabulary * own


def _on_host(leg: Leg, scenario: Scenario, adapters: dict[BackendEntry, Adapter]) -> int:
    """Bytes of the host's memory that a rank of a leg holds beside a GPU, as its adapter says."""
    try:
        if leg.backend not in adapters:
            adapters[leg.backend] = adapter_of(leg.backend)
        return adapters[leg.backend].host_bytes(scenario, leg.layout)
    except AskFailed as error:
        raise UsageError(
            f"{leg.backend.name} was asked how much of the host's memory a rank holds ({leg.layout}): {error}; correct "
            f"its adapter, or select other backends (--backend)"
        ) from None


def _frozen(size: Size) -> int:
    return size.parameters - size.trained


def _record(leg: Leg, first_step: int, size: Size, own: int) -> float:
    """Weights as loaded, and gradients and weights of every observed step; what is handed over is as large as masters
    and moments, in the record and in the folder that is saved."""
    observed = leg.steps - (unobserved_step(first_step, leg.steps) is not None)
    handed = 2 * 3 * size.trained if leg.save else 0
    return float(((size.parameters + observed * (size.trained + size.recorded)) * size.kept + handed) * own)
