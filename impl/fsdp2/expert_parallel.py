"""Shards experts over the ranks of ``ep`` (GShard, arXiv 2006.16668, section 3): each rank holds some of every layer.

Each rank of ``ep`` has its own rows. For each chosen expert, a token is sent to the rank that holds the expert, by an
all-to-all; another all-to-all returns the expert's output, which is weighted and summed. Experts have no capacity
limit, and no token is dropped. Experts are stacked along their first dimension, which is sharded over ``ep``; FSDP2
shards each expert further over the ranks that hold the same experts (dp x sp), along the second dimension.

A rank's experts see the tokens of all ranks of ``ep``. Their gradients are therefore already summed over ``ep`` and are
reduced over dp x sp only. FSDP2 averages over dp x sp, and the loss was multiplied by the number of all data ranks, so
the gradients are divided by ``ep`` before. FSDP2's own setting for that divides twice
(docs/findings/fsdp2-divide-factor.md). All tensor-parallel ranks hold whole experts and do the same work.
"""

from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def experts_of(model: transformers.PreTrainedModel) -> list[Any]:
    """Returns the modules that each hold the experts of a layer, in the order of the layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def cut_experts(model: transformers.PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leaves each rank of ``mesh`` (``ep``) its experts, and dispatches tokens to them; collective.

    The model has no numbers yet, or is the same on all ranks.
    """
    group = mesh.get_group()
    for experts in experts_of(model):
        for name, parameter in list(experts.named_parameters(recurse=False)):
            # Every rank has all numbers or none are read yet, so nothing is sent.
            cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, torch.nn.Parameter(cut))
        experts.forward = _over_ranks(experts, group)


def is_of_experts(key: str) -> bool:
    """Returns whether a key of a model's tensor-parallel plan belongs to experts, which stay whole with ``ep``."""
    return ".mlp.experts" in key


def _over_ranks(experts: Any, group: dist.ProcessGroup) -> Any:
    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Maps ``hidden`` (N, D), ``chosen`` and ``weights`` (N, K) to (N, D), as the module's own function."""
        order, token = sorted_by_expert(chosen)
        counts = torch.bincount(chosen.flatten(), minlength=experts.num_experts)
        plan = exchange_plan(counts, group)
        arrived = exchange(hidden[token], plan.sent, plan.received, group)
        back = exchange(_apply(experts, arrived, plan, expert_divisor(group)), plan.received, plan.sent, group)
        weighted = back * weights.flatten()[order, None].to(back.dtype)
        return torch.zeros_like(hidden).index_add(0, token, weighted.to(hidden.dtype))

    return forward


def sorted_by_expert(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the positions in flattened ``chosen`` (N, K), sorted by expert, and the token of each."""
    order = chosen.flatten().argsort(stable=True)
    return order, order // chosen.shape[1]


class Exchange:
    """Holds token counts: ``sent`` to and ``received`` from each rank; ``arriving``: by source and own expert."""

    def __init__(self, sent: list[int], arriving: Tensor) -> None:
        self.sent, self.arriving = sent, arriving
        self.received: list[int] = arriving.sum(dim=1).tolist()


def exchange_plan(counts: Tensor, group: dist.ProcessGroup) -> Exchange:
    """Exchanges the numbers of tokens of this rank for each expert (X,); collective."""
    by_rank = counts.view(group.size(), -1).contiguous()
    arriving = torch.empty_like(by_rank)
    dist.all_to_all_single(arriving, by_rank, group=group)
    return Exchange(by_rank.sum(dim=1).tolist(), arriving)


def _apply(experts: Any, arrived: Tensor, plan: Exchange, divisor: float) -> Tensor:
    """Applies this rank's experts to the tokens (N, D) that have arrived, sorted by source rank and then by expert.

    An expert without a token takes part, so that all experts have gradients on every rank, divided by ``divisor``.
    """
    weights: dict[str, Tensor] = {
        name: _Divided.apply(_local(weight), divisor)  # type: ignore[no-untyped-call]
        for name, weight in experts.named_parameters(recurse=False)
    }
    pieces = arrived.split(plan.arriving.flatten().tolist())  # source 0: expert 0, 1, ...; source 1: ...
    count = plan.arriving.shape[1]
    found: list[Tensor] = [arrived] * len(pieces)
    for number in range(count):
        inputs = pieces[number::count]
        own = {name: weight[number] for name, weight in weights.items()}
        result = _expert(experts, torch.cat(inputs), own)
        found[number::count] = result.split([len(piece) for piece in inputs])
    return torch.cat(found)


def _expert(experts: Any, tokens: Tensor, own: dict[str, Tensor]) -> Tensor:
    """Applies one expert with the parameters ``own`` to tokens (N, D) -> (N, D), by the code of its family."""
    if "gate_up_proj_bias" in own:  # gpt-oss: matrices are (in, out), gate and up are interleaved
        gated: Tensor = experts._apply_gate(tokens @ own["gate_up_proj"] + own["gate_up_proj_bias"])
        return gated @ own["down_proj"] + own["down_proj_bias"]
    gate, up = torch.nn.functional.linear(tokens, own["gate_up_proj"]).chunk(2, dim=-1)
    return torch.nn.functional.linear(experts.act_fn(gate) * up, own["down_proj"])


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def exchange(tokens: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends rows (N, D), sorted by destination rank; returns the received rows, sorted by source rank."""
    result: Tensor = _AllToAll.apply(tokens, sent, received, group)  # type: ignore[no-untyped-call]
    return result


def expert_divisor(group: dist.ProcessGroup) -> float:
    """Returns the divisor of experts' gradients, which FSDP2 averages over fewer ranks than other gradients."""
    return group.size()


class _Divided(torch.autograd.Function):
    """Returns the same tensor, and divides its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: float) -> Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.divisor, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = tokens.new_empty(sum(received), *tokens.shape[1:])
        dist.all_to_all_single(result, tokens.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        result = gradient.new_empty(sum(ctx.sent), *gradient.shape[1:])
        dist.all_to_all_single(result, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return result, None, None, None
