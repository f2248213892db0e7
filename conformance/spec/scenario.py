"""Scenario: WHAT is trained, independent of any backend.

Every number that decides the outcome of a run (objective, data, optimizer, schedule, precision, micro-batching, seed)
is written down here once; backends and the oracle only read it. Loaded from TOML.

Conventions that every backend has to follow:

* Loss of an optimizer step, as its objective says (conformance.spec.objectives), over all ranks and all
micro-batches: of SFT
  a global token mean, never a mean of means.
* ``max_grad_norm`` clips by the global 2-norm: g <- g * min(1, max_grad_norm / (norm + 1e-6)), as torch does.
* Weight decay is decoupled (Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2) and applies to parameters with two or
  more dimensions: biases and norm weights are exempt. Under SGD there is none.
* A frozen parameter has no gradient, no update and no decay, and the norm leaves it out: it stays what was loaded.
* With adapters (conformance.spec.lora), nothing else of the policy is trained. Numbers of its base are rounded to
bf16 once,
  before anybody loads them, as those of published weights are: so whoever holds the base in half precision loses none.
* As an input, the padding token of the model's configuration gives no gradient to its embedding, as in transformers.
* An update whose gradients overflow in fp16 is skipped: weights, moments, step counts and the schedule stay. The loss
  scale halves, at the first overflow. After ``growth_interval`` updates in a row it doubles.
* The learning rate of optimizer step k (from 0) is ``schedule.factor(k) * lr``; schedules carry transformers' names.
"""

import dataclasses
import math
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError, did_you_mean, explain, shown
from conformance.core.io import read_toml
from conformance.spec.lora import LoraConfig, is_adapter
from conformance.spec.objectives import Objective, Sft, objective_to_json, parse_objective
from conformance.spec.precision import PRECISIONS, Precision, PrecisionName
from conformance.spec.roles import POLICY, Role

NAME = "[a-z0-9][a-z0-9-]*"  # of a scenario
TooLong = Literal["truncate", "drop", "error"]
# Strict: a text is no number and a number is no bool. The bounds are beyond what anybody trains with: past them, a run
# only fills the memory or gives numbers that are not finite.
Count = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Steps = Annotated[int, Field(strict=True, ge=0, le=10_000_000)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Flag = Annotated[bool, Field(strict=True)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
MOST_ROWS = 2**22  # in all steps together; they are held in memory


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Where the documents come from and how they become rows of one optimizer step.

    ``path`` names a JSONL or Parquet file or a Hugging Face dataset saved on disk; relative paths are looked up beside
    the built-in fixtures. ``max_len`` is in tokens; ``rows`` is per optimizer step, over all ranks and micro-batches.
    ``too_long``: what becomes of documents of more than ``max_len`` tokens: they are cut at the end, left out, or an
    error. ``max_samples``: only so many samples from the beginning of the data are read; None: all. Both are about
    pairs of texts, not about roll-outs.
    """

    path: FilePath = "data/word_problems.jsonl"
    input_key: str = "question"
    output_key: str = "answer"
    max_len: Count = 96
    packed: Flag = False
    rows: Count = 24
    too_long: TooLong = "truncate"
    max_samples: Count | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """SGD with momentum, or AdamW. ``max_grad_norm`` None leaves the gradients unclipped.

    ``frozen``: shell patterns of Hugging Face parameter names that are not trained, of every model of the objective.
    """

    name: Literal["sgd", "adamw"]
    lr: Annotated[float, Field(strict=True, gt=0, le=1000)]
    momentum: Fraction = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(strict=True, gt=0, le=1)] = 1e-5
    weight_decay: Annotated[float, Field(strict=True, ge=0, le=100)] = 0.0
    max_grad_norm: Annotated[float, Field(strict=True, gt=0, le=1e12)] | None = None
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name == "sgd" and self.weight_decay:
            raise ValueError("sgd has no weight decay here; use weight_decay=0, or adamw")
        if self.name == "adamw" and self.momentum:
            raise ValueError("adamw has betas instead of a momentum; use momentum=0, or sgd")

    def trains(self, name: str) -> bool:
        """Whether a parameter of a trained model is trained, too."""
        return not any(fnmatchcase(name, pattern) for pattern in self.frozen)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    """Learning-rate schedule with the formulas of ``transformers.get_scheduler``; its ``constant`` is with warm-up.

    ``min_factor``: what a cosine ends at (transformers' ``min_lr_rate``), after ``total_steps``; then it rises again.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Steps = 0
    total_steps: Annotated[Steps, Field(ge=1)] = 10
    min_factor: Fraction = 0.0

    def __post_init__(self) -> None:
        if self.min_factor and self.name != "cosine":
            raise ValueError(f"the schedule {self.name} has no minimum; use min_factor=0, or cosine")

    def factor(self, step: int) -> float:
        """Multiplier of the base learning rate at optimizer step ``step`` (from 0)."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.name == "linear":
            return max(0.0, 1.0 - progress)
        if self.name == "cosine":
            height = 0.5 * (1.0 + math.cos(math.pi * progress))
            return max(0.0, height * (1.0 - self.min_factor) + self.min_factor)
        return 1.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LossScaleConfig:
    """The dynamic loss scale of fp16 (Micikevicius et al., arXiv 1710.03740, section 3.3).

    It begins at 2^``initial_power``; from the usual 16 or 32 the first updates overflow, until it has fallen.
    """

    initial_power: Annotated[int, Field(strict=True, ge=1, le=64)] = 12
    growth_interval: Count = 2000


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Scenario:
    """One training run. ``model`` is a Hugging Face folder; relative paths are looked up beside the built-in fixtures.

    ``accumulation`` is the number of micro-batches per optimizer step. ``seed`` perturbs the model's weights and picks
    the documents. ``loss_scale``: in fp16, how the loss is scaled; if it is given, it is judged at every step which
    updates are skipped, and how the scale falls and grows. ``lora``: the policy has adapters; only they are trained.
    ``router_z_loss``: what the z-loss of the routers of a mixture of experts is multiplied by, before it is added to
    the loss of each trained model (Zoph et al., arXiv 2202.08906, equation 5); 0 adds none.
    ``trust_remote_code``: Python code of the model's folder may be run; the user says so on the command line, and a
    scenario's file cannot. ``sketch``: of matrices with more elements than this, records
    keep sketches (conformance.numerics.sketch); None: as is usual for the model's size.
    """

    name: Annotated[str, Field(pattern=rf"^{NAME}$", max_length=100)]
    model: FilePath
    precision: PrecisionName
    optimizer: OptimizerConfig
    objective: Annotated[Objective, PlainValidator(parse_objective), PlainSerializer(objective_to_json)] = Field(
        default_factory=Sft
    )
    accumulation: Count = 1
    steps: Count = 5
    seed: Seed = 0
    data: DataConfig = Field(default_factory=DataConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    loss_scale: LossScaleConfig | None = None
    lora: LoraConfig | None = None
    router_z_loss: Annotated[float, Field(strict=True, ge=0, le=1000)] = 0.0
    trust_remote_code: Flag = False
    sketch: Annotated[int, Field(strict=True, ge=0, le=2**50)] | None = None

    def __post_init__(self) -> None:
        if self.steps * self.data.rows > MOST_ROWS:
            raise ValueError(
                f"steps={self.steps} of data.rows={self.data.rows} are more than {MOST_ROWS} rows, which are all held "
                f"in memory; use fewer steps or rows"
            )
        if self.data.rows % self.accumulation:
            raise ValueError(
                f"data.rows={self.data.rows} is not divisible by accumulation={self.accumulation}; "
                f"use data.rows={math.ceil(self.data.rows / self.accumulation) * self.accumulation}"
            )

    def trains(self, role: Role, name: str) -> bool:
        """Whether a parameter of this role's model is trained."""
        adapted = self.lora is not None and role == POLICY
        return role.trained and self.optimizer.trains(name) and (not adapted or is_adapter(name))

    @property
    def model_name(self) -> str:
        """Last part of the model's path; the family in a cell's id."""
        return Path(os.path.realpath(self.model)).name  # resolve() raises where a link leads to itself

    @property
    def tier(self) -> Precision:
        """The facts about this scenario's precision."""
        return PRECISIONS[self.precision]

    @property
    def judged_loss_scale(self) -> LossScaleConfig | None:
        """How the loss scale falls and grows; None if the precision has none, or the scenario does not say."""
        return self.loss_scale if self.tier.is_loss_scaled else None

    @property
    def reference(self) -> "Scenario":
        """The part that the oracle depends on: cutting a step into micro-batches must not matter, what the code of the
        model's folder computes does not change by trusting it, and only fp16 has a loss scale."""
        scale = self.judged_loss_scale
        return dataclasses.replace(self, accumulation=1, trust_remote_code=False, loss_scale=scale)


_ADAPTER = TypeAdapter(Scenario)


def parse_scenario(values: dict[str, Any], *, source: str = "scenario") -> Scenario:
    """Build a Scenario from plain values; raises UsageError that names every wrong field and says what it may be."""
    try:
        return _ADAPTER.validate_python(values)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except ValidationError as error:
        raise explain(error, source=source, what="scenario") from None


def load_scenario(path: Path, *, data_overrides: dict[str, Any] | None = None, **overrides: Any) -> Scenario:
    """Read a scenario from a TOML file.

    ``overrides`` replace top-level values (model, precision, seed, ...), ``data_overrides`` those of its data table.

    Raises UsageError with the file's name for a missing file, broken TOML, unknown keys and values out of range, and
    for a file that wants the model's code to be trusted.
    """
    try:
        values = read_toml(path)
    except FileNotFoundError:
        known = sorted(p.stem for p in path.parent.glob("*.toml"))
        near = did_you_mean(path.stem, known)
        raise UsageError(f"no scenario file {path}; {near}scenarios there: {', '.join(known) or 'none'}") from None
    if not isinstance(values.get("data", {}), dict):
        raise UsageError(f"{path}: data has to be a table ([data]), not {shown(values['data'])}")
    if "trust_remote_code" in values:
        raise UsageError(f"{path}: trust_remote_code cannot be said by a file; use the option --trust-remote-code")
    if "name" not in values and not re.fullmatch(NAME, path.stem):
        raise UsageError(
            f"{path}: a scenario is called what its file is called, in small letters, digits and dashes; rename the "
            f'file or write name = "..." into it'
        )
    values["data"] = {**values.get("data", {}), **(data_overrides or {})}
    return parse_scenario({"name": path.stem, **values, **overrides}, source=str(path))


def scenario_to_json(scenario: Scenario) -> dict[str, Any]:
    """Plain JSON values of a scenario; ``parse_scenario`` reads them back."""
    values: dict[str, Any] = _ADAPTER.dump_python(scenario, mode="json")
    return values
