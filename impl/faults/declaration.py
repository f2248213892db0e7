"""Declares faults by a decorator, and the cheapest cell for each backend in which a fault changes something.

Tests plant a fault in these cells with fewer steps and rows; ``benchmarks/mutation_score.py`` with all of them.
"""

import contextlib
import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from conformance.backends.faults import Fault, FaultCells, Function, Gate, Resumes
from conformance.core.host import resolve
from conformance.core.io import read_json
from conformance.matrix.cell import Cell
from conformance.spec.layout import Layout
from conformance.spec.precision import HALF_PRECISIONS, PRECISIONS, Precision, PrecisionName


class Faults(list[Fault]):
    """Collects the faults of a group. ``blind`` holds for each of them that does not say otherwise."""

    def __init__(self, *, blind: tuple[Gate, ...] = ()) -> None:
        super().__init__()
        self._blind = blind

    def add(
        self,
        *,
        summary: str,
        source: str,
        stage: str,
        cells: FaultCells,
        needs: str,
        blind: tuple[Gate, ...] | None = None,
        half_stage: str = "",
    ) -> Callable[[Function], Function]:
        """Declares a function as the fault of its name, with dashes.

        The function replaces the seam that its first parameter names, and gets the original function there.
        """

        def declare(function: Function) -> Function:
            self.append(
                Fault(
                    name=function.__name__.replace("_", "-"),
                    summary=summary,
                    source=source,
                    seam=next(iter(inspect.signature(function).parameters)),
                    stage=stage,
                    cells=cells,
                    blind=self._blind if blind is None else blind,
                    needs=needs,
                    wrap=lambda original: partial(function, original),
                    half_stage=half_stage,
                )
            )
            return function

        return declare


Reasons = Mapping[PrecisionName, str]  # why a fault changes nothing that could be observed, by precision

_BF16_SHOWS_IT = "other half precisions are used only for faults that bf16 cannot show"


def _where(condition: Callable[[Precision], bool], reason: str) -> Reasons:
    return {name: reason for name, precision in PRECISIONS.items() if condition(precision)}


# Values of ``only``: the condition under which a fault can be observed.
ROUNDING = _where(lambda p: p.is_exact, "float64 stands for every dtype in the exact tier, so nothing is rounded")
COARSE = _where(lambda p: not p.is_exact, "below the exact tier float8 amplifies rounding, which hides the fault")
FLOAT32 = _where(
    lambda p: p.is_exact or p.is_half, "TransformerEngine has no float64; in half precision the fault was not tried"
)
REPLAY = _where(lambda p: p.is_exact, "in the exact tier backends choose experts by themselves")
OWN_CHOICES = _where(lambda p: not p.is_exact, "below the exact tier backends are given the choices of experts")
WITHOUT_HALF = _where(lambda p: p.is_half, "DeepSpeed's Muon is not built in for half precision")
HALF = _where(lambda p: not p.is_half, "the fault acts in half precision only")
FULL = _where(
    lambda p: p.is_half,
    "half precision has no scenario with a clip that is reached, Dr. GRPO, GSPO, SAPO, GMPO or masks",
)
OFFLOADED = _where(
    lambda p: p.is_exact or p.is_half,
    "DeepSpeed adds offloaded gradients up by other code if parameters are not float32",
)
CHOSEN_TOKENS = _where(lambda p: p.is_half, "half precision chooses other tokens among the likeliest of the teacher")
BF16 = _where(lambda p: p.compute.name != "bfloat16", "the code in question runs in bf16 only")
STOCHASTIC = _where(lambda p: not p.is_stochastic, "only bf16-stochastic rounds at random")
REMAINDERS = _where(lambda p: p.name != "bf16", "remainders complete bf16 to float32 masters")
STORED = _where(lambda p: p.stored is None, "only bf16-nearest and bf16-stochastic have no masters")
FP16 = _where(lambda p: not p.is_loss_scaled, "only fp16 has a loss scale")
_ROUNDED_BASE = _where(
    lambda p: p.is_half, "DeepSpeed rounds a base without masters, so the merged weights differ without a fault as well"
)

RL_LAYOUTS = {"fsdp2": "dp2", "deepspeed": "dp2.zero2", "megatron": "dp2"}
RESUME_LAYOUTS = {"fsdp2": "tp2", "deepspeed": "dp2.zero2", "megatron": "pp2"}
RESUMED_IN = {"fsdp2": "dp2", "deepspeed": "dp2.zero3", "megatron": "tp2"}
DROPOUT = 0.1  # of attention, in the models that ``with_dropout`` makes


def sft(scenario: str, model: str, *, only: Reasons | None = None, **layouts: str) -> FaultCells:
    """Cells of supervised fine-tuning. ``layouts``: by backend."""
    return FaultCells(scenario=scenario, model=model, layouts=layouts, unobservable=_unobservable(only))


def rl(
    scenario: str,
    *,
    half: str = "",
    model: str = "llama",
    dropout: bool = False,
    only: Reasons | None = None,
    **layouts: str,
) -> FaultCells:
    """Cells of GRPO or PPO; half precision has a scenario of its own. ``layouts``: by backend; default: RL_LAYOUTS."""
    return FaultCells(
        scenario=scenario,
        half_scenario="" if only is FULL else half or f"{scenario.partition('-')[0]}-half",
        model=model,
        layouts=layouts or RL_LAYOUTS,
        dropout=dropout,
        unobservable=_unobservable(only),
    )


def distilled(scenario: str = "distillation", **layouts: str) -> FaultCells:
    """Cells of distillation. ``layouts``: by backend; default: RL_LAYOUTS."""
    unobservable = _unobservable(CHOSEN_TOKENS if "top-k" in scenario else None)
    return FaultCells(scenario=scenario, model="llama", layouts=layouts or RL_LAYOUTS, unobservable=unobservable)


def resume(
    saves: Resumes = "state",
    *,
    scenario: str = "sft-warmup",
    model: str = "llama",
    only: Reasons | None = None,
    **layouts: str,
) -> FaultCells:
    """Cells of two phases, in which the second phase resumes from what the first one ``saves``. ``layouts``: by
    backend; default: RESUME_LAYOUTS."""
    return FaultCells(
        scenario=scenario,
        model=model,
        layouts=layouts or RESUME_LAYOUTS,
        saves=saves,
        unobservable=_unobservable(only),
    )


def merge() -> FaultCells:
    """Cells of two phases, in which the first phase trains an adapter and merges it into the base."""
    layouts = {backend: RESUME_LAYOUTS[backend] for backend in ("fsdp2", "deepspeed")}
    return FaultCells(scenario="sft-lora", model="llama", layouts=layouts, saves="merge", unobservable=_ROUNDED_BASE)


def _unobservable(reasons: Reasons | None) -> Reasons:
    """Completes ``reasons``: a fault that bf16 shows is not planted in other half precisions as well."""
    reasons = reasons or {}
    other: dict[PrecisionName, str] = {name: _BF16_SHOWS_IT for name in HALF_PRECISIONS if name != "bf16"}
    return reasons if "bf16" in reasons else {**reasons, **other}


def with_program(cell: Cell, fault: Fault, models: Path) -> Cell:
    """Applies to a cell of one phase what the fault's cells need besides a layout: dropout, a second phase.

    ``models``: the folder in which a model with dropout is made.
    """
    cell = with_dropout(cell, models) if fault.cells.dropout else cell
    return with_resume(cell, fault.cells.saves) if fault.cells.saves else cell


def with_resume(cell: Cell, saves: Resumes) -> Cell:
    """Splits a cell into two phases: after two steps ``saves`` is written, and another layout of the backend resumes.

    A checkpoint is resumed in the layout that wrote it, because only there the random generators continue.
    """
    (phase,) = cell.phases
    first = replace(phase, steps=2, save=saves)
    layout = phase.layout if saves == "checkpoint" else Layout.parse(RESUMED_IN[phase.backend.name])
    second = replace(phase, layout=layout, steps=phase.steps - 2)
    return replace(cell, phases=(first, second), program=saves)


def with_dropout(cell: Cell, root: Path) -> Cell:
    """Runs a cell on a copy of its model, made under ``root``, whose configuration has dropout in attention."""
    scenario = cell.scenario
    folder = root / f"{scenario.model_name}-dropout"
    with contextlib.suppress(FileExistsError):
        shutil.copytree(resolve(scenario.model), folder)
        config = read_json(folder / "config.json")
        (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": DROPOUT}), encoding="utf-8")
    data = replace(scenario.data, path=scenario.data.path.replace("{model}", scenario.model_name))
    return replace(cell, scenario=replace(scenario, model=str(folder), data=data))
