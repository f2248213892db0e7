"""Turns the options of ``parity train`` into a TrainConfig, and rejects options that do not fit together.

Every number that decides a step is in the scenario, and the arrangement of ranks in the layout; the backend's adapter
decides whether it supports both, as for a cell of the suite.
"""

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from conformance.backends.protocol import MissingExtra, Unsupported, find_backend
from conformance.core.errors import UsageError, explain
from conformance.core.host import resolve
from conformance.core.io import read_json
from conformance.data.samples import read_dataset
from conformance.models.folder_checks import check_model_folder, runs_code
from conformance.models.folders import weight_files
from conformance.runner.environment import model_sizes
from conformance.spec.layout import Layout
from conformance.spec.lora import ALL_LINEAR, LoraConfig
from conformance.spec.scenario import Scenario, parse_scenario
from impl.models.family_quirks import PLANNED
from impl.train.config import ARITHMETIC, OutputConfig, RolloutConfig, TrainConfig, Values
from impl.train.flags import Value, written
from impl.train.plan import parameter_shapes

Device = Literal["cpu", "cuda"]
DATASETS = {"sft": "data/word_problems.jsonl", "grpo": ARITHMETIC, "ppo": ARITHMETIC}  # defaults


def train_config(
    command: str, values: Mapping[str, Value], *, given: Mapping[str, Value], ranks: int | None, dry_run: bool = False
) -> TrainConfig:
    """Builds the training configuration from ``values``, which has one for every option of the command.

    given: the user's options, which the log repeats.
    ranks: the number of running ranks under torchrun; else None.
    dry_run: weights, the model's code and GPUs may be missing.
    Raises UsageError, with numbers that would work, for options that do not fit together or that the backend does not
    support.
    """
    read = Values(values)
    backend, device = read.text("backend"), device_of(values, dry_run=dry_run)
    model = _model(read, "pretrain", dry_run=dry_run)
    layout = _layout(read, backend, ranks or ranks_to_start(values, dry_run=dry_run))
    batch = _Batch.of(read, layout, command)
    scenario = _scenario(read, command, model=model, batch=batch)
    layout.validate(**model_sizes(model), rows=scenario.data.rows, accumulation=scenario.accumulation)
    _check_support(backend, scenario, layout)
    models = {role.name: model for role in scenario.objective.roles}
    if command == "ppo":
        models["critic"] = _model(read, "critic_pretrain", dry_run=dry_run) if read.given("critic_pretrain") else model
    return TrainConfig(
        backend=backend,
        layout=layout,
        device=device,
        scenario=scenario,
        models=models,
        output=_output(read, under_torchrun=ranks is not None),
        rollout=None if command == "sft" else _rollout(read),
        eval_dataset=Path(_dataset(read, "eval_dataset", command)) if read.given("eval_dataset") else None,
        eval_steps=read.whole("eval_steps"),
        options=dict(given),
    )


def _model(read: Values, name: str, *, dry_run: bool) -> Path:
    """Returns a model's folder. Raises UsageError if it cannot be loaded; a dry run needs no weights."""
    model = resolve(read.text(name))
    check_model_folder(model)
    if not dry_run:
        runs_code(model, trusted=read.flag("trust_remote_code"))
        weight_files(model)
    return model


def device_of(values: Mapping[str, Value], *, dry_run: bool) -> Device:
    import torch

    if values["device"] == "cuda" and not dry_run and not torch.cuda.is_available():
        raise UsageError("--device cuda: no GPU is visible; use --device cpu, or check CUDA_VISIBLE_DEVICES")
    device = values["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    return "cuda" if device == "cuda" else "cpu"


def ranks_to_start(values: Mapping[str, Value], *, dry_run: bool) -> int:
    """Returns ``nproc_per_node``, else the number of visible GPUs, else the smallest number for the layout.

    Raises UsageError if there are fewer GPUs than ranks.
    """
    import torch

    read, gpus = Values(values), torch.cuda.device_count()
    on_gpus = device_of(values, dry_run=dry_run) == "cuda"
    if values["nproc_per_node"] is not None:
        requested = read.whole("nproc_per_node")
        if on_gpus and requested > gpus and not dry_run:
            raise UsageError(f"--nproc-per-node {requested}: only {gpus} GPUs are visible; use {gpus} or less")
        return requested
    return (
        gpus if on_gpus and gpus else read.cut("tensor_model_parallel_size") * read.cut("ring_attn_size") * read.stages
    )


def _layout(read: Values, backend: str, ranks: int) -> Layout:
    tp, sp = read.cut("tensor_model_parallel_size"), read.cut("ring_attn_size")
    _check_ranks(ranks, {"tensor-parallel": tp, "context-parallel": sp, "pipeline": read.stages})
    sized = Layout.for_world(ranks, tp=tp, sp=sp, pp=read.stages)
    if read.flag("use_hf_tp_plan") and (tp == 1 or read.flag("sequence_parallel")):
        raise UsageError(
            "--use-hf-tp-plan is for tensor parallelism without --sequence-parallel, which needs an explicit plan; "
            + ("give --fsdp-tensor-parallel-size 2, or leave it out" if tp == 1 else "leave one of the two out")
        )
    explicit = backend == "fsdp2" and tp > 1 and not read.flag("use_hf_tp_plan")
    zero = _stage(read, backend)
    options = {
        "plan": explicit and not read.flag("sequence_parallel"),
        "seqpar": read.flag("sequence_parallel"),
        "ckpt": read.flag("gradient_checkpointing"),
        "compile": read.flag("torch_compile"),
        # Gathering the weights of a layer together costs the host less, and layers compile
        # (docs/measurements/speed.md).
        "leaf": backend == "deepspeed" and zero is None,
        "offload": read.flag("offload"),
    }
    return dataclasses.replace(
        sized,
        stride=read.whole("ring_head_stride"),
        zero=zero,
        options=tuple(option for option, is_on in options.items() if is_on),
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


def _stage(read: Values, backend: str) -> int | None:
    """Returns the layout's ZeRO stage; None if the backend uses the requested stage by default."""
    if not read.given("zero_stage"):
        return None
    stage = read.whole("zero_stage")
    return None if stage == _adapter(backend).describe().default_zero else stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    """Holds the sizes of an optimizer step.

    rows: of an optimizer step.
    accumulation: micro-batches of a step and rank.
    mini_batches: steps of a pass over a rollout; 1 for SFT.
    """

    rows: int
    accumulation: int
    mini_batches: int = 1

    @classmethod
    def of(cls, read: Values, layout: Layout, command: str) -> "_Batch":
        rows, micro = read.whole("train_batch_size"), read.whole("micro_train_batch_size")
        at_once = micro * layout.dp
        accumulation, left = divmod(rows, at_once)
        if left or not accumulation:
            below, above = rows // at_once * at_once, -(-rows // at_once) * at_once
            raise UsageError(
                f"--train-batch-size {rows} is not a multiple of --micro-train-batch-size {micro} x {layout.dp} "
                f"data-parallel ranks = {at_once}; use {f'{below} or ' if below else ''}{above}"
            )
        if command == "sft":
            return cls(rows=rows, accumulation=accumulation)
        prompts, samples = read.whole("rollout_batch_size"), read.whole("n_samples_per_prompt")
        responses = prompts * samples
        if read.flag("packing_samples"):
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


def _scenario(read: Values, command: str, *, model: Path, batch: _Batch) -> Scenario:
    path = _dataset(read, "dataset", command)
    data = {
        "path": path,
        "input_key": read.text("input_key"),
        "output_key": read.text("output_key"),
        "max_len": read.whole("max_len"),
        "packed": read.flag("packing_samples"),
        "rows": batch.rows,
    }
    steps = _steps(read, command, path, batch)
    return parse_scenario(
        {
            "name": command,
            "model": str(model),
            "precision": read.text("param_dtype"),
            "seed": read.whole("seed"),
            "trust_remote_code": read.flag("trust_remote_code"),
            "accumulation": batch.accumulation,
            "steps": steps,
            "data": data,
            "optimizer": {
                "name": "adamw",
                "lr": read.number("learning_rate"),
                "eps": read.number("adam_eps"),
                "weight_decay": read.number("weight_decay"),
                "max_grad_norm": read.number("max_norm") or None,
            },
            "schedule": {
                "name": read.text("lr_scheduler"),
                "warmup_steps": math.ceil(steps * read.number("lr_warmup_ratio")),
                "total_steps": steps,
            },
            "objective": {"kind": command} if command == "sft" else _policy_gradient(read, command, batch),
            "lora": _lora(read, model),
        },
        source="the options",
    )


def _lora(read: Values, model: Path) -> dict[str, Any] | None:
    """Returns the scenario's adapters. Raises UsageError for targets that the model does not have."""
    if not read.given("lora_rank"):
        for name in ("lora_alpha", "target_modules", "lora_save"):
            if read.given(name):
                raise UsageError(
                    f"{written(name)} configures adapters, but without --lora-rank there are none; give a rank"
                )
        return None
    modules = read.text("target_modules") if read.given("target_modules") else ALL_LINEAR
    targets = modules if modules == ALL_LINEAR else tuple(name.strip() for name in modules.split(","))
    values = {
        "r": read.whole("lora_rank"),
        "lora_alpha": read.whole("lora_alpha") if read.given("lora_alpha") else 16,
        "target_modules": targets,
    }
    if read.given("lora_save") and read.text("lora_save") == "merged" and not read.given("save_path"):
        raise UsageError("--lora-save merged needs a folder; give --save-path")
    try:
        TypeAdapter(LoraConfig).validate_python(values).targets(parameter_shapes(model, "causal"))
    except ValidationError as error:
        raise explain(error, source="--target-modules", what="adapter") from None
    return values


def _dataset(read: Values, name: str, command: str) -> str:
    """Returns the path of a data set; embedded data has a name instead."""
    path = read.text(name) if read.given(name) else DATASETS[command]
    return path if path == ARITHMETIC == DATASETS[command] else str(resolve(path))


def _steps(read: Values, command: str, data: str, batch: _Batch) -> int:
    """Returns the number of optimizer steps: the requested one, or the whole batches of the passes over the data."""
    passes = "max_epochs" if command == "sft" else "num_episodes"
    if read.given("max_steps"):
        if read.given(passes):
            raise UsageError(f"--max-steps and {written(passes)} both set the length of the training; give one of them")
        return _whole_rollouts(read.whole("max_steps"), read, command, batch)
    if read.flag("packing_samples") and command == "sft":
        raise UsageError(
            "--packing-samples: the number of rows in a pass over the data depends on its lengths; give --max-steps"
        )
    if data == ARITHMETIC:
        raise UsageError("the embedded arithmetic has no end; give --max-steps, or a --dataset")
    count, epochs = len(read_dataset(Path(data))), read.whole(passes) if read.given(passes) else 1
    each, what = (batch.rows, "train") if command == "sft" else (read.whole("rollout_batch_size"), "rollout")
    if count * epochs < each:
        raise UsageError(
            f"{data} has {count} samples, but --{what}-batch-size is {each}; use --{what}-batch-size {count} or less, "
            f"or {written(passes)} {-(-each // count)}"
        )
    made = count * epochs // each
    return made if command == "sft" else made * batch.mini_batches * read.whole("ppo_epochs")


def _whole_rollouts(steps: int, read: Values, command: str, batch: _Batch) -> int:
    if command == "sft":
        return steps
    each = batch.mini_batches * read.whole("ppo_epochs")
    if steps % each:
        below, above = steps // each * each, -(-steps // each) * each
        raise UsageError(
            f"--max-steps {steps} ends within a rollout, which has {batch.mini_batches} mini-batches x "
            f"{read.whole('ppo_epochs')} epochs = {each} steps; use {f'{below} or ' if below else ''}{above}"
        )
    return steps


def _policy_gradient(read: Values, command: str, batch: _Batch) -> dict[str, Any]:
    common = {
        "kind": command,
        "temperature": read.number("temperature"),
        "mini_batches": batch.mini_batches,
        "ppo_epochs": read.whole("ppo_epochs"),
        "clip_ratio_low": read.number("eps_clip"),
        "clip_ratio_high": read.number("eps_clip"),
        "loss_mode": read.text("loss_mode"),
        "kl_coef": read.number("kl_coef"),
        "kl_loss_coef": read.number("kl_loss_coef"),
        "gamma": read.number("gamma"),
    }
    if command == "ppo":
        return common | {"lam": read.number("lambd"), "cliprange_value": read.number("value_clip")}
    estimator, samples = read.text("advantage_estimator"), read.whole("n_samples_per_prompt")
    if samples == 1 and estimator != "reinforce_plus_plus":
        raise UsageError(
            f"--advantage-estimator {estimator} compares the responses to one prompt, but --n-samples-per-prompt is 1; "
            f"use 2 or more, or reinforce_plus_plus"
        )
    if read.number("gamma") != 1 and estimator != "reinforce_plus_plus":
        raise UsageError(
            f"--gamma {read.number('gamma'):g}: --advantage-estimator {estimator} gives all tokens of a response the "
            f"same reward, without a discount; leave it out, or use reinforce_plus_plus"
        )
    return common | {"adv_estimator": estimator}


def _rollout(read: Values) -> RolloutConfig:
    longest, row = read.whole("generate_max_len"), read.whole("max_len")
    if longest >= row:
        raise UsageError(
            f"--generate-max-len {longest} leaves no room for a prompt in --max-len {row}; use --max-len "
            f"{longest * 2} or --generate-max-len {max(1, row // 2)}"
        )
    samples = read.whole("n_samples_per_prompt")
    if read.flag("greedy") and samples > 1:
        raise UsageError(
            f"--greedy: all {samples} responses to a prompt would be the same; use --n-samples-per-prompt 1 (for grpo "
            f"with --advantage-estimator reinforce_plus_plus), or leave it out"
        )
    return RolloutConfig(
        prompts=read.whole("rollout_batch_size"),
        n_samples_per_prompt=samples,
        max_new_tokens=longest,
        engine="vllm" if read.text("rollout_engine") == "vllm" else "hf",
        greedy=read.flag("greedy"),
    )


def _output(read: Values, *, under_torchrun: bool) -> OutputConfig:
    if read.flag("load_checkpoint") and not read.given("ckpt_path"):
        raise UsageError("--load-checkpoint needs the folder of checkpoints; give --ckpt-path")
    log, checkpoints = read.path("logging"), read.path("ckpt_path")
    if log is None and checkpoints is None and under_torchrun:
        raise UsageError("under torchrun, all ranks need the same log; give --logging or --ckpt-path")
    if log is None:
        folder = checkpoints or Path("parity-train", datetime.now().strftime("%Y-%m-%d_%H-%M-%S")).absolute()
        log = folder / "log.jsonl"
    return OutputConfig(
        log=log,
        trackers=(
            *(("tensorboard",) if read.flag("use_tensorboard") else ()),
            *(("wandb",) if read.flag("use_wandb") else ()),
        ),
        save_path=read.path("save_path"),
        merged=read.given("lora_save") and read.text("lora_save") == "merged",
        ckpt_path=checkpoints,
        save_steps=read.whole("save_steps"),
        keep=read.whole("max_ckpt_num"),
        async_save=read.flag("async_save"),
        load_checkpoint=read.flag("load_checkpoint"),
    )


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
