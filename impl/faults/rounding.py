"""Plants faults in training without whole float32 masters, and in the handling of overflows in fp16.

Without masters, parameters are in bf16 and are rounded at random after each update, or remainders complete them to
float32. Single weights stay plausible, and a loss curve of a few steps is the same. Seams are torchao's rounding, which
runs uncompiled on a CPU, the context in which it draws numbers, and TransformerEngine's AdamW.
"""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from conformance.backends.faults import FaultCells, Function
from impl.faults.declaration import FP16, REMAINDERS, STOCHASTIC, STORED, Faults, resume, sft
from impl.faults.optimizer import of_torch

ROUNDING_FAULTS = Faults(blind=("loss",))
OVERFLOW_FAULTS = Faults(blind=("loss",))
REMAINDER_FAULTS = Faults(blind=("loss",))  # which need TransformerEngine and a GPU
DRAW = torch.randint
REMAINDER, IN_REMAINDERS, OF_EXPERTS = "master_param", "dp2.zero1.remainders", "ep2.zero1.remainders"


def _cells(layout: str = "dp2") -> FaultCells:
    return sft("sft-packed", "llama", fsdp2=layout, only=STOCHASTIC)


@ROUNDING_FAULTS.add(
    summary="the rounded parameter is overwritten by its nearest bf16 number",
    source="https://github.com/Nerogar/OneTrainer/issues/994",
    stage="clipped update",
    cells=_cells(),
    needs="stochastic rounding",
)
def random_rounding_overwritten(round_at_random: Function, x: Tensor) -> Tensor:
    round_at_random(x)
    return x.bfloat16()


@ROUNDING_FAULTS.add(
    summary="float32 is cut off after the digits of bf16",
    source="https://github.com/ROCm/aiter/issues/5151, of activations",
    stage="clipped update",
    cells=_cells(),
    needs="stochastic rounding",
)
def cut_off(round_at_random: Function, x: Tensor) -> Tensor:
    def none(low: int, high: int, shape: Any, **options: Any) -> Tensor:
        return torch.full(shape, high - 1, **options)

    return _with_numbers(none, round_at_random, x)


@ROUNDING_FAULTS.add(
    summary="one random number decides about all elements of a parameter",
    source="https://github.com/karpathy/llm.c/pull/597, where parameters shared the seeds of their elements",
    stage="clipped update",
    cells=_cells(),
    needs="stochastic rounding",
)
def one_number_for_a_parameter(round_at_random: Function, x: Tensor) -> Tensor:
    def one(low: int, high: int, shape: Any, **options: Any) -> Tensor:
        return DRAW(low, high, (1,), **options).expand(shape)

    return _with_numbers(one, round_at_random, x)


@ROUNDING_FAULTS.add(
    summary="all parameters, ranks and steps draw the same random numbers",
    source="https://github.com/karpathy/llm.c/pull/597",
    stage="clipped update",
    cells=_cells(),
    needs="stochastic rounding",
)
def one_seed_for_all(round_at_random: Function, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found: Tensor = round_at_random(x)
    return found


@ROUNDING_FAULTS.add(
    summary="ranks that hold other parts of a parameter draw the same random numbers",
    source="https://github.com/karpathy/llm.c/pull/597, where all shards reused the same seeds",
    stage="clipped update",
    cells=_cells(),
    needs="stochastic rounding, and dp of 2 or more",
)
def one_seed_for_all_ranks(numbers_of: Function, replicas: Any, region: str, place: tuple[int, int]) -> Any:
    from impl.engine.optimizers import Replicas

    return numbers_of(Replicas(region=lambda parameter: "", seed=0), "", place)


@ROUNDING_FAULTS.add(
    summary="each random number decides about two elements",
    source="https://github.com/meta-pytorch/torchcomms/pull/1364, which splits a number into two halves instead",
    stage="clipped update",
    cells=_cells(),
    needs="stochastic rounding",
)
def numbers_used_twice(round_at_random: Function, x: Tensor) -> Tensor:
    def pairs(low: int, high: int, shape: Any, **options: Any) -> Tensor:
        count = math.prod(shape)
        return DRAW(low, high, (-(-count // 2),), **options).repeat_interleave(2)[:count].view(shape)

    return _with_numbers(pairs, round_at_random, x)


@ROUNDING_FAULTS.add(
    summary="replicas of a parameter are rounded by random numbers of their own",
    source="https://github.com/Nerogar/OneTrainer/pull/804",
    stage="weight replicas",
    cells=_cells("dp2.rep2"),
    needs="stochastic rounding, and replicas (rep of 2 or more)",
)
def replicas_rounded_apart(numbers_of: Function, replicas: Any, region: str, place: tuple[int, int]) -> Any:
    return numbers_of(None, region, place)


@ROUNDING_FAULTS.add(
    summary="weights decay in bf16 before the update, where the decay is less than half a digit",
    source="https://github.com/Nerogar/OneTrainer/issues/996",
    stage="clipped update",
    cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", only=STORED),
    needs="bf16-nearest or bf16-stochastic, and AdamW with weight decay",
)
def decay_lost_in_bf16(stored_optimizer: Function, groups: Any, config: Any, **options: Any) -> Any:
    optimizer = stored_optimizer(groups, config, **options)

    @torch.no_grad()
    def decay_all(*_: Any) -> None:
        for group in optimizer.param_groups:  # of DeepSpeed one at a time
            for parameter in group["params"]:
                parameter.mul_(1 - float(group["lr"]) * group["lost_decay"])

    for group in optimizer.param_groups:
        group["lost_decay"], group["weight_decay"] = group["weight_decay"], 0.0
    optimizer.register_step_pre_hook(decay_all)
    return optimizer


def _with_numbers(draw: Function, round_at_random: Function, x: Tensor) -> Tensor:
    """Rounds by the numbers that ``draw`` returns instead of torch.randint."""
    with mock.patch.object(torch, "randint", draw):
        found: Tensor = round_at_random(x)
    return found


@REMAINDER_FAULTS.add(
    summary="masters of a checkpoint are its bf16 parameters, without their remainders",
    source="https://github.com/NVIDIA/Megatron-LM/issues/1359",
    stage="weights",
    cells=resume("checkpoint", megatron=IN_REMAINDERS, only=REMAINDERS),
    needs="remainders, and a checkpoint",
)
def remainders_not_loaded(set_state: Function, own: Any, parameter: Any, name: str, state: Tensor) -> None:
    set_state(own, parameter, name, torch.zeros_like(state) if _is_loaded(own, name) else state)


@REMAINDER_FAULTS.add(
    summary="a rank takes the remainders of a checkpoint from another stretch of the parameter than its own",
    source="docs/findings/megatron-checkpoint-buckets.md",
    stage="weights",
    cells=resume("checkpoint", megatron=IN_REMAINDERS, only=REMAINDERS),
    needs="remainders, and a checkpoint",
)
def remainders_of_another_stretch(set_state: Function, own: Any, parameter: Any, name: str, state: Tensor) -> None:
    set_state(own, parameter, name, state.roll(1) if _is_loaded(own, name) else state)


def _is_loaded(optimizer: Any, name: str) -> bool:
    """Tells whether the state ``name`` is a checkpoint's masters: an optimizer that has made no update counts none."""
    return name == REMAINDER and any("step" in group for group in optimizer.param_groups)


@REMAINDER_FAULTS.add(
    summary="an update begins with the bf16 parameters, and what the last one left in remainders is lost",
    source="https://github.com/flagos-ai/TransformerEngine-FL/pull/34, whose remainders were nearly all zero",
    stage="clipped update",
    cells=sft("sft-packed", "llama", megatron=IN_REMAINDERS, only=REMAINDERS),
    needs="remainders",
)
def remainders_zeroed(update_parameters: Function, optimizer: Any, *arguments: Any, **options: Any) -> Any:
    for state in optimizer.state.values():
        state[REMAINDER].zero_()
    return update_parameters(optimizer, *arguments, **options)


@REMAINDER_FAULTS.add(
    summary="the optimizer of experts, a second one, loses what the last update left in remainders; the first keeps it",
    source="https://github.com/NVIDIA/Megatron-LM/pull/6470, where the second optimizer lacked what the first got",
    stage="clipped update",
    cells=sft("sft-packed", "qwen3-moe", megatron=OF_EXPERTS, only=REMAINDERS),
    needs="remainders, and experts that ranks share out",
)
def remainders_of_experts_zeroed(update_parameters: Function, optimizer: Any, *arguments: Any, **options: Any) -> Any:
    if _has_experts(optimizer):
        for state in optimizer.state.values():
            state[REMAINDER].zero_()
    return update_parameters(optimizer, *arguments, **options)


@REMAINDER_FAULTS.add(
    summary="all experts of a rank take the remainders of a checkpoint that are its first expert's",
    source="https://github.com/databricks/megablocks/issues/160, where experts of two ranks were the same",
    stage="weights",
    cells=resume("checkpoint", model="qwen3-moe", megatron=OF_EXPERTS, only=REMAINDERS),
    needs="remainders, experts that ranks share out, and a checkpoint",
)
def remainders_of_first_expert(set_state: Function, own: Any, parameter: Any, name: str, state: Tensor) -> None:
    if _is_loaded(own, name) and _has_experts(own):
        state = vars(own).setdefault(f"first of {state.numel()}", state)
    set_state(own, parameter, name, state)


def _has_experts(optimizer: Any) -> bool:
    return any(group["is_expert_parallel"] for group in optimizer.param_groups)


@REMAINDER_FAULTS.add(
    summary="adapters, whose files are in float32, begin as bf16 numbers, without remainders",
    source="docs/findings/megatron-rounded-masters.md",
    stage="weights",
    cells=sft("sft-lora", "llama", megatron=IN_REMAINDERS, only=REMAINDERS),
    needs="remainders, and adapters",
)
def adapters_begin_rounded(set_state: Function, own: Any, parameter: Any, name: str, state: Tensor) -> None:
    begins = name == REMAINDER and not _is_loaded(own, name)
    set_state(own, parameter, name, torch.zeros_like(state) if begins else state)


@REMAINDER_FAULTS.add(
    summary="masters are put together without undoing the rounding of parameters, which is half of them",
    source="https://github.com/NVIDIA/apex/issues/1842",
    stage="weights",
    cells=sft("sft-packed", "llama", megatron=IN_REMAINDERS, only=REMAINDERS),
    needs="remainders",
)
def rounding_not_undone(with_remainders: Function, parameter: Tensor, remainders: Tensor) -> Tensor:
    masters: Tensor = with_remainders(parameter, remainders)
    bits = masters.view(torch.int32) + ((remainders < 0).int() << 16)
    return bits.view(torch.float32)


@REMAINDER_FAULTS.add(
    summary="moments are kept in bf16, because gradients and parameters are",
    source="https://github.com/verl-project/verl/pull/6526, which does so on purpose",
    stage="weights after N steps",
    cells=sft("sft-packed", "llama", megatron=IN_REMAINDERS, only=REMAINDERS),
    needs="remainders, and two updates",
)
def moments_like_parameters(optimizer_settings: Function, *arguments: Any) -> Any:
    settings = optimizer_settings(*arguments)
    settings.exp_avg_dtype = settings.exp_avg_sq_dtype = torch.bfloat16
    return settings


def _keep_scale(optimizer_step: Function, trainable: Any, limit: Callable[[float, float], float]) -> Any:
    """Runs a step, and sets the loss scale after it to ``limit(before, after)``."""
    before = _progress(trainable)
    norm = optimizer_step(trainable)
    after = _progress(trainable)
    if "loss_scale" in after and (scale := limit(before["loss_scale"], after["loss_scale"])) != after["loss_scale"]:
        trainable.set_progress(after | {"loss_scale": scale})
    return norm


def _progress(trainable: Any) -> dict[str, float]:
    return {name: float(number) for name, number in trainable.named_tensors("progress")}


@OVERFLOW_FAULTS.add(
    summary="AdamW counts an update that is skipped for an overflow, and its moments decay",
    source="https://github.com/allenai/OLMo-core/pull/309, where it never counts",
    stage="weights after N steps",
    cells=sft("sft-overflow", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=FP16),
    needs="fp16, AdamW, an overflow and an update after it",
)
def skip_counted_by_optimizer(optimizer_step: Function, trainable: Any) -> Any:
    norm = optimizer_step(trainable)
    for optimizer in of_torch(trainable.optimizer) if trainable.skipped else ():
        first, second = optimizer.param_groups[0]["betas"]
        for state in optimizer.state.values():
            state["exp_avg"].mul_(first)  # as an update with zero gradients does
            state["exp_avg_sq"].mul_(second)
            state["step"] += 1
    return norm


@OVERFLOW_FAULTS.add(
    summary="only the first rank finds an overflow, and the other ranks make the update",
    source="https://github.com/pytorch/pytorch/pull/115710",
    stage="loss scale",
    cells=sft("sft-overflow", "llama", fsdp2="dp2", only=FP16),
    needs="fp16, two ranks and an overflow",
)
def overflow_on_one_rank(find_overflow: Function, *arguments: Any) -> Any:
    found = find_overflow(*arguments)
    if torch.distributed.get_rank() > 0:
        for number in found.values():
            number.zero_()
    return found


@OVERFLOW_FAULTS.add(
    summary="the learning-rate schedule counts an update that is skipped for an overflow",
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/18828",
    stage="clipped update",
    cells=sft("sft-overflow", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=FP16),
    needs="fp16, an overflow and a schedule that is not constant",
)
def skip_counted_by_schedule(optimizer_step: Function, trainable: Any) -> Any:
    norm = optimizer_step(trainable)
    if trainable.skipped:
        progress = _progress(trainable)
        trainable.set_progress(progress | {"schedule": progress["schedule"] + 1})
    return norm


@OVERFLOW_FAULTS.add(
    summary="the loss scale stays as it is at an overflow",
    source="https://github.com/deepspeedai/DeepSpeed/issues/1599, point 2",
    stage="loss scale",
    cells=sft("sft-overflow", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=FP16),
    needs="fp16 and an overflow",
)
def scale_not_halved(optimizer_step: Function, trainable: Any) -> Any:
    return _keep_scale(optimizer_step, trainable, max)


@OVERFLOW_FAULTS.add(
    summary="the loss scale falls at overflows and never grows, so gradients underflow in the end",
    source="arXiv 1710.03740, section 3.3: it is increased when there was no overflow for N iterations",
    stage="loss scale",
    cells=sft("sft-overflow", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=FP16),
    needs="fp16 and as many updates as the scale grows after",
)
def scale_never_grows(optimizer_step: Function, trainable: Any) -> Any:
    return _keep_scale(optimizer_step, trainable, min)


@OVERFLOW_FAULTS.add(
    summary="an overflow stays in the buffer to which the next gradients are added, so every update is skipped",
    source="docs/findings/deepspeed-offload-overflow.md",
    stage="loss scale",
    cells=sft("sft-overflow", "llama", deepspeed="dp2.zero1.offload", only=FP16),
    needs="fp16, an overflow, an optimizer that is offloaded at ZeRO-1 or 2, and gradients added up in float32",
)
def overflow_stays(forget_overflow: Function, *arguments: Any) -> None:
    pass
