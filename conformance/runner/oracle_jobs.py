"""Runs the oracle while cells run, caches its records across runs, and gives cells the oracle's choices of experts.

Oracle runs use their own worker groups. The key of the cache covers everything that the records depend on: the models'
files, the batches, the relevant part of the scenario, the defects of the oracle, the source files of the oracle, of its
imports and of the objective, the version of torch, and for runs below float64 the device. ``PARITY_CACHE`` names the
folder of the cache (default: ``~/.cache/backend-parity``).

Below the exact tier, rounding may send a token to other experts, and then no later number can be compared: a single
process in bf16 is as far from float64 as a wrong backend. So the choices of the oracle's float64 run are part of the
batches there (conformance.oracle.run). In the exact tier a backend makes its own choices, which are judged.

While cells run, the records lie next to the output folder, in a folder whose name no rank gets, and this process
keeps their digests. So a rank finds no reference in its folders, and no cell is judged by a changed reference. At
the end of the session the records are moved into the output folder.
"""

import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from conformance import oracle
from conformance.core.host import cache_folder
from conformance.core.io import complete_or_nothing, locked
from conformance.core.timeline import timeline
from conformance.data.inputs import FrozenInputs, short_key
from conformance.matrix.cell import Cell
from conformance.models.families import is_written
from conformance.models.synthetic import is_large
from conformance.oracle.objectives import functions_of
from conformance.oracle.role_model import SPARE, bytes_needed, is_routed
from conformance.oracle.run import POLICIES
from conformance.records.record_format import RECORD_FILE, RecordError
from conformance.records.step_tensors import file_sha256, input_sha256, read_record
from conformance.runtime import Device, Outcome, Pool, WorkerGroupConfig
from conformance.runtime.leased_slots import Lanes
from conformance.spec.batch import CHOICES
from conformance.spec.known_defects import Defect, defects_to_json
from conformance.spec.precision import FLOAT64, noise_runs, parts_of_run
from conformance.spec.scenario import ADAPTER, Scenario, scenario_to_json

logger = logging.getLogger(__name__)


def is_replayed(scenario: Scenario, inputs: FrozenInputs) -> bool:
    """Whether a cell gets the oracle's choices of experts."""
    return not scenario.tier.is_exact and any(map(is_routed, inputs.models.values()))


Defects = tuple[Defect, ...]
# Files outside of the oracle's package that determine numbers and names in its records.
COMPUTED_WITH = (
    *("core/io.py", "models/components.py", "models/declarations.py", "models/families.py", "models/folder_checks.py"),
    *("models/folders.py", "models/hf_config.py"),
    *("numerics/float64_tier.py", "numerics/sketch.py"),
    *("records/record_format.py", "records/step_tensors.py"),
    *("spec/batch.py", "spec/conventions.py", "spec/known_defects.py", "spec/layout.py", "spec/objectives.py"),
    *("spec/observables.py", "spec/offline.py", "spec/precision.py", "spec/scenario.py"),
)
PRELOAD = ("conformance.oracle.run", "transformers")  # which reads the configuration
CACHE_SIZE = 4 * 2**30  # bytes; the least recently used records are removed first


class Oracles:
    """Runs the oracle in worker groups of one rank, several at once on the CPU and on leased GPUs.

    Use it in a ``with`` statement.
    """

    def __init__(
        self,
        *,
        root: Path,
        device: Device,
        budget_s: float,
        lanes: int = 1,
        leased: Pool | None = None,
        gpus: int = 1,
        packed: bool = False,
    ) -> None:
        """lanes: the number of oracle runs on the CPU at once; of large models one. leased: the pool of the cells'
        worker groups, if they lease slots; oracle runs on a GPU then lease slots too. gpus: the number of oracle runs
        on GPUs at once. With only one, other GPUs would idle, as cells need several. packed: whether others may take
        the memory of a run, so that one that failed is repeated alone."""
        self._root, self._device, self._budget_s = root, device, budget_s
        self.withheld = withheld_folder(root)
        self._digests: dict[Path, str] = {}  # of each record, from the moment it was written or read from the cache
        self._threads = ThreadPoolExecutor(max_workers=lanes, thread_name_prefix="oracle")
        self._large = threading.Lock()  # held by the run of a large model, which needs the memory
        self._threads_of_gpus = ThreadPoolExecutor(max_workers=gpus, thread_name_prefix="oracle-on-gpu")
        self._cache = _cache_for(root)
        self._runs: dict[Path, Future[str]] = {}
        self._variants: dict[Cell, dict[Defects, None]] = defaultdict(dict)
        work_dir = root / "worlds"  # for runs on the CPU, and on a GPU without leases
        slots = Lanes(lanes, work_dir=work_dir, name="oracle") if lanes > 1 else None
        self._pool = Pool(work_dir=work_dir, slots=slots)
        self._leased, self._is_packed, self._is_over = leased, packed, False
        self.repeated: list[str] = []  # of failed runs: which one, and why it failed
        self._wants_all = False  # whether oracles of large models need a whole GPU, because one has failed

    def __enter__(self) -> "Oracles":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        is_at_work = [run for run in self._runs.values() if not run.cancel() and not run.done()]
        if is_at_work:  # the session was stopped, so these runs are not needed any more
            self._pool.abort()
            if self._leased is not None:
                self._leased.abort()
        self._threads_of_gpus.shutdown()
        # One pool has one thread; of several lanes, any thread may close it, after the others.
        self._threads.submit(self._close).result()
        self._threads.shutdown()

    def prepare(self) -> None:
        """Starts to import what oracle runs on the CPU need."""
        self._threads.submit(self._pool.prepare, WorkerGroupConfig(size=1, device="cpu", preload=PRELOAD))

    def folder(self, cell: Cell, defects: Defects = ()) -> Path:
        """Returns the folder of the record ``float64`` and of the noise runs, made by the oracle with these defects,
        during the session."""
        return self.withheld / self.published(cell, defects).name

    def published(self, cell: Cell, defects: Defects = ()) -> Path:
        """Returns the folder of these records in the output folder, after the session."""
        request = [*cell.oracle_request, *([defects_to_json(defects)] if defects else [])]
        kinds = "".join(f"-{defect.kind}" for defect in defects)
        return self._root / "oracle" / f"{cell.scenario.model_name}{kinds}-{short_key(*request)}"

    def request(self, cell: Cell, inputs: FrozenInputs, *variants: Defects) -> None:
        """Starts the oracle runs for a cell, unless they were requested before: of the correct oracle, and of the
        oracle with the defects of each of ``variants``. Does not wait."""
        self._start(cell, inputs, (FLOAT64, *noise_runs(cell.scenario.precision)[:1]), variants)

    def wait(self, cell: Cell, *variants: Defects) -> str:
        """Waits for the oracle runs of a cell, which have to be requested before. Returns why runs failed, or ""."""
        return self._wait(cell, (FLOAT64, *noise_runs(cell.scenario.precision)[:1]), variants)

    def variants(self, cell: Cell) -> dict[Defects, Path]:
        """Returns the ``published`` folders of the oracles with defects that were requested for a cell, by defects."""
        found = (one for one in self._variants[cell] if (self.folder(cell, one) / FLOAT64).exists())
        return {defects: self.published(cell, defects) for defects in found}

    def replayed(self, cell: Cell, inputs: FrozenInputs) -> FrozenInputs:
        """Returns the inputs of the cell's ranks, with the oracle's choices of experts if the cell gets them.

        Waits for the float64 run in that case. If that run failed, returns the inputs unchanged; ``wait`` reports the
        failure.
        """
        if not is_replayed(cell.scenario, inputs) or self._wait(cell, (FLOAT64,), ()):
            return inputs
        return self._with_choices(cell, inputs)

    def _with_choices(self, cell: Cell, inputs: FrozenInputs) -> FrozenInputs:
        """Replaces the batches by a copy of those with the choices of experts in the float64 record."""
        copy = self._root / "inputs" / f"{self.folder(cell).name}-{CHOICES}"
        unfinished = copy.with_name(f"{copy.name}.{os.getpid()}-{threading.get_ident()}")
        shutil.copyfile(self.folder(cell) / FLOAT64 / CHOICES, unfinished)
        unfinished.rename(copy)
        return replace(inputs, batches=copy)

    def more_noise(self, cell: Cell, inputs: FrozenInputs, variants: Sequence[Defects] = ()) -> bool:
        """Makes the further noise runs of a cell. Returns whether there are any, and all succeeded."""
        ranks = min(phase.layout.data for phase in cell.phases) if self._device == "cpu" else None
        further = noise_runs(cell.scenario.precision, ranks)[1:]
        self._start(cell, inputs, further, variants)
        return bool(further) and not self._wait(cell, further, variants)

    def _start(self, cell: Cell, inputs: FrozenInputs, policies: Sequence[str], variants: Sequence[Defects]) -> None:
        for has in dict.fromkeys(((), *variants)):
            if has:
                self._variants[cell][has] = None
            for policy in policies:
                out = self.folder(cell, has) / policy
                if out not in self._runs:
                    if (earlier := self.published(cell, has) / policy).is_dir():  # of an earlier session in this folder
                        out.parent.mkdir(exist_ok=True)
                        with contextlib.suppress(OSError):  # another session has taken it in the same moment
                            shutil.move(earlier, out)
                    run = partial(self._run, cell, inputs, out, policy, has)
                    is_here = self._leased is None or self._device_of(cell, policy) == "cpu"
                    self._runs[out] = (self._threads if is_here else self._threads_of_gpus).submit(run)

    def _device_of(self, cell: Cell, policy: str) -> Device:
        """Returns the CPU for float64, whose results do not depend on the device, unless the model is large."""
        return "cpu" if policy == FLOAT64 and not is_large(cell.scenario) else self._device

    def _wait(self, cell: Cell, policies: Sequence[str], variants: Sequence[Defects]) -> str:
        runs = [
            self._runs[self.folder(cell, has) / policy] for has in dict.fromkeys(((), *variants)) for policy in policies
        ]
        failed = "; ".join(filter(None, (run.result() for run in runs)))
        return failed or self._changed(
            self.folder(cell, has) / policy for has in ((), *variants) for policy in policies
        )

    def _changed(self, records: Iterable[Path]) -> str:
        """Returns which of the records was changed since it was written, as a failure; else empty."""
        for record in records:
            if digest_of_record(record) != self._digests[record]:
                return (
                    f"the oracle's record {record.parent.name}/{record.name} was changed while cells ran, and this "
                    f"suite changes none; find the program or the backend that did, and run the cell again"
                )
        return ""

    def _run(self, cell: Cell, inputs: FrozenInputs, out: Path, policy: str, defects: Defects) -> str:
        device = self._device_of(cell, policy)
        if policy != FLOAT64 and is_replayed(cell.scenario, inputs):
            reference = self.folder(cell) / FLOAT64
            if self._runs[reference].result():  # submitted earlier, and it waits for no later run: no deadlock
                return "the oracle's choices of experts are missing, because its float64 run failed"
            inputs = self._with_choices(cell, inputs)
        cached = self._cache / _cache_key(cell, inputs, policy, device, defects)
        with locked(cached.with_suffix(".lock")):
            if _is_whole(out):
                self._digests[out] = digest_of_record(out)
                return ""
            shutil.rmtree(out, ignore_errors=True)  # left by an interrupted run
            out.parent.mkdir(exist_ok=True)
            if not _is_whole(cached):
                shutil.rmtree(cached, ignore_errors=True)
                computed = out.with_name(f"{policy}.computed")
                shutil.rmtree(computed, ignore_errors=True)
                logs = self.published(cell, defects) / f"{policy}-logs"
                timeline.switch(f"oracle {policy}", kind="groups", about=str(cell))
                try:
                    outcome = self._outcome(cell, inputs, computed, policy, device, defects, logs=logs)
                finally:
                    timeline.switch("", kind="groups")
                if outcome.state != "done":
                    return f"the oracle's {policy} run failed: {outcome.reason}"
                with complete_or_nothing(cached) as unfinished:
                    shutil.move(computed, unfinished)
            os.utime(cached)
            self._digests[out] = digest_of_record(cached)
            with complete_or_nothing(out) as unfinished:
                shutil.copytree(cached, unfinished)
        return ""

    def _outcome(
        self,
        cell: Cell,
        inputs: FrozenInputs,
        out: Path,
        policy: str,
        device: Device,
        defects: Defects,
        *,
        logs: Path,
    ) -> Outcome:
        leased = None if device == "cpu" else self._leased
        dtypes = POLICIES[parts_of_run(policy)[0]]
        needed = bytes_needed(cell.scenario, inputs.models, dtypes) if is_large(cell.scenario) else 0
        config = WorkerGroupConfig(
            size=1,
            device=device,
            preload=PRELOAD,
            gpu_memory=(sys.maxsize if self._wants_all else round(needed / (1 - SPARE))) if needed else None,
        )
        run = partial(
            (leased or self._pool).run,
            key="oracle",
            task="conformance.oracle.run:run",
            kwargs={
                "scenario": scenario_to_json(cell.scenario.reference),
                "models": {role: str(folder) for role, folder in inputs.models.items()},
                "batches": str(inputs.batches),
                "out": str(out),
                "policy": policy,
                "restarts": list(cell.restarts),
                "merges": list(cell.merges),
                "defects": defects_to_json(defects),
                "trusted": cell.scenario.trust_remote_code,
            },
            log_dir=logs,
            budget_s=self._budget_s,
            about=str(cell),
        )
        with self._large if needed and leased is None else contextlib.nullcontext():
            outcome = run(config=config)
        # Drivers sometimes fail, and runs side by side may lack memory; an exception on the CPU would come again.
        may_pass = leased is not None or (self._is_packed and outcome.kind != "raised")
        if outcome.state == "failed" and may_pass and not self._is_over:
            shutil.rmtree(out, ignore_errors=True)
            lost = outcome.kind == "MPS"
            if needed and not lost:  # take the GPU with the most free memory: another program may have filled the first
                self._wants_all = True
            reason = outcome.reason.partition("\n")[0]
            self.repeated.append(f"the oracle's {policy} run of {cell} was repeated: {reason}")
            logger.warning(self.repeated[-1])
            if not lost:
                config = replace(config, gpu_memory=sys.maxsize if needed else None)
            outcome = run(config=config, fresh=True, alone=self._is_packed and not lost)
        return outcome

    def _close(self) -> None:
        self._pool.close()
        for record in sorted(record for record in self._digests if record.is_dir()):
            _publish(record, self._root)
        shutil.rmtree(self.withheld, ignore_errors=True)
        prune(self._cache, size=CACHE_SIZE)


def _cache_for(root: Path) -> Path:
    """Returns the folder of the oracle's cache, or a folder inside ``root`` if the cache is not writable."""
    shared = cache_folder() / "oracle"
    try:
        shared.mkdir(parents=True, exist_ok=True)
        if os.access(shared, os.W_OK):
            return shared
    except OSError:
        pass
    return root / "oracle" / "cache"


def prune(folder: Path, *, size: int) -> None:
    """Removes the least recently used records, until at most ``size`` bytes are left."""
    records = sorted((p for p in folder.glob("*") if p.is_dir()), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for record in records:
        total += sum(file.stat().st_size for file in record.glob("*"))
        if total > size:
            shutil.rmtree(record, ignore_errors=True)


def _publish(record: Path, root: Path) -> None:
    published = root / "oracle" / record.parent.name / record.name
    with contextlib.suppress(OSError):  # another session has published it, or the output folder was removed
        if root.is_dir():
            published.parent.mkdir(parents=True, exist_ok=True)
            record.rename(published)


def recover(root: Path) -> None:
    """Publishes the oracle's records that killed sessions have withheld, and removes their folders.

    No other process may run cells in ``root``. Without these records, nobody can judge the cells that were done.
    """
    found: list[Path] = []
    for around in (root.resolve().parent, root):
        with contextlib.suppress(OSError):  # it cannot be listed
            found += [path for path in around.iterdir() if path.name.startswith(_withheld(root))]
    for withheld in found:
        if not withheld.is_symlink() and withheld.stat().st_uid == os.getuid():  # as a session makes it
            for record in withheld.glob(f"*/*/{RECORD_FILE}"):
                if not (record.parent.is_symlink() or record.parent.suffix in (".unfinished", ".computed")):
                    _publish(record.parent, root)
            shutil.rmtree(withheld, ignore_errors=True)


def _withheld(root: Path) -> str:
    return f".{root.resolve().name}.withheld-"


def withheld_folder(root: Path) -> Path:
    """Makes a folder beside the output folder ``root``, or inside if the folder around it is on another disk or cannot
    be written."""
    root.mkdir(parents=True, exist_ok=True)
    around, prefix = root.resolve().parent, _withheld(root)
    if around.stat().st_dev == root.stat().st_dev:
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=around))
    return Path(tempfile.mkdtemp(prefix=prefix, dir=root))


def digest_of_record(record: Path) -> str:
    """Returns the digest of the file that has the digests of all other files of a record; "" if it is missing."""
    try:
        return file_sha256(record / RECORD_FILE)
    except FileNotFoundError:
        return ""


def _is_whole(record: Path) -> bool:
    with contextlib.suppress(RecordError):
        read_record(record)
        return True
    return False


def _cache_key(cell: Cell, inputs: FrozenInputs, policy: str, device: Device, defects: Defects = ()) -> str:
    digest = hashlib.sha256()
    request = cell.oracle_request  # includes the paths of model and data, because the judge compares them
    kernels = "" if device == "cpu" else torch.cuda.get_device_name()
    versions = [torch.__version__, torch.backends.cpu.get_cpu_capability(), kernels]
    if not all(map(is_written, inputs.models.values())):
        versions.append(importlib.metadata.version("transformers"))
    parts = [request, policy, *versions, defects_to_json(defects)]
    digest.update(json.dumps(parts, sort_keys=True).encode())
    objective = cell.scenario.objective
    sources = {inspect.getsourcefile(type(part)) for part in (objective, functions_of(objective))}
    package = Path(oracle.__file__).parent
    files = [inputs.batches, *sorted(package.glob("*.py")), *sorted(Path(source) for source in sources if source)]
    files += [package.parent / name for name in COMPUTED_WITH]
    for role, folder in sorted(inputs.models.items()):
        digest.update(role.encode())
        files += sorted(
            file for file in folder.iterdir() if file.name == "config.json" or file.suffix in (".safetensors", ".py")
        )
        files += sorted((folder / ADAPTER).glob("*"))
    for file in files:
        digest.update(bytes.fromhex(input_sha256(file)))
    return digest.hexdigest()[:32]
