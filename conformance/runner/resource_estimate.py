"""Estimates memory, disk and time of cells from shapes alone (docs/guides/real-data.md has formulas and measurements).

On the CPU, the numbers are those of a backend that shards nothing over data-parallel ranks; they are accurate to a
factor of about 1.5. On GPUs, only the host's memory is estimated, and the adapter reports the share of a rank. P is the
number of parameters, V the vocabulary, b the bytes of a number in the cell's precision.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conformance.backends.protocol import BackendEntry
from conformance.backends.registry import Adapter, AskFailed, adapter_of
from conformance.core.errors import UsageError
from conformance.core.host import resolve
from conformance.matrix.cell import Cell, Phase
from conformance.models.synthetic import is_large, shapes_of
from conformance.numerics.sketch import numbers_kept, sketched_above
from conformance.oracle.role_model import Decoder, decoder_of
from conformance.runtime import Device
from conformance.spec.precision import FLOAT64, PrecisionName, noise_runs
from conformance.spec.scenario import Scenario

FLOAT64_BYTES = 8  # of the oracle
IMPORTED = 350e6  # bytes: torch and a backend, once for all ranks that are forked from one process
RANK = 60e6  # bytes that a rank adds without a model
STATES = 4  # copies of the trained parameters on a rank: weights, gradients and two moments
PASSING = 2  # further whole copies: loaded, gathered, or kept for the record
LOGITS = 5  # tensors of tokens x V at once: logits, their log-probs and exponentials, and gradients
ORACLE = 6  # copies, in float64: weights, gradients, moments, and their new values before they are written
JUDGE = 4.5  # copies, in float64: rounding errors of moments and weights, and the compared tensors
PIECES = 0.5e9  # bytes of oracle and judge in allocations below glibc's mmap threshold, which are released late
AT_ONCE = 0.5  # share of their peak that ranks use while the oracle is at its peak, and the other way round
ON_GPU = 3e9  # bytes of the host's memory for a rank on a GPU: CUDA, libraries, and the weights that it reads
CONTEXT = 2e9  # bytes of a GPU for a rank: context, communicators, workspaces
IDLE = 150e6  # bytes that an idle rank on the CPU keeps between cells
OVERHEAD_S = 5.0  # seconds per cell for ranks, meshes and collectives
DISK_RATE = 100e6  # bytes per second that are written, hashed, copied and judged


@dataclass(frozen=True, kw_only=True)
class Size:
    """Holds numbers of parameters.

    parameters: of all models of the objective together, with adapters. trained: those that get gradients. recorded:
    those of trained models, base and adapters, whose weights are recorded after every step. kept: recorded numbers per
    parameter: 1, or less with sketches. layers, hidden: of one model, by the names and shapes of its parameters.
    """

    parameters: int
    trained: int
    recorded: int
    vocabulary: int
    kept: float = 1.0
    layers: int = 0
    hidden: int = 0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Holds the estimate of one cell.

    rank, oracle, judge: peak bytes of memory of a rank, of the oracle's process and of this process. ranks: the largest
    number of ranks. idle: bytes of a rank between cells. record: bytes of the cell's records, with saved checkpoints.
    references: bytes of each oracle record, by its key. operations: multiplications and additions of one step's forward
    and backward passes on all ranks. steps: the number of steps. at_once: whether ranks and oracle compute at the same
    time.
    """

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
        """Returns the peak bytes: ranks or oracle at their peak, or the judge while ranks are idle."""
        less, more = sorted((self.ranks * self.rank, self.oracle))
        at_work = more + (AT_ONCE * less if self.at_once else 0.0)
        return 2 * IMPORTED + max(at_work, self.judge + (self.ranks + 1) * self.idle)

    @property
    def controller(self) -> float:
        """Returns the peak bytes on a controller's host if ranks are on other hosts: oracle plus judge of one cell."""
        less, more = sorted((self.judge, self.oracle))
        return IMPORTED + more + AT_ONCE * less

    def seconds(self, rates: Mapping[PrecisionName, float], precision: PrecisionName, *, processors: int) -> float:
        """Returns the seconds of training and oracle in sequence. rates: operations per second of one processor."""
        work = self.steps * self.operations
        trained = work / rates[precision] / min(self.ranks, processors)
        reference = sum(work / rates["exact" if FLOAT64 in name else precision] for name in self.references)
        written = (self.record + 2 * sum(self.references.values())) / DISK_RATE
        return OVERHEAD_S + trained + reference + written


@dataclass(frozen=True, kw_only=True)
class Total:
    """Holds the estimate of all cells.

    host: peak bytes of memory. worst: the largest cell. disk: bytes of the output folder before tensors are removed.
    cache: bytes of the oracle's cache.
    """

    host: float
    worst: Cell
    disk: float
    cache: float


def size_of(scenario: Scenario) -> Size:
    """Returns the size of a scenario's models; reads only headers of files. Raises UsageError for a model that cannot
    be used."""
    model = resolve(scenario.model)
    by_name = shapes_of(model, trusted=scenario.trust_remote_code)
    shapes = by_name.values()
    count = sum(map(math.prod, shapes))
    decoder = decoder_of(scenario, model)
    roles = scenario.objective.roles
    above = sketched_above(scenario.sketch, count * len(roles))
    recorded = count * sum(role.trained for role in roles)
    adapters = _adapters(scenario, decoder, by_name)
    return Size(
        parameters=count * len(roles) + adapters,
        trained=recorded - count + adapters if scenario.lora else recorded,  # of the policy only the adapters
        recorded=recorded + adapters,
        vocabulary=decoder.vocab_size,
        kept=sum(numbers_kept(shape, above=above) for shape in shapes) / count,
        layers=len({found[1] for name in by_name if (found := re.search(r"\.(\d+)\.", name))}),
        hidden=min(max((shape for shape in shapes if len(shape) == 2), key=math.prod, default=(0,))),
    )


def _adapters(scenario: Scenario, decoder: Decoder, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the number of parameters of the policy's adapters. Raises UsageError for targets that it does not
    have."""
    lora = scenario.lora
    if lora is None:
        return 0
    return sum(lora.r * sum(shapes[f"{target}.weight"]) for target in lora.targets(decoder.parameter_names("causal")))


def estimate(
    cell: Cell, size: Size, *, device: Device = "cpu", adapters: dict[BackendEntry, Adapter] | None = None
) -> Estimate:
    """Estimates one cell. On ``cuda``, estimates only the host's memory; CUDA reports a full GPU.

    On ``cuda`` the adapters of the phases have to be importable, because they are queried. ``adapters`` caches them for
    the next cell, because a new adapter reads the versions of its packages. Raises UsageError if an adapter fails to
    answer.
    """
    adapters = {} if adapters is None else adapters
    scenario, data = cell.scenario, cell.scenario.data
    own = scenario.tier.master.bytes
    oracle = oracle_bytes(scenario, size)
    if device == "cuda":
        rank = ON_GPU + max(_on_host(phase, scenario, adapters) for phase in cell.phases)
        oracle = ON_GPU if is_large(scenario) else oracle
    else:
        rank = max(_rank(phase, scenario, size) for phase in cell.phases)
    return Estimate(
        rank=rank,
        ranks=cell.world_size,
        idle=ON_GPU if device == "cuda" else IDLE,
        oracle=oracle,
        at_once=not is_large(scenario),
        judge=PIECES + JUDGE * size.recorded * size.kept * FLOAT64_BYTES,
        record=sum(_record(phase, size, own) for phase in cell.phases),
        references={
            f"{cell.oracle_request} {run}": (size.parameters + scenario.steps * (size.trained + size.recorded))
            * size.kept
            * (FLOAT64_BYTES if run == FLOAT64 else own)
            for run in (FLOAT64, *noise_runs(scenario.precision)[:1])
        },
        # Kaplan et al., arXiv 2001.08361, table 1; frozen weights have no gradients.
        operations=(4.0 * size.recorded + 2.0 * size.trained) * data.rows * data.max_len,
        steps=scenario.steps,
    )


def oracle_bytes(scenario: Scenario, size: Size) -> float:
    """Estimates the peak bytes of an oracle run on the CPU."""
    longest = scenario.data.max_len * size.vocabulary * FLOAT64_BYTES * LOGITS
    return RANK + PIECES + ORACLE * size.trained * FLOAT64_BYTES + _frozen(size) * FLOAT64_BYTES + longest


def rank_bytes(cell: Cell) -> float:
    """Estimates the peak bytes of a rank that shards nothing over data-parallel ranks."""
    size = size_of(cell.scenario)
    return max(_rank(phase, cell.scenario, size) for phase in cell.phases)


def leased_bytes(cell: Cell) -> int:
    """Estimates the bytes that a rank takes of its GPU: with a context, and as if nothing were sharded.

    For openPangu 1B in SFT, exact, this is 55.8 GiB. On H200s tensors took 45.3 at their peak, and processes of
    DeepSpeed 60.6 and 56.7 with what torch caches, which a process frees when it lacks memory.
    """
    size = size_of(cell.scenario)
    return round(CONTEXT + max(_rank(phase, cell.scenario, size, is_cut=False) for phase in cell.phases))


def gpu_bytes(cell: Cell, size: Size, adapters: Mapping[BackendEntry, Adapter]) -> float:
    """Estimates the bytes of the fullest GPU, with one rank on each, from shapes and the layout.

    Model states are those of Rajbhandari et al. (arXiv 1910.02054, section 3.1), with gradients in the masters' format,
    cut by tensor and pipeline parallelism; activations those of Korthikanti et al. (arXiv 2205.05198, table 2) without
    scores. Gathered layers and buckets are not counted.
    """
    return max(
        _on_gpu(phase, cell.scenario, size, adapters[phase.backend].traits.default_zero or 0) for phase in cell.phases
    )


def _on_gpu(phase: Phase, scenario: Scenario, size: Size, default_zero: int) -> float:
    layout, compute, master = phase.layout, scenario.tier.compute.bytes, scenario.tier.master.bytes
    stage = layout.stage(default_zero) or 0
    shards = layout.dp // (layout.rep if layout.rep < layout.dp else 1) * layout.sp * layout.ulysses
    kinds = (3, size.parameters * compute), (2, size.trained * master), (1, size.trained * 2 * master)
    masters = ((1, size.trained * master),) if compute < master else ()
    states = sum(held / (shards if stage >= first else 1) for first, held in (*kinds, *masters))
    tokens = _tokens_at_once(phase, scenario)
    layers = -(-size.layers // layout.pp) * min(layout.pp, scenario.accumulation)
    activations = tokens * size.hidden * layers * (10 + 24 / layout.tp) * compute / 2
    logits = LOGITS * tokens * size.vocabulary * max(4, compute)
    return float(states / (layout.tp * layout.pp) + activations + logits)


def _tokens_at_once(phase: Phase, scenario: Scenario) -> int:
    """Returns the tokens of a micro-batch on one rank."""
    rows = -(-scenario.data.rows // (phase.layout.data * scenario.accumulation))
    return rows * -(-scenario.data.max_len // (phase.layout.sp * phase.layout.ulysses))


def total(cells: Sequence[tuple[Cell, Estimate]], *, workers: int = 1) -> Total:
    """Estimates one run with ``workers`` concurrent cells; at the peak, the largest cells coincide.

    Cells with the same oracle request share its records.
    """
    largest = sorted(cells, key=lambda one: one[1].host, reverse=True)[:workers]
    references: dict[str, float] = {}
    for _, of_cell in cells:
        references |= of_cell.references
    oracles = sum(references.values())
    return Total(
        host=sum(of_cell.host + _idle_groups(cells, cell) for cell, of_cell in largest),
        worst=largest[0][0],
        disk=sum(of_cell.record for _, of_cell in cells) + oracles,
        cache=oracles,
    )


def on_slots(cells: Sequence[tuple[Cell, Estimate]], slots: int) -> tuple[float, Cell]:
    """Returns the peak bytes of a host, and the cell with the largest ranks.

    At the peak, the largest ranks fill the ``slots``, and ranks of other worker groups are idle.
    """
    left, peak, at_work = slots, IMPORTED, set[tuple[str, int]]()
    largest = sorted(cells, key=lambda one: one[1].rank, reverse=True)
    for cell, of_cell in largest:
        peak += min(left, of_cell.ranks) * of_cell.rank
        left -= min(left, of_cell.ranks)
        at_work.update((phase.backend.name, phase.layout.world_size) for phase in cell.phases)
        if not left:
            break
    idle = {
        (phase.backend.name, phase.layout.world_size): min(slots, phase.layout.world_size) * of_cell.idle
        for cell, of_cell in cells
        for phase in cell.phases
    }
    return peak + sum(size for key, size in idle.items() if key not in at_work), largest[0][0]


def _idle_groups(cells: Iterable[tuple[Cell, Estimate]], worst: Cell) -> float:
    """Returns the bytes of idle ranks for other cells: one worker group for each backend and size."""
    worker_groups: dict[tuple[str, int], float] = {}
    for cell, of_cell in cells:
        for phase in cell.phases:
            key = phase.backend.name, phase.layout.world_size
            worker_groups[key] = of_cell.idle * phase.layout.world_size
    for phase in worst.phases:
        worker_groups.pop((phase.backend.name, phase.layout.world_size), None)
    return sum(worker_groups.values())


def _rank(phase: Phase, scenario: Scenario, size: Size, *, is_cut: bool = True) -> float:
    layout, own = phase.layout, scenario.tier.master.bytes
    states = STATES * size.trained / (layout.tp * layout.pp if is_cut else 1) + PASSING * size.recorded + _frozen(size)
    return RANK + states * own + LOGITS * _tokens_at_once(phase, scenario) * size.vocabulary * own


def _on_host(phase: Phase, scenario: Scenario, adapters: dict[BackendEntry, Adapter]) -> int:
    """Returns the bytes of host memory that a rank of a phase needs in addition to its GPU, as its adapter reports."""
    try:
        if phase.backend not in adapters:
            adapters[phase.backend] = adapter_of(phase.backend)
        return adapters[phase.backend].host_bytes(scenario, phase.layout)
    except AskFailed as error:
        raise UsageError(
            f"{phase.backend.name} did not report the host's memory of a rank ({phase.layout}): {error}; correct its "
            f"adapter, or select other backends (--backend)"
        ) from None


def _frozen(size: Size) -> int:
    return size.parameters - size.trained


def _record(phase: Phase, size: Size, own: int) -> float:
    """Returns the bytes of loaded weights, and of gradients and weights of every step.

    Instead of the gradients and weights that are not read, moments are. A saved state adds masters and moments, once in
    the record and once in the saved folder.
    """
    saved = 2 * 3 * size.trained if phase.save else 0
    return float(((size.parameters + phase.steps * (size.trained + size.recorded)) * size.kept + saved) * own)
