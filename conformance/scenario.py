"""Scenario: WHAT is trained, independent of any backend.

Every number that decides the outcome of a run (objective, data, optimizer, schedule, precision, micro-batching, seed)
is written down here once; backends and the oracle only read it. Loaded from TOML.

Conventions that every backend has to follow:

* Loss of an optimizer step, as its objective says (conformance.objective), over all ranks and all micro-batches: of SFT
  a global token mean, never a mean of means.
* ``max_grad_norm`` clips by the global 2-norm: g <- g * min(1, max_grad_norm / (norm + 1e-6)), as torch does.
* Weight decay is decoupled (Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2) and applies to parameters with two or
  more dimensions: biases and norm weights are exempt. Under SGD there is none.
* A frozen parameter has no gradient, no update and no decay, and the norm leaves it out: it stays what was loaded.
* As an input, the padding token of the model's configuration gives no gradient to its embedding, as in transformers.
* The learning rate of optimizer step k (from 0) is ``schedule.factor(k) * lr``; schedules carry transformers' names.
"""

import dataclasses
import math
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.objective import Objective, Sft, objective_to_json, parse_objective
from conformance.validation import STRICT, UsageError, explain

Precision = Literal["exact", "fp32", "bf16", "fp16"]
PositiveInt = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Where the documents come from and how they become rows of one optimizer step.

    ``path`` names a JSONL or Parquet file or a Hugging Face dataset saved on disk; relative paths are looked up beside
    the built-in fixtures. ``max_len`` is in tokens; ``rows`` is per optimizer step, over all ranks and micro-batches.
    """

    path: str = "data/word_problems.jsonl"
    input_key: str = "question"
    output_key: str = "answer"
    max_len: PositiveInt = 96
    packed: bool = False
    rows: PositiveInt = 24


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """SGD with momentum, or AdamW. ``max_grad_norm`` None leaves the gradients unclipped.

    ``frozen``: shell patterns of Hugging Face parameter names that are not trained, of every model of the objective.
    """

    name: Literal["sgd", "adamw"]
    lr: Positive
    momentum: Fraction = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-5
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive | None = None
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
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    total_steps: PositiveInt = 10
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
class Scenario:
    """One training run. ``model`` is a Hugging Face folder; relative paths are looked up beside the built-in fixtures.

    ``accumulation`` is the number of micro-batches per optimizer step. ``seed`` perturbs the model's weights and picks
    the documents.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    model: str
    precision: Precision
    optimizer: OptimizerConfig
    objective: Annotated[Objective, PlainValidator(parse_objective), PlainSerializer(objective_to_json)] = Field(
        default_factory=Sft
    )
    accumulation: PositiveInt = 1
    steps: PositiveInt = 5
    seed: int = 0
    data: DataConfig = Field(default_factory=DataConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        if self.data.rows % self.accumulation:
            raise ValueError(
                f"data.rows={self.data.rows} is not divisible by accumulation={self.accumulation}; "
                f"use data.rows={math.ceil(self.data.rows / self.accumulation) * self.accumulation}"
            )

    @property
    def model_name(self) -> str:
        """Last part of the model's path; the family in a cell's id."""
        return Path(self.model).resolve().name

    @property
    def reference(self) -> "Scenario":
        """The part that the oracle depends on: cutting a step into micro-batches must not matter."""
        return dataclasses.replace(self, accumulation=1)


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

    Raises UsageError with the file's name for a missing file, broken TOML, unknown keys and values out of range.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.toml"))) or "none"
        raise UsageError(f"no scenario file {path}; scenarios in that folder: {known}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    if not isinstance(values.get("data", {}), dict):
        raise UsageError(f"{path}: data has to be a table ([data]), not {values['data']!r}")
    values["data"] = {**values.get("data", {}), **(data_overrides or {})}
    return parse_scenario({"name": path.stem, **values, **overrides}, source=str(path))


def scenario_to_json(scenario: Scenario) -> dict[str, Any]:
    """Plain JSON values of a scenario; ``parse_scenario`` reads them back."""
    values: dict[str, Any] = _ADAPTER.dump_python(scenario, mode="json")
    return values
