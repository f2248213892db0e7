"""Routers of megatron-core's mixtures of experts: choices that are given, what they did, and the load-balancing loss.

The library's router computes and chooses; choices are given to it by its own ``RouterReplay``. Its load-balancing
losses are of one layer, and of one micro-batch or of a mean over those so far. Here the loss is that of the whole step
and of all routers (docs/explanations/mixture-of-experts.md), and is attached as the library attaches its own, by
``MoEAuxLossAutoScaler``: so it is there on every stage of a pipeline, and where layers are computed again.

A router may run a micro-batch at any time of a pipeline's schedule, and again in its backward pass, so what it is given
and where it writes travels with the micro-batch's ``Documents`` and is handed to it by a hook of its layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from conformance.spec.batch import expert_column
from impl.interface.collate import MicroBatch
from impl.interface.outputs import RouterTerms
from impl.megatron.moe_config import Groups, Mixture
from impl.models.router import Choice, replayed_choice, router_probabilities, router_sigmoids

# Undefined without TransformerEngine, and asked for in every router (docs/findings/megatron-router-needs-te.md).
vars(moe_utils).setdefault("te_general_gemm", None)


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """What routers add to the loss of a step. scale: what the library divides gradients by afterwards."""

    terms: RouterTerms
    scale: float


@dataclass(frozen=True, kw_only=True)
class Routed:
    """One micro-batch in front of the routers of a rank: what they are given, and ``seen``, what they did.

    real: (N,), of the tokens that this rank's routers see, in megatron-core's order. replayed: by router the choices
    (N, K), or none.
    """

    real: Tensor
    replayed: Sequence[Tensor] = ()
    loss: StepLoss | None = None
    seen: dict[int, Choice] = field(default_factory=dict)


def routed(own: MicroBatch, mixture: Mixture, *, sequence_parallel: bool, loss: StepLoss | None) -> Routed:
    """``own``: the tokens that this rank of a ring holds."""
    given = expert_column(0, 0) in own.columns
    choices = [replayed_choice(own, n, mixture.chosen) for n in range(len(mixture.layers))] if given else []
    rows, length = own.tokens.shape

    def seen_here(numbers: Tensor) -> Tensor:
        """(rows x length, ...) -> (length x rows, ...), and of that the part of this tensor-parallel rank."""
        ordered = numbers.view(rows, length, *numbers.shape[1:]).transpose(0, 1).flatten(0, 1)
        return ordered.chunk(_parts(sequence_parallel))[_part(sequence_parallel)]

    return Routed(real=seen_here(own.real.flatten()), replayed=[seen_here(one) for one in choices], loss=loss)


class StepTopKRouter(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, which takes choices that are given and adds its part of the step's loss.

    number: among the model's routers. routed: the micro-batch of the next forward pass.
    """

    number: int
    routed: Routed
    groups: Groups | None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        sigmoid = self.score_function == "sigmoid"
        probabilities = (router_sigmoids if sigmoid else router_probabilities)(logits.view(-1, logits.shape[-1]))
        given = self._given(probabilities.detach())
        self.router_replay.target_topk_idx = given
        self.router_replay.router_replay_action = None if given is None else RouterReplayAction.REPLAY_FORWARD
        weights, chosen = super().routing(logits, padding_mask)
        logits = logits.view(-1, logits.shape[-1])
        squares = torch.logsumexp(logits.to(probabilities.dtype), dim=-1).square()
        self.routed.seen[self.number] = Choice(
            weights=weights.detach(), probabilities=probabilities.detach(), squares=squares.detach()
        )
        loss = self.routed.loss
        if loss is not None and torch.is_grad_enabled():
            told = (one[self.routed.real, None] for one in (weights.detach(), probabilities, squares))
            share = loss.terms.share(*told)
            weights = MoEAuxLossAutoScaler.apply(weights, share * loss.scale)
        return weights, chosen

    def _given(self, probabilities: Tensor) -> Tensor | None:
        """Choices (N, K) in the place of the library's, which adds up another number of scores of a group than
        DeepSeek's models do (docs/findings/megatron-groups-of-experts.md). ``probabilities``: (N, X)."""
        if self.routed.replayed:
            return self.routed.replayed[self.number]
        if self.groups is None or self.groups.best == self.topk // self.groups.chosen:
            return None
        preferred = probabilities if self.expert_bias is None else probabilities + self.expert_bias
        return chosen_in_groups(preferred, self.groups, self.topk)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the router, or change its dtype, of which the library has rounded the bias of choices by the time that
        it keeps it in float32 (docs/findings/megatron-rounded-bias.md)."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None:
            self.expert_bias.data = before.to(self.expert_bias.device)
        return self


def chosen_in_groups(preferred: Tensor, groups: Groups, count: int) -> Tensor:
    """The ``count`` experts of each token, (N, K), in its best groups. ``preferred``: (N, X)."""
    best = preferred.unflatten(1, (groups.many, -1)).topk(groups.best, dim=2).values.sum(dim=2)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(groups.chosen, dim=1).indices, value=True)
    inside = kept.repeat_interleave(preferred.shape[1] // groups.many, dim=1)
    return preferred.masked_fill(~inside, -torch.inf).topk(count, dim=1).indices


def number_routers(chunk: Any, mixture: Mixture) -> None:
    """Number the routers of a GPTModel, and let each layer hand its router the micro-batch."""
    for layer in chunk.decoder.layers:
        if (number := layer.layer_number - 1) in mixture.layers:
            layer.mlp.router.number = mixture.layers.index(number)
            layer.mlp.router.groups = mixture.groups
            layer.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _hand_over(layer: Any, _: Any, arguments: dict[str, Any]) -> None:
    layer.mlp.router.routed = arguments["packed_seq_params"].routed


def release(chunk: Any) -> None:
    """Let go of the last forward pass.

    A token dispatcher keeps its tensors with their graph, which leads back to it by way of hooks on gradients; Python
    finds no such cycle, and process groups would stay open.
    """
    for dispatcher in (m.token_dispatcher for m in chunk.modules() if hasattr(m, "token_dispatcher")):
        for name, value in list(vars(dispatcher).items()):
            if isinstance(value, Tensor):
                setattr(dispatcher, name, None)


def forget() -> None:
    """Clear what the library keeps of routers for the whole process."""
    RouterReplay.clear_global_router_replay_instances()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def gathered(found: Routed, mixture: Mixture, own: MicroBatch, *, sequence_parallel: bool) -> tuple[Tensor, ...]:
    """What routers did with the tokens in ``own``: weights and probabilities of experts (rows, length, routers, X) and
    squares (rows, length, routers), from all stages of a pipeline and all ranks that have cut the sequence; collective.
    """
    size = (len(found.real), len(mixture.layers), 2 * mixture.experts + 1)
    told = torch.zeros(size, device=own.tokens.device, dtype=torch.get_default_dtype())
    for number, choice in found.seen.items():
        assert choice.squares is not None
        told[:, number] = torch.cat([choice.weights, choice.probabilities, choice.squares[:, None]], dim=-1)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(told, group=parallel_state.get_pipeline_model_parallel_group())
    pieces = [torch.empty_like(told) for _ in range(_parts(sequence_parallel))]
    if len(pieces) > 1:
        dist.all_gather(pieces, told, group=parallel_state.get_tensor_model_parallel_group())
        told = torch.cat(pieces)
    rows, length = own.tokens.shape
    parts = told.unflatten(0, (length, rows)).transpose(0, 1).split([mixture.experts, mixture.experts, 1], dim=-1)
    return parts[0], parts[1], parts[2][..., 0]


def _parts(sequence_parallel: bool) -> int:
    return int(parallel_state.get_tensor_model_parallel_world_size()) if sequence_parallel else 1


def _part(sequence_parallel: bool) -> int:
    return int(parallel_state.get_tensor_model_parallel_rank()) if sequence_parallel else 0
