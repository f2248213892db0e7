"""Declares the options of ``parity train`` in one table, for the command line and for recipes.

The names are those of OpenRLHF, Megatron-LM and transformers. A default of ``None`` follows from other options
(impl/train/options.py). A recipe is a TOML or YAML file with the same names as its keys; the command line overrides the
recipe, also under an alternative name.
"""

import argparse
import contextlib
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from conformance.core import parser
from conformance.core.errors import UsageError, one_line, shown
from conformance.core.io import MIB, read_text, read_toml
from conformance.spec.objectives import LossMode
from conformance.spec.precision import PRECISIONS

COMMANDS = {
    "sft": "supervised fine-tuning on inputs and outputs",
    "grpo": "group-relative policy optimisation: rollouts of the policy, rewards, updates",
    "ppo": "proximal policy optimisation with a critic: rollouts of the policy, rewards, updates",
}
ROLLOUT = ("grpo", "ppo")
SAME_SIZE = {"tensor_model_parallel_size": "fsdp_tensor_parallel_size", "ring_attn_size": "context_parallel_size"}
ALTERNATIVES = (*SAME_SIZE.items(), ("max_steps", "max_epochs", "num_episodes"))  # only one of each may be given
Value = str | int | float | bool | None


def written(name: str) -> str:
    """Returns an option as it is written on the command line; a recipe has its bare name."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Declares one option. ``kind`` is its type; a ``bool`` is a switch, ``--name`` or ``--no-name``.

    least, above, most: the range of a number.
    commands: the commands that have the option.
    unsupported: by backend, the reason why it does not support the option.
    in_recipe: whether a recipe may contain it.
    """

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    help: str
    default: Value = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    commands: tuple[str, ...] = tuple(COMMANDS)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    in_recipe: bool = True

    def typed(self, value: object, *, source: str) -> Value:
        """Converts a recipe's value to the option's type; a text is read as on the command line. Raises UsageError."""
        if self.kind is bool and isinstance(value, bool):
            return value
        original = value
        if isinstance(value, str) and self.kind is not bool:
            with contextlib.suppress(ValueError):
                value = self.kind(value)
        exact = isinstance(value, self.kind) or (self.kind is float and isinstance(value, int))
        if not exact or isinstance(value, bool) or (self.choices and value not in self.choices):
            wanted = f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.kind]
            raise UsageError(f"{source}: {self.name} must be {wanted}, got {shown(original)}")
        assert isinstance(value, str | int | float)
        return float(value) if self.kind is float else value

    def check(self, value: Value) -> None:
        """Raises UsageError for a number out of range."""
        if self.kind not in (int, float) or value is None:
            return
        assert isinstance(value, int | float)
        bounds = {
            f"{self.least} or more": self.least is None or value >= self.least,
            f"more than {self.above}": self.above is None or value > self.above,
            f"{self.most} or less": self.most is None or value <= self.most,
        }
        if broken := [words for words, holds in bounds.items() if not holds] or math.isnan(value):
            words = " and ".join(broken) if isinstance(broken, list) else "a number"
            raise UsageError(f"{written(self.name)} must be {words}, got {value}")


_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
_TP = "give --tensor-model-parallel-size, which every backend has"

FLAGS = (
    Flag(name="backend", kind=str, choices=("deepspeed", "fsdp2", "megatron"), help="training backend"),
    # Models
    Flag(name="pretrain", kind=str, help="Hugging Face folder of the policy, and of the reference if there is one"),
    Flag(
        name="critic_pretrain",
        kind=str,
        commands=("ppo",),
        help="Hugging Face folder of the critic: a value model (score.weight), or a language model, which gets a new "
        "value head (default: as --pretrain)",
    ),
    Flag(
        name="trust_remote_code",
        kind=bool,
        default=False,
        in_recipe=False,
        help="run Python code of model folders",
    ),
    # Data
    Flag(name="dataset", kind=str, help="JSONL or Parquet file, or a saved Hugging Face dataset (default: embedded)"),
    Flag(name="eval_dataset", kind=str, help="held-out data, in the same form (default: none)"),
    Flag(name="input_key", kind=str, default="question", help="field of the input or prompt"),
    Flag(name="output_key", kind=str, default="answer", help="field of the output or reference answer"),
    Flag(name="max_len", kind=int, least=1, default=2048, help="tokens of a row at most, prompt and response together"),
    Flag(name="packing_samples", kind=bool, default=False, help="put several documents into a row"),
    # Steps
    Flag(name="train_batch_size", kind=int, least=1, default=32, help="rows of an optimizer step, over all ranks"),
    Flag(name="micro_train_batch_size", kind=int, least=1, default=1, help="rows of a forward pass of one rank"),
    Flag(name="max_steps", kind=int, least=1, help="optimizer steps (default: by --max-epochs or --num-episodes)"),
    Flag(name="max_epochs", kind=int, least=1, commands=("sft",), help="passes over the data (default: 1)"),
    Flag(name="num_episodes", kind=int, least=1, commands=ROLLOUT, help="passes over the prompts (default: 1)"),
    Flag(
        name="seed",
        kind=int,
        least=0,
        most=2**32 - 1,
        default=0,
        help="order of the data, sampling of responses, a new value head",
    ),
    # Optimizer
    Flag(name="learning_rate", kind=float, above=0, default=5e-6, help="peak of AdamW's learning rate"),
    Flag(name="lr_scheduler", kind=str, default="cosine", choices=("constant", "linear", "cosine"), help="schedule"),
    Flag(
        name="lr_warmup_ratio",
        kind=float,
        least=0,
        most=1,
        default=0.03,
        help="share of the steps in which the learning rate rises",
    ),
    Flag(name="weight_decay", kind=float, least=0, default=0.0, help="decoupled; biases and norms are exempt"),
    Flag(name="adam_eps", kind=float, above=0, default=1e-8, help="epsilon of AdamW"),
    Flag(
        name="max_norm", kind=float, least=0, default=1.0, help="norm to which gradients are clipped; 0 for no clipping"
    ),
    Flag(
        name="param_dtype",
        kind=str,
        default="bf16",
        choices=tuple(tier.name for tier in sorted(PRECISIONS.values(), key=lambda tier: tier.compute.bytes)),
        help="dtype of forward and backward; masters are float32. exact: all in float64, for comparisons",
    ),
    # Adapters
    Flag(
        name="lora_rank",
        kind=int,
        least=1,
        most=2**16,
        unsupported={"megatron": "megatron-core has no adapters; use fsdp2 or deepspeed"},
        help="train adapters of this rank (LoRA) on the frozen policy (default: none, the whole policy is trained)",
    ),
    Flag(name="lora_alpha", kind=int, least=1, most=2**16, help="adapters are scaled by this / rank (default: 16)"),
    Flag(
        name="target_modules",
        kind=str,
        help="linear layers with an adapter, such as q_proj,v_proj (default: all-linear)",
    ),
    Flag(
        name="lora_save",
        kind=str,
        choices=("adapter", "merged"),
        help="--save-path gets the adapter beside the base, or merged into it (default: adapter)",
    ),
    # Ranks
    Flag(
        name="nproc_per_node",
        kind=int,
        least=1,
        help="ranks to start (default: one per GPU; on the CPU, the fewest for the layout)",
    ),
    Flag(name="device", kind=str, choices=("cpu", "cuda"), help="where ranks compute (default: cuda if there is any)"),
    Flag(
        name="zero_stage",
        kind=int,
        least=0,
        most=3,
        help="what data-parallel ranks shard: ZeRO 0 to 3 of deepspeed (default: 3), the distributed optimizer of "
        "megatron (1; default: 0); fsdp2 is always 3",
    ),
    Flag(name="tensor_model_parallel_size", kind=int, least=1, help="tensor-parallel ranks (default: 1)"),
    Flag(
        name="fsdp_tensor_parallel_size",
        kind=int,
        least=1,
        unsupported={"deepspeed": _TP, "megatron": _TP},
        help="the same, by its name in FSDP programs",
    ),
    Flag(
        name="use_hf_tp_plan",
        kind=bool,
        default=False,
        unsupported={
            "deepspeed": "AutoTP plans the sharding of a model itself; leave it out",
            "megatron": "megatron-core's layers are sharded by their own classes; leave it out",
        },
        help="tensor parallelism by the plan of the model's class instead of an explicit plan",
    ),
    Flag(
        name="sequence_parallel",
        kind=bool,
        default=False,
        help="norms and residuals sharded along the sequence between tensor-parallel blocks",
    ),
    Flag(
        name="ring_attn_size",
        kind=int,
        least=1,
        help="context-parallel ranks, which share rows (default: 1)",
    ),
    Flag(name="context_parallel_size", kind=int, least=1, help="the same, by its name in Megatron-LM"),
    Flag(
        name="ring_head_stride",
        kind=int,
        least=1,
        default=1,
        help="key-value heads that the ring gathers at a time",
    ),
    Flag(name="pipeline_model_parallel_size", kind=int, least=1, default=1, help="pipeline stages"),
    Flag(name="gradient_checkpointing", kind=bool, default=False, help="recompute activations in the backward pass"),
    Flag(
        name="torch_compile",
        kind=bool,
        default=False,
        unsupported={"megatron": "megatron-core's layers cannot be compiled; leave it out"},
        help="compile each layer by torch.compile",
    ),
    Flag(name="offload", kind=bool, default=False, help="parameters, gradients and optimizer state on the CPU"),
    # Rollouts
    Flag(name="rollout_batch_size", kind=int, least=1, default=8, commands=ROLLOUT, help="prompts of a rollout"),
    Flag(name="n_samples_per_prompt", kind=int, least=1, default=4, commands=ROLLOUT, help="responses to each prompt"),
    Flag(
        name="generate_max_len", kind=int, least=1, default=1024, commands=ROLLOUT, help="tokens of a response at most"
    ),
    Flag(name="temperature", kind=float, above=0, default=1.0, commands=ROLLOUT, help="of sampling and of log-probs"),
    Flag(
        name="rollout_engine",
        kind=str,
        default="hf",
        choices=("hf", "vllm"),
        commands=ROLLOUT,
        help="engine that samples responses",
    ),
    Flag(name="greedy", kind=bool, default=False, commands=ROLLOUT, help="the likeliest token instead of sampling"),
    # Objective
    Flag(name="ppo_epochs", kind=int, least=1, default=1, commands=ROLLOUT, help="passes over a rollout"),
    Flag(
        name="eps_clip", kind=float, above=0, default=0.2, commands=ROLLOUT, help="the ratio is clipped to 1 -/+ this"
    ),
    Flag(
        name="loss_mode",
        kind=str,
        default="vanilla",
        choices=get_args(LossMode),
        commands=ROLLOUT,
        help="loss of the policy (docs/explanations/objectives.md)",
    ),
    Flag(
        name="kl_coef",
        kind=float,
        least=0,
        default=0.0,
        commands=ROLLOUT,
        help="KL to the reference, in the reward",
    ),
    Flag(
        name="kl_loss_coef", kind=float, least=0, default=0.0, commands=ROLLOUT, help="KL to the reference, in the loss"
    ),
    Flag(
        name="advantage_estimator",
        kind=str,
        default="grpo",
        choices=("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        commands=("grpo",),
        help="how rewards become advantages",
    ),
    Flag(name="gamma", kind=float, least=0, most=1, default=1.0, commands=ROLLOUT, help="discount of rewards"),
    Flag(
        name="lambd",
        kind=float,
        least=0,
        most=1,
        default=1.0,
        commands=("ppo",),
        help="lambda of generalised advantage estimation",
    ),
    Flag(
        name="value_clip",
        kind=float,
        above=0,
        default=0.5,
        commands=("ppo",),
        help="values are clipped to the old -/+ this",
    ),
    # Output
    Flag(name="save_path", kind=str, help="Hugging Face folder that is written at the end (default: none)"),
    Flag(name="ckpt_path", kind=str, help="folder of checkpoints (default: none)"),
    Flag(name="load_checkpoint", kind=bool, default=False, help="resume from the last checkpoint in --ckpt-path"),
    Flag(name="save_steps", kind=int, least=1, default=100, help="updates between two checkpoints"),
    Flag(name="async_save", kind=bool, default=False, help="write checkpoints while the training continues"),
    Flag(name="max_ckpt_num", kind=int, least=1, default=2, help="checkpoints to keep"),
    Flag(name="eval_steps", kind=int, least=1, default=100, help="updates between two evaluations"),
    Flag(
        name="logging",
        kind=str,
        help="file of JSON lines, one a step (default: log.jsonl in --ckpt-path, else in parity-train/DATE_TIME)",
    ),
    Flag(name="use_tensorboard", kind=bool, default=False, help="write the numbers for TensorBoard, too"),
    Flag(name="use_wandb", kind=bool, default=False, help="send the numbers to Weights & Biases, too"),
)


class Parser(parser.Parser):
    """Parses one of the commands: an unknown option may belong to another command."""

    def unknown(self, option: str) -> str:
        return _unknown(option, self.prog.rpartition(" ")[2], written=written)


def add_flags(to: argparse.ArgumentParser, command: str) -> None:
    """Declares a command's options. Options that are not given are not in the namespace."""
    for flag in FLAGS:
        if command not in flag.commands:
            continue
        default = "" if flag.default is None or flag.kind is bool else f" (default: {flag.default})"
        about: dict[str, Any] = {"help": flag.help + default, "default": argparse.SUPPRESS}
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
    by_name = {flag.name: flag for flag in FLAGS}
    found: dict[str, Value] = {}
    for name, value in values.items():
        flag = by_name.get(name)
        if flag is None or command not in flag.commands:
            raise UsageError(f"{path}: {_unknown(str(name), command)}")
        if not flag.in_recipe:
            raise UsageError(f"{path}: {name} is not allowed in a recipe; use the option {written(name)}")
        found[name] = flag.typed(value, source=str(path))
    return found


def merge_values(given: Mapping[str, Value], recipe: Mapping[str, Value]) -> dict[str, Value]:
    """Merges the options of the command line and the recipe; an option overrides all of its alternatives."""
    replaced = {name for names in ALTERNATIVES if not given.keys().isdisjoint(names) for name in names}
    return {name: value for name, value in recipe.items() if name not in replaced} | dict(given)


def resolve_values(given: Mapping[str, Value], recipe: Mapping[str, Value], command: str) -> dict[str, Value]:
    """Returns a value for every option of a command: the command line's, else the recipe's, else the default.

    Raises UsageError for an option that the backend does not support, with the reason.
    """
    flags = [flag for flag in FLAGS if command in flag.commands]
    explicit = merge_values(given, recipe)
    values = {flag.name: explicit.get(flag.name, flag.default) for flag in flags}
    for name in ("backend", "pretrain"):
        if values[name] is None:
            raise UsageError(f"{written(name)} is missing; {_advice(name)}")
    backend = str(values["backend"])
    for flag in flags:
        flag.check(values[flag.name])
        if explicit.get(flag.name) and backend in flag.unsupported:
            raise UsageError(f"--backend {backend} does not support {written(flag.name)}: {flag.unsupported[backend]}")
    return values


def _advice(name: str) -> str:
    flag = next(flag for flag in FLAGS if flag.name == name)
    return f"give one of {', '.join(flag.choices)}" if flag.choices else f"give the {flag.help}"


def _unknown(name: str, command: str, *, written: Callable[[str], str] = str) -> str:
    """Explains that a command does not have an option. ``written``: how names of options are written."""
    bare = name.removeprefix("--").removeprefix("no-").replace("-", "_")
    commands = next((flag.commands for flag in FLAGS if flag.name == bare), ())
    if commands and command not in commands:
        return f"{written(bare)} is an option of {' and '.join(commands)}, not of {command}; leave it out"
    names = [flag.name for flag in FLAGS if command in flag.commands]
    close = difflib.get_close_matches(bare, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(written, close))}?" if close else "see --help for all options"
    return f"there is no option {shown(name)}; {hint}"


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(read_text(path, limit=MIB))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not valid YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold options (name: value), got {shown(values)}")
    return values


def given_values(options: argparse.Namespace, command: str) -> dict[str, Value]:
    """Returns the options of the command line."""
    names: Sequence[str] = [flag.name for flag in FLAGS if command in flag.commands]
    return {name: value for name, value in vars(options).items() if name in names}
