"""What a training is put together from, by its configuration: models, backend, data, evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
import transformers

from conformance.backend import Unsupported, find_backend
from conformance.inputs.tokenizer import load_tokenizer
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
from impl.train.experience import RolloutSource, check_rollout
from impl.train.prompts import load_prompts, reward_of
from impl.train.rollout import Sampling, make_engine
from impl.train.source import Source, document_source, read_documents, vocabulary_size

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


def set_up(config: TrainConfig, folders: Mapping[str, Path], device: str) -> StrategyBackend:
    """The backend with all models loaded; collective."""
    backend = backend_class(config.backend)()
    backend.setup(config.scenario, config.layout, folders, device)
    return backend


def source_of(config: TrainConfig, backend: StrategyBackend, policy: Path, device: str) -> Source:
    """Where the training's work comes from: documents, or roll-outs of prompts. ``policy``: its folder."""
    scenario, rollout = config.scenario, config.rollout
    if rollout is None:
        return document_source(scenario, policy)
    trusted = scenario.trust_remote_code
    tokenizer = load_tokenizer(policy, trusted=trusted)
    vocabulary = vocabulary_size(policy, trusted=trusted)
    most = rollout.max_new_tokens
    prompts = load_prompts(scenario.data, tokenizer, vocabulary=vocabulary, max_new_tokens=most)
    check_rollout(scenario, rollout, prompts)
    sampling = Sampling(
        temperature=functions_of(scenario.objective).temperature,
        max_new_tokens=most,
        end=end_tokens(policy, tokenizer.eos_token_id),
    )
    return RolloutSource(
        context=backend.context,
        policy=backend.models[POLICY.name],
        scenario=scenario,
        config=rollout,
        engine=make_engine(rollout.engine, policy, scenario, sampling, device),
        prompts=prompts,
        reward=reward_of(scenario.data),
        tokenizer=tokenizer,
        position=DataPosition(seed=scenario.seed, documents=len(prompts)),
    )


def end_tokens(policy: Path, end: int | None) -> tuple[int, ...]:
    """What ends a response: the tokenizer's end-of-sequence token, and those of the folder's generation settings.

    Raises UsageError where there is none.
    """
    found = set() if end is None else {end}
    if (policy / transformers.utils.GENERATION_CONFIG_NAME).is_file():
        told = transformers.GenerationConfig.from_pretrained(policy).eos_token_id
        found |= {told} if isinstance(told, int) else set(told or ())
    if not found:
        raise UsageError(f"the tokenizer in {policy} has no end-of-sequence token, so no response would have an end")
    return tuple(sorted(found))


def evaluation_of(config: TrainConfig, backend: StrategyBackend, source: Source, policy: Path) -> Evaluate | None:
    """What is looked at on held-out data, if there are any."""
    scenario, path = config.scenario, config.eval_dataset
    if path is None:
        return None
    data = replace(scenario.data, path=str(path))
    if isinstance(source, RolloutSource):
        prompts = load_prompts(
            data,
            source.tokenizer,
            vocabulary=vocabulary_size(policy, trusted=scenario.trust_remote_code),
            max_new_tokens=source.config.max_new_tokens,
        )
        return lambda: held_out_reward(source, prompts, reward_of(data))
    batches = held_out_batches(read_documents(scenario, data, policy), data)
    return lambda: held_out_loss(backend.context, backend.models[POLICY.name], batches)
