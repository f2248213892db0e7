"""Declares the options of ``parity train`` as fields of one class, for the command line and for recipes.

The names are those of OpenRLHF, Megatron-LM and transformers. An option that is ``None`` follows from other options
(impl/train/options.py). A recipe is a TOML or YAML file with the same names as its keys; the command line overrides the
recipe, also under an alternative name.
"""

import argparse
import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from conformance.core.errors import UsageError, shown
from conformance.spec.objectives import BUILT_IN, AdvantageEstimator, LossMode
from conformance.spec.offline import PreferenceLoss
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import TooLong
from impl.train.rewards import ARITHMETIC, REWARDS

COMMANDS = {
    "sft": "supervised fine-tuning on inputs and outputs",
    "dft": "dynamic fine-tuning: the same, the loss of a token weighted by its probability",
    "grpo": "group-relative policy optimisation: rollouts of the policy, rewards, updates",
    "ppo": "proximal policy optimisation with a critic: rollouts of the policy, rewards, updates",
    "dpo": "direct preference optimisation on chosen and rejected answers; --loss-type has its relatives, such as ORPO",
    "kto": "Kahneman-Tversky optimisation on answers that are labelled as desired or not",
    "reward": "a reward model of chosen and rejected answers",
    "prm": "a process reward model of answers in labelled steps",
    "distillation": "the distributions of a teacher, on inputs and outputs",
}
ROLLOUT = ("grpo", "ppo")
REWARDED = ("reward", "prm")  # train a model with a value head, and no policy
_POLICIES = tuple(command for command in COMMANDS if command not in REWARDED)
_EVALUATED = ("sft", *ROLLOUT)
DOCUMENTS = tuple(command for command in COMMANDS if command not in ROLLOUT)  # read what they train on from --dataset
EMBEDDED = {  # data without --dataset
    **dict.fromkeys(("sft", "dft", "distillation"), "data/word_problems.jsonl"),
    **dict.fromkeys(ROLLOUT, ARITHMETIC),
    **dict.fromkeys(("dpo", "reward"), "data/preferences.jsonl"),
    "kto": "data/labelled_answers.jsonl",
    "prm": "data/labelled_steps.jsonl",
}
SAME_SIZE = {"tensor_model_parallel_size": "fsdp_tensor_parallel_size", "ring_attn_size": "context_parallel_size"}
ALTERNATIVES = (*SAME_SIZE.items(), ("max_steps", "max_epochs", "num_episodes"))  # only one of each may be given
Value = str | int | float | bool | None
_BY_WIDTH = tuple(tier.name for tier in sorted(PRECISIONS.values(), key=lambda tier: tier.compute.bytes))
_TP = "give --tensor-model-parallel-size, which every backend has"


def not_trained(kind: str) -> str:
    """Tells a user who asks to train with an objective that backends are only judged on how to judge them."""
    return (
        f"{kind} is not trained with; backends are judged on it by parity run --profile full --cells '{kind}*'; "
        f"commands: {', '.join(COMMANDS)}"
    )


def written(name: str) -> str:
    """Returns an option as it is written on the command line; a recipe has its bare name."""
    return f"--{name.replace('_', '-')}"


def option(help: str, *, default: Value = None, **rules: Any) -> Any:
    """Declares an option; ``rules`` are fields of Flag."""
    return field(default=default, metadata={"help": help, **rules})


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Holds a value for every option; a ``bool`` is a switch, ``--name`` or ``--no-name``."""

    backend: Literal["deepspeed", "fsdp2", "megatron"] = option("training backend")
    # Models
    pretrain: str = option(
        "Hugging Face folder of the policy, and of the reference if there is one; of a reward model: a value model "
        "(score.weight), or a language model, which gets a new value head"
    )
    critic_pretrain: str | None = option(
        "Hugging Face folder of the critic: a value model (score.weight), or a language model, which gets a "
        "new value head (default: as --pretrain)",
        commands=("ppo",),
    )
    teacher_pretrain: str = option(
        "Hugging Face folder of the teacher, of the same vocabulary", commands=("distillation",)
    )
    trust_remote_code: bool = option("run Python code of model folders", default=False, in_recipe=False)
    # Data
    dataset: str | None = option("JSONL or Parquet file, or a saved Hugging Face dataset (default: embedded)")
    eval_dataset: str | None = option("held-out data, in the same form (default: none)", commands=_EVALUATED)
    split: str | None = option("split of a saved dataset that has several (default: none)")
    eval_split: str | None = option("the same, of --eval-dataset (default: none)", commands=_EVALUATED)
    input_key: str = option("field of the input or prompt", default="question")
    output_key: str = option("field of the output or reference answer", default="answer")
    max_len: int = option("tokens of a row at most, prompt and response together", default=2048)
    too_long: TooLong = option(
        "what happens to documents of more than --max-len tokens", default="truncate", commands=DOCUMENTS
    )
    packing_samples: bool = option("put several documents into a row", default=False)
    # Steps
    train_batch_size: int = option(
        "rows of an optimizer step, over all ranks; of dpo, kto and reward without packing pairs of rows", default=32
    )
    micro_train_batch_size: int = option("the same, of a forward pass of one rank", default=1)
    max_steps: int | None = option("optimizer steps (default: by --max-epochs or --num-episodes)")
    max_epochs: int | None = option("passes over the data (default: 1)", commands=DOCUMENTS)
    num_episodes: int | None = option("passes over the prompts (default: 1)", commands=ROLLOUT)
    seed: int = option("order of the data, sampling of responses, a new value head", default=0, least=0, most=2**32 - 1)
    # Optimizer
    learning_rate: float = option("peak of AdamW's learning rate", default=5e-6, above=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = option("schedule", default="cosine")
    lr_warmup_ratio: float = option(
        "share of the steps in which the learning rate rises", default=0.03, least=0, most=1
    )
    weight_decay: float = option("decoupled; biases and norms are exempt", default=0.0, least=0)
    adam_eps: float = option("epsilon of AdamW", default=1e-8, above=0)
    max_norm: float = option("norm to which gradients are clipped; 0 for no clipping", default=1.0, least=0)
    param_dtype: PrecisionName = option(
        "dtype of forward and backward; masters are float32. Without masters: bf16-nearest (fsdp2, deepspeed), "
        "bf16-stochastic (fsdp2). exact: all in float64, for comparisons",
        default="bf16",
        choices=_BY_WIDTH,
    )
    # Adapters
    lora_rank: int | None = option(
        "train adapters of this rank (LoRA) on the frozen policy (default: none, the whole policy is trained)",
        most=2**16,
        commands=_POLICIES,
    )
    lora_alpha: int | None = option("adapters are scaled by this / rank (default: 16)", most=2**16, commands=_POLICIES)
    target_modules: str | None = option(
        "linear layers with an adapter, such as q_proj,v_proj (default: all-linear)", commands=_POLICIES
    )
    lora_save: Literal["adapter", "merged"] | None = option(
        "--save-path gets the adapter beside the base, or merged into it (default: adapter)", commands=_POLICIES
    )
    # Ranks
    nproc_per_node: int | None = option("ranks to start (default: one per GPU; on the CPU, the fewest for the layout)")
    ddp_timeout: int = option("seconds that a rank may wait for other ranks", default=1800)
    device: Literal["cpu", "cuda"] | None = option("where ranks compute (default: cuda if there is any)")
    zero_stage: int | None = option(
        "what data-parallel ranks shard: ZeRO 0 to 3 of deepspeed (default: 3), the distributed optimizer of "
        "megatron (1; default: 0); fsdp2 is always 3",
        least=0,
        most=3,
    )
    tensor_model_parallel_size: int | None = option("tensor-parallel ranks (default: 1)")
    fsdp_tensor_parallel_size: int | None = option(
        "the same, by its name in FSDP programs", unsupported={"deepspeed": _TP, "megatron": _TP}
    )
    use_hf_tp_plan: bool = option(
        "tensor parallelism by the plan of the model's class instead of an explicit plan",
        default=False,
        unsupported={
            "deepspeed": "AutoTP plans the sharding of a model itself; leave it out",
            "megatron": "megatron-core's layers are sharded by their own classes; leave it out",
        },
    )
    sequence_parallel: bool = option(
        "norms and residuals sharded along the sequence between tensor-parallel blocks", default=False
    )
    ring_attn_size: int | None = option("context-parallel ranks, which share rows (default: 1)")
    context_parallel_size: int | None = option("the same, by its name in Megatron-LM")
    ring_head_stride: int = option("key-value heads that the ring gathers at a time", default=1)
    pipeline_model_parallel_size: int = option("pipeline stages", default=1)
    gradient_checkpointing: bool = option("recompute activations in the backward pass", default=False)
    torch_compile: bool = option(
        "compile each layer by torch.compile",
        default=False,
        unsupported={"megatron": "megatron-core's layers cannot be compiled; leave it out"},
    )
    offload: bool = option("parameters, gradients and optimizer state on the CPU", default=False)
    # Rollouts
    rollout_batch_size: int = option("prompts of a rollout", default=8, commands=ROLLOUT)
    n_samples_per_prompt: int = option("responses to each prompt", default=4, commands=ROLLOUT)
    micro_rollout_batch_size: int = option("responses that a rank samples at once", default=32, commands=ROLLOUT)
    generate_max_len: int = option("tokens of a response at most", default=1024, commands=ROLLOUT)
    temperature: float = option(
        "of sampling and of log-probs; of both distributions of distillation",
        default=1.0,
        commands=(*ROLLOUT, "distillation"),
    )
    rollout_engine: str = option(
        "engine that samples responses: hf, or one that parity engine judges, such as vllm",
        default="hf",
        commands=ROLLOUT,
    )
    rollout_python: str | None = option("Python of the engine's own environment (default: none)", commands=ROLLOUT)
    greedy: bool = option("the likeliest token instead of sampling", default=False, commands=ROLLOUT)
    reward: str | None = option(
        f"score of a response: {', '.join(REWARDS)}, or MODULE:FUNCTION in TRL's form (default: near-answer for the "
        "embedded arithmetic, else exact-answer)",
        commands=ROLLOUT,
    )
    # Objective: ranges are those of fields with the same name in conformance/spec (_in_range_of)
    loss_type: PreferenceLoss = option(
        "loss of a pair; odds_ratio is that of ORPO", default="sigmoid", commands=("dpo",)
    )
    beta: float | None = option(
        "of dpo and kto the strength of the constraint to the reference (default: 0.1); of distillation 0 is the "
        "forward KL, 1 the reverse KL (default), between them the Jensen-Shannon divergence",
        commands=("dpo", "kto", "distillation"),
    )
    label_smoothing: float = option("probability that a label is wrong", default=0.0, commands=("dpo",))
    reference_free: bool = option("log-probs instead of log-ratios", default=False, commands=("dpo",))
    length_normalised: bool = option(
        "the mean over the tokens of an answer instead of the sum", default=False, commands=("dpo",)
    )
    target_margin: float = option(
        "subtracted from every margin; SimPO: gamma / beta, with --reference-free and --length-normalised",
        default=0.0,
        commands=("dpo",),
    )
    sft_coef: float = option("factor of -log p of the chosen answers", default=0.0, commands=("dpo",))
    desirable_weight: float = option("weight of desired answers", default=1.0, commands=("kto",))
    undesirable_weight: float = option("weight of the others", default=1.0, commands=("kto",))
    center_coef: float = option("factor of the squared sum of both scores", default=0.0, commands=("reward",))
    top_k: int | None = option(
        "the teacher's likeliest tokens alone (default: the whole vocabulary)", commands=("distillation",)
    )
    renormalise_top_k: bool = option("distributions over these tokens alone", default=True, commands=("distillation",))
    ppo_epochs: int = option("passes over a rollout", default=1, commands=ROLLOUT)
    eps_clip: float = option("the ratio is clipped to 1 -/+ this", default=0.2, above=0, commands=ROLLOUT)
    loss_mode: LossMode = option(
        "loss of the policy (docs/explanations/objectives.md)", default="vanilla", commands=ROLLOUT
    )
    kl_coef: float = option("KL to the reference, in the reward", default=0.0, commands=ROLLOUT)
    kl_loss_coef: float = option("KL to the reference, in the loss", default=0.0, commands=ROLLOUT)
    advantage_estimator: AdvantageEstimator = option(
        "how rewards become advantages", default="grpo", commands=("grpo",)
    )
    gamma: float = option("discount of rewards", default=1.0, commands=ROLLOUT)
    lambd: float = option("lambda of generalised advantage estimation", default=1.0, least=0, most=1, commands=("ppo",))
    value_clip: float = option("values are clipped to the old -/+ this", default=0.5, above=0, commands=("ppo",))
    # Output
    save_path: str | None = option("Hugging Face folder that is written at the end (default: none)")
    ckpt_path: str | None = option("folder of checkpoints (default: none)")
    load_checkpoint: bool = option("resume from the last checkpoint in --ckpt-path", default=False)
    save_steps: int = option("updates between two checkpoints", default=100)
    async_save: bool = option("write checkpoints while the training continues", default=False)
    max_ckpt_num: int = option("checkpoints to keep", default=2)
    eval_steps: int = option("updates between two evaluations", default=100, commands=_EVALUATED)
    logging: str | None = option(
        "file of JSON lines, one a step (default: log.jsonl in --ckpt-path, else in parity-train/DATE_TIME)"
    )
    use_tensorboard: bool = option("write the numbers for TensorBoard, too", default=False)
    use_wandb: bool = option("send the numbers to Weights & Biases, too", default=False)

    @property
    def tp(self) -> int:
        return self._size("tensor_model_parallel_size")

    @property
    def sp(self) -> int:
        return self._size("ring_attn_size")

    @property
    def pp(self) -> int:
        return self.pipeline_model_parallel_size

    def _size(self, name: str) -> int:
        """Returns a size that has two names. Raises UsageError if they are given different sizes."""
        sizes = {each: size for each in (name, SAME_SIZE[name]) if (size := getattr(self, each)) is not None}
        if len({*sizes.values()}) > 1:
            names = " and ".join(f"{written(each)} {size}" for each, size in sizes.items())
            raise UsageError(f"{names} are two names of one size; give one")
        return next(iter(sizes.values()), 1)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Describes one option.

    least, above, most, below: the range of a number; a whole number is 1 or more unless ``least`` says otherwise.
    commands: the commands that have the option.
    unsupported: by backend, the reason why it does not support the option.
    in_recipe: whether a recipe may contain it.
    """

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    help: str
    default: Value
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
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
        broken = [words for words, holds in self.bounds.items() if not holds(value)]
        if broken or math.isnan(value):
            raise UsageError(f"{written(self.name)} must be {' and '.join(broken) or 'a number'}, got {value}")

    @property
    def bounds(self) -> dict[str, Callable[[float], bool]]:
        """The tests of a number, by their words."""
        least, above, most, below = self.least, self.above, self.most, self.below
        every: dict[str, Callable[[float], bool] | None] = {
            f"{least} or more": None if least is None else lambda value: value >= least,
            f"more than {above}": None if above is None else lambda value: value > above,
            f"{most} or less": None if most is None else lambda value: value <= most,
            f"less than {below}": None if below is None else lambda value: value < below,
        }
        return {words: holds for words, holds in every.items() if holds}


_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def _flag(option: Field[Any]) -> Flag:
    """Describes a field of TrainOptions. A Literal has the choices; None is not a kind."""
    kind = get_args(_KINDS[option.name] | None)[0]
    choices = get_args(kind)
    rules: dict[str, Any] = {"choices": choices} if choices else {"least": 1} if kind is int else {}
    rules |= {"default": option.default, **option.metadata}
    return Flag(name=option.name, kind=str if choices else kind, **rules)


_KINDS = get_type_hints(TrainOptions)
FLAGS = {option.name: _flag(option) for option in fields(TrainOptions)}


def flags_of(command: str) -> dict[str, Flag]:
    """Returns the options of a command by name."""
    return {name: _in_range_of(flag, command) for name, flag in FLAGS.items() if command in flag.commands}


def _in_range_of(flag: Flag, command: str) -> Flag:
    """Returns the option with the range of the objective's field of this name, if there is one."""
    field = BUILT_IN[command].__pydantic_fields__.get(flag.name)
    rules = {
        name: getattr(one, name) for one in (field.metadata if field else ()) for name in _RANGES if hasattr(one, name)
    }
    return replace(flag, **{_RANGES[name]: bound for name, bound in rules.items()})


_RANGES = {"ge": "least", "gt": "above", "le": "most", "lt": "below"}


def merge_values(given: Mapping[str, Value], recipe: Mapping[str, Value]) -> dict[str, Value]:
    """Merges the options of the command line and the recipe; an option overrides all of its alternatives."""
    replaced = {name for names in ALTERNATIVES if not given.keys().isdisjoint(names) for name in names}
    return {name: value for name, value in recipe.items() if name not in replaced} | dict(given)


def resolve_options(given: Mapping[str, Value], recipe: Mapping[str, Value], command: str) -> TrainOptions:
    """Returns the command line's value of every option, else the recipe's, else the default.

    Raises UsageError for an option that the backend does not support, with the reason.
    """
    flags, explicit = flags_of(command), merge_values(given, recipe)
    options = TrainOptions(**{name: explicit[name] for name in flags if name in explicit})  # type: ignore[arg-type]
    if options.backend is None:
        raise UsageError(f"--backend is missing; give one of {', '.join(FLAGS['backend'].choices)}")
    if options.pretrain is None:
        raise UsageError(f"--pretrain is missing; give the {FLAGS['pretrain'].help}")
    if command == "distillation" and options.teacher_pretrain is None:
        raise UsageError(f"--teacher-pretrain is missing; give the {FLAGS['teacher_pretrain'].help}")
    for name, flag in flags.items():
        flag.check(getattr(options, name))
        if explicit.get(name) and (reason := flag.unsupported.get(options.backend)):
            raise UsageError(f"--backend {options.backend} does not support {written(name)}: {reason}")
    return options


def given_values(options: argparse.Namespace, command: str) -> dict[str, Value]:
    """Returns the options of the command line."""
    return {name: value for name, value in vars(options).items() if name in flags_of(command)}
