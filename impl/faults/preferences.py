"""Plants faults in the losses of preference pairs: scores of answers, margins, what is summed over pairs."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.backends.faults import FaultCells, Function
from conformance.spec.preferences import PAIR, SIDE
from impl.faults.declaration import RL_LAYOUTS, Faults

PREFERENCE_FAULTS = Faults()
MICRO_BATCHES = 3  # of a rank in a step of the scenario dpo


def pairs(scenario: str = "dpo") -> FaultCells:
    """Cells of preferences."""
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
