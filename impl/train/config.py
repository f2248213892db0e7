"""TrainConfig: a whole training, as ``parity train`` runs it.

What decides a step (objective, optimizer, schedule, precision, micro-batches, seed) is a scenario, and how ranks are
arranged is a layout, as in a cell of the suite: a training runs the code that cells judge. Here is what a cell does not
have: where data comes from, how responses are sampled, what is evaluated, written and kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from conformance.layout import Layout
from conformance.scenario import Scenario

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
    end. ckpt_path: the folder of checkpoints (impl/checkpoints/training_folder.py), one every ``save_steps`` updates,
    of which ``keep`` stay. load_checkpoint: go on from the last one in ``ckpt_path``.
    """

    log: Path
    trackers: tuple[Tracker, ...] = ()
    save_path: Path | None = None
    ckpt_path: Path | None = None
    save_steps: int = 100
    keep: int = 2
    load_checkpoint: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """``backend``: a name of impl.strategy.CONTEXTS. ``models``: the Hugging Face folder of each role of the objective.

    ``scenario.steps`` counts optimizer steps; of ``grpo`` and ``ppo`` there are ``mini_batches * ppo_epochs`` for each
    roll-out. ``eval_dataset``: held-out documents (of ``sft``) or prompts, looked at every ``eval_steps`` updates.
    """

    backend: str
    layout: Layout
    device: Literal["cpu", "cuda"]
    scenario: Scenario
    models: Mapping[str, Path]
    output: OutputConfig
    rollout: RolloutConfig | None = None
    eval_dataset: Path | None = None
    eval_steps: int = 100
    options: Mapping[str, object] = field(default_factory=dict)  # as the user gave them, for the log's first line
