"""TrainConfig: a whole training, as ``parity train`` runs it.

What decides a step (objective, optimizer, schedule, precision, micro-batches, seed) is a scenario, and how ranks are
arranged is a layout, as in a cell of the suite: a training runs the code that cells judge. Here is what a cell does not
have: where data comes from, how responses are sampled, what is evaluated, written and kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from conformance.layout import Layout
from conformance.scenario import Scenario, parse_scenario, scenario_to_json
from conformance.validation import UsageError, explain

ARITHMETIC = "arithmetic"  # as the path of a data set: the embedded questions of impl/train/prompts.py
Engine = Literal["hf", "vllm"]
Tracker = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled, for ``grpo`` and ``ppo``. The temperature is the objective's.

    prompts: of one roll-out. n_samples_per_prompt: responses to each, which make a group. max_new_tokens: the longest
    response. engine: who samples. greedy: always the likeliest token, instead of sampling.
    """

    prompts: int
    n_samples_per_prompt: int
    max_new_tokens: int
    engine: Engine = "hf"
    greedy: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What a training leaves, and what it goes on from.

    log: JSON lines, one for each step. trackers: where numbers go besides. save_path: the Hugging Face folder at the
    end; merged: with the adapter added to its weights. ckpt_path: the folder of checkpoints
    (impl/checkpoints/training_folder.py), one every ``save_steps`` updates, of which ``keep`` stay. async_save: they
    are written while the training goes on. load_checkpoint: go on from the last one in ``ckpt_path``.
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
    """``backend``: a name of impl.strategy.CONTEXTS. ``models``: the Hugging Face folder of each role of the objective.

    ``scenario.steps`` counts optimizer steps; of ``grpo`` and ``ppo`` there are ``mini_batches * ppo_epochs`` for each
    roll-out. ``scenario.data.path`` may be ARITHMETIC for these. ``eval_dataset``: held-out documents (of ``sft``) or
    prompts, looked at before the first update, every ``eval_steps`` updates and after the last.
    """

    backend: str
    layout: Annotated[Layout, PlainValidator(Layout.parse), PlainSerializer(str)]
    device: Literal["cpu", "cuda"]
    scenario: Annotated[Scenario, PlainValidator(parse_scenario), PlainSerializer(scenario_to_json)]
    models: Mapping[str, Path]
    output: OutputConfig
    rollout: RolloutConfig | None = None
    eval_dataset: Path | None = None
    eval_steps: int = 100
    options: Mapping[str, object] = field(default_factory=dict)  # as the user gave them, for the log's first line


_ADAPTER = TypeAdapter(TrainConfig)


def to_json(config: TrainConfig) -> dict[str, Any]:
    """Plain JSON values; ``from_json`` reads them back."""
    values: dict[str, Any] = _ADAPTER.dump_python(config, mode="json")
    return values


def from_json(values: Any, *, source: str = "training") -> TrainConfig:
    """Read what ``to_json`` gave. Raises UsageError that names ``source`` and every wrong field."""
    try:
        return _ADAPTER.validate_python(values)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except ValidationError as error:
        raise explain(error, source=source, what="training") from None
