"""Replays, records and balances the expert choices of megatron-core's routers.

The library's router computes and chooses; its own ``RouterReplay`` replays given choices. The library's load-balancing
loss covers one layer, and one micro-batch or a running mean. Here the loss covers the whole step and all routers
(docs/explanations/mixture-of-experts.md). ``MoEAuxLossAutoScaler`` attaches it, as for the library's own loss, so it
works on every pipeline stage and with recomputation.

A router may run a micro-batch at any time of a pipeline's schedule, and again in its backward pass. So its inputs and
the place of its results travel with the micro-batch's ``Documents``; a hook of the layer passes them to the router.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from conformance.spec.batch import expert_column
from impl.interface.micro_batches import MicroBatch, RouterTerms
from impl.megatron.moe_config import Groups, Mixture
from impl.models.router import Choice, replayed_choice, router_probabilities, router_sigmoids

# Every router reads it, but it is undefined without TransformerEngine (docs/findings/megatron-router-needs-te.md). With
# TransformerEngine, which remainders need, routers would multiply by it from 0.17 on, though their layers are torch's.
moe_utils.te_general_gemm = None


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """Holds the routers' part of the loss of a step. scale: the library divides gradients by it afterwards."""

    terms: RouterTerms
    scale: float


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Holds inputs and recorded choices of a rank's routers for one micro-batch.

    real: (N,), for the tokens of this rank's routers, in megatron-core's order. replayed: choices (N, K) per router,
    or none. choices: recorded choices by router.
    """

    real: Tensor
    replayed: Sequence[Tensor] = ()
    loss: StepLoss | None = None
    choices: dict[int, Choice] = field(default_factory=dict)


def routed(own: MicroBatch, mixture: Mixture, *, sequence_parallel: bool, loss: StepLoss | None) -> Routed:
    """Creates the routers' inputs. ``own``: the tokens of this context-parallel rank."""
    given = expert_column(0, 0) in own.columns
    choices = [replayed_choice(own, n, mixture.chosen) for n in range(len(mixture.layers))] if given else []
    rows, length = own.tokens.shape

    def local_part(numbers: Tensor) -> Tensor:
        """Reorders (rows x length, ...) to (length x rows, ...) and takes this tensor-parallel rank's part."""
        ordered = numbers.view(rows, length, *numbers.shape[1:]).transpose(0, 1).flatten(0, 1)
        return ordered.chunk(_parts(sequence_parallel))[_part(sequence_parallel)]

    return Routed(real=local_part(own.real.flatten()), replayed=[local_part(one) for one in choices], loss=loss)


class StepTopKRouter(TopKRouter):  # type: ignore[misc]
    """Extends megatron-core's router by replayed choices and its part of the step's loss.

    number: index among the model's routers. routed: the micro-batch of the next forward pass.
    """

    number: int
    routed: Routed
    groups: Groups | None
    corrects_counts = False
    _choices_before: Tensor

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        sigmoid = self.score_function == "sigmoid"
        probabilities = (router_sigmoids if sigmoid else router_probabilities)(logits.view(-1, logits.shape[-1]))
        given = self._given(probabilities.detach())
        self.router_replay.target_topk_idx = given
        self.router_replay.router_replay_action = None if given is None else RouterReplayAction.REPLAY_FORWARD
        if self.is_aux_loss_enabled():
            padding_mask = ~self.routed.real
        if self.corrects_counts:
            self._choices_before = self.global_tokens_per_expert.sum()
        weights, chosen = super().routing(logits, padding_mask)
        logits = logits.view(-1, logits.shape[-1])
        squares = torch.logsumexp(logits.to(probabilities.dtype), dim=-1).square()
        self.routed.choices[self.number] = Choice(
            weights=weights.detach(), probabilities=probabilities.detach(), squares=squares.detach()
        )
        loss = self.routed.loss
        if loss is not None and torch.is_grad_enabled():
            observed = (numbers[self.routed.real, None] for numbers in (weights.detach(), probabilities, squares))
            share = loss.terms.share(*observed)
            weights = MoEAuxLossAutoScaler.apply(weights, share * loss.scale)
        return weights, chosen

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, coefficient: float, loss: Tensor, *more: Any, **options: Any
    ) -> Tensor:
        """Adds the library's loss, whose running counts are divided by all tokens that they are of.

        The library divides by the tokens of the last micro-batch (docs/findings/megatron-running-counts.md).
        """
        if self.corrects_counts:
            now = self.global_tokens_per_expert.sum()
            loss = loss * count_factor(self._choices_before, now, self.ga_steps)
        return cast(
            "Tensor", super().attach_and_log_load_balancing_loss(activation, coefficient, loss, *more, **options)
        )

    def _given(self, probabilities: Tensor) -> Tensor | None:
        """Returns replayed choices (N, K), or choices in groups as in DeepSeek's models, or None for the library's.

        The library sums a different number of scores per group (docs/findings/megatron-groups-of-experts.md).
        ``probabilities``: (N, X).
        """
        if self.routed.replayed:
            return self.routed.replayed[self.number]
        if self.groups is None or self.groups.best == self.topk // self.groups.chosen:
            return None
        preferred = probabilities if self.expert_bias is None else probabilities + self.expert_bias
        return chosen_in_groups(preferred, self.groups, self.topk)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Counts choices for the update of the bias, without those in padding.

        The library cannot mask them (https://github.com/NVIDIA/Megatron-LM/issues/6111).
        """
        super()._apply_expert_bias(routing_map & self.routed.real[:, None])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the router or changes its dtype, without rounding the correction bias and the counts that move it.

        The library rounds the bias before it casts it back to float32 (docs/findings/megatron-rounded-bias.md), and
        goes on with rounded counts.
        """
        before = self.expert_bias, self.local_tokens_per_expert
        super()._apply(fn, recurse)
        for buffer, kept in zip((self.expert_bias, self.local_tokens_per_expert), before, strict=True):
            if kept is not None:
                buffer.data = kept.to(buffer.device)
        return self


def chosen_in_groups(preferred: Tensor, groups: Groups, count: int) -> Tensor:
    """Chooses ``count`` experts per token, (N, K), in the token's best groups. ``preferred``: scores (N, X)."""
    best = preferred.unflatten(1, (groups.many, -1)).topk(groups.best, dim=2).values.sum(dim=2)
    selected = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(groups.chosen, dim=1).indices, value=True)
    inside = selected.repeat_interleave(preferred.shape[1] // groups.many, dim=1)
    return preferred.masked_fill(~inside, -torch.inf).topk(count, dim=1).indices


def number_routers(chunk: Any, mixture: Mixture) -> None:
    """Numbers the routers of a GPTModel, and lets each layer pass the micro-batch to its router."""
    modules = chunk.mtp.layers if chunk.mtp_process else ()
    for layer in (*chunk.decoder.layers, *(module.transformer_layer for module in modules)):
        if (number := layer.layer_number - 1) in mixture.layers:
            layer.mlp.router.number = mixture.layers.index(number)
            layer.mlp.router.groups = mixture.groups
            layer.register_forward_pre_hook(_pass_documents, with_kwargs=True)


def correct_running_counts(chunks: Sequence[Any]) -> None:
    """Lets routers divide running counts by their own tokens, in float64 where weights are."""
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, StepTopKRouter)):
        router.corrects_counts = True
        for name in ("global_tokens_per_expert", "ga_steps"):
            setattr(router, name, getattr(router, name).to(router.weight.dtype))


def count_factor(before: Tensor, now: Tensor, steps: Tensor) -> Tensor:
    """Returns the tokens of the last of ``steps`` micro-batches, times their number, by the tokens of all of them.

    ``before``, ``now``: choices without and with those of the last micro-batch.
    """
    return (now - before) * steps / now


def _pass_documents(layer: Any, _: Any, arguments: dict[str, Any]) -> None:
    layer.mlp.router.routed = arguments["packed_seq_params"].routed


def release(chunk: Any) -> None:
    """Drops the tensors of the last forward pass.

    A token dispatcher keeps tensors whose autograd graph leads back to it through gradient hooks. Python's garbage
    collector does not find such a cycle, so process groups would stay open.
    """
    for dispatcher in (m.token_dispatcher for m in chunk.modules() if hasattr(m, "token_dispatcher")):
        for name, value in list(vars(dispatcher).items()):
            if isinstance(value, Tensor):
                setattr(dispatcher, name, None)


def forget() -> None:
    """Clears the library's process-wide state of routers."""
    RouterReplay.clear_global_router_replay_instances()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    moe_utils.get_moe_layer_wise_logging_tracker().clear()


def gathered(routed: Routed, mixture: Mixture, own: MicroBatch, *, sequence_parallel: bool) -> tuple[Tensor, ...]:
    """Gathers the routers' outputs for the tokens in ``own`` from all pipeline and sequence-parallel ranks; collective.

    Returns weights and probabilities of experts (rows, length, routers, X) and squares (rows, length, routers).
    """
    size = (len(routed.real), len(mixture.layers), 2 * mixture.experts + 1)
    observed = torch.zeros(size, device=own.tokens.device, dtype=torch.get_default_dtype())
    for number, choice in routed.choices.items():
        assert choice.squares is not None
        observed[:, number] = torch.cat([choice.weights, choice.probabilities, choice.squares[:, None]], dim=-1)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(observed, group=parallel_state.get_pipeline_model_parallel_group())
    pieces = [torch.empty_like(observed) for _ in range(_parts(sequence_parallel))]
    if len(pieces) > 1:
        dist.all_gather(pieces, observed, group=parallel_state.get_tensor_model_parallel_group())
        observed = torch.cat(pieces)
    rows, length = own.tokens.shape
    parts = observed.unflatten(0, (length, rows)).transpose(0, 1).split([mixture.experts, mixture.experts, 1], dim=-1)
    return parts[0], parts[1], parts[2][..., 0]


def _parts(sequence_parallel: bool) -> int:
    return int(parallel_state.get_tensor_model_parallel_world_size()) if sequence_parallel else 1


def _part(sequence_parallel: bool) -> int:
    return int(parallel_state.get_tensor_model_parallel_rank()) if sequence_parallel else 0
