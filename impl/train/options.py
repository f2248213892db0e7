"""Turns the options of ``parity train`` into a TrainConfig, and rejects options that do not fit together.

Every number that decides a step is in the scenario, and the arrangement of ranks in the layout; the backend's adapter
decides whether it supports both, as for a cell of the suite.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from conformance.backends.engines import load_engine
from conformance.backends.protocol import MissingExtra, Unsupported, find_backend
from conformance.core.errors import UsageError, explain
from conformance.core.host import resolve
from conformance.core.io import read_json
from conformance.data.samples import read_dataset
from conformance.models.folder_checks import check_model_folder, runs_code
from conformance.models.folders import model_sizes, weight_files
from conformance.spec.layout import Layout
from conformance.spec.objectives import BUILT_IN
from conformance.spec.observables import documents_together
from conformance.spec.scenario import ALL_LINEAR, LoraConfig, Scenario, parse_scenario
from impl.models.family_quirks import PLANNED
from impl.train.config import OutputConfig, RolloutConfig, TrainConfig
from impl.train.flags import EMBEDDED, ROLLOUT, TrainOptions, Value, flags_of, written
from impl.train.plan import parameter_shapes
from impl.train.rewards import ARITHMETIC, reward_of


def train_config(
    command: str, options: TrainOptions, *, given: Mapping[str, Value], ranks: int | None, dry_run: bool = False
) -> TrainConfig:
    """Builds the training configuration of a command.

    given: the options that the user has given, which the log repeats.
    ranks: the number of running ranks under torchrun; else None.
    dry_run: weights, the model's code and GPUs may be missing.
    Raises UsageError, with numbers that would work, for options that do not fit together or that the backend does not
    support.
    """
    backend, device = options.backend, device_of(options, dry_run=dry_run)
    model = _model(options.pretrain, options, dry_run=dry_run)
    layout = _layout(options, backend, ranks or ranks_to_start(options, dry_run=dry_run))
    batch = _Batch.of(options, layout, command)
    scenario = _scenario(options, command, model=model, batch=batch)
    layout.validate(**model_sizes(model), rows=scenario.data.rows, accumulation=scenario.accumulation)
    _check_support(backend, scenario, layout)
    models = {role.name: model for role in scenario.objective.roles}
    if command == "ppo":
        models["critic"] = _model(options.critic_pretrain or options.pretrain, options, dry_run=dry_run)
        why = "the critic reads the policy's tokens"
        _check_vocabulary(models["critic"], "--critic-pretrain", policy=model, larger=True, why=why)
    if command == "distillation":
        models["teacher"] = _model(options.teacher_pretrain, options, dry_run=dry_run)
        why = "distillation compares the probabilities of the same tokens"
        _check_vocabulary(models["teacher"], "--teacher-pretrain", policy=model, why=why)
    return TrainConfig(
        backend=backend,
        layout=layout,
        device=device,
        scenario=scenario,
        models=models,
        output=_output(options, under_torchrun=ranks is not None),
        rollout=_rollout(options) if command in ROLLOUT else None,
        eval_dataset=Path(_dataset(options.eval_dataset, command)) if options.eval_dataset is not None else None,
        eval_split=options.eval_split,
        eval_steps=options.eval_steps,
        ddp_timeout=options.ddp_timeout,
        options=dict(given),
    )


def _model(folder: str, options: TrainOptions, *, dry_run: bool) -> Path:
    """Returns a model's folder. Raises UsageError if it cannot be loaded; a dry run needs no weights."""
    model = resolve(folder)
    check_model_folder(model)
    if not dry_run:
        runs_code(model, trusted=options.trust_remote_code)
        weight_files(model)
    return model


def _check_vocabulary(other: Path, option: str, *, policy: Path, larger: bool = False, why: str) -> None:
    """Raises UsageError if the vocabulary of ``other`` is of another size by its configuration. larger: it may be
    larger, which sizes of a family often are by their padding."""
    configs = [read_json(folder / "config.json") for folder in (other, policy)]
    theirs, own = (config.get("text_config", config).get("vocab_size") for config in configs)
    if None not in (theirs, own) and (theirs < own if larger else theirs != own):
        raise UsageError(
            f"{option} {other} has vocab_size {theirs} in its config.json and --pretrain {policy} has {own}, but {why}"
            f"; give a model with a vocabulary of {own}{' or more' if larger else ''}, or if one is only padded, "
            f"resize its embeddings (resize_token_embeddings of transformers)"
        )


def device_of(options: TrainOptions, *, dry_run: bool) -> Literal["cpu", "cuda"]:
    import torch

    if options.device == "cuda" and not dry_run and not torch.cuda.is_available():
        raise UsageError("--device cuda: no GPU is visible; use --device cpu, or check CUDA_VISIBLE_DEVICES")
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def ranks_to_start(options: TrainOptions, *, dry_run: bool) -> int:
    """Returns ``nproc_per_node``, else the number of visible GPUs, else the smallest number for the layout.

    Raises UsageError if there are fewer GPUs than ranks.
    """
    import torch

    requested, gpus = options.nproc_per_node, torch.cuda.device_count()
    on_gpus = device_of(options, dry_run=dry_run) == "cuda"
    if requested is not None:
        if on_gpus and requested > gpus and not dry_run:
            raise UsageError(f"--nproc-per-node {requested}: only {gpus} GPUs are visible; use {gpus} or less")
        return requested
    return gpus if on_gpus and gpus else options.tp * options.sp * options.pp


def _layout(options: TrainOptions, backend: str, ranks: int) -> Layout:
    tp, sp, pp = options.tp, options.sp, options.pp
    _check_ranks(ranks, {"tensor-parallel": tp, "context-parallel": sp, "pipeline": pp})
    sized = Layout.for_world(ranks, tp=tp, sp=sp, pp=pp)
    if options.use_hf_tp_plan and (tp == 1 or options.sequence_parallel):
        raise UsageError(
            "--use-hf-tp-plan is for tensor parallelism without --sequence-parallel, which needs an explicit plan; "
            + ("give --fsdp-tensor-parallel-size 2, or leave it out" if tp == 1 else "leave one of the two out")
        )
    explicit = backend == "fsdp2" and tp > 1 and not options.use_hf_tp_plan
    zero = _stage(options, backend)
    switches = {
        "plan": explicit and not options.sequence_parallel,
        "seqpar": options.sequence_parallel,
        "ckpt": options.gradient_checkpointing,
        "compile": options.torch_compile,
        # Gathering the weights of a layer together costs the host less, and layers compile
        # (docs/measurements/speed.md).
        "leaf": backend == "deepspeed" and zero is None,
        "offload": options.offload,
    }
    return dataclasses.replace(
        sized,
        stride=options.ring_head_stride,
        zero=zero,
        options=tuple(option for option, is_on in switches.items() if is_on),
    )


def _check_ranks(ranks: int, sizes: Mapping[str, int]) -> None:
    """Raises UsageError if the number of data-parallel ranks is not whole."""
    divisor = math.prod(sizes.values())
    if ranks % divisor:
        words = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
        below, above = ranks // divisor * divisor, -(-ranks // divisor) * divisor
        raise UsageError(
            f"{ranks} ranks cannot be divided by {words}{f' = {divisor}' if ' x ' in words else ''}; use "
            f"--nproc-per-node {f'{below} or ' if below else ''}{above}, or smaller sizes"
        )


def _stage(options: TrainOptions, backend: str) -> int | None:
    """Returns the layout's ZeRO stage; None if the backend uses the requested stage by default."""
    if options.zero_stage is None:
        return None
    stage = options.zero_stage
    return None if stage == _adapter(backend).describe().default_zero else stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    """Holds the sizes of an optimizer step.

    rows: of an optimizer step.
    accumulation: micro-batches of a step and rank.
    mini_batches: steps of a pass over a rollout; 1 without rollouts.
    """

    rows: int
    accumulation: int
    mini_batches: int = 1

    @classmethod
    def of(cls, options: TrainOptions, layout: Layout, command: str) -> "_Batch":
        rows, micro = options.train_batch_size, options.micro_train_batch_size
        at_once = micro * layout.dp
        accumulation, left = divmod(rows, at_once)
        if left or not accumulation:
            below, above = rows // at_once * at_once, -(-rows // at_once) * at_once
            raise UsageError(
                f"--train-batch-size {rows} is not a multiple of --micro-train-batch-size {micro} x {layout.dp} "
                f"data-parallel ranks = {at_once}; use {f'{below} or ' if below else ''}{above}"
            )
        if command not in ROLLOUT:
            in_rows = 1 if options.packing_samples else documents_together(BUILT_IN[command].reads)
            return cls(rows=rows * in_rows, accumulation=accumulation)
        prompts, samples = options.rollout_batch_size, options.n_samples_per_prompt
        responses = prompts * samples
        if options.packing_samples:
            if responses < rows:
                raise UsageError(
                    f"--rollout-batch-size {prompts} x --n-samples-per-prompt {samples} = {responses} responses do not "
                    f"fill --train-batch-size {rows} rows; use --rollout-batch-size {-(-rows // samples)} or more"
                )
            return cls(rows=rows, accumulation=accumulation)
        if responses % rows:
            fitting = [n for n in range(1, responses + 1) if responses % n == n % at_once == 0]
            advice = f"--train-batch-size {max(fitting)}, or " if fitting else ""
            more = -(-responses // math.lcm(rows, samples)) * math.lcm(rows, samples) // samples
            raise UsageError(
                f"--rollout-batch-size {prompts} x --n-samples-per-prompt {samples} = {responses} responses are not a "
                f"multiple of --train-batch-size {rows}; use {advice}--rollout-batch-size {more}"
            )
        return cls(rows=rows, accumulation=accumulation, mini_batches=responses // rows)


def _scenario(options: TrainOptions, command: str, *, model: Path, batch: _Batch) -> Scenario:
    path = _dataset(options.dataset, command)
    data = {
        "path": path,
        "split": options.split,
        "input_key": options.input_key,
        "output_key": options.output_key,
        "max_len": options.max_len,
        "packed": options.packing_samples,
        "too_long": options.too_long,
        "rows": batch.rows,
    }
    steps = _steps(options, command, path, batch)
    return parse_scenario(
        {
            "name": command,
            "model": str(model),
            "precision": options.param_dtype,
            "seed": options.seed,
            "trust_remote_code": options.trust_remote_code,
            "accumulation": batch.accumulation,
            "steps": steps,
            "data": data,
            "optimizer": {
                "name": "adamw",
                "lr": options.learning_rate,
                "eps": options.adam_eps,
                "weight_decay": options.weight_decay,
                "max_grad_norm": options.max_norm or None,
            },
            "schedule": {
                "name": options.lr_scheduler,
                "warmup_steps": math.ceil(steps * options.lr_warmup_ratio),
                "total_steps": steps,
            },
            "objective": (_policy_gradient if command in ROLLOUT else _of_documents)(options, command, batch),
            "lora": _lora(options, model),
        },
        source="the options",
    )


def _lora(options: TrainOptions, model: Path) -> dict[str, Any] | None:
    """Returns the scenario's adapters. Raises UsageError for targets that the model does not have."""
    if options.lora_rank is None:
        for name in ("lora_alpha", "target_modules", "lora_save"):
            if getattr(options, name) is not None:
                raise UsageError(
                    f"{written(name)} configures adapters, but without --lora-rank there are none; give a rank"
                )
        return None
    modules = ALL_LINEAR if options.target_modules is None else options.target_modules
    targets = modules if modules == ALL_LINEAR else tuple(name.strip() for name in modules.split(","))
    values = {
        "r": options.lora_rank,
        "lora_alpha": options.lora_alpha or 16,
        "target_modules": targets,
    }
    if options.lora_save == "merged" and options.save_path is None:
        raise UsageError("--lora-save merged needs a folder; give --save-path")
    try:
        TypeAdapter(LoraConfig).validate_python(values).targets(parameter_shapes(model, "causal"))
    except ValidationError as error:
        raise explain(error, source="--target-modules", what="adapter") from None
    return values


def _dataset(path: str | None, command: str) -> str:
    """Returns the path of a data set; embedded data has a name instead."""
    path = EMBEDDED[command] if path is None else path
    return path if path == ARITHMETIC == EMBEDDED[command] else str(resolve(path))


def _steps(options: TrainOptions, command: str, data: str, batch: _Batch) -> int:
    """Returns the number of optimizer steps: the requested one, or the whole batches of the passes over the data."""
    passes = "--num-episodes" if command in ROLLOUT else "--max-epochs"
    epochs = options.max_epochs or options.num_episodes
    if options.max_steps is not None:
        if epochs is not None:
            raise UsageError(f"--max-steps and {passes} both set the length of the training; give one of them")
        return _whole_rollouts(options.max_steps, options, command, batch)
    if command not in ROLLOUT and (options.packing_samples or options.too_long == "drop"):
        given = "--packing-samples" if options.packing_samples else "--too-long drop"
        raise UsageError(
            f"{given}: the number of rows in a pass over the data depends on its lengths; give --max-steps"
        )
    if data == ARITHMETIC:
        raise UsageError("the embedded arithmetic has no end; give --max-steps, or a --dataset")
    count = len(read_dataset(Path(data), split=options.split))
    samples = count * (epochs or 1)
    each, what = (options.rollout_batch_size, "rollout") if command in ROLLOUT else (options.train_batch_size, "train")
    if samples < each:
        raise UsageError(
            f"{data} has {count} samples, but --{what}-batch-size is {each}; use --{what}-batch-size {count} or less, "
            f"or {passes} {-(-each // count)}"
        )
    return samples // each * (batch.mini_batches * options.ppo_epochs if command in ROLLOUT else 1)


def _whole_rollouts(steps: int, options: TrainOptions, command: str, batch: _Batch) -> int:
    if command not in ROLLOUT:
        return steps
    each = batch.mini_batches * options.ppo_epochs
    if steps % each:
        below, above = steps // each * each, -(-steps // each) * each
        raise UsageError(
            f"--max-steps {steps} ends within a rollout, which has {batch.mini_batches} mini-batches x "
            f"{options.ppo_epochs} epochs = {each} steps; use {f'{below} or ' if below else ''}{above}"
        )
    return steps


def _of_documents(options: TrainOptions, command: str, batch: _Batch) -> dict[str, Any]:
    """Returns an objective without rollouts, whose fields have the names of options."""
    names = sorted({one.name for one in dataclasses.fields(BUILT_IN[command])} & flags_of(command).keys())
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    try:
        BUILT_IN[command](**values)
    except ValidationError as error:  # each value is in its range, so they do not fit together
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(re.sub(rf"\b({'|'.join(names)})\b", lambda name: written(name[0]), message)) from None
    return {"kind": command} | values


def _policy_gradient(options: TrainOptions, command: str, batch: _Batch) -> dict[str, Any]:
    common = {
        "kind": command,
        "temperature": options.temperature,
        "mini_batches": batch.mini_batches,
        "ppo_epochs": options.ppo_epochs,
        "clip_ratio_low": options.eps_clip,
        "clip_ratio_high": options.eps_clip,
        "loss_mode": options.loss_mode,
        "kl_coef": options.kl_coef,
        "kl_loss_coef": options.kl_loss_coef,
        "gamma": options.gamma,
    }
    if command == "ppo":
        return common | {"lam": options.lambd, "cliprange_value": options.value_clip}
    estimator, samples = options.advantage_estimator, options.n_samples_per_prompt
    if samples == 1 and estimator != "reinforce_plus_plus":
        raise UsageError(
            f"--advantage-estimator {estimator} compares the responses to one prompt, but --n-samples-per-prompt is 1; "
            f"use 2 or more, or reinforce_plus_plus"
        )
    if options.gamma != 1 and estimator != "reinforce_plus_plus":
        raise UsageError(
            f"--gamma {options.gamma:g}: --advantage-estimator {estimator} gives all tokens of a response the "
            f"same reward, without a discount; leave it out, or use reinforce_plus_plus"
        )
    return common | {"adv_estimator": estimator}


def _rollout(options: TrainOptions) -> RolloutConfig:
    longest, row = options.generate_max_len, options.max_len
    if longest >= row:
        raise UsageError(
            f"--generate-max-len {longest} leaves no room for a prompt in --max-len {row}; use --max-len "
            f"{longest * 2} or --generate-max-len {max(1, row // 2)}"
        )
    reward_of(options.dataset or ARITHMETIC, options.reward)  # raises UsageError before ranks are started
    if options.rollout_engine != "hf" and options.rollout_python is None:
        load_engine(options.rollout_engine)
    samples = options.n_samples_per_prompt
    if options.greedy and samples > 1:
        raise UsageError(
            f"--greedy: all {samples} responses to a prompt would be the same; use --n-samples-per-prompt 1 (for grpo "
            f"with --advantage-estimator reinforce_plus_plus), or leave it out"
        )
    return RolloutConfig(
        prompts=options.rollout_batch_size,
        n_samples_per_prompt=samples,
        max_new_tokens=longest,
        engine=options.rollout_engine,
        python=options.rollout_python or "",
        greedy=options.greedy,
        at_once=max(1, options.micro_rollout_batch_size // samples),
        reward=options.reward,
    )


def _output(options: TrainOptions, *, under_torchrun: bool) -> OutputConfig:
    if options.load_checkpoint and options.ckpt_path is None:
        raise UsageError("--load-checkpoint needs the folder of checkpoints; give --ckpt-path")
    log, checkpoints = _path(options.logging), _path(options.ckpt_path)
    if log is None and checkpoints is None and under_torchrun:
        raise UsageError("under torchrun, all ranks need the same log; give --logging or --ckpt-path")
    if log is None:
        folder = checkpoints or Path("parity-train", datetime.now().strftime("%Y-%m-%d_%H-%M-%S")).absolute()
        log = folder / "log.jsonl"
    return OutputConfig(
        log=log,
        trackers=(
            *(("tensorboard",) if options.use_tensorboard else ()),
            *(("wandb",) if options.use_wandb else ()),
        ),
        save_path=_path(options.save_path),
        merged=options.lora_save == "merged",
        ckpt_path=checkpoints,
        save_steps=options.save_steps,
        keep=options.max_ckpt_num,
        async_save=options.async_save,
        load_checkpoint=options.load_checkpoint,
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser().absolute()


def _adapter(backend: str) -> Any:
    """Returns the adapter's class. Raises UsageError if packages of the backend are not installed."""
    try:
        return find_backend(backend).load()
    except MissingExtra as error:
        raise UsageError(f"--backend {backend}: {error}") from None


def _check_support(backend: str, scenario: Scenario, layout: Layout) -> None:
    """Raises UsageError if the backend does not support a scenario in a layout."""
    answer = _adapter(backend).supports(scenario, layout)
    if isinstance(answer, Unsupported):
        raise UsageError(f"--backend {backend} does not support this training in the layout {layout}: {answer.reason}")
    if "plan" in layout.options or (backend == "fsdp2" and "seqpar" in layout.options):
        kind = _model_type(Path(scenario.model))
        if kind not in PLANNED:
            raise UsageError(
                f"there is no explicit tensor-parallel plan for models of type {kind!r} (there is for "
                f"{', '.join(PLANNED)}); give --use-hf-tp-plan, without --sequence-parallel"
            )


def _model_type(folder: Path) -> str:
    return str(read_json(folder / "config.json").get("model_type"))
