"""Plants faults in the losses of preferences, reward models, KTO, DFT, multi-token prediction and distillation."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.backends.faults import FaultCells, Function
from conformance.spec.offline import PAIR, SIDE
from impl.faults.declaration import RL_LAYOUTS, Faults, distilled
from impl.interface.micro_batches import NO_TARGET
from impl.objectives.preferences import answer_sums, log_ratios

PREFERENCE_FAULTS, DFT_FAULTS, MTP_FAULTS, DISTILLATION_FAULTS = Faults(), Faults(), Faults(), Faults()
MICRO_BATCHES = 3  # of a rank in a step of the scenario dpo


def pairs(scenario: str = "dpo") -> FaultCells:
    """Cells of preferences, reward models, KTO or DFT."""
    return FaultCells(scenario=scenario, model="llama", layouts=RL_LAYOUTS)


@PREFERENCE_FAULTS.add(
    summary="one data-parallel rank takes rejected answers for chosen ones",
    source="arXiv 2305.18290, equation 7: the margin is that of the chosen answer minus that of the rejected one",
    stage="margins",
    cells=pairs(),
    needs="several data-parallel ranks",
)
def swapped_on_one_rank(pair_margins: Function, ratios: Tensor, inputs: Any, objective: Any) -> Any:
    margins, present = pair_margins(ratios, inputs, objective)
    return (-margins if dist.get_rank() == 1 else margins), present


@PREFERENCE_FAULTS.add(
    summary="the log-ratio of an answer is the mean over its tokens instead of the sum",
    source="https://github.com/huggingface/trl/blob/main/trl/trainer/dpo_trainer.py, where only IPO takes means",
    stage="margins",
    cells=pairs(),
    needs="answers of several tokens",
)
def mean_for_sum(pair_margins: Function, ratios: Tensor, inputs: Any, objective: Any) -> Any:
    return pair_margins(ratios, inputs, replace(objective, length_normalised=True))


@PREFERENCE_FAULTS.add(
    summary="the mean over an answer's tokens counts those of its prompt, too",
    source="arXiv 2405.14734, equation 3: |y| is the length of the answer",
    stage="margins",
    half_stage="gradients",
    cells=pairs("ipo"),
    needs="length_normalised",
)
def prompt_in_length(pair_margins: Function, ratios: Tensor, inputs: Any, objective: Any) -> Any:
    labels = inputs.labels.where(inputs.columns[SIDE] == 0, 0)  # each position of a document is a target
    return pair_margins(ratios, replace(inputs, labels=labels), objective)


@PREFERENCE_FAULTS.add(
    summary="the reference is updated with the policy, so every margin is 0",
    source="arXiv 2305.18290, section 4: the reference is frozen",
    stage="margins",
    cells=pairs(),
    needs="a reference",
)
def reference_is_policy(
    evaluate_pairs: Function, functions: Any, model: str, outputs: Any, inputs: Any, *, totals: Any, others: Any
) -> Any:
    known = {name: outputs.detach() for name in others}
    return evaluate_pairs(functions, model, outputs, inputs, totals=totals, others=known)


@PREFERENCE_FAULTS.add(
    summary="smoothed labels weigh the loss of the right label, and leave that of the wrong one out",
    source="https://ericmitchell.ai/cdpo.pdf, equation 3",
    stage="loss",
    cells=pairs(),
    needs="label_smoothing",
)
def smoothing_on_one_side(pair_losses: Function, margins: Tensor, objective: Any) -> Any:
    return (1 - objective.label_smoothing) * pair_losses(margins, replace(objective, label_smoothing=0.0))


@PREFERENCE_FAULTS.add(
    summary="pairs of any loss_type are trained with the loss of sigmoid",
    source="https://github.com/modelscope/ms-swift/issues/10167",
    stage="loss",
    cells=pairs("ipo"),
    needs="another loss_type than sigmoid",
)
def sigmoid_for_all(pair_losses: Function, margins: Tensor, objective: Any) -> Any:
    return pair_losses(margins, replace(objective, loss_type="sigmoid"))


@PREFERENCE_FAULTS.add(
    summary="the loss is the mean over micro-batches of their means, so pairs in small ones count more",
    source="https://unsloth.ai/blog/gradient",
    stage="loss",
    cells=pairs(),
    needs="micro-batches with different numbers of pairs",
)
def mean_of_pair_means(
    evaluate_pairs: Function, functions: Any, model: str, outputs: Any, inputs: Any, *, totals: Any, others: Any
) -> Any:
    own = inputs.columns[PAIR][inputs.targets].unique().numel()
    count = totals["pair_count"].new_tensor(float(max(own, 1) * dist.get_world_size() * MICRO_BATCHES))
    return evaluate_pairs(functions, model, outputs, inputs, totals={**totals, "pair_count": count}, others=others)


@PREFERENCE_FAULTS.add(
    summary="no gradient reaches rejected answers",
    source="arXiv 2305.18290, equation 7: both answers have a gradient",
    stage="gradients",
    cells=pairs(),
    blind=("loss",),
    needs="a pair",
)
def rejected_without_gradient(pair_margins: Function, ratios: Tensor, inputs: Any, objective: Any) -> Any:
    return pair_margins(ratios.where(inputs.columns[SIDE] > 0, ratios.detach()), inputs, objective)


@PREFERENCE_FAULTS.add(
    summary="the score of an answer is the value at the end of its row, which is padding in all rows but the longest",
    source="https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_layers.py, where a "
    "classifier looks for the last token that is not padding",
    stage="scores",
    cells=pairs("reward-padded"),
    needs="padded rows",
)
def score_at_padding(answer_scores: Function, values: Tensor, inputs: Any) -> Any:
    return answer_scores(values[:, -1:].expand_as(values), inputs)


@PREFERENCE_FAULTS.add(
    summary="the score of an answer is the value that predicts its last token, as a critic's, instead of the last one",
    source="arXiv 2203.02155, section 3.5: the reward model reads the whole answer",
    stage="scores",
    cells=pairs("reward"),
    needs="a reward model",
)
def score_before_last(answer_scores: Function, values: Tensor, inputs: Any) -> Any:
    return answer_scores(values.roll(1, dims=1), inputs)


@PREFERENCE_FAULTS.add(
    summary="one data-parallel rank trains its rejected answers to have the higher scores",
    source="arXiv 2203.02155, equation 1: the score of the chosen answer minus that of the rejected one",
    stage="loss",
    cells=pairs("reward"),
    needs="several data-parallel ranks",
)
def rewards_swapped_on_one_rank(reward_losses: Function, scores: Tensor, margins: Tensor, objective: Any) -> Any:
    return reward_losses(scores.flip(1) if dist.get_rank() == 1 else scores, margins, objective)


@PREFERENCE_FAULTS.add(
    summary="the margin of a pair is added to the difference of its scores, so a clear preference is trained less",
    source="arXiv 2307.09288, equation 2: the margin is subtracted",
    stage="loss",
    cells=pairs("reward"),
    needs="a column of margins",
)
def margin_added(reward_losses: Function, scores: Tensor, margins: Tensor, objective: Any) -> Any:
    return reward_losses(scores, -margins, objective)


@PREFERENCE_FAULTS.add(
    summary="centring pulls the difference of the scores of a pair towards 0 instead of their sum",
    source="arXiv 2312.09244, section 3.2; TRL's RewardTrainer.compute_loss",
    stage="loss",
    cells=pairs("reward"),
    needs="center_coef",
)
def centred_difference(reward_losses: Function, scores: Tensor, margins: Tensor, objective: Any) -> Any:
    difference = (scores[:, 0] - scores[:, 1]).square()
    return reward_losses(scores, margins, replace(objective, center_coef=0.0)) + objective.center_coef * difference


@PREFERENCE_FAULTS.add(
    summary="the score of a step is the value that predicts its last token, as a critic's, instead of the last one",
    source="https://github.com/huggingface/trl/blob/v1.9.2/trl/experimental/prm/prm_trainer.py: tokenize_row",
    stage="scores",
    cells=pairs("prm"),
    needs="a process reward model",
)
def score_before_separator(step_scores: Function, values: Tensor) -> Tensor:
    return values


@PREFERENCE_FAULTS.add(
    summary="a step is right if its label is 1, so the likelihood that it is right counts as wrong",
    source="https://github.com/huggingface/trl/blob/v1.9.2/trl/experimental/prm/prm_trainer.py: int(label)",
    stage="loss",
    cells=pairs("prm"),
    needs="labels between 0 and 1",
)
def soft_labels_cut(step_losses: Function, scores: Tensor, labels: Tensor) -> Any:
    return step_losses(scores, labels.floor())


@PREFERENCE_FAULTS.add(
    summary="the KL is estimated on the answers that are trained on instead of mismatched ones",
    source="arXiv 2402.01306, section 4.2: answers to other prompts, so that the estimate is not that of the rewards",
    stage="margins",
    cells=pairs("kto"),
    needs="labelled answers",
)
def kl_of_matched_answers(mismatched_ratios: Function, ratios: Tensor, inputs: Any) -> Any:
    return answer_sums(ratios, inputs)[0][::2]


@PREFERENCE_FAULTS.add(
    summary="each rank estimates the KL on its own mismatched answers",
    source="https://github.com/huggingface/trl/blob/main/trl/trainer/kto_trainer.py, which gathers the KL of all ranks",
    stage="margins",
    cells=pairs("kto"),
    needs="several data-parallel ranks",
)
def kl_of_one_rank(of_all_ranks: Function, context: Any, sums: Any, highest: Any) -> Any:
    if sums.keys() != {"kl"}:
        return of_all_ranks(context, sums, highest)
    return {"kl": sums["kl"] * context.data_size}


@PREFERENCE_FAULTS.add(
    summary="the KL has a gradient, which pushes the policy away from the reference on mismatched answers",
    source="arXiv 2402.01306, section 4.2: no gradient passes through the estimate",
    stage="gradients",
    half_stage="clipped update",
    cells=pairs("kto"),
    blind=("loss",),
    needs="a KL above 0",
)
def kl_with_gradient(
    evaluate_answers: Function, functions: Any, model: str, outputs: Any, inputs: Any, *, totals: Any, others: Any
) -> Any:
    if others:
        share = functions.ahead(outputs, inputs, totals=totals, others=others)["kl"]
        totals = {**totals, "kl": totals["kl"] + share - share.detach()}
    return evaluate_answers(functions, model, outputs, inputs, totals=totals, others=others)


@PREFERENCE_FAULTS.add(
    summary="each micro-batch has a KL of its own, so the loss depends on how a batch is accumulated",
    source="https://github.com/huggingface/trl/blob/main/trl/trainer/kto_trainer.py, KTOTrainer._compute_loss",
    stage="margins",
    cells=pairs("kto"),
    needs="several micro-batches",
)
def kl_of_one_micro_batch(
    evaluate_answers: Function, functions: Any, model: str, outputs: Any, inputs: Any, *, totals: Any, others: Any
) -> Any:
    if others:
        sums, lengths = (numbers[1::2] for numbers in answer_sums(log_ratios(outputs, others), inputs))
        totals = {**totals, "kl": (sums.sum() / (lengths > 0).sum()).detach()}
    return evaluate_answers(functions, model, outputs, inputs, totals=totals, others=others)


@PREFERENCE_FAULTS.add(
    summary="desired answers have the weight of undesired ones, and the reverse",
    source="arXiv 2402.01306, equation 8",
    stage="loss",
    cells=pairs("kto"),
    needs="unequal weights",
)
def weights_swapped(answer_losses: Function, margins: Tensor, desired: Tensor, objective: Any) -> Any:
    weights = objective.undesirable_weight, objective.desirable_weight
    swapped = replace(objective, desirable_weight=weights[0], undesirable_weight=weights[1])
    return answer_losses(margins, desired, swapped)


@DFT_FAULTS.add(
    summary="the probability that weights a token has a gradient, too, so unlikely tokens become less likely",
    source="https://github.com/modelscope/twinkle/pull/291",
    stage="gradients",
    cells=pairs("dft"),
    blind=("loss",),
    needs="dynamic fine-tuning",
)
def weight_with_gradient(weighted_losses: Function, logprobs: Tensor) -> Tensor:
    return -logprobs.exp() * logprobs


_MTP = "arXiv 2412.19437, equation "


def modules() -> FaultCells:
    """Cells of multi-token prediction."""
    return FaultCells(scenario="mtp", model="deepseek-v3-mtp", layouts={"megatron": "dp2"})


@MTP_FAULTS.add(
    summary="modules for multi-token prediction read and predict tokens of the next document in the row",
    source="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/"
    "multi_token_prediction.py: roll_tensor without packed_seq_params",
    stage="routing",
    cells=modules(),
    needs="packed documents",
)
def modules_across_documents(further_ahead: Function, inputs: Any, depth: int) -> Any:
    one = torch.arange(inputs.positions.shape[1], device=inputs.positions.device).expand_as(inputs.positions)
    return replace(further_ahead(replace(inputs, positions=one), depth), positions=inputs.positions)


@MTP_FAULTS.add(
    summary="modules shift the mask of targets once too often: the token before a span is trained, not its last one",
    source="https://github.com/radixark/miles/pull/3219",
    stage="multi-token log-probs",
    cells=modules(),
    needs="documents with tokens that are no targets",
)
def mask_shifted_again(further_ahead: Function, inputs: Any, depth: int) -> Any:
    after = further_ahead(inputs, depth + 1)  # whose tokens the module predicts
    return replace(further_ahead(inputs, depth), labels=after.tokens.where(after.targets, NO_TARGET))


@MTP_FAULTS.add(
    summary="modules for multi-token prediction train all tokens, also those of prompts",
    source="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6103",
    stage="loss",
    cells=modules(),
    needs="documents with tokens that are no targets",
)
def modules_without_mask(further_ahead: Function, inputs: Any, depth: int) -> Any:
    every = further_ahead(replace(inputs, labels=torch.zeros_like(inputs.labels)), depth + 1)
    return replace(further_ahead(inputs, depth), labels=every.tokens.where(every.targets, NO_TARGET))


@MTP_FAULTS.add(
    summary="the losses of modules for multi-token prediction are added up with the whole factor instead of their mean",
    source=f"{_MTP}25",
    stage="loss",
    cells=modules(),
    needs="several modules",
)
def modules_added_up(evaluate_modules: Function, functions: Any, *given: Any, **sums: Any) -> Any:
    o = functions.objective
    scale = o.mtp_loss_scaling_factor * o.mtp_num_layers
    return evaluate_modules(replace(functions, objective=replace(o, mtp_loss_scaling_factor=scale)), *given, **sums)


@MTP_FAULTS.add(
    summary="the loss of a module is divided by all targets, of which it predicts some only",
    source="https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/models/gpt/gpt_model.py: "
    "calculate_per_token_loss",
    stage="loss",
    cells=modules(),
    needs="targets near the beginning of a document",
)
def modules_over_all_targets(
    evaluate_modules: Function, functions: Any, model: str, outputs: Any, inputs: Any, *, totals: Any, others: Any
) -> Any:
    whole = dict.fromkeys(totals, totals["token_count"])
    return evaluate_modules(functions, model, outputs, inputs, totals=whole, others=others)


_GKD = "arXiv 2306.13649, equation 1"
SHARDED_VOCABULARY = {"fsdp2": "tp2.losspar", "megatron": "tp2"}


@DISTILLATION_FAULTS.add(
    summary="the temperature divides the logits of the student alone",
    source="arXiv 1503.02531, section 2: both models have the temperature",
    stage="divergences",
    cells=distilled(),
    needs="a temperature other than 1",
)
def temperature_once(scaled_logits: Function, logits: Tensor, temperature: float) -> Any:
    return scaled_logits(logits, temperature if logits.requires_grad else 1.0)


@DISTILLATION_FAULTS.add(
    summary="the teacher has the weight of the student in the mixture and in the divergence, and the reverse",
    source=_GKD,
    stage="divergences",
    cells=distilled(),
    needs="beta other than 0.5",
)
def beta_swapped(divergence_terms: Function, log_q: Tensor, log_p: Tensor, beta: float) -> Any:
    return divergence_terms(log_q, log_p, 1 - beta)


@DISTILLATION_FAULTS.add(
    summary="the reverse KL is minimised where the forward KL was asked for",
    source=_GKD,
    stage="divergences",
    cells=distilled("distillation-top-k"),
    needs="a divergence that is not symmetric",
)
def divergence_reversed(divergence_terms: Function, log_q: Tensor, log_p: Tensor, beta: float) -> Any:
    return divergence_terms(log_p, log_q, beta)


@DISTILLATION_FAULTS.add(
    summary="the probabilities of the top k tokens are those of the whole vocabulary, and do not sum to 1",
    source="https://github.com/volcengine/verl/blob/main/verl/trainer/distillation/fsdp/losses.py, which means it",
    stage="divergences",
    cells=distilled("distillation-top-k"),
    needs="top_k with renormalise_top_k",
)
def top_k_not_renormalised(divergences: Function, student: Tensor, teacher: Tensor, objective: Any, group: Any) -> Any:
    return divergences(student, teacher, replace(objective, renormalise_top_k=False), group)


@DISTILLATION_FAULTS.add(
    summary="the top k tokens are those of the student",
    source="arXiv 2306.13649, section 3: the divergence is taken from the teacher's distribution",
    stage="divergences",
    cells=distilled("distillation-top-k"),
    needs="top_k",
)
def top_k_of_student(divergences: Function, student: Tensor, teacher: Tensor, objective: Any, group: Any) -> Any:
    least = student.detach().topk(objective.top_k, dim=-1).values[:, -1:]
    return divergences(student, teacher.where(student.detach() >= least, -torch.inf), objective, group)


@DISTILLATION_FAULTS.add(
    summary="the teacher is part of the graph as the student itself, so nothing is learned",
    source="arXiv 2306.13649, algorithm 1: the teacher is another model, and frozen",
    stage="divergences",
    cells=distilled(),
    needs="a teacher",
)
def student_as_teacher(divergences: Function, student: Tensor, teacher: Tensor, objective: Any, group: Any) -> Any:
    return divergences(student, student.detach(), objective, group)


@DISTILLATION_FAULTS.add(
    summary="no gradient reaches the softmax of the student through its normaliser",
    source="https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html#torch.distributed.tensor.parallel."
    "loss_parallel",
    stage="gradients",
    cells=distilled(**SHARDED_VOCABULARY),
    blind=("loss",),
    needs="vocabulary shards",
)
def normaliser_without_gradient(sum_over_shards: Function, own: Tensor, group: Any) -> Any:
    return sum_over_shards(own.detach(), group)


@DISTILLATION_FAULTS.add(
    summary="each rank normalises over its own part of the vocabulary",
    source="https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html#torch.distributed.tensor.parallel."
    "loss_parallel",
    stage="divergences",
    cells=distilled(**SHARDED_VOCABULARY),
    needs="vocabulary shards",
)
def softmax_of_own_shard(sum_over_shards: Function, own: Tensor, group: Any) -> Any:
    return sum_over_shards(own, None)


@DISTILLATION_FAULTS.add(
    summary="each rank takes the top k tokens of its own part of the vocabulary",
    source="https://github.com/volcengine/verl/blob/main/verl/trainer/distillation/megatron/losses.py, which looks for "
    "the tokens of all parts",
    stage="divergences",
    cells=distilled("distillation-top-k", **SHARDED_VOCABULARY),
    needs="vocabulary shards",
)
def top_k_of_own_shard(least_of_top_k: Function, logits: Tensor, count: int, group: Any) -> Any:
    return least_of_top_k(logits, count, None)
