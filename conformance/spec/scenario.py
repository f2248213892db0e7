"""Defines what is trained, independently of any backend.

Every number that decides the outcome of a run (objective, data, optimizer, schedule, precision, micro-batching, seed)
is set here once; backends and the oracle only read it. Scenarios are read from TOML.

Conventions that every backend must follow:

* The objective defines the loss of an optimizer step, over all ranks and micro-batches (conformance.spec.objectives).
  SFT has a global token mean, never a mean of means.
* ``max_grad_norm`` clips by the global 2-norm: g <- g * min(1, max_grad_norm / (norm + 1e-6)), as torch does.
* Weight decay is decoupled (Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2) and applies to parameters with two or
  more dimensions: biases and norm weights are exempt. Under SGD there is none.
* A frozen parameter has no gradient, update or decay, and does not count in the norm: it stays as loaded.
* With LoRA adapters, nothing else of the policy is trained. Its base is rounded to bf16 once, before it is loaded, as
  published weights are, so that a backend that stores the base in half precision loses nothing.
* As an input, the padding token of the model's configuration gives no gradient to its embedding, as in transformers.
* An update whose gradients overflow in fp16 is skipped: weights, moments, step counts and the schedule stay. The loss
  scale halves at each overflow. After ``growth_interval`` updates in a row it doubles.
* The learning rate of optimizer step k (from 0) is ``schedule.factor(k) * lr``; schedules have transformers' names.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError, did_you_mean, explain, shown
from conformance.core.io import read_toml
from conformance.spec.objectives import Objective, objective_to_json, parse_objective
from conformance.spec.observables import MULTI_TOKEN, POLICY, Role, documents_together
from conformance.spec.offline import Sft
from conformance.spec.precision import PRECISIONS, Precision, PrecisionName

NAME = "[a-z0-9][a-z0-9-]*"  # of a scenario
TooLong = Literal["truncate", "drop", "error"]
# Strict: a text is not a number and a number is not a bool. The bounds are beyond real trainings; larger values would
# only exhaust the memory or overflow.
Count = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Steps = Annotated[int, Field(strict=True, ge=0, le=10_000_000)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Flag = Annotated[bool, Field(strict=True)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
MOST_ROWS = 2**22  # in all steps together; all rows are in memory

ADAPTER = "adapter"  # the folder of a model's adapter, inside that of the model
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."  # precedes the parameter's name in WEIGHTS_FILE
PARTS = ("lora_A", "lora_B")
ALL_LINEAR = "all-linear"
IN_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.\d+\.")  # in the name of a parameter
_PARTS = {  # of fused matrices, in names of parameters
    "qkv_proj": re.compile(r"(?<=\.)[qkv]_proj(?=\.weight$)"),
    "gate_up_proj": re.compile(r"(?<=\.)(?:gate|up)_proj(?=\.weight$)"),
}
LINEAR = "_proj.weight"  # suffix of the names of linear layers inside a model's layers
Size = Annotated[int, Field(strict=True, ge=1, le=2**16)]
Target = Annotated[str, Field(pattern=r"^[\w.]+$", max_length=200)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Selects the documents and how they become rows of one optimizer step.

    ``path``: a JSONL or Parquet file or a Hugging Face dataset saved on disk, relative to the working directory or to
    the built-in fixtures. ``max_len`` is in tokens; ``rows`` is per optimizer step, over all ranks and micro-batches.
    ``split``: of a dataset that was saved with several.
    ``too_long``: documents of more than ``max_len`` tokens are cut at the end, left out, or an error. ``max_samples``:
    read only the first samples; None: all. The last two are for pairs of texts, not for rollouts. ``spread_groups``:
    without packing, spread the responses to one prompt over the rollout. Otherwise each rank, mini-batch and
    micro-batch has whole groups, where their numbers of rows allow it, as frameworks need that sample where they train.
    """

    path: FilePath = "data/word_problems.jsonl"
    input_key: str = "question"
    output_key: str = "answer"
    max_len: Count = 96
    packed: Flag = False
    rows: Count = 24
    too_long: TooLong = "truncate"
    max_samples: Count | None = None
    split: str | None = None
    spread_groups: Flag = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """Configures SGD with momentum, AdamW, or Muon. ``max_grad_norm`` None leaves the gradients unclipped.

    Muon (https://kellerjordan.github.io/posts/muon/) orthogonalizes the momentum of the matrices of a model's layers,
    with ``nesterov`` the momentum after one more step; AdamW updates all other parameters, with the same ``lr`` and
    ``weight_decay``. ``adjust_lr``: the factor of the update of a matrix (A, B), by torch's names: ``original`` is
    sqrt(max(1, A / B)), ``match_rms_adamw`` is 0.2 sqrt(max(A, B)) (arXiv 2502.16982, equation 4), and ``spectral``,
    Megatron's, is sqrt(max(A, B)). Both are None under other optimizers, and without defaults under Muon, as
    ``momentum`` is. ``ns_steps`` and ``ns_coefficients``: the Newton-Schulz steps, torch's by default; ``quintic`` has
    other coefficients at each step, and is Megatron's default. ``fused_matrices``: the projections that Muon takes for
    one matrix, their rows one after the other, as Megatron does with ``gate_up_proj``, and with ``qkv_proj`` unless
    muon_split_qkv is set. A model whose files have them as one matrix needs no such word.
    ``frozen``: shell patterns of Hugging Face parameter names that are not trained, in every model of the objective.
    """

    name: Literal["sgd", "adamw", "muon"]
    lr: Annotated[float, Field(strict=True, gt=0, le=1000)]
    momentum: Fraction = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(strict=True, gt=0, le=1)] = 1e-5
    weight_decay: Annotated[float, Field(strict=True, ge=0, le=100)] = 0.0
    max_grad_norm: Annotated[float, Field(strict=True, gt=0, le=1e12)] | None = None
    frozen: tuple[str, ...] = ()
    nesterov: Flag | None = None
    adjust_lr: Literal["original", "match_rms_adamw", "spectral"] | None = None
    ns_steps: Annotated[int, Field(strict=True, ge=1, le=20)] = 5
    ns_coefficients: Literal["simple", "quintic"] = "simple"
    fused_matrices: tuple[Literal["qkv_proj", "gate_up_proj"], ...] = ()

    def __post_init__(self) -> None:
        if self.name == "sgd" and self.weight_decay:
            raise ValueError("sgd has no weight decay here; use weight_decay=0, or adamw")
        if self.name == "adamw" and self.momentum:
            raise ValueError("adamw has betas instead of a momentum; use momentum=0, or sgd")
        if self.name != "muon" and (self.nesterov is not None or self.adjust_lr is not None):
            raise ValueError(f"nesterov and adjust_lr are settings of muon, not of {self.name}; leave them out")
        if self.name != "muon" and (self.ns_steps, self.ns_coefficients, self.fused_matrices) != (5, "simple", ()):
            raise ValueError(
                f"ns_steps, ns_coefficients and fused_matrices are settings of muon, not of {self.name}; leave them out"
            )
        if self.name == "muon" and (not self.momentum or self.nesterov is None or self.adjust_lr is None):
            raise ValueError(
                "muon needs momentum, nesterov and adjust_lr; torch's defaults are momentum=0.95, nesterov=true and "
                "adjust_lr='original'"
            )

    def orthogonalizes(self, name: str, dims: int) -> bool:
        """Tells whether Muon updates a parameter; AdamW updates embeddings, heads, vectors and stacked experts."""
        return self.name == "muon" and dims == 2 and bool(IN_LAYER.search(name))

    def matrices(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Groups parameters that Muon takes for one matrix: its name, and its parts.

        Every other parameter is a group of its own. The order of rows does not matter to orthogonalization.
        """
        found: dict[str, list[str]] = {}
        for name in names:
            matrix = name
            for whole in self.fused_matrices:
                matrix = _PARTS[whole].sub(whole, matrix)
            found.setdefault(matrix, []).append(name)
        return {matrix: tuple(sorted(parts)) for matrix, parts in found.items()}

    def trains(self, name: str) -> bool:
        """Tells whether a parameter of a trained model is trained."""
        return not any(fnmatchcase(name, pattern) for pattern in self.frozen)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    """Configures the learning rate with the formulas of ``transformers.get_scheduler``; ``constant`` includes warm-up.

    ``min_factor``: the value of a cosine (transformers' ``min_lr_rate``) at ``total_steps``; then it rises again.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Steps = 0
    total_steps: Annotated[Steps, Field(ge=1)] = 10
    min_factor: Fraction = 0.0

    def __post_init__(self) -> None:
        if self.min_factor and self.name != "cosine":
            raise ValueError(f"the schedule {self.name} has no minimum; use min_factor=0, or cosine")

    def factor(self, step: int) -> float:
        """Returns the multiplier of the base learning rate at optimizer step ``step`` (from 0)."""
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
class LoraConfig:
    """Configures LoRA (Hu et al., arXiv 2106.09685): which linear layers get an adapter, and its size.

    An adapter of a linear layer W is two matrices, A (r, in) and B (out, r), and the layer computes W x + scale B A x.
    The scale is lora_alpha / r, or lora_alpha / sqrt(r) with ``use_rslora`` (arXiv 2312.03732). Names of options and
    files are peft's.
    ``target_modules``: last parts of the names of linear layers, such as ``q_proj`` or ``layers.0.mlp.up_proj``, or
    ``all-linear``. There is no dropout, because no two frameworks draw the same numbers.
    """

    r: Size
    lora_alpha: Size
    target_modules: Literal["all-linear"] | Annotated[tuple[Target, ...], Field(min_length=1)]
    use_rslora: Annotated[bool, Field(strict=True)] = False

    @property
    def names_layers(self) -> bool:
        """Tells whether a target names a layer by number, so that layers may differ."""
        return self.target_modules != ALL_LINEAR and any(
            part.isdecimal() for target in self.target_modules for part in target.split(".")
        )

    def targets(self, parameters: Iterable[str]) -> tuple[str, ...]:
        """Returns the linear layers that get an adapter in a model with these parameters, without ``.weight``.

        Raises UsageError for a target that is not inside the model's layers, and for experts that the folder stores
        separately: models stack them, and adapters for stacked experts are not implemented.
        """
        inside = [n.removesuffix(".weight") for n in parameters if ".layers." in n and n.endswith(LINEAR)]
        linear = [name for name in inside if ".experts." not in name]
        ends = inside if self.target_modules == ALL_LINEAR else self.target_modules
        if experts := [name for name in inside if name not in linear and any(_matches(name, end) for end in ends)]:
            known = dict.fromkeys(name.rpartition(".")[2] for name in linear if ".self_attn." in name)
            raise UsageError(
                f"lora.target_modules requests adapters of experts, such as {experts[0]}, which are unsupported; name "
                f"linear layers outside of experts, such as {', '.join(known)}"
            )
        if self.target_modules == ALL_LINEAR:
            return tuple(linear)
        for target in self.target_modules:
            if not any(_matches(name, target) for name in linear):
                known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
                raise UsageError(
                    f"lora.target_modules names {target!r}, which matches no linear layer inside the model's layers; "
                    f"use some of {', '.join(known)}, or {ALL_LINEAR!r}"
                )
        return tuple(name for name in linear if any(_matches(name, target) for target in self.target_modules))


def _matches(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def is_adapter(name: str) -> bool:
    """Tells whether a parameter belongs to an adapter."""
    return name.endswith(tuple(f".{part}.weight" for part in PARTS))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LossScaleConfig:
    """Configures the dynamic loss scale of fp16 (Micikevicius et al., arXiv 1710.03740, section 3.3).

    It begins at 2^``initial_power``; from the usual 16 or 32 the first updates overflow until it has fallen enough.
    """

    initial_power: Annotated[int, Field(strict=True, ge=1, le=64)] = 12
    growth_interval: Count = 2000


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Scenario:
    """Describes one training run. ``model``: a Hugging Face folder, absolute or relative as ``DataConfig.path``.

    ``accumulation``: micro-batches per optimizer step. ``seed``: perturbs the model's weights and selects the
    documents. ``loss_scale``: the loss scale of fp16; if given, skipped updates and changes of the scale are judged at
    every step. ``lora``: adapters of the policy; only they are trained. ``router_z_loss``: the factor of the routers'
    z-loss in the loss of each trained model (Zoph et al., arXiv 2202.08906, equation 5); 0 adds none.
    ``router_bias_rate``: after each step the bias by which a router chooses experts moves by this rate, up for experts
    that were chosen less often than the mean, down for the others (arXiv 2408.15664, algorithm 1); 0 leaves it.
    ``trust_remote_code``: Python code of the model's folder may run; only the command line can set it, not a scenario
    file. ``assume_inert``: keys of the model's config.json that the user says change nothing. ``sketch``: records keep
    sketches of matrices with more elements than this (conformance.numerics.sketch); None: the default for the model's
    size.
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
    router_bias_rate: Annotated[float, Field(strict=True, ge=0, le=1000)] = 0.0
    trust_remote_code: Flag = False
    assume_inert: tuple[str, ...] = ()
    sketch: Annotated[int, Field(strict=True, ge=0, le=2**50)] | None = None

    def __post_init__(self) -> None:
        if self.steps * self.data.rows > MOST_ROWS:
            raise ValueError(
                f"steps={self.steps} of data.rows={self.data.rows} are more than {MOST_ROWS} rows, which must all fit "
                f"into memory; use fewer steps or rows"
            )
        if self.lora and POLICY not in self.objective.roles:
            trained = "modules without adapters" if MULTI_TOKEN in self.objective.roles else "none"
            raise ValueError(f"lora adapts a policy, and {self.objective.kind!r} trains {trained}; leave out [lora]")
        if self.data.rows % (parts := self.accumulation * self.rows_together):
            pairs = " pairs of rows" if self.rows_together > 1 else ""
            raise ValueError(
                f"data.rows={self.data.rows} is not divisible by accumulation={self.accumulation}{pairs}; "
                f"use data.rows={math.ceil(self.data.rows / parts) * parts}"
            )

    @property
    def rows_together(self) -> int:
        """Returns how many consecutive rows a micro-batch must not separate: 2 for the answers of unpacked pairs."""
        return 1 if self.data.packed else documents_together(self.objective.reads)

    def trains(self, role: Role, name: str) -> bool:
        """Tells whether a parameter of this role's model is trained."""
        adapted = self.lora is not None and role == POLICY
        return role.trained and self.optimizer.trains(name) and (not adapted or is_adapter(name))

    @property
    def balances_routers(self) -> bool:
        """Tells whether a training needs a z-loss or updates of biases, which few libraries have."""
        return bool(self.router_z_loss or self.router_bias_rate)

    @property
    def model_name(self) -> str:
        """Returns the last part of the model's path or, in the cache of the Hugging Face Hub, of the model's name.

        It is the family in a cell's id.
        """
        path = Path(os.path.realpath(self.model))  # resolve() raises for a link to itself
        is_cached = path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--")
        return path.parent.parent.name.rpartition("--")[2] if is_cached else path.name

    @property
    def tier(self) -> Precision:
        """Returns the facts about this scenario's precision."""
        return PRECISIONS[self.precision]

    @property
    def judged_loss_scale(self) -> LossScaleConfig | None:
        """Returns the configuration of the loss scale; None if precision or scenario have none."""
        return self.loss_scale if self.tier.is_loss_scaled else None

    @property
    def reference(self) -> "Scenario":
        """Returns the part that the oracle depends on.

        Micro-batches must not matter, trusting the code of the model's folder does not change what it computes, and
        only fp16 has a loss scale.
        """
        scale = self.judged_loss_scale
        return dataclasses.replace(self, accumulation=1, trust_remote_code=False, loss_scale=scale)


_SCENARIO = TypeAdapter(Scenario)


def parse_scenario(values: dict[str, Any], *, source: str = "scenario") -> Scenario:
    """Builds a Scenario from plain values. Raises UsageError that names every wrong field and its allowed values."""
    try:
        return _SCENARIO.validate_python(values)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except ValidationError as error:
        raise explain(error, source=source, what="scenario") from None


def load_scenario(path: Path, *, data_overrides: dict[str, Any] | None = None, **overrides: Any) -> Scenario:
    """Reads a scenario from a TOML file.

    ``base`` in the file: the name of a scenario of the same folder, whose other values are taken. ``overrides`` replace
    top-level values (model, precision, seed, ...), ``data_overrides`` those of its data table.

    Raises UsageError with the file's name for a missing file, broken TOML, unknown keys and values out of range, and
    for a file that sets trust_remote_code.
    """
    values = _read_scenario(path)
    if base := values.pop("base", ""):
        common = _read_base(path, base)
        values = {**common, **values, **{key: {**common[key], **values[key]} for key in _tables(common, values)}}
    if not isinstance(values.get("data", {}), dict):
        raise UsageError(f"{path}: data must be a table ([data]), got {shown(values['data'])}")
    if "trust_remote_code" in values:
        raise UsageError(f"{path}: a file cannot set trust_remote_code; use the option --trust-remote-code")
    if "name" not in values and not re.fullmatch(NAME, path.stem):
        raise UsageError(
            f"{path}: the name of a scenario's file must consist of small letters, digits and dashes; rename the "
            f'file or add name = "..." to it'
        )
    values["data"] = {**values.get("data", {}), **(data_overrides or {})}
    return parse_scenario({"name": path.stem, **values, **overrides}, source=str(path))


def _read_scenario(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except FileNotFoundError:
        known = sorted(p.stem for p in path.parent.glob("*.toml"))
        near = did_you_mean(path.stem, known)
        raise UsageError(f"no scenario file {path}; {near}scenarios there: {', '.join(known) or 'none'}") from None


def _read_base(path: Path, base: Any) -> dict[str, Any]:
    """Returns the values of the scenario that the file ``path`` names as its base."""
    problem = f"{path}: base must name a scenario of this folder that has no base, got {shown(base)}"
    if not re.fullmatch(NAME, str(base)):
        raise UsageError(problem)
    try:
        values = _read_scenario(path.with_name(f"{base}.toml"))
    except UsageError as error:
        raise UsageError(f"{problem}; {error}") from None
    if "base" in values:
        raise UsageError(problem)
    return values


def _tables(*files: dict[str, Any]) -> list[str]:
    """Returns the keys that are tables in all files."""
    return [key for key in files[0] if all(isinstance(file.get(key), dict) for file in files)]


def scenario_to_json(scenario: Scenario) -> dict[str, Any]:
    """Returns plain JSON values of a scenario; ``parse_scenario`` reads them back."""
    values: dict[str, Any] = _SCENARIO.dump_python(scenario, mode="json")
    return values
