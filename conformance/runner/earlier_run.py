"""Continues an earlier run of the same cells that was stopped, or in which cells failed, in its output folder.

It continues only with the versions and hardware that it began with (``environment``). A cell that runs again keeps its
earlier state in its verdict (``Entry.before``), so that a failure that does not recur is still reported. After the code
of a user's backend changed, no verdict of its cells counts: a folder never holds verdicts about two versions of a
backend, and is incomplete until the new one has run all cells. What counts as its code: conformance.core.packages,
``code_digest``. A change elsewhere, such as of an installed package of the same version or of a compiled extension, is
not seen; only a new run shows it.
"""

import logging
import os
import platform
import re
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import conformance
from conformance.backends.registry import CODE
from conformance.core.errors import UsageError, first_few
from conformance.core.io import LOCK
from conformance.core.packages import UNKNOWN, is_installed, package_version
from conformance.matrix.cell import Cell
from conformance.matrix.options import Again, Ranks, Selection
from conformance.matrix.plan import Plan
from conformance.matrix.profile import select
from conformance.results.baseline import CHANGED, COMMIT, RANKS_PER_GPU
from conformance.results.output_folders import Part, check_parts, read_part, rewrite_summary
from conformance.results.run_results import SUMMARY, Entry, Run, read_summary, write_entry
from conformance.results.trust import read_cells
from conformance.results.verdict import ANSWERED, FAILED, FAILED_BEFORE, State
from conformance.runner.oracle_jobs import recover
from conformance.runtime.gpu_inventory import installed_gpus

logger = logging.getLogger(__name__)
PACKAGE = Path(conformance.__file__).parent
# Prefixes of environment variables that change results of libraries or the communication of ranks.
VARIABLES = ("CUDA_", "CUBLAS_", "GLOO_", "MKL_", "NCCL_", "NVIDIA_TF32_", "OMP_", "PYTORCH_")
PACKAGES = ("torch", "transformers", "ring-flash-attn", "deepspeed", "megatron-core")  # listed in the summary
WHERE_INSTALLED = ("transformer-engine",)  # listed in the summary only if they are installed


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Holds the earlier run and its cells. A verdict that cannot be trusted is a failure.

    outdated: the cells whose backend has other code now, with or without a verdict. inputs: what both runs read.
    """

    run: Run
    entries: tuple[Entry, ...]
    outdated: tuple[Cell, ...]
    inputs: Mapping[str, str]

    @property
    def failed(self) -> frozenset[str]:
        """Returns the cells that failed, or that failed with earlier code and were not reached since."""
        verdicts = ((entry.cell, entry.verdict) for entry in self.entries)
        return frozenset(cell for cell, one in verdicts if one.state in FAILED or one.reason == FAILED_BEFORE)


def with_earlier_cells(selection: Selection, out: Path) -> Selection:
    """Returns the selection with the cells of the run in ``out``, if it names none. Only patterns are taken from the
    folder, which may come from anybody: other options can name code. Raises UsageError."""
    return selection.with_cells_of(read_summary(out)[0].selection if (out / SUMMARY).exists() else "")


def refuse_other_options(out: Path, selection: str, *, more: str) -> None:
    """Raises UsageError if the run in ``out`` has other options. more: what its command has to be given besides."""
    run = read_summary(out)[0]
    if changes := _option_changes(run.selection, selection):
        command = (run.resumed(out) or run.command).replace(" --rerun failed", "")
        raise UsageError(f"{out} has other options than this run: {changes}; go on with it: {command}{more}")


def read_earlier(
    out: Path, plan: Plan, ranks: Ranks, *, selection: str, inputs: Mapping[str, str], more: str = ""
) -> Earlier:
    """Reads the run in ``out``. Raises UsageError unless it has the cells, device, versions and files of ``plan``.

    selection, inputs: those of this run (conformance.results.run_results.Run). more: see refuse_other_options.
    """
    if {path.name for path in out.glob("*")} == {LOCK}:
        raise UsageError(f"{out} has no cells: its run ended before the first one; give --out instead of --resume")
    _refuse_links(out)
    recover(out)
    earlier = read_part(out)
    command = earlier.run.resumed(out) or earlier.run.command
    if earlier.run.selected != plan.digest:
        refuse_other_options(out, selection, more=more)
    wanted = Run(
        started="",
        finished=None,
        seconds=0,
        profile=earlier.run.profile,
        device=ranks.device,
        command="",
        environment=environment(ranks_per_gpu=ranks.ranks_per_gpu),
        floor=plan.floor,
        selected=earlier.run.selected,
        inputs=earlier.run.inputs,
    )
    check_parts([earlier, Part(name="this run", run=wanted, entries=(), version=earlier.version)])
    if earlier.run.floor.shards != plan.floor.shards:
        shards = ", ".join(earlier.run.floor.shards) or "all cells"
        raise UsageError(f"{out} has {shards}; resume it with the same --shard: {command}{more}")
    changed = _changed_code(earlier, plan, selection=selection, inputs=inputs)
    rewrite_summary(out)  # a killed run has written verdicts that are missing in its summary
    run, cells = read_cells(out)
    for cell, stored in zip(cells, earlier.entries, strict=True):
        if cell.entry != stored:
            write_entry(out, cell.entry)
    return Earlier(
        run=run,
        entries=tuple(cell.entry for cell in cells),
        outdated=tuple(cell for cell in plan.cells if any(CODE + one.backend.name in changed for one in cell.phases)),
        inputs={**earlier.run.inputs, **inputs},
    )


def _changed_code(earlier: Part, plan: Plan, *, selection: str, inputs: Mapping[str, str]) -> set[str]:
    """Returns the backends, by ``CODE`` and their names, whose code has changed since the ``earlier`` run. The code of
    a backend that could not be imported in one of the runs is not compared.

    Raises UsageError if models, data, profiles or scenarios have changed, or if there is too much code to compare."""
    advice = "its verdicts are not about what is there now; restore what it read, or give a new --out for all cells"
    before = earlier.run.inputs
    if not before:
        raise UsageError(
            f"{earlier.name} does not say what it read: it ended before, or is of an older version; give a new --out"
        )
    names = {name for name in {*before, *inputs} if before.get(name) != inputs.get(name)}
    if changed := sorted(name for name in names if not name.startswith(CODE)):
        raise UsageError(f"{first_few(changed, most=4)} changed since the run in {earlier.name}: {advice}")
    if earlier.run.selected != plan.digest:
        files = " or ".join(word for word in selection.split() if word.endswith(".toml")) or "a profile or scenario"
        raise UsageError(f"{files} changed since the run in {earlier.name}, which had other cells: {advice}")
    for name in (name for name in inputs if name.startswith(CODE) and inputs[name].startswith(UNKNOWN)):
        raise UsageError(
            f"the {name} cannot be compared with that of the run in {earlier.name}: "
            f"{inputs[name].removeprefix(UNKNOWN)}; put the adapter into a smaller folder, and give a new --out"
        )
    return {name for name in names if name in before and name in inputs}


def _refuse_links(out: Path) -> None:
    """Raises UsageError for links, pipes and devices below ``out``: the run would write to wherever they lead.

    Inputs contain links to the weights of the user's model, which are only read.
    """
    for folder, folders, files in os.walk(out):
        is_model = Path(folder).parent == out / "inputs"
        for path in (Path(folder, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            linked_weights = stat.S_ISLNK(mode) and is_model and path.suffix == ".safetensors"
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or linked_weights):
                raise UsageError(f"{path} is a link, pipe or device, and a run only resumes in files; remove it")


def _option_changes(then: str, now: str) -> str:
    """Returns the options that only one of two selections has, in words; empty if they have the same options."""
    before, after = (re.findall(r"--\S+(?: (?!--)\S+)*", text) for text in (then, now))
    only_then = [option for option in before if option not in after]
    only_now = [option for option in after if option not in before]
    changes = (("it had", only_then), ("this one has", only_now)) if then else ()
    return ", and ".join(f"{who} {' '.join(options)}" for who, options in changes if options)


def cells_left(cells: Sequence[Cell], earlier: Earlier, again: Again, *, only: Sequence[str] = ()) -> list[Cell]:
    """Returns the cells to run: those without a verdict on the present code, or those that failed, also with code that
    was mended since. only: patterns of those to run.

    There may be none if a run was stopped after its last cell. Raises UsageError if no cell failed.
    """
    verdicts = {entry.cell: entry.verdict for entry in earlier.entries}
    unanswered = {str(cell) for cell in cells if str(cell) not in verdicts} | {
        cell for cell, verdict in verdicts.items() if verdict.state not in ANSWERED
    }
    outdated = {str(cell) for cell in earlier.outdated}
    wanted = set(earlier.failed) if again.rerun else unanswered | outdated
    left = [cell for cell in cells if str(cell) in wanted]
    if again.rerun and not left:
        raise UsageError(f"no cell of {again.resume} failed; parity report {again.resume} shows all")
    left = select(left, only)
    if outdated:
        waiting = len(outdated - {str(cell) for cell in left})
        later = f"; {waiting} of them wait for --resume without --rerun" if waiting else ""
        logger.warning("the code of a backend changed, so its %d cells lose their verdicts%s", len(outdated), later)
    return left


def before(earlier: Entry | None) -> tuple[State, ...]:
    """Returns the states in which a cell ended in earlier runs."""
    if earlier is None:
        return ()
    return (*earlier.before, *((earlier.verdict.state,) if earlier.verdict.state in FAILED else ()))


def environment(*, ranks_per_gpu: int = 1) -> dict[str, Any]:
    """Returns versions and hardware as JSON values. ranks_per_gpu: how many ranks might share a GPU."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        **({RANKS_PER_GPU: ranks_per_gpu} if ranks_per_gpu > 1 else {}),
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        **{name: package_version(name) for name in (*PACKAGES, *filter(is_installed, WHERE_INSTALLED))},
        "backend-parity": conformance.__version__,
        COMMIT: commit(PACKAGE.parent),
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    }


def _nccl() -> str | None:
    is_there = torch.distributed.is_nccl_available() and torch.cuda.device_count()
    return ".".join(map(str, torch.cuda.nccl.version())) if is_there else None


def commit(checkout: Path) -> str | None:
    """Returns the git commit of ``checkout``, with the suffix CHANGED if tracked files were changed; None if the folder
    is not a checkout."""
    if not (checkout / ".git").exists():  # installed from a wheel, perhaps inside of another repository
        return None
    describe = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--exclude=*", f"--dirty={CHANGED}"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def _gpus() -> list[str]:
    """Returns the name and driver of each GPU of the host, without creating a CUDA context in this process."""
    if not torch.cuda.device_count():
        return []
    return [f"{gpu.name}, {gpu.driver}" for gpu in installed_gpus()]
