"""The catalogue: each fault with its public source, the seam it wraps, and the stage at which the suite must see it.

``loss_blind`` says whether the loss of step 0 (of a fault of handing over, the first one after loading) is exactly
right in spite of the fault: the checks in common use cannot see such a fault, however tight. Seams and what a function
there means:

==================  ===================================================================================
load_model          (trainable, path) -> model of a Hugging Face folder; its weights are read afterwards
hugging_face_model  (path, ...) -> the model of transformers, before anything is cut or read
read_slice          (reader, name, spans) -> a slice of a tensor in a file of weights or of a training state
load_adapter        (model, folder) -> the model with the adapter of a folder in peft's format
trained_names       (model, optimizer's configuration) -> names of the parameters that are trained
merge_adapter       (model, folder) -> weights by name, with the adapter of the folder added to them
switch_off_dropout  (model): leaves no dropout in it, in whatever mode it runs
collate             (rows, multiple_of=1) -> inputs with ``tokens``, ``labels``, ``positions`` (rows, length)
step_totals         (context, functions, micro_batches) -> the objective's sums over the whole optimizer step, by name
start_micro_batch   (trainable, index, count): before each micro-batch; clears gradients before the first
backward            (trainable, loss): once per micro-batch; adds its gradient, summed over the data ranks in the end,
                    or returns what the framework is to take the gradient of
finish_gradients    (trainable): after a model's last backward pass; then its gradients are whole
reduce_replicas     (...): averages gradients over ranks that hold the same parameters, in place
norm_axes           (gradient) -> mesh axes over which its squares are added up for the global norm
clip_coefficient    (norm, max_norm) -> factor for the gradients
clip_threshold      (max_norm or None) -> what a library that clips by itself is told; None is for no clipping
create_optimizer    (trainable, model, config) -> optimizer of torch, or of the library around one of torch
summing_dtype       (...) -> dtype, or its name in DeepSpeed's words, in which half-precision gradients are added up
advance_schedule    (trainable): after each optimizer step
optimizer_step      (trainable) -> norm: clips, updates, advances schedule and loss scale
find_overflow       (...) -> by device, whether this rank knows of an overflow
forget_overflow     (optimizer of DeepSpeed): clears what an overflow leaves in its buffers
gradient_scale      (trainable) -> number of ranks that the framework averages gradients over
reduction_mesh      (trainable) -> mesh of the ranks that see different tokens: gradients are reduced over it
mark_cut_gradients  (...): says of gradients that they are shards, which a library's norm asks
forgotten_scale     (strategy) -> loss scale, where the library divides by it and does not multiply
forget_steps        (strategy): undoes the count of a step that was made to allocate the optimizer's state
shard_inputs        (inputs, source) -> the part of a micro-batch that this rank of a ring holds
merge_blocks        (out, lse, block_out, block_lse, slice_=None) -> out, lse of ring attention so far
pipeline_config     (...) -> configuration of a pipeline's exchanges, with the switches that megatron-core names
qkv_spans           (...) -> for q, k, v: named tuples (theirs: row of it, own: row in the fused parameter, length)
project_output      (module, x) -> output summed over tensor-parallel ranks, and the bias to add
layer_numbers       (part of a model) -> numbers of its layers in the whole model, from 0
reduce_norms        (...): sums gradients of replicated parameters that see a part of the work, in place
reduce_tie          (...): sums gradients of a tied pair that lies on two pipeline stages, in place
gather_shared_key   (own part, group=...) -> latent attention's key of all tokens, that heads on all ranks share
counts_in_norm      (parameter, group) -> whether this rank is the one that counts it in the global norm
look_ahead          (context, models, objective, mini-batches) -> mini-batches with the columns of a whole roll-out
look                (context, trainable, mini-batch, want, temperature) -> what this rank finds of its rows, by index
annotated           (roll-outs, batch) -> the batch of a step with its columns
token_rewards       (response, *, kl_coef, kl_penalty) -> the reward of each token
kl_in_reward        (logprobs, reference, kind) -> estimates, for the penalty in the reward
kl_in_loss          the same, for the loss
of_groups           (scores, groups, function) -> what the function makes of the scores of each group
group_advantages    (scores, groups, *, by_std) -> advantages of responses
group_deviation     (scores of a group) -> its standard deviation
rloo                (scores, groups) -> advantages of responses
of_responses        (rewards, values, *, gamma, lam) -> advantages and returns of each response
next_values         (values) -> the value after each token
whiten              (lists of numbers) -> the same, whitened over all of them
importance_weights  (old log-probs, sampled ones, *, threshold) -> weights of tokens
evaluate            (functions, model, outputs, inputs, *, totals, others) -> what an objective says of a micro-batch
loss_weights        (inputs, objective, totals) -> weights of losses, 0 outside of the mask
token_weights       (lengths, mode, *, tokens, sequences, scale_factor) -> the same without the mask
policy_losses       (logprobs, old, advantages, *, mask, documents, objective) -> losses and ratios of tokens
dual_clipped        (losses, advantages, *, bound) -> losses that are bounded where the advantage is negative
sequence_mean       (numbers, *, mask, documents) -> at each token, the mean over its response
actor_loss          (objective, *, pg_loss, entropy_loss, kl_loss=None) -> what the policy minimises
value_losses        (values, old, returns, *, cliprange) -> losses of tokens, and which were clipped
of_all_ranks        (context, sums, highest) -> numbers of the whole step
forward_backward    (trainable, inputs, *, want, temperature, loss, terms) -> outputs of all micro-batches
outputs_of          (result, inputs, ...) -> log-probs, entropy or values from what a model gave
through_softmax     (shifted logits, total, mean, gradients) -> the logits' gradient by way of the softmax
load_kind           (model, kind, folder): sets one kind of its training state from files
read_generators     (folder, rank) -> states of a rank's random generators, out of a checkpoint
load_progress       (model, progress): sets schedule and loss scale
write_model         (folder, *, source, weights, ...): writes a Hugging Face folder, from a model's weights by name
routers_of          (model, ...) -> its routers, or None; called before the first step
router_loss         (factor, balance of the step, weights and probabilities of experts) -> a share of the routers' loss
z_loss              (factor, tokens of the step, squares of real tokens and routers) -> a share of the z-loss of routers
choices_for         (inputs, key of a forward pass) -> the inputs with the choices of experts that are given for it
sorted_by_expert    (chosen experts) -> places in the order of their experts, and the token of each
permute_tokens      (tokens, ...) -> tokens in the order of their experts, and what is needed to put them back
reduce_gradients    (trainable): wraps a model in what reduces its gradients
expert_divisor      (group of ranks with other experts) -> what gradients of experts are divided by
through_label       (gradient, of_logprob, *, index, held): adds the gradient of each label's own logit
==================  ===================================================================================
"""

import dataclasses
from typing import Any

import torch

from conformance.backends.faults import Fault, Function
from impl.faults.experts import EXPERT_FAULTS
from impl.faults.loss_normalization import MEANS_FAULTS
from impl.faults.models import ADAPTER_FAULTS, ARCHITECTURE_FAULTS, MERGE_FAULTS, MODELS_FAULTS, read_as_zeros
from impl.faults.optimizer import ENGINE_FAULTS, OPTIMIZER_FAULTS, OVERFLOW_FAULTS
from impl.faults.parallelism import MODEL_PARALLEL_FAULTS, RING_FAULTS
from impl.faults.policy import POLICY_FAULTS
from impl.faults.resume import HANDOVER_FAULTS
from impl.faults.rollout import ROLLOUT_FAULTS


def _rotary_in_bf16(load_model: Function) -> Function:
    def in_bf16(value: Any) -> Any:
        return value.bfloat16().to(value.dtype) if isinstance(value, torch.Tensor) else value

    def of_rounded_positions(forward: Function) -> Function:
        def faulty(*values: Any, **named: Any) -> Any:
            positions = {name: in_bf16(value) for name, value in named.items() if name == "position_ids"}
            return forward(*map(in_bf16, values), **named | positions)

        return faulty

    def faulty(trainable: Any, path: Any) -> Any:
        model = load_model(trainable, path)
        for module in model.modules():
            frequencies = [name for name in dir(module) if name.endswith("inv_freq")]
            for name in frequencies:
                setattr(module, name, in_bf16(getattr(module, name)))
            if frequencies:
                module.forward = of_rounded_positions(module.forward)
        return model

    return faulty


def _leaking_documents(collate: Function) -> Function:
    def faulty(rows: Any, **options: Any) -> Any:
        inputs = collate(rows, **options)
        count, length = inputs.positions.shape
        return dataclasses.replace(inputs, positions=torch.arange(length).expand(count, length))

    return faulty


def _local_token_mean(step_totals: Function) -> Function:
    def faulty(context: Any, functions: Any, micro_batches: Any) -> dict[str, torch.Tensor]:
        # The mean over a rank's own tokens, then averaged over ranks by the data-parallel reduction.
        own = functions.totals([row for rows in micro_batches for row in rows])
        every = step_totals(context, functions, micro_batches)
        return {key: torch.full_like(every[key], max(1, value) * context.data_size) for key, value in own.items()}

    return faulty


def _cleared_gradients(start_micro_batch: Function) -> Function:
    def faulty(trainable: Any, index: int, count: int) -> None:
        trainable.optimizer.zero_grad()
        start_micro_batch(trainable, index, count)

    return faulty


def _replicas_counted(axes: Function) -> Function:
    def faulty(gradient: Any) -> tuple[int, ...]:
        return tuple(range(gradient.device_mesh.ndim))

    return faulty


def _inverted_clip(clip_coefficient: Function) -> Function:
    def faulty(norm: float, max_norm: float) -> float:
        return max(1.0, max_norm / (norm + 1e-6))

    return faulty


def _clip_always(clip_coefficient: Function) -> Function:
    def faulty(norm: float, max_norm: float) -> float:
        return max_norm / (norm + 1e-6)

    return faulty


def _clip_on_one_replica(clip_coefficient: Function) -> Function:
    def faulty(norm: float, max_norm: float) -> float:
        return float(clip_coefficient(norm, max_norm)) if torch.distributed.get_rank() == 0 else 1.0

    return faulty


def _schedule_per_micro_batch(advance_schedule: Function) -> Function:
    def faulty(trainable: Any) -> None:
        for _ in range(trainable.context.config.accumulation):
            advance_schedule(trainable)

    return faulty


_FAULTS = (
    Fault(
        name="dropped-o-bias",
        summary="the bias of o_proj is not loaded",
        source="converters that know no attention bias: verl's sets add_bias_linear=False, Megatron-Bridge's maps none",
        seam="read_slice",
        stage="weights",
        loss_blind=False,
        needs="a model with a bias on o_proj",
        wrap=read_as_zeros("o_proj.bias"),
    ),
    Fault(
        name="rotary-in-bf16",
        summary="positions and frequencies are rounded to bf16 before the angles of rotary tables are computed of them",
        source="https://github.com/huggingface/transformers/pull/29285",
        seam="load_model",
        stage="log-probs",
        loss_blind=False,
        needs="positions above 256, which bf16 cannot tell from their neighbours",
        wrap=_rotary_in_bf16,
    ),
    Fault(
        name="leaking-documents",
        summary="packed documents attend to each other",
        source="https://github.com/axolotl-ai-cloud/axolotl/issues/3608",
        seam="collate",
        stage="log-probs",
        loss_blind=False,
        needs="packed rows",
        wrap=_leaking_documents,
    ),
    Fault(
        name="local-token-mean",
        summary="each rank divides by its own token count before gradients are averaged",
        source="https://github.com/pytorch/torchtitan/pull/2206",
        seam="step_totals",
        stage="loss",
        loss_blind=False,
        needs="dp of 2 or more and ranks with different token counts",
        wrap=_local_token_mean,
    ),
    Fault(
        name="cleared-gradients",
        summary="gradients are cleared before every micro-batch, so only the last one trains",
        source="https://github.com/pytorch/torchtitan/pull/3575",
        seam="start_micro_batch",
        stage="gradients",
        loss_blind=True,
        needs="accumulation of 2 or more",
        wrap=_cleared_gradients,
    ),
    Fault(
        name="replicas-counted",
        summary="the gradient norm counts replicated parameters once per rank",
        source="https://github.com/ROCm/TransformerEngine/pull/715",
        seam="norm_axes",
        stage="gradient norm",
        loss_blind=True,
        needs="a parameter that is replicated over an axis of its mesh, such as norms under seqpar",
        wrap=_replicas_counted,
    ),
    Fault(
        name="inverted-clip",
        summary="the clip coefficient is bounded below instead of above: large gradients are never clipped",
        source="https://github.com/deepspeedai/DeepSpeed/pull/5150",
        seam="clip_coefficient",
        stage="clipped update",
        loss_blind=True,
        needs="max_grad_norm other than the norm itself",
        wrap=_inverted_clip,
    ),
    Fault(
        name="clip-always",
        summary="gradients below max_grad_norm are scaled up to it",
        source="the other half of https://github.com/deepspeedai/DeepSpeed/pull/5150",
        seam="clip_coefficient",
        stage="weights after N steps",
        loss_blind=True,
        needs="a step whose gradient norm is below max_grad_norm",
        wrap=_clip_always,
    ),
    Fault(
        name="clip-on-one-replica",
        summary="only the first rank clips, so replicas drift apart",
        source="https://github.com/deepspeedai/DeepSpeed/issues/1801",
        seam="clip_coefficient",
        stage="weight replicas",
        loss_blind=True,
        needs="replicas (rep of 2 or more) and active clipping",
        wrap=_clip_on_one_replica,
    ),
    Fault(
        name="schedule-per-micro-batch",
        summary="the learning-rate schedule advances with every micro-batch",
        source="https://github.com/huggingface/accelerate/issues/963",
        seam="advance_schedule",
        stage="clipped update",
        loss_blind=True,
        needs="accumulation of 2 or more and a schedule that is not constant",
        wrap=_schedule_per_micro_batch,
    ),
)

RL_FAULTS = (*ROLLOUT_FAULTS, *MEANS_FAULTS, *POLICY_FAULTS, *MODELS_FAULTS)
CATALOGUE = (
    *_FAULTS,
    *ENGINE_FAULTS,
    *OPTIMIZER_FAULTS,
    *OVERFLOW_FAULTS,
    *RING_FAULTS,
    *ARCHITECTURE_FAULTS,
    *ADAPTER_FAULTS,
    *EXPERT_FAULTS,
    *MODEL_PARALLEL_FAULTS,
    *RL_FAULTS,
    *HANDOVER_FAULTS,
    *MERGE_FAULTS,
)
