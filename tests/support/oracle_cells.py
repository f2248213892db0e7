"""Runs the oracle with conventions in a folder of a test, and writes its runs as records of cells."""

from collections.abc import Sequence
from pathlib import Path

from conformance.data.inputs import prepare_inputs
from conformance.matrix.cell import Cell
from conformance.oracle.run import run_oracle
from conformance.records.step_tensors import Record, RecordWriter, read_record
from conformance.runner.oracle_jobs import Defects
from conformance.spec.batch import Batch, read_batches
from conformance.spec.known_defects import defects_to_json

OWN = ("type", "schema", "first_step", "observables")  # keys of a header that the writer adds


class OracleRuns:
    """Runs the oracle on the inputs of a cell, each run once."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self._folder = cell, folder
        self._inputs = prepare_inputs(cell.scenario, folder / "inputs")
        self.batches: Sequence[Batch] = read_batches(self._inputs.batches)

    def folder(self, defects: Defects = (), run: str = "float64") -> Path:
        """The folder of the runs of the oracle with these defects, of which ``run`` has been made."""
        name = "oracle" + "".join(f"-{'-'.join(map(str, one.values()))}" for one in defects_to_json(defects))
        if not (self._folder / name / run).exists():
            run_oracle(
                scenario=self.cell.scenario,
                models=self._inputs.models,
                batches=list(self.batches),
                out=self._folder / name / run,
                policy_name=run,
                defects=defects,
            )
        return self._folder / name

    def record(self, defects: Defects = (), run: str = "float64") -> Record:
        return read_record(self.folder(defects, run) / run)


def as_cell(
    run: Record,
    path: Path,
    cell: Cell,
    *without: str,
    values: dict[str, float] | None = None,
    scaled: dict[str, float] | None = None,
) -> Record:
    """Writes a run of the oracle as the record of a cell of one rank, without some quantities, with other values, and
    with values and tensors that are scaled, by key."""
    factors = scaled or {}
    backend = {"name": cell.backend, "url": "", "default_zero": None}
    header = {**run.header, "cell": str(cell), "backend": backend, "optimizer": "new", "loads": ""}
    writer = RecordWriter(path, {k: v for k, v in header.items() if k not in OWN}, observables=run.observables)
    writer.loaded(run.loaded.tensors())
    for step in run.steps:
        tensors = {name: t for name, t in step.tensors().items() if name.partition("/")[0] not in without}
        tensors = {name: t * factors.get(name.partition("/")[0], 1.0) for name, t in tensors.items()}
        known = {key: n for key, n in {**step.line["values"], **(values or {})}.items() if key not in without}
        known = {key: n * factors.get(key, 1.0) for key, n in known.items()}
        writer.step(known, tensors, seconds=0.0)
    dtype = cell.scenario.tier.compute.name
    evidence = {"collectives": [], "products": [[dtype, "forward", 4], [dtype, "backward", 8]], "widths": []}
    writer.finish({"seconds": 0.0, "leaks": [], "evidence": [evidence]})
    return read_record(path)
