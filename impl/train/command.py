"""Runs the command ``parity train``, which conformance/core/packages.py finds, by its options and those of a recipe.

Under torchrun this process is a rank of the training; otherwise it starts the ranks. Slow imports happen when the
command runs. FOREIGN has the options of other trainers, for the message about an option that is unknown here.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.core import errors
from conformance.core.errors import UsageError, one_line, shown
from conformance.core.io import MIB, read_text, read_toml
from conformance.spec.objectives import BUILT_IN
from impl.train.flags import (
    COMMANDS,
    EMBEDDED,
    FLAGS,
    ROLLOUT,
    TrainOptions,
    Value,
    flags_of,
    given_values,
    merge_values,
    not_trained,
    resolve_options,
    written,
)
from impl.train.rewards import ARITHMETIC, reward_name

RANK = "impl.train.launch"  # the module that runs a rank


class Train:
    help = "train with SFT, GRPO, PPO, preferences, reward models or distillation on any backend"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        commands = parser.add_subparsers(dest="train", required=True, metavar="|".join(COMMANDS), parser_class=Parser)
        commands.advice = {kind: not_trained(kind) for kind in BUILT_IN if kind not in COMMANDS}  # type: ignore[attr-defined]
        for command, about in COMMANDS.items():
            one = commands.add_parser(command, help=about, description=about)
            one.add_argument("--config", type=Path, metavar="FILE", help="recipe: TOML or YAML, the options by name")
            one.add_argument("--dry-run", action="store_true", help="print the plan and the memory it takes, and stop")
            add_flags(one, command)

    def run(self, options: argparse.Namespace) -> int:
        """Returns the exit code.

        0: done. 1: a rank failed. 2: wrong usage. 128 + a signal: stopped by the signal, with a checkpoint.
        """
        command: str = options.train
        given = given_values(options, command)
        recipe = read_recipe(options.config, command) if options.config else {}
        resolved = resolve_options(given, recipe, command)
        ranks = _torchrun_ranks()
        if ranks is not None:
            _check_requested_ranks(resolved.nproc_per_node)
        if os.environ.get("RANK", "0") == "0":
            print(summary(resolved, command), flush=True)

        from impl.train.options import train_config

        explicit = merge_values(given, recipe)
        config = train_config(command, resolved, given=explicit, ranks=ranks, dry_run=options.dry_run)
        if options.dry_run:
            from impl.train.plan import plan

            print(plan(config))
            return 0

        from impl.train.config import to_json

        with os.fdopen(os.memfd_create("config.json"), "w", encoding="utf-8") as file:  # of which a kill leaves nothing
            json.dump(to_json(config), file)
            file.flush()
            path = f"/proc/self/fd/{file.fileno()}"
            if ranks is not None:
                from impl.train.launch import main

                return main(path)

            from impl.train.launch import run_ranks
            from impl.train.setup import check_inputs

            check_inputs(config)
            start = [sys.executable, "-m", "conformance.core.packages", RANK, path]
            size, device = config.layout.world_size, config.device
            return run_ranks(start, ranks=size, device=device, inherited=[file.fileno()])


TRAIN = Train()


class Parser(errors.Parser):
    """Parses one of the commands: an unknown option may belong to another command."""

    def unknown(self, option: str) -> str:
        return unknown_option(option, self.prog.rpartition(" ")[2], written=written)


def add_flags(to: argparse.ArgumentParser, command: str) -> None:
    """Declares a command's options. Options that are not given are not in the namespace."""
    for flag in flags_of(command).values():
        notes = [] if flag.default is None or flag.kind is bool else [f"default: {flag.default}"]
        if flag.bounds.keys() - {"1 or more"}:
            notes.insert(0, " and ".join(flag.bounds))
        help = flag.help + (f" ({'; '.join(notes)})" if notes else "")
        about: dict[str, Any] = {"help": help, "default": argparse.SUPPRESS}
        if flag.kind is bool:
            to.add_argument(written(flag.name), action=argparse.BooleanOptionalAction, **about)
        else:
            choices = {"choices": flag.choices} if flag.choices else {"metavar": _METAVARS[flag.kind]}
            to.add_argument(written(flag.name), type=flag.kind, **choices, **about)


_METAVARS = {str: "TEXT", int: "N", float: "X"}


def read_recipe(path: Path, command: str) -> dict[str, Value]:
    """Reads the options in a TOML file, or in a YAML file if its name ends in .yaml or .yml.

    Raises UsageError for an unreadable file, an unknown option, an option of another command, and a value of another
    type.
    """
    try:
        values = _read_yaml(path) if path.suffix in (".yaml", ".yml") else read_toml(path)
    except FileNotFoundError:
        raise UsageError(f"there is no recipe {path}; give --config a TOML or YAML file") from None
    flags = flags_of(command)
    found: dict[str, Value] = {}
    for name, value in values.items():
        if (flag := flags.get(name)) is None:
            raise UsageError(f"{path}: {unknown_option(str(name), command)}")
        if not flag.in_recipe:
            raise UsageError(f"{path}: {name} is not allowed in a recipe; use the option {written(name)}")
        found[name] = flag.typed(value, source=str(path))
    return found


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(read_text(path, limit=MIB))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not valid YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold options (name: value), got {shown(values)}")
    return values


def summary(options: TrainOptions, command: str) -> str:
    """Describes what is trained on what; needs no slow import, so that a user sees it at once."""
    data = options.dataset or f"{EMBEDDED[command]}, embedded in the package (--dataset gives your own)"
    parts = [f"{command} of {options.pretrain} on {options.backend}", f"data: {data}"]
    if command in ROLLOUT:
        by_default = "" if options.reward else " (--reward gives another)"
        parts.append(f"reward: {reward_name(options.dataset or ARITHMETIC, options.reward)}{by_default}")
    return "; ".join(parts)


def _torchrun_ranks() -> int | None:
    """Returns the number of ranks under torchrun; None without torchrun."""
    if "RANK" not in os.environ:
        return None
    try:
        return int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise UsageError(
            "RANK is set in the environment, but WORLD_SIZE is not; start with torchrun, or unset RANK"
        ) from None


def _check_requested_ranks(requested: int | None) -> None:
    """Raises UsageError if torchrun has started another number of ranks on this host."""
    started = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    if requested is not None and str(requested) != started:
        raise UsageError(
            f"--nproc-per-node {requested}: torchrun has started {started} ranks on this host; leave it out, or start "
            f"as many"
        )


# Options of TRL, verl, OpenRLHF and Megatron-LM, for messages. Quantities may be counted differently, so a foreign
# option is never accepted in silence: the message has the difference.
_RESPONSES = "train_batch_size, which counts responses: that number of prompts x --n-samples-per-prompt"
_ALL_ROWS = "train_batch_size, the rows of a step: --micro-train-batch-size x accumulation x data-parallel ranks"
_LENGTH = "max_len, which counts prompt and response together"

# The end of a foreign name (dotted in verl) -> the own option (or several by commands, with |), and after a comma what
# differs. Without an own option there is only a reason. Equal names are left out.
FOREIGN = {
    # Models and data
    **dict.fromkeys(("model_name_or_path", "model_path", "model.path", "model.partial_pretrain"), "pretrain"),
    "reward_model_path": "reward, a function instead of a model",
    "critic.model.path": "critic_pretrain",
    **dict.fromkeys(("dataset_name", "data_path", "prompt_data", "train_files"), "dataset"),
    **dict.fromkeys(("val_files", "eval_data", "dataset_test_split"), "eval_dataset"),
    **dict.fromkeys(("prompt_key", "dataset_text_field"), "input_key"),
    **dict.fromkeys(("label_key", "response_key"), "output_key"),
    **dict.fromkeys(("max_length", "max_seq_length", "seq_length"), "max_len"),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), _LENGTH),
    "packing": "packing_samples",
    # Steps
    **dict.fromkeys(
        ("per_device_train_batch_size", "ppo_micro_batch_size_per_gpu", "micro_batch_size_per_gpu", "micro_batch_size"),
        "micro_train_batch_size",
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "global_batch_size"), _ALL_ROWS),
    "ppo_mini_batch_size": _RESPONSES,
    **dict.fromkeys(("num_train_epochs", "total_epochs"), "max_epochs|num_episodes"),
    **dict.fromkeys(("total_training_steps", "train_iters"), "max_steps"),
    # Optimizer
    **dict.fromkeys(("lr", "actor_learning_rate"), "learning_rate"),
    "critic.optim.lr": "learning_rate, of policy and critic",
    **dict.fromkeys(("lr_scheduler_type", "lr_decay_style"), "lr_scheduler"),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps_ratio", "lr_warmup_fraction"), "lr_warmup_ratio"),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "lr_warmup_iters"), "lr_warmup_ratio, a share of the steps"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad"), "max_norm"),
    "adam_epsilon": "adam_eps",
    **dict.fromkeys(("bf16", "fp16"), "param_dtype, with bf16 or fp16 as its value"),
    # Adapters
    **dict.fromkeys(("lora_r", "use_peft"), "lora_rank"),
    "lora_target_modules": "target_modules",
    # Ranks
    **dict.fromkeys(("n_gpus_per_node", "num_processes"), "nproc_per_node"),
    "rollout.tensor_model_parallel_size": ", every rank samples from a whole replica",
    **dict.fromkeys(("nnodes", "num_machines"), ", torchrun starts the ranks of several hosts"),
    **dict.fromkeys(("nccl_timeout", "timeout"), "ddp_timeout"),
    "distributed_timeout_minutes": "ddp_timeout, in seconds",
    "ds_tensor_parallel_size": "tensor_model_parallel_size",
    "ulysses_sequence_parallel_size": "ring_attn_size, a ring instead of Ulysses",
    "use_distributed_optimizer": "zero_stage, with 1 as its value",
    **dict.fromkeys(("enable_gradient_checkpointing", "recompute_granularity"), "gradient_checkpointing"),
    **dict.fromkeys(("adam_offload", "param_offload", "optimizer_offload"), "offload"),
    # Rollouts and objective
    "data.train_batch_size": "rollout_batch_size",
    "generation_batch_size": "rollout_batch_size, which counts prompts: that number / --n-samples-per-prompt",
    **dict.fromkeys(("num_generations", "rollout.n"), "n_samples_per_prompt"),
    **dict.fromkeys(("max_completion_length", "max_response_length", "response_length"), "generate_max_len"),
    **dict.fromkeys(("use_vllm", "rollout.name"), "rollout_engine"),
    **dict.fromkeys(
        ("reward_funcs", "remote_rm_url", "custom_reward_function.path", "custom_reward_function.name"), "reward"
    ),
    **dict.fromkeys(("teacher_model_name_or_path", "teacher_model"), "teacher_pretrain"),
    **dict.fromkeys(("ref_pretrain", "ref_model"), "pretrain, which the reference is loaded from, too"),
    "rpo_alpha": "sft_coef",
    "simpo_gamma": "target_margin, gamma / beta",
    "center_rewards_coefficient": "center_coef",
    "lmbda": ", in TRL's distillation it is the share of texts that the student samples, and here all are those of "
    "--dataset (the lambda of PPO's advantages is --lambd)",
    **dict.fromkeys(("num_iterations", "num_ppo_epochs"), "ppo_epochs"),
    **dict.fromkeys(("epsilon", "cliprange", "clip_ratio"), "eps_clip"),
    "loss_type": "loss_mode",
    "beta": "kl_loss_coef",
    "init_kl_coef": "kl_coef",
    "adv_estimator": "advantage_estimator",
    "lam": "lambd",
    "cliprange_value": "value_clip",
    # Output
    **dict.fromkeys(("output_dir", "default_local_dir"), "ckpt_path"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_mode"), "load_checkpoint"),
    **dict.fromkeys(("save_freq", "save_interval"), "save_steps"),
    **dict.fromkeys(("test_freq", "eval_interval"), "eval_steps"),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), "max_ckpt_num"),
    **dict.fromkeys(("report_to", "trainer.logger"), "use_wandb, or --use-tensorboard"),
    "tensorboard_dir": "use_tensorboard",
    **dict.fromkeys(("logging_steps", "log_interval"), ", every step is logged"),
}


def unknown_option(name: str, command: str, *, written: Callable[[str], str] = str) -> str:
    """Explains that a command does not have an option. ``written``: how names of options are written."""
    bare = name.removeprefix("--").removeprefix("no-").replace("-", "_")
    flags = flags_of(command)
    typed = next((end for end in endings(bare) if end in FOREIGN or end in FLAGS), "")
    names, _, difference = (typed if typed in flags else FOREIGN.get(typed, typed)).partition(", ")
    own = next((each for each in names.split("|") if each in flags), names.split("|")[0])
    elsewhere = typed if typed in FLAGS and typed not in flags else own
    if elsewhere in FLAGS and elsewhere not in flags:
        *commands, last = FLAGS[elsewhere].commands
        advice = f"{command} has {written(own)}" if own in flags else "leave it out"
        listed = f"{', '.join(commands)} and {last}" if commands else last
        return f"{written(elsewhere)} is an option of {listed}, not of {command}; {advice}"
    if difference and not own:
        return f"there is no option {shown(name)}: {difference}; leave it out"
    if own:
        about = f" ({difference})" if difference else ""
        return f"there is no option {shown(name)}; in parity train this is {written(own)}{about}"
    close = difflib.get_close_matches(bare, flags, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(written, close))}?" if close else "see --help for all options"
    return f"there is no option {shown(name)}; {hint}"


def endings(name: str) -> list[str]:
    """Returns a dotted name and its ends, longest first: a.b.c, b.c, c."""
    parts = name.lstrip("+").split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
