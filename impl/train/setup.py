"""Sets up a training from its configuration: models, backend, data, evaluation.

Data is read before a model is loaded, and checked before ranks are started, so that unusable data ends a training
early.

If the user gives a language model for the critic, a folder with its layers and a new head of one number per token is
written. Backends load every model from a folder, so all begin with the same weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import transformers
from pydantic_core import to_jsonable_python
from safetensors import safe_open

from conformance.backends.protocol import Unsupported, find_backend
from conformance.core.errors import UsageError, shown
from conformance.core.host import cache_folder
from conformance.core.io import Unwritable, read_json, write_file
from conformance.data.inputs import load_documents, samples_in_turn
from conformance.data.tokenizer import load_tokenizer
from conformance.models.folder_checks import CONFIG, runs_code
from conformance.models.folders import HEAD, value_config, weight_files, weight_shapes
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.objectives import Objective
from conformance.spec.observables import POLICY, Role, documents_together
from conformance.spec.scenario import ADAPTER, DataConfig, Scenario, ScheduleConfig, scenario_to_json
from impl.checkpoints.manifest import digest
from impl.checkpoints.training_state import DataPosition
from impl.engine.adapter import ReferenceBackend
from impl.engine.trainer import output_rows
from impl.interface.distributed import on_first
from impl.interface.trainable import Context, Trainable
from impl.megatron.model_config import VALUE_HEAD
from impl.models.export import check_target, write_folder
from impl.models.lora import check_same, write_start
from impl.objectives.policy_gradient import functions_of
from impl.train.config import RolloutConfig, TrainConfig
from impl.train.experience import RolloutSource, check_rollout, sample_responses, score, texts_of
from impl.train.generation import Sampling, make_engine
from impl.train.plan import parameter_shapes
from impl.train.rewards import FunctionReward, Reward, reward_of
from impl.train.text_pipeline import DocumentSource, Prompt, Source, fits, load_prompts

LARGE = 2**26  # bytes of a file that takes longer to read than to look up


def is_value_model(folder: Path) -> bool:
    """Returns whether a Hugging Face folder has the head of a value model."""
    return VALUE_HEAD in weight_shapes(folder)


def write_critic(folder: Path, *, source: Path, seed: int) -> None:
    """Writes the value model ``folder`` with the layers of the language model ``source``; in one process.

    The head (1, hidden) is normal with a deviation of 1 / (hidden + 1), as OpenRLHF begins, and follows from ``seed``.
    """
    config = read_json(source / CONFIG)
    hidden = config.get("text_config", config)["hidden_size"]
    drawn = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    write_folder(
        folder, source=source, weights=chain(_layers(source), [(VALUE_HEAD, drawn / (hidden + 1))]), dtype="source"
    )
    value_config(folder / CONFIG)


def _layers(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in weight_files(source):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if not name.endswith(HEAD):
                    yield name, tensors.get_tensor(name)


@dataclass(frozen=True, kw_only=True)
class DocumentInputs:
    """Holds documents. ``held_out`` is None without an ``eval_dataset``."""

    documents: Sequence[Document]
    held_out: Sequence[Document] | None


@dataclass(frozen=True, kw_only=True)
class PromptInputs:
    """Holds prompts. ``held_out`` is None without an ``eval_dataset``. ``end``: the tokens that end a response."""

    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt] | None
    tokenizer: Any
    end: tuple[int, ...]


def check_inputs(config: TrainConfig) -> None:
    """Raises UsageError for unusable data; for the process that starts the ranks.

    Prompts are few and short, so they are read as ranks read them. Only ranks tokenize documents.
    """
    if config.rollout is not None:
        _prompts(config, config.rollout)
        return
    for data in (config.scenario.data, held_out_data(config)):
        if data is not None:
            samples_in_turn(data, config.scenario.objective.reads)


def read_inputs(config: TrainConfig) -> DocumentInputs | PromptInputs:
    """Reads all data of a training. Raises UsageError for an unusable file, tokenizer or length."""
    if config.rollout is not None:
        return _prompts(config, config.rollout)
    held_out = held_out_data(config)
    return DocumentInputs(
        documents=_documents(config, config.scenario.data),
        held_out=None if held_out is None else _documents(config, held_out),
    )


def held_out_data(config: TrainConfig) -> DataConfig | None:
    """Returns the data for evaluation; None without it."""
    return (
        None
        if config.eval_dataset is None
        else replace(config.scenario.data, path=str(config.eval_dataset), split=config.eval_split)
    )


def _documents(config: TrainConfig, data: DataConfig) -> list[Document]:
    """Returns all samples of a data set, in order, tokenized for the policy."""
    scenario, model = config.scenario, config.models[result_of(config.scenario.objective).name]
    trusted = scenario.trust_remote_code
    tokenizer, size = load_tokenizer(model, trusted=trusted), _vocabulary_size(model, trusted=trusted)
    return load_documents(data, tokenizer, scenario.objective.reads, vocabulary=size)


def _prompts(config: TrainConfig, rollout: RolloutConfig) -> PromptInputs:
    model, trusted = config.models[POLICY.name], config.scenario.trust_remote_code
    tokenizer, size = load_tokenizer(model, trusted=trusted), _vocabulary_size(model, trusted=trusted)

    def load(data: DataConfig) -> list[Prompt]:
        reward, longest = reward_of(data.path, rollout.reward), rollout.max_new_tokens
        return load_prompts(data, tokenizer, vocabulary=size, max_new_tokens=longest, reward=reward)

    prompts, held_out = load(config.scenario.data), held_out_data(config)
    check_rollout(config.scenario, rollout, prompts)
    return PromptInputs(
        prompts=prompts,
        held_out=None if held_out is None else load(held_out),
        tokenizer=tokenizer,
        end=end_tokens(model, tokenizer.eos_token_id),
    )


def end_tokens(policy: Path, end: int | None) -> tuple[int, ...]:
    """Returns the tokens that end a response, from the tokenizer and the model's generation settings.

    Raises UsageError if there is none.
    """
    found = set() if end is None else {end}
    file = policy / transformers.utils.GENERATION_CONFIG_NAME
    if file.exists():
        configured = read_json(file).get("eos_token_id")
        tokens = configured if isinstance(configured, list) else [] if configured is None else [configured]
        if any(type(token) is not int or token < 0 for token in tokens):
            raise UsageError(f"{file}: eos_token_id must be a token or a list of tokens, got {shown(configured)}")
        found |= set(tokens)
    if not found:
        raise UsageError(f"the tokenizer in {policy} has no end-of-sequence token, so no response would end; add one")
    return tuple(sorted(found))


def _vocabulary_size(model: Path, *, trusted: bool) -> int:
    """Returns the size of a model's vocabulary, by its configuration."""
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=runs_code(model, trusted=trusted))
    size: int = config.get_text_config().vocab_size
    return size


def held_out_batches(documents: Sequence[Document], data: DataConfig) -> list[Batch]:
    """Returns each document once and in order, in batches of ``data.rows`` rows; filler rows have no targets."""
    rows: list[list[Document]] = []
    for document in documents:
        if rows and fits(rows[-1], [document], data):
            rows[-1].append(document)
        else:
            rows.append([document])
    shortest = min(documents, key=lambda document: len(document.tokens))
    filling = Document(shortest.tokens, (False,) * len(shortest.tokens))
    rows += [[filling]] * (-len(rows) % data.rows)
    cut = [rows[start : start + data.rows] for start in range(0, len(rows), data.rows)]
    return [Batch(n, data.max_len, tuple(Row(i, tuple(row)) for i, row in enumerate(own))) for n, own in enumerate(cut)]


def held_out_loss(context: Context, policy: Trainable, batches: Sequence[Batch]) -> dict[str, float]:
    """Computes the mean of -log p over all targets, by forward passes without dropout; collective."""
    total, count = 0.0, 0
    for batch in batches:
        rows = output_rows(context, policy, batch, frozenset({"logprobs"}), 1.0).rows
        total -= sum(logprobs.sum().item() for logprobs in rows.values())
        count += batch.target_count
    return {"eval/loss": context.all_reduce(total) / count}


def held_out_reward(
    source: RolloutSource, prompts: Sequence[Prompt], reward: Reward | FunctionReward
) -> dict[str, float]:
    """Computes the mean ``reward`` of the likeliest response to each prompt; collective."""
    source.load_engine()
    groups = sample_responses(source.context, source.engine, prompts, [[0]] * len(prompts), greedy=True)
    return {"eval/reward": fmean(chain.from_iterable(score(reward, prompts, texts_of(groups, source.tokenizer))))}


Evaluate = Callable[[], dict[str, float]]  # collective; numbers for the log


def check(config: TrainConfig) -> None:
    """Raises UsageError for a configuration whose parts do not fit together."""
    scenario, layout = config.scenario, config.layout
    functions_of(scenario.objective)
    if (ranks := dist.get_world_size()) != layout.world_size:
        raise UsageError(f"the layout {layout} needs {layout.world_size} ranks, but there are {ranks}; start as many")
    if scenario.data.rows % (parts := layout.dp * scenario.accumulation * scenario.rows_together):
        pairs = " pairs of rows" if scenario.rows_together > 1 else ""
        raise UsageError(
            f"data.rows={scenario.data.rows} cannot be divided over dp={layout.dp} x accumulation="
            f"{scenario.accumulation}{pairs}; use a multiple of {parts}"
        )
    if missing := [role.name for role in scenario.objective.roles if role.name not in config.models]:
        raise UsageError(f"{scenario.objective.kind} also needs a model {missing[0]!r}; give its Hugging Face folder")
    if scenario.objective.reads == "rollouts" and config.rollout is None:
        raise UsageError(f"{scenario.objective.kind} samples responses; give the numbers of prompts and of responses")
    check_save_path(config)
    supported = backend_class(config.backend).supports(scenario, layout)
    if isinstance(supported, Unsupported):
        raise UsageError(f"{config.backend} does not support {layout} in {scenario.precision}: {supported.reason}")


def settings_of(scenario: Scenario, models: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Returns what may not change when a training resumes, as JSON values: optimizer, schedule, objective, and by role
    the contents of the folders of ``models`` that are not trained."""
    values = scenario_to_json(scenario)
    parts = {
        part: {k: v for k, v in values[part].items() if k != "max_grad_norm"} for part in ("optimizer", "schedule")
    }
    frozen = {r.name: _contents(models[r.name]) for r in scenario.objective.roles if not r.trained and r.name in models}
    return {**parts, "objective": values["objective"], "models": frozen}


def _contents(folder: Path) -> str:
    """Returns a digest of a model's weight files. The cache keeps those of large files, which are slow to read."""
    with ThreadPoolExecutor(4) as threads:
        return sha256("".join(threads.map(_digest, weight_files(folder))).encode()).hexdigest()


def _digest(file: Path) -> str:
    """Returns the digest of a file, from the cache if the file has not changed since it was put there."""
    about = file.stat()
    version = f"{file.resolve()} {about.st_ino} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"
    kept = cache_folder() / "digests" / sha256(version.encode()).hexdigest()
    if about.st_size < LARGE:
        return digest(file)
    if not kept.is_file():
        found = digest(file)
        with suppress(OSError, Unwritable):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_file(kept, found)
        return found
    return kept.read_text(encoding="utf-8")


def check_same_settings(
    config: TrainConfig, before: Mapping[str, Mapping[str, Any]], *, step: int, source: Path
) -> None:
    """Raises UsageError if a training of ``step`` updates cannot go on as configured.

    Backends load the optimizer's settings with its state. Another schedule is fine if it goes on with the same rates.
    Checkpoints of earlier versions do not tell their objective; a field that they lack had its default.
    """
    scenario = config.scenario
    now, old = settings_of(scenario, config.models), ScheduleConfig(**before["schedule"])
    if all(old.factor(at) == scenario.schedule.factor(at) for at in range(step, scenario.steps)):
        now = now | {"schedule": dict(before["schedule"])}
    parts = before.keys() & now.keys() - {"models"}
    had = {part: {**_defaults(getattr(scenario, part)), **before[part]} for part in parts}
    changes = [
        f"{part}.{name} {shown(had[part].get(name))}, now {shown(value)}"
        for part, values in now.items()
        for name, value in values.items()
        if part in had and had[part].get(name) != value
    ]
    if changes:
        raise UsageError(
            f"{source} was trained with {', '.join(changes)}; the learning rate would jump, the loss would be another, "
            f"or the option would have no effect, so resume with the same options and number of steps, or begin a new "
            f"training with the saved model as --pretrain (only --lr-scheduler constant can be lengthened, after its "
            f"warm-up)"
        )
    for name, contents in now["models"].items():
        if "models" in before and before["models"].get(name) != contents:
            raise UsageError(
                f"{source} was trained with another {name} than the model in {config.models[name]}, by its weight "
                f"files; resume with the same folder, or begin a new training with the saved model as --pretrain"
            )


def _defaults(settings: Any) -> dict[str, Any]:
    """Returns the defaults of the fields of a dataclass as JSON values."""
    return {one.name: to_jsonable_python(one.default) for one in fields(settings) if one.default is not MISSING}


def check_save_path(config: TrainConfig) -> None:
    """Raises UsageError for a folder that the model cannot be written to after the last update."""
    output = config.output
    if output.save_path is None:
        return
    check_target(output.save_path, source=config.models[result_of(config.scenario.objective).name])
    for name, path in (("the log", output.log), ("ckpt_path", output.ckpt_path)):
        if path and path.resolve().is_relative_to(output.save_path.resolve()):
            raise UsageError(f"save_path {output.save_path} would replace {name}, which lies in it; give another one")


def result_of(objective: Objective) -> Role:
    """Returns the role whose model a training is for: the policy, or a reward model."""
    return POLICY if POLICY in objective.roles else objective.roles[-1]


def backend_class(name: str) -> type[ReferenceBackend]:
    """Returns the backend of this name. Raises UsageError for a third-party backend, which cannot train."""
    found = find_backend(name).load()
    if not issubclass(found, ReferenceBackend):
        raise UsageError(f"the backend {name!r} is not built in; train with deepspeed, fsdp2 or megatron")
    return found


def model_folders(config: TrainConfig) -> dict[str, Path]:
    """Returns the folder of each role; a critic given as a language model gets a new folder. Collective."""
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


def adapter_folder(config: TrainConfig, *, resumes: bool) -> Path | None:
    """Returns the folder of the policy's initial adapter, beside the log; None without an adapter. Collective.

    Raises UsageError if a training that ``resumes`` began with an adapter of other settings.
    """
    scenario, lora = config.scenario, config.scenario.lora
    if lora is None:
        return None
    folder = config.output.log.with_name(f"{config.output.log.name}.{ADAPTER}")

    def make() -> None:
        shapes = parameter_shapes(config.models[POLICY.name], POLICY.head)
        if resumes and folder.exists():
            check_same(folder, lora, shapes)
        else:
            write_start(folder, lora, shapes, seed=scenario.seed)

    on_first(f"making the adapter {folder}", make)
    return folder


def set_up(config: TrainConfig, folders: Mapping[str, Path], device: str, adapter: Path | None) -> ReferenceBackend:
    """Returns the backend with all models loaded; collective."""
    backend = backend_class(config.backend)()
    backend.adapter = adapter
    backend.setup(config.scenario, config.layout, folders, device)
    return backend


def source_of(
    config: TrainConfig, backend: ReferenceBackend, inputs: DocumentInputs | PromptInputs, device: str
) -> Source:
    """Returns the source of the training's work: documents, or rollouts of prompts."""
    scenario, rollout = config.scenario, config.rollout
    if isinstance(inputs, DocumentInputs):
        count = len(inputs.documents) // documents_together(scenario.objective.reads)
        position = DataPosition(seed=scenario.seed, documents=count)
        return DocumentSource(inputs.documents, scenario.data, position, scenario.objective)
    assert rollout is not None
    policy = config.models[POLICY.name]
    sampling = Sampling(
        temperature=functions_of(scenario.objective).temperature,
        max_new_tokens=rollout.max_new_tokens,
        end=inputs.end,
        prompts=rollout.at_once,
    )
    return RolloutSource(
        context=backend.context,
        policy=backend.models[POLICY.name],
        scenario=scenario,
        config=rollout,
        engine=make_engine(rollout.engine, policy, scenario, sampling, device, python=rollout.python),
        prompts=inputs.prompts,
        reward=reward_of(scenario.data.path, rollout.reward),
        tokenizer=inputs.tokenizer,
        position=DataPosition(seed=scenario.seed, documents=len(inputs.prompts)),
        targets=scenario.lora.targets(parameter_shapes(policy, POLICY.head)) if scenario.lora else (),
    )


def evaluation_of(
    config: TrainConfig, backend: ReferenceBackend, source: Source, inputs: DocumentInputs | PromptInputs
) -> Evaluate | None:
    """Returns the evaluation on held-out data; None without such data."""
    data = held_out_data(config)
    if data is None:
        return None
    if isinstance(inputs, PromptInputs):
        assert isinstance(source, RolloutSource)
        assert inputs.held_out is not None
        prompts = inputs.held_out
        return lambda: held_out_reward(source, prompts, reward_of(data.path, source.config.reward))
    assert inputs.held_out is not None
    batches = held_out_batches(inputs.held_out, data)
    return lambda: held_out_loss(backend.context, backend.models[POLICY.name], batches)
