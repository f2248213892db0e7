"""Plants faults that any training step may have: in loading, packing, losses, accumulation, clipping and schedule."""

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from conformance.backends.faults import Function
from conformance.spec.objectives import METRICS
from impl.faults.declaration import BF16, FULL, ROUNDING, Faults, rl, sft
from impl.faults.models import zeros_for

STEP_FAULTS = Faults()


@STEP_FAULTS.add(
    summary="packed documents attend to each other",
    source="https://github.com/axolotl-ai-cloud/axolotl/issues/3608",
    stage="log-probs",
    cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="tp2"),
    needs="packed rows",
)
def leaking_documents(collate: Function, rows: Any, **options: Any) -> Any:
    inputs = collate(rows, **options)
    count, length = inputs.positions.shape
    return dataclasses.replace(inputs, positions=torch.arange(length).expand(count, length))


@STEP_FAULTS.add(
    summary="convolutions and states of recurrent layers run on from one packed document into the next",
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/2147",
    stage="routing",
    cells=sft("sft-packed", "qwen3-next", fsdp2="dp2", deepspeed="dp2.zero2"),
    needs="packed rows, and recurrent layers",
)
def packed_states_leaking(separate_states: Function, model: torch.nn.Module) -> None:
    pass


@STEP_FAULTS.add(
    summary="each rank divides by its own token count before gradients are averaged",
    source="https://github.com/pytorch/torchtitan/pull/2206",
    stage="loss",
    half_stage="gradients",
    cells=sft("sft-padded", "pangu", fsdp2="dp2", deepspeed="dp2.zero3", megatron="dp2.zero1"),
    needs="dp of 2 or more and ranks with different token counts",
)
def local_token_mean(step_totals: Function, context: Any, functions: Any, micro_batches: Any) -> dict[str, Tensor]:
    # The mean over the rank's own tokens, which the data-parallel reduction averages over ranks.
    own = functions.totals([row for rows in micro_batches for row in rows])
    every = step_totals(context, functions, micro_batches)
    return {key: torch.full_like(every[key], max(1, value) * context.data_size) for key, value in own.items()}


@STEP_FAULTS.add(
    summary="gradients are cleared before every micro-batch, so only the last one trains",
    source="https://github.com/pytorch/torchtitan/pull/3575",
    stage="gradients",
    cells=sft("sft-packed", "llama", fsdp2="dp2"),
    blind=("loss",),
    needs="accumulation of 2 or more",
)
def cleared_gradients(start_micro_batch: Function, trainable: Any, index: int, count: int) -> None:
    trainable.optimizer.zero_grad()
    start_micro_batch(trainable, index, count)


@STEP_FAULTS.add(
    summary="a recomputed layer draws other masks of dropout than its forward pass",
    source="https://github.com/allenai/OLMo-core/pull/828",
    stage="configuration",
    cells=sft("sft-packed", "llama", fsdp2="dp2.ckpt.dropout", deepspeed="dp2.zero2.ckpt.dropout"),
    blind=("loss", "loss and norm"),
    needs="recomputation and the option dropout",
)
def masks_drawn_anew(recompute_activations: Function, model: Any, options: Any) -> None:
    recompute_activations(model, options)
    reentrant = "reentrant" in options
    model.gradient_checkpointing_enable({"use_reentrant": reentrant, "preserve_rng_state": False})


@STEP_FAULTS.add(
    summary="generators are not set back before a layer is recomputed, so it draws other masks of dropout",
    source="https://github.com/NVIDIA/Megatron-LM/pull/5841",
    stage="configuration",
    cells=sft("sft-packed", "llama", megatron="tp2.seqpar.ckpt.dropout"),
    blind=("loss", "loss and norm"),
    needs="megatron-core, recomputation and the option dropout",
)
def generators_not_set_back(restore_generators: Function, *states: Any) -> None:
    pass


@STEP_FAULTS.add(
    summary="the reduction over replicas, delayed to the last micro-batch, leaves out those before it",
    source="https://github.com/pytorch/pytorch/pull/125484",
    stage="gradients",
    cells=sft("sft-packed", "llama", fsdp2="dp2.rep2.manual"),
    blind=("loss",),
    needs="accumulation of 2 or more, replicas and the option manual",
)
def partial_sums_dropped(start_micro_batch: Function, trainable: Any, index: int, count: int) -> None:
    for module in trainable.model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                group._partial_reduce_output = None
    start_micro_batch(trainable, index, count)


@STEP_FAULTS.add(
    summary="the gradient norm counts replicated parameters once per rank",
    source="https://github.com/ROCm/TransformerEngine/pull/715",
    stage="gradient norm",
    cells=sft("sft-sgd", "llama", fsdp2="tp2.seqpar"),
    blind=("loss",),
    needs="a parameter that is replicated over an axis of its mesh, such as a norm with seqpar",
)
def replicas_counted(norm_axes: Function, gradient: Any) -> tuple[int, ...]:
    return tuple(range(gradient.device_mesh.ndim))


@STEP_FAULTS.add(
    summary="the clip coefficient is bounded below instead of above: large gradients are never clipped",
    source="https://github.com/deepspeedai/DeepSpeed/pull/5150",
    stage="clipped update",
    cells=sft("sft-sgd", "llama", fsdp2="dp2"),
    blind=("loss",),
    needs="max_grad_norm other than the norm itself",
)
def inverted_clip(clip_coefficient: Function, norm: float, max_norm: float) -> float:
    return max(1.0, max_norm / (norm + 1e-6))


@STEP_FAULTS.add(
    summary="gradients below max_grad_norm are scaled up to it",
    source="the other half of https://github.com/deepspeedai/DeepSpeed/pull/5150",
    stage="weights after N steps",
    cells=sft("sft-packed", "llama", fsdp2="dp2"),
    blind=("loss",),
    needs="a step whose gradient norm is below max_grad_norm",
)
def clip_always(clip_coefficient: Function, norm: float, max_norm: float) -> float:
    return max_norm / (norm + 1e-6)


@STEP_FAULTS.add(
    summary="only the first rank clips, so replicas drift apart",
    source="https://github.com/deepspeedai/DeepSpeed/issues/1801",
    stage="weight replicas",
    cells=sft("sft-sgd", "llama", fsdp2="dp2.rep2"),
    blind=("loss",),
    needs="replicas (rep of 2 or more) and active clipping",
)
def clip_on_one_replica(clip_coefficient: Function, norm: float, max_norm: float) -> float:
    return float(clip_coefficient(norm, max_norm)) if torch.distributed.get_rank() == 0 else 1.0


@STEP_FAULTS.add(
    summary="the learning-rate schedule advances with every micro-batch",
    source="https://github.com/huggingface/accelerate/issues/963",
    stage="clipped update",
    cells=sft("sft-sgd", "llama", fsdp2="dp2", megatron="dp2"),
    blind=("loss",),
    needs="accumulation of 2 or more and a schedule that is not constant",
)
def schedule_per_micro_batch(advance_schedule: Function, trainable: Any) -> None:
    for _ in range(trainable.context.config.accumulation):
        advance_schedule(trainable)


@STEP_FAULTS.add(
    summary="log-probs are a softmax of bf16 logits in bf16",
    source="https://github.com/huggingface/trl/pull/7084",
    stage="log-probs",
    cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=BF16),
    blind=("loss",),
    needs="bf16",
)
def logits_not_upcast(outputs_of: Function, result: Tensor, inputs: Any, *, temperature: float, **options: Any) -> Any:
    outputs = outputs_of(result, inputs, temperature=temperature, **options)
    if outputs.logprobs is None:
        return outputs
    logits, labels = result[..., : options.get("vocab_size")].bfloat16(), inputs.labels
    every = torch.log_softmax(logits / temperature, dim=-1)
    own = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0].to(outputs.logprobs.dtype)
    return dataclasses.replace(outputs, logprobs=own.where(labels >= 0, 0))


@STEP_FAULTS.add(
    summary="the bias of o_proj is not loaded",
    source="converters without attention biases: verl sets add_bias_linear=False, Megatron-Bridge maps none",
    stage="weights",
    cells=sft("sft-padded", "pangu", fsdp2="dp2", deepspeed="dp2.zero1", megatron="dp2"),
    needs="a model with a bias on o_proj",
)
def dropped_o_bias(read_slice: Function, reader: Any, name: str, spans: Any) -> Tensor:
    return zeros_for("o_proj.bias", name, read_slice(reader, name, spans))


@STEP_FAULTS.add(
    summary="positions and frequencies are rounded to bf16 before rotary angles are computed",
    source="https://github.com/huggingface/transformers/pull/29285",
    stage="log-probs",
    cells=sft("sft-long", "pangu", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=ROUNDING),
    needs="positions above 256, which bf16 cannot distinguish from their neighbors",
)
def rotary_in_bf16(load_model: Function, trainable: Any, path: Any) -> Any:
    model = load_model(trainable, path)
    for module in model.modules():
        frequencies = [name for name in dir(module) if name.endswith("inv_freq")]
        for name in frequencies:
            setattr(module, name, _in_bf16(getattr(module, name)))
        if frequencies:
            module.forward = partial(_with_rounded_positions, module.forward)
    return model


def _with_rounded_positions(forward: Function, *values: Any, **named: Any) -> Any:
    positions = {name: _in_bf16(value) for name, value in named.items() if name == "position_ids"}
    return forward(*map(_in_bf16, values), **named | positions)


def _in_bf16(value: Any) -> Any:
    return value.bfloat16().to(value.dtype) if isinstance(value, Tensor) else value


MEANS_FAULTS = Faults()


@MEANS_FAULTS.add(
    summary="each micro-batch is divided by its own tokens and weighted by its share of the sequences",
    source="https://github.com/verl-project/verl/issues/5625",
    stage="loss",
    cells=rl("grpo"),
    needs="token-mean, several micro-batches and responses of different lengths",
)
def mean_of_micro_batch(
    evaluate: Function, functions: Any, model: str, outputs: Any, inputs: Any, *, totals: Any, others: Any
) -> Any:
    # The mean over the micro-batch's own tokens, times its share of the sequences.
    targets = inputs.targets
    begins = targets & ~torch.nn.functional.pad(targets, (1, 0))[:, :-1]
    tokens, sequences = targets.sum().item(), begins.sum().item()
    own = tokens * totals["sequence_count"] / sequences if sequences else totals["token_count"]
    return evaluate(functions, model, outputs, inputs, totals={**totals, "token_count": own}, others=others)


@MEANS_FAULTS.add(
    summary="the loss of a mini-batch has the denominator of the whole rollout",
    source="arXiv 1707.06347, algorithm 1: an update for each minibatch, of the surrogate's mean over it",
    stage="loss",
    cells=rl("grpo-off-policy"),
    needs="mini_batches of 2 or more",
)
def divided_by_mini_batches(loss_weights: Function, inputs: Any, objective: Any, totals: Any) -> Any:
    return loss_weights(inputs, objective, totals) / objective.mini_batches


@MEANS_FAULTS.add(
    summary="the sum over response tokens is divided by all tokens of the micro-batches, including masked ones",
    source="https://github.com/huggingface/trl/pull/6439",
    stage="loss",
    cells=rl("grpo"),
    needs="token-mean",
)
def padding_in_mean(step_totals: Function, context: Any, functions: Any, micro_batches: Any) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = step_totals(context, functions, micro_batches)
    places = sum(len(rows) * max(row.length for row in rows) for rows in micro_batches)
    return totals | {"token_count": torch.full_like(totals["token_count"], context.all_reduce(places))}


@MEANS_FAULTS.add(
    summary="the denominator counts the responses that dynamic sampling leaves out",
    source="arXiv 2503.14476, equation 11: the mean is over the groups that are kept",
    stage="loss",
    cells=rl("dapo", only=FULL),
    needs="filter_groups and a group of equal rewards",
)
def filtered_groups_counted(step_totals: Function, context: Any, functions: Any, micro_batches: Any) -> Any:
    totals = step_totals(context, functions, micro_batches)
    documents = [document for rows in micro_batches for row in rows for document in row.documents]
    tokens = sum(number != 0 for document in documents for number in document.columns["rollout_logprob"])
    return totals | {"token_count": torch.full_like(totals["token_count"], context.all_reduce(tokens))}


@MEANS_FAULTS.add(
    summary="groups of equal rewards are trained on, by entropy and KL alone",
    source="arXiv 2503.14476, equation 11",
    stage="old log-probs",
    cells=rl("dapo", only=FULL),
    needs="filter_groups and a group of equal rewards",
)
def equal_groups_kept(kept_groups: Function, groups: Any, rewards: Any) -> set[float]:
    return {*groups}


@MEANS_FAULTS.add(
    summary="the weights of losses ignore the mask, so the critic learns from prompts",
    source="https://github.com/TIGER-AI-Lab/verl-tool/issues/116",
    stage="critic loss",
    cells=rl("ppo"),
    blind=("loss",),
    needs="a critic; a policy loss is masked again",
)
def mask_lost(loss_weights: Function, inputs: Any, objective: Any, totals: Any) -> Tensor:
    weights: Tensor = loss_weights(inputs, objective, totals)
    return torch.full_like(weights, weights.max().item())


@MEANS_FAULTS.add(
    summary="tokens of the prompt are targets with the advantage of their response",
    source="https://github.com/TIGER-AI-Lab/verl-tool/issues/116",
    stage="old log-probs",
    cells=rl("grpo"),
    needs="rollouts",
)
def prompt_trained(collate: Function, rows: Any, **options: Any) -> Any:
    inputs = collate(rows, **options)
    if "advantage" not in inputs.columns:  # before advantages are known, no token is trained on
        return inputs
    labels, columns = inputs.labels.clone(), {name: numbers.clone() for name, numbers in inputs.columns.items()}
    for r, row in enumerate(rows):
        start = 0
        for document in row.documents:
            end = start + len(document.tokens)
            labels[r, start : end - 1] = inputs.tokens[r, start + 1 : end]
            advantages = columns["advantage"][r, start:end]
            advantages[:-1] = advantages[advantages.abs().argmax()]
            start = end
    return dataclasses.replace(inputs, labels=labels, columns=columns)


@MEANS_FAULTS.add(
    summary="the response mask begins and ends one token early",
    source="https://github.com/lucidrains/PaLM-rlhf-pytorch/issues/31",
    stage="old log-probs",
    cells=rl("grpo"),
    needs="prompts",
)
def mask_off_by_one(collate: Function, rows: Any, **options: Any) -> Any:
    # The last token of the prompt becomes a target, and the last token of the response is no longer one.
    moved = [dataclasses.replace(row, documents=tuple(map(_one_earlier, row.documents))) for row in rows]
    return collate(moved, **options)


def _one_earlier(document: Any) -> Any:
    targets = document.targets
    # A prompt of one token has no earlier token.
    return document if len(targets) > 1 and targets[1] else dataclasses.replace(document, targets=(*targets[1:], False))


@MEANS_FAULTS.add(
    summary="metrics are those of the first rank's own tokens",
    source="https://github.com/RLinf/RLinf/issues/603",
    stage="policy metrics",
    cells=rl("grpo"),
    blind=("loss", "loss and norm"),
    needs="dp of 2 or more, and a metric that is not the same on all ranks: a second update of a rollout",
)
def metrics_of_one_rank(of_all_ranks: Function, context: Any, sums: Any, highest: Any) -> dict[str, Tensor]:
    first = context.all_gather({o.key: sums[o.key].item() for o in METRICS if o.key in sums})[0]
    reduced: dict[str, Tensor] = of_all_ranks(context, sums, highest)
    own = {key: torch.full_like(reduced[key], value * context.data_size) for key, value in first.items()}
    return reduced | own


@MEANS_FAULTS.add(
    summary="the mean over tokens is a mean over sequences of means, so short responses weigh more",
    source="arXiv 2503.14476, section 3.3, on what a mean over sequences does to long responses",
    stage="loss",
    cells=rl("grpo"),
    needs="token-mean and responses of different lengths",
)
def sequence_mean_for_token_mean(token_weights: Function, lengths: Tensor, mode: str, **totals: Any) -> Any:
    return token_weights(lengths, "seq-mean-token-mean", **totals)


@MEANS_FAULTS.add(
    summary="the mean over sequences of means is a mean over tokens, so long responses weigh more",
    source="https://github.com/huggingface/trl/issues/3187",
    stage="loss",
    cells=rl("gspo", only=FULL),
    needs="seq-mean-token-mean and responses of different lengths",
)
def token_mean_for_sequence_mean(token_weights: Function, lengths: Tensor, mode: str, **totals: Any) -> Any:
    return token_weights(lengths, "token-mean", **totals)
