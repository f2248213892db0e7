"""What a training is put together from, by its configuration: models, backend, data, evaluation."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from conformance.backend import Unsupported, find_backend
from conformance.lora import ADAPTER
from conformance.role import POLICY
from conformance.validation import UsageError
from impl.adapter import StrategyBackend
from impl.data_position import DataPosition
from impl.model_folder import check_target
from impl.objectives import functions_of
from impl.together import on_first
from impl.train.config import TrainConfig
from impl.train.critic import is_value_model, write_critic
from impl.train.evaluation import held_out_batches, held_out_loss, held_out_reward
from impl.train.experience import RolloutSource
from impl.train.inputs import DocumentInputs, PromptInputs, held_out_data
from impl.train.prompts import reward_of
from impl.train.rollout import Sampling, make_engine
from impl.train.shapes import parameter_shapes
from impl.train.source import DocumentSource, Source
from impl.train.start_adapter import check_same, write_start

Evaluate = Callable[[], dict[str, float]]  # collective; numbers for the log


def check(config: TrainConfig) -> None:
    """Raises UsageError for a configuration whose parts do not go together."""
    scenario, layout = config.scenario, config.layout
    functions_of(scenario.objective)
    if (ranks := dist.get_world_size()) != layout.world_size:
        raise UsageError(f"the layout {layout} is for {layout.world_size} ranks, and there are {ranks}; start as many")
    if scenario.data.rows % (layout.dp * scenario.accumulation):
        raise UsageError(
            f"data.rows={scenario.data.rows} cannot be divided over dp={layout.dp} x accumulation="
            f"{scenario.accumulation}; use a multiple of {layout.dp * scenario.accumulation}"
        )
    if missing := [role.name for role in scenario.objective.roles if role.name not in config.models]:
        raise UsageError(f"{scenario.objective.kind} has a model {missing[0]!r}, too; give its Hugging Face folder")
    if scenario.objective.reads == "rollouts" and config.rollout is None:
        raise UsageError(f"{scenario.objective.kind} samples responses; say how many, to how many prompts")
    check_save_path(config)
    supported = backend_class(config.backend).supports(scenario, layout)
    if isinstance(supported, Unsupported):
        raise UsageError(f"{config.backend} does not train {layout} in {scenario.precision}: {supported.reason}")


def check_save_path(config: TrainConfig) -> None:
    """Raises UsageError for a folder that the model could not be written to after the last update."""
    output = config.output
    if output.save_path is None:
        return
    check_target(output.save_path, source=config.models[POLICY.name])
    for name, path in (("the log", output.log), ("ckpt_path", output.ckpt_path)):
        if path and path.resolve().is_relative_to(output.save_path.resolve()):
            raise UsageError(f"save_path {output.save_path} would replace {name}, which lies in it; give another one")


def backend_class(name: str) -> type[StrategyBackend]:
    """The backend of this name. Raises UsageError for one of somebody else's: training asks more than cells do."""
    found = find_backend(name).load()
    if not issubclass(found, StrategyBackend):
        raise UsageError(f"the backend {name!r} is not one of impl; train with deepspeed, fsdp2 or megatron")
    return found


def model_folders(config: TrainConfig) -> dict[str, Path]:
    """The folder of each role; for a critic that was given a language model, a new one beside the log. Collective."""
    folders = dict(config.models)
    for role in config.scenario.objective.roles:
        given = config.models[role.name]
        if role.head == "value" and not is_value_model(given):
            made = config.output.log.with_name(f"{config.output.log.name}.{role.name}")

            def write(folder: Path = made, source: Path = given) -> None:
                write_critic(folder, source=source, seed=config.scenario.seed)

            on_first(f"making the model {made}", write)
            folders[role.name] = made
    return folders


def adapter_folder(config: TrainConfig, *, goes_on: bool) -> Path | None:
    """The adapter that the policy begins with, in a folder beside the log; None without one. Collective.

    ``goes_on``: from a checkpoint. Raises UsageError where the training began with an adapter of other settings.
    """
    scenario, lora = config.scenario, config.scenario.lora
    if lora is None:
        return None
    folder = config.output.log.with_name(f"{config.output.log.name}.{ADAPTER}")

    def make() -> None:
        shapes = parameter_shapes(config.models[POLICY.name], POLICY.head)
        if goes_on and folder.exists():
            check_same(folder, lora, shapes)
        else:
            write_start(folder, lora, shapes, seed=scenario.seed)

    on_first(f"making the adapter {folder}", make)
    return folder


def set_up(config: TrainConfig, folders: Mapping[str, Path], device: str, adapter: Path | None) -> StrategyBackend:
    """The backend with all models loaded; collective."""
    backend = backend_class(config.backend)()
    backend.adapter = adapter
    backend.setup(config.scenario, config.layout, folders, device)
    return backend


def source_of(
    config: TrainConfig, backend: StrategyBackend, inputs: DocumentInputs | PromptInputs, device: str
) -> Source:
    """Where the training's work comes from: documents, or roll-outs of prompts."""
    scenario, rollout, policy = config.scenario, config.rollout, config.models[POLICY.name]
    if isinstance(inputs, DocumentInputs):
        position = DataPosition(seed=scenario.seed, documents=len(inputs.documents))
        return DocumentSource(inputs.documents, scenario.data, position)
    assert rollout is not None
    sampling = Sampling(
        temperature=functions_of(scenario.objective).temperature,
        max_new_tokens=rollout.max_new_tokens,
        end=inputs.end,
    )
    return RolloutSource(
        context=backend.context,
        policy=backend.models[POLICY.name],
        scenario=scenario,
        config=rollout,
        engine=make_engine(rollout.engine, policy, scenario, sampling, device),
        prompts=inputs.prompts,
        reward=reward_of(scenario.data),
        tokenizer=inputs.tokenizer,
        position=DataPosition(seed=scenario.seed, documents=len(inputs.prompts)),
        targets=scenario.lora.targets(parameter_shapes(policy, POLICY.head)) if scenario.lora else (),
    )


def evaluation_of(
    config: TrainConfig, backend: StrategyBackend, source: Source, inputs: DocumentInputs | PromptInputs
) -> Evaluate | None:
    """What is looked at on held-out data, if there are any."""
    data = held_out_data(config)
    if data is None:
        return None
    if isinstance(inputs, PromptInputs):
        assert isinstance(source, RolloutSource)
        assert inputs.held_out is not None
        prompts = inputs.held_out
        return lambda: held_out_reward(source, prompts, reward_of(data))
    assert inputs.held_out is not None
    batches = held_out_batches(inputs.held_out, data)
    return lambda: held_out_loss(backend.context, backend.models[POLICY.name], batches)
