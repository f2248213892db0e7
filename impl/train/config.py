"""Values: what the options of ``parity train`` are, read in their types.

TrainConfig: a whole training, as ``parity train`` runs it.

What decides a step (objective, optimizer, schedule, precision, micro-batches, seed) is a scenario, and how ranks are
arranged is a layout, as in a cell of the suite: a training runs the code that cells judge. Here is what a cell does not
have: where data comes from, how responses are sampled, what is evaluated, written and kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from conformance.core.errors import UsageError, explain
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario, parse_scenario, scenario_to_json
from impl.train.flags import SAME_SIZE, Value, written


class Values:
    """Reads values in their types, which resolve_values has checked."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        return str(self._values[name])

    def whole(self, name: str) -> int:
        value = self._values[name]
        assert isinstance(value, int)
        return value

    def number(self, name: str) -> float:
        value = self._values[name]
        assert isinstance(value, float)
        return value

    def flag(self, name: str) -> bool:
        return bool(self._values[name])

    def path(self, name: str) -> Path | None:
        return None if self._values[name] is None else Path(self.text(name)).expanduser().absolute()

    def given(self, name: str) -> bool:
        return self._values[name] is not None

    def cut(self, name: str) -> int:
        """A size that has two names, of which one may be given."""
        other = SAME_SIZE[name]
        if self.given(name) and self.given(other) and self.whole(name) != self.whole(other):
            names = f"{written(name)} {self.whole(name)} and {written(other)} {self.whole(other)}"
            raise UsageError(f"{names} are two names of one size; give one")
        return self.whole(name) if self.given(name) else self.whole(other) if self.given(other) else 1

    @property
    def stages(self) -> int:
        return self.whole("pipeline_model_parallel_size")


ARITHMETIC = "arithmetic"  # as the path of a data set: the embedded questions of impl/train/data.py
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
    (impl/checkpoints/folder.py), one every ``save_steps`` updates, of which ``keep`` stay. async_save: they
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
    """``backend``: a name of impl.interface.protocol.CONTEXTS. ``models``: the Hugging Face folder of each role of
    the objective.

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
