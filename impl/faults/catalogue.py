"""Lists every planted fault by group, and describes the seams that faults replace."""

from collections.abc import Mapping, Sequence
from itertools import chain

from conformance.backends.faults import Fault
from impl.faults.experts import EXPERT_FAULTS
from impl.faults.float8 import FLOAT8_FAULTS
from impl.faults.losses import DFT_FAULTS, DISTILLATION_FAULTS, MTP_FAULTS, PREFERENCE_FAULTS
from impl.faults.models import ADAPTER_FAULTS, ARCHITECTURE_FAULTS, MERGE_FAULTS, MODELS_FAULTS
from impl.faults.optimizer import ENGINE_FAULTS, OPTIMIZER_FAULTS, OVERFLOW_FAULTS
from impl.faults.parallelism import MODEL_PARALLEL_FAULTS, RING_FAULTS
from impl.faults.policy import POLICY_FAULTS
from impl.faults.resume import RESUME_FAULTS
from impl.faults.rollout import ROLLOUT_FAULTS
from impl.faults.training_step import MEANS_FAULTS, STEP_FAULTS

SEAMS: Mapping[str, str] = {
    # Models and what is loaded into them
    "load_model": "(trainable, path) -> model of a Hugging Face folder, before its weights are read",
    "hugging_face_model": "(path, ...) -> the transformers model, before it is sharded or its weights are read",
    "read_slice": "(reader, name, spans) -> a slice of a tensor from a file of weights or of training state",
    "load_adapter": "(model, folder) -> the model with the adapter of a folder in peft's format",
    "trained_names": "(model, optimizer configuration) -> names of the parameters that are trained",
    "merge_adapter": "(model, folder) -> weights by name, with the adapter of the folder added",
    "switch_off_dropout": "(model): disables dropout in training mode and in evaluation mode",
    "recompute_activations": "(model, layout options): lets transformers recompute layers in the backward pass",
    "restore_generators": "(states of the library's generators): sets them, before and after a layer is recomputed",
    "own_generator": "(tracker, name) -> context in which a tensor-parallel rank draws from its own generator",
    "shard_model": "(trainable, model): shards the parameters of a model, which has no numbers yet, over ranks",
    "adapter_plan": "(layer, plan, *, sequence) -> styles of tensor parallelism of a layer and its adapters, by name",
    "layer_numbers": "(part of a model) -> numbers of its layers in the whole model, from 0",
    "qkv_spans": "(...) -> for q, k, v: named tuples (full: its row, own: row in the fused parameter, length)",
    "outputs_of": "(result, inputs, ...) -> log-probs, entropy or values from the output of a model",
    # Micro-batches and the backward pass
    "collate": "(rows, multiple_of=1) -> inputs with ``tokens``, ``labels``, ``positions`` (rows, length)",
    "step_totals": "(context, functions, micro_batches) -> the objective's sums over the optimizer step, by name",
    "start_micro_batch": "(trainable, index, count): runs before each micro-batch; clears gradients before the first",
    "forward_backward": "(trainable, inputs, *, want, temperature, loss, terms) -> outputs of all micro-batches",
    "backward": "(trainable, loss): adds the gradient of a micro-batch, or returns the loss for the framework to do so",
    "through_softmax": "(shifted logits, total, mean, gradients) -> the logits' gradient through the softmax",
    "through_label": "(gradient, of_logprob, *, index, held): adds the gradient of each label's own logit",
    "finish_gradients": "(trainable): runs after the last backward pass of a model and completes its gradients",
    # Parallelism
    "shard_inputs": "(inputs, source) -> the part of a micro-batch that this context-parallel rank holds",
    "merge_blocks": "(out, lse, block_out, block_lse, slice_=None) -> accumulated out and lse of ring attention",
    "add_adapters": "(part of a model, shape): adds adapters without numbers",
    "pipeline_schedule": "(stage, number of micro-batches, loss) -> schedule of torch's pipelines",
    "norm_of_stages": "(pipeline, norm of a stage) -> norm of the gradients of all stages",
    "pipeline_config": "(...) -> configuration of pipeline communication, with megatron-core's options",
    "project_output": "(module, x) -> output summed over tensor-parallel ranks, and the bias to add",
    "gather_shared_key": "(own part, group=...) -> latent attention's key of all tokens, shared by heads on all ranks",
    # Reduction of gradients
    "wrap_model": "(trainable, model) -> the model in DistributedDataParallel",
    "delays_reduction": "(trainable, index, count) -> whether gradients of this micro-batch are reduced later",
    "reduce_gradients": "(trainable): wraps a model in the library that reduces its gradients",
    "scale_bucket": "(gradients, factor, settings) -> reduction of a bucket of Megatron-FSDP, which it may have scaled",
    "gather_updated": "(wrapped model, ...): gathers the weights that Megatron-FSDP's ranks have updated",
    "reduce_replicas": "(...): averages gradients in place over ranks that hold the same parameters",
    "reduce_norms": "(...): sums in place gradients of replicated parameters that process a part of the work",
    "reduce_tie": "(...): sums in place gradients of tied parameters that lie on two pipeline stages",
    "reduction_mesh": "(trainable) -> mesh of the ranks with different tokens, over which gradients are reduced",
    "gradient_scale": "(trainable) -> number of ranks over which the framework averages gradients",
    "expert_divisor": "(group of ranks with other experts) -> divisor for gradients of experts",
    "summing_dtype": "(...) -> dtype, or its name in DeepSpeed, in which half-precision gradients are added up",
    "end_backward": "(DeepSpeed engine): reduces gradients and adds them up in full precision after a backward pass",
    "copy_offloaded": "(optimizer, parameter, ...): copies or adds a parameter's gradient to the offloaded ones",
    "forget_second_copy": "(ZeRO-3 optimizer): drops the second copies of weights (hpZ) after an update",
    "cut_second_copy": "(owner of a partitioned model, parameter, ...): keeps this rank's part of the second copy",
    "average_bucket": "(optimizer, bucket, ...): averages a bucket of gradients in place over data-parallel ranks",
    "count_tokens": "(part of a micro-batch) -> number of its targets, for a library that divides by their sum",
    # Gradient norm, clipping, optimizer and schedule
    "norm_axes": "(gradient) -> mesh axes over which its squares are summed for the global norm",
    "counts_in_norm": "(parameter, ...) -> whether this rank counts it in the global norm",
    "mark_cut_gradients": "(...): marks gradients as shards, for a library's gradient norm",
    "clip_coefficient": "(norm, max_norm) -> factor for the gradients",
    "clip_pieces": "(trainable) -> norm: clips gradients that FullyShardedDataParallel has sharded",
    "clip_threshold": "(max_norm or None) -> max_norm for a library that clips by itself; None disables clipping",
    "create_optimizer": "(trainable, model, config) -> optimizer of torch, or of the library around one of torch",
    "optimizer_step": "(trainable) -> norm: clips, updates, advances schedule and loss scale",
    "orthogonalize": "(matrix, coefficients, steps, eps) -> the matrix that Muon updates by",
    "adjust_rate": "(learning rate, name of the adjustment, shape) -> learning rate of a matrix under Muon",
    "restore_state": "(Muon beside AdamW, state): takes the state of a checkpoint",
    "advance_schedule": "(trainable): runs after each optimizer step",
    "forget_steps": "(strategy): undoes the count of a step that only allocated the optimizer's state",
    "forgotten_scale": "(strategy) -> loss scale, where the library divides by it and does not multiply",
    "find_overflow": "(...) -> by device, whether this rank found an overflow",
    "forget_overflow": "(DeepSpeed optimizer): clears buffers that still hold the values of an overflow",
    # The rollout pass: columns of a rollout that are computed before its first update
    "rollout_columns": "(context, models, objective, mini-batches) -> mini-batches with all columns of the rollout",
    "output_rows": "(context, trainable, mini-batch, want, temperature) -> outputs for this rank's rows, by index",
    "annotated": "(rollouts, batch) -> the batch of a step with its columns",
    "token_rewards": "(response, *, kl_coef, kl_penalty) -> the reward of each token",
    "kl_in_reward": "(logprobs, reference, kind) -> KL estimates for the penalty in the reward",
    "estimate": "(responses, objective) -> advantages and returns of each response of a rollout",
    "of_groups": "(scores, groups, function) -> the function's results for the scores of each group",
    "group_advantages": "(scores, groups, *, by_std) -> advantages of responses",
    "group_deviation": "(scores of a group) -> its standard deviation",
    "rloo": "(scores, groups) -> advantages of responses",
    "of_responses": "(rewards, values, gaps, *, gamma, lam) -> advantages and returns of each response",
    "next_values": "(values) -> the value after each token",
    "whiten": "(lists of numbers) -> the same numbers, whitened over all of them",
    # The losses of policy and critic
    "evaluate": "(functions, model, outputs, inputs, *, totals, others) -> losses and metrics of a micro-batch",
    "loss_weights": "(inputs, objective, totals) -> weights of token losses, 0 outside of the mask",
    "token_weights": "(lengths, mode, *, tokens, sequences, scale_factor) -> the same without the mask",
    "importance_weights": "(old log-probs, sampled ones, *, threshold, level, mask) -> weights of a response's tokens",
    "kept_groups": "(groups, rewards) -> the groups that dynamic sampling keeps",
    "overlong_penalty": "(tokens of a response, objective) -> what it loses of its reward",
    "gate": "(ratios, temperatures) -> the gates of SAPO",
    "policy_losses": "(logprobs, old, advantages, *, mask, documents, objective) -> losses and ratios of tokens",
    "dual_clipped": "(losses, advantages, *, bound) -> losses, bounded where the advantage is negative",
    "sequence_mean": "(numbers, *, mask, documents) -> at each token, the mean over its response",
    "kl_in_loss": "(logprobs, reference, kind) -> KL estimates for the loss",
    "actor_loss": "(objective, *, pg_loss, entropy_loss, kl_loss=None) -> the loss that the policy minimizes",
    "value_losses": "(values, old, returns, *, cliprange) -> losses of tokens, and whether each was clipped",
    "of_all_ranks": "(context, sums, highest) -> metrics of the whole step, over all ranks",
    # The losses of preferences, reward models and KTO
    "pair_margins": "(ratios, inputs, objective) -> margins of pairs, and which of them the micro-batch holds",
    "pair_losses": "(margins, objective) -> losses of pairs",
    "evaluate_pairs": "(functions, model, outputs, inputs, *, totals, others) -> losses of a micro-batch of pairs",
    "answer_scores": "(values, inputs) -> scores of both answers of each pair, and whether the micro-batch holds it",
    "reward_losses": "(scores, margins, objective) -> losses of pairs of a reward model",
    "step_scores": "(values) -> at each label, the score of the step that ends with the label",
    "step_losses": "(scores, labels) -> losses of steps",
    "mismatched_ratios": "(log-ratios, inputs) -> the log-ratio of each mismatched answer, for the KL of KTO",
    "answer_losses": "(margins, desired, objective) -> losses of labelled answers",
    "evaluate_answers": "(functions, model, outputs, inputs, *, totals, others) -> losses of labelled answers",
    # Dynamic fine-tuning and multi-token prediction
    "weighted_losses": "(logprobs) -> losses of tokens, weighted by their probabilities",
    "further_ahead": "(micro-batch, depth) -> it with the tokens and labels that a module at this depth reads",
    "evaluate_modules": "(functions, model, outputs, inputs, *, totals, others) -> losses with multi-token prediction",
    # Sampling masks and distillation
    "kept_logits": "(logits, micro-batch, *, start) -> logits, -inf for tokens that the sampler did not keep",
    "kept_logits_of_shard": "the same, of a backend that can leave logits sharded along the vocabulary",
    "divergences": "(student's logits, teacher's, objective, group) -> divergence of each token",
    "divergence_terms": "(log q, log p, beta) -> what each token of the vocabulary adds to a divergence",
    "scaled_logits": "(logits, temperature) -> logits of the student (with a gradient) or the teacher, divided by it",
    "sum_over_shards": "(sums over a part of the vocabulary, group) -> sums over all parts",
    "least_of_top_k": "(teacher's logits, k, group) -> the smallest of the k largest logits of the whole vocabulary",
    # Mixtures of experts
    "routers_of": "(model, ...) -> its routers, or None; called before the first step",
    "router_loss": "(factor, balance of the step, weights, probabilities of experts) -> a share of the balancing loss",
    "z_loss": "(factor, tokens of the step, squares of real tokens and routers) -> a share of the routers' z-loss",
    "updated_bias": "(..., biases of routers, rate) -> biases after a step: up for experts with little load",
    "scale_router_loss": "(scale): sets the factor of a library's own load-balancing loss in each micro-batch",
    "count_factor": "(choices before, choices now, micro-batches) -> factor of a library's loss with running counts",
    "choices_for": "(inputs, key of a forward pass) -> the inputs with the choices of experts to replay in it",
    "sorted_by_expert": "(chosen experts) -> positions in the order of their experts, and the token of each",
    "permute_tokens": "(tokens, ...) -> tokens in the order of their experts, and the data to undo the permutation",
    # Float8
    "float8_config": "(recipe, *, emulate, gathers) -> torchao's configuration of linear layers",
    "cast_names": "(model, layout options) -> names of the linear layers that multiply in float8",
    "cast_blocks": "(torchao's function, rows, float8 dtype, block, rounding, ...) -> scales of blocks, numbers",
    "agree_on_scales": "(model): computes the scales of weights that are gathered in float8, after an update",
    "cast_operand": "(tensor, dtype, layer's configuration, *, gemm_input_role, axiswise_dim, ...) -> it in float8",
    "axis_of_scale": "(axis, granularity) -> the axis along which a row has its scale, or None",
    "cast_shard": "(shard, dtype, ..., *, reduce_amax, device_mesh, ...) -> a rank's part of a weight in float8",
    "cast_saturated": "(scaled tensor, dtype) -> it in float8, with numbers beyond the largest one set to it",
    "amax_to_scale": "(largest magnitude, dtype, *, round_scales_to_power_of_2) -> scale",
    # Checkpoints and exports
    "load_kind": "(model, kind, folder): sets one kind of the model's training state from files",
    "load_progress": "(model, progress): sets schedule and loss scale",
    "read_generators": "(folder, rank) -> states of a rank's random generators, from a checkpoint",
    "write_model": "(folder, *, source, weights, ...): writes a Hugging Face folder from weights by name",
}

RL_FAULTS = (*ROLLOUT_FAULTS, *MEANS_FAULTS, *POLICY_FAULTS, *MODELS_FAULTS)
GROUPS: Mapping[str, Sequence[Fault]] = {
    "Any training step": STEP_FAULTS,
    "Engines that accumulate, reduce and clip by themselves": ENGINE_FAULTS,
    "Optimizer and accumulation precision": OPTIMIZER_FAULTS,
    "Overflow in fp16": OVERFLOW_FAULTS,
    "Context parallelism": RING_FAULTS,
    "Model families": ARCHITECTURE_FAULTS,
    "LoRA adapters": ADAPTER_FAULTS,
    "Mixtures of experts": EXPERT_FAULTS,
    "Float8": FLOAT8_FAULTS,
    "Tensor and pipeline parallelism": MODEL_PARALLEL_FAULTS,
    "Rollouts, GRPO and PPO": RL_FAULTS,
    "Preferences, reward models and KTO": PREFERENCE_FAULTS,
    "Dynamic fine-tuning": DFT_FAULTS,
    "Multi-token prediction": MTP_FAULTS,
    "Distillation": DISTILLATION_FAULTS,
    "Resuming from a checkpoint, a training state or an export": RESUME_FAULTS,
    "Merging adapters": MERGE_FAULTS,
}
CATALOGUE = tuple(chain.from_iterable(GROUPS.values()))
