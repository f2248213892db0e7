"""Holds the configuration of a training.

Settings that decide a step (objective, optimizer, schedule, precision, micro-batches, seed) form a scenario, and the
arrangement of ranks is a layout, as in a cell of the suite: a training runs the code that cells judge. TrainConfig adds
settings that a cell does not have: data sources, sampling, evaluation, and output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from conformance.core.errors import UsageError, explain
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario, parse_scenario, scenario_to_json

Tracker = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Configures the sampling of responses, for ``grpo`` and ``ppo``. The temperature is the objective's.

    prompts: the number of prompts in a rollout.
    n_samples_per_prompt: responses to each prompt; they form a group.
    max_new_tokens: the longest response.
    engine: ``hf``, or an engine of conformance.backends.engines.
    python: the Python of the engine's environment; empty for this one.
    greedy: takes the likeliest token instead of sampling.
    at_once: prompts whose responses a rank samples at once.
    reward: a name in impl.train.rewards.REWARDS, or MODULE:FUNCTION; None selects it by the data set.
    """

    prompts: int
    n_samples_per_prompt: int
    max_new_tokens: int
    engine: str = "hf"
    python: str = ""
    greedy: bool = False
    at_once: int = 8
    reward: str | None = None


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Configures the output of a training and the checkpoint that it resumes from.

    log: JSON lines, one for each step.
    trackers: additional destinations of the numbers.
    save_path: the Hugging Face folder at the end.
    merged: writes this folder with the adapter merged into the weights.
    ckpt_path: the folder of checkpoints (impl/checkpoints/folder.py), one every ``save_steps`` updates; ``keep`` of
        them stay.
    async_save: writes checkpoints while the training continues.
    load_checkpoint: resumes from the last checkpoint in ``ckpt_path``.
    """

    log: Path
    trackers: tuple[Tracker, ...] = ()
    save_path: Path | None = None
    merged: bool = False
    ckpt_path: Path | None = None
    save_steps: int = 100
    keep: int = 2
    async_save: bool = False
    load_checkpoint: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Configures a whole training, as ``parity train`` runs it.

    backend: a name of impl.interface.trainable.CONTEXTS.
    models: the Hugging Face folder of each role of the objective.
    scenario: ``steps`` counts optimizer steps; ``grpo`` and ``ppo`` make ``mini_batches * ppo_epochs`` for each
        rollout, and their ``data.path`` may be ARITHMETIC.
    eval_dataset: held-out documents (``sft``) or prompts, evaluated before the first update, every ``eval_steps``
        updates and after the last.
    ddp_timeout: the longest wait of a rank for other ranks, in seconds.
    """

    backend: str
    layout: Annotated[Layout, PlainValidator(Layout.parse), PlainSerializer(str)]
    device: Literal["cpu", "cuda"]
    scenario: Annotated[Scenario, PlainValidator(parse_scenario), PlainSerializer(scenario_to_json)]
    models: Mapping[str, Path]
    output: OutputConfig
    rollout: RolloutConfig | None = None
    eval_dataset: Path | None = None
    eval_split: str | None = None
    eval_steps: int = 100
    ddp_timeout: float = 1800.0
    options: Mapping[str, object] = field(default_factory=dict)  # as given by the user, for the log's first line


_ADAPTER = TypeAdapter(TrainConfig)


def to_json(config: TrainConfig) -> dict[str, Any]:
    """Converts the configuration to plain JSON values; ``from_json`` reads them back."""
    values: dict[str, Any] = _ADAPTER.dump_python(config, mode="json")
    return values


def from_json(values: Any, *, source: str = "training") -> TrainConfig:
    """Reads the result of ``to_json``. Raises UsageError that names ``source`` and every wrong field."""
    try:
        return _ADAPTER.validate_python(values)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except ValidationError as error:
        raise explain(error, source=source, what="training") from None
