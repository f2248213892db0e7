"""Shards a model over the ranks of ``tp``, and its experts over those of ``ep``.

Tensor parallelism follows the Hugging Face model's own plan or this project's plans in PyTorch's styles.
Both avoid two upstream defects (docs/findings): tied weights stay tied, and the gradient of a norm that sees only the
heads of its rank is not summed over the ranks again at each micro-batch.

With experts (GShard, arXiv 2006.16668, section 3) each rank of ``ep`` holds some of every layer.

Each rank of ``ep`` has its own rows. For each chosen expert, a token is sent to the rank that holds the expert, by an
all-to-all; another all-to-all returns the expert's output, which is weighted and summed. Experts have no capacity
limit, and no token is dropped. Experts are stacked along their first dimension, which is sharded over ``ep``; FSDP2
shards each expert further over the ranks that hold the same experts (dp x sp), along the second dimension.

A rank's experts see the tokens of all ranks of ``ep``. Their gradients are therefore already summed over ``ep`` and are
reduced over dp x sp only. FSDP2 averages over dp x sp, and the loss was multiplied by the number of all data ranks, so
the gradients are divided by ``ep`` before. FSDP2's own setting for that divides twice
(docs/findings/fsdp2-divide-factor.md). All tensor-parallel ranks hold whole experts and do the same work.
"""

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers import PreTrainedModel

from impl.models.family_quirks import PLANNED, FamilyQuirks, quirks_of
from impl.models.lora import NAME, is_adapted

_HEAD_NORM_STYLE = "replicated_with_grad_allreduce"
# The projections into heads and into the feed-forward network, for layers that do not fuse them
_HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj")


def apply_model_plan(
    model: PreTrainedModel, mesh: DeviceMesh, *, shipped: bool, without: Callable[[str], bool] = lambda key: False
) -> None:
    """Shards ``model`` in place by the plan that its Hugging Face class carries, ``without`` some of its keys.

    ``shipped`` keeps upstream behaviour for head norms, which is wrong under gradient accumulation. Raises ValueError
    for a model without a plan.
    """
    from transformers.distributed import tensor_parallel as hf

    if not getattr(model, "tp_plan", None):
        raise ValueError(
            f"{type(model).__name__} carries no tensor-parallel plan; use tp1, or the layout option 'plan'"
        )
    tied = _untie(model)
    # The embedding must be sharded like the head along the vocabulary before the two can be tied again.
    own = {key: style for key, style in model.tp_plan.items() if not without(key)}
    plan = {**own, **({"model.embed_tokens": "embedding_rowwise"} if tied else {})}
    head_norms = [] if shipped else [key for key, style in plan.items() if style == _HEAD_NORM_STYLE]
    plan = {key: style for key, style in plan.items() if key not in head_norms}
    plan = {name: style for key, style in plan.items() for name, style in _with_adapter(model, key, style)}
    if "tp_plan" in inspect.signature(hf.apply_tensor_parallelism).parameters:
        hf.apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(plan))
    else:  # transformers 5.17 reads the plan from the model
        model._tp_plan = plan
        hf.apply_tensor_parallelism(model, mesh)
    if tied:
        _tie(model)
    for key in head_norms:
        for module in _matching(model, key):
            _sum_gradient_over(module, mesh.get_group())


def apply_explicit_plan(model: PreTrainedModel, mesh: DeviceMesh, *, sequence: bool, loss: bool) -> None:
    """Shards ``model`` in place by an explicit plan, for the families that have ``stream_norms``.

    ``sequence``: norms and residuals hold a slice of the sequence between blocks (arXiv 2205.05198, section 4.2.2).
        ``loss``: the head's output stays sharded along the vocabulary (``vocabulary_shard``); a value model has no such
        head. Raises ValueError for another family.
    """
    kind = model.config.model_type
    quirks = quirks_of(kind)
    if not quirks.has_plan:
        raise ValueError(
            f"no explicit tensor-parallel plan for {kind!r} (known: {', '.join(PLANNED)}); to add one, see "
            f"docs/guides/adding-a-model.md"
        )
    tied = _untie(model)
    stream = Shard(1) if sequence else Replicate()  # placement of the residual stream (rows, length, hidden)
    # The embedding's output is the whole sequence, because the model reads the length of its masks from it.
    outside: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    }
    if sequence:
        outside["model.norm"] = SequenceParallel(use_local_output=True)
    if model.get_output_embeddings() is not None:
        outside["lm_head"] = ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1) if loss else Replicate(), use_local_output=not loss
        )
    elif sequence:  # every rank computes the values of the whole sequence
        outside["score"] = PrepareModuleInput(
            input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=True
        )
    parallelize_module(model, mesh, outside)
    for layer in model.model.layers:
        plan = _layer_plan(quirks, stream=stream, sequence=sequence)
        parallelize_module(layer, mesh, _with_adapters(layer, plan, sequence=sequence))
        if hasattr(layer.self_attn, "sinks"):
            _cut_sinks(layer.self_attn, mesh)
    if sequence:  # the residual stream is sharded where it enters the first layer
        cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
        parallelize_module(model.model.layers[0], mesh, cut)
    if tied:
        _tie(model)


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """Holds a rank's part of the logits.

    logits: (rows, length, V of this rank).
    start: the token of the first logit.
    group: the ranks that hold all shards, or None if the logits are not sharded.
    """

    logits: Tensor
    start: int = 0
    group: dist.ProcessGroup | None = None


def vocabulary_shard(logits: Tensor) -> VocabularyShard:
    """Returns this rank's part of a model's logits: its shard if they are sharded along the vocabulary, else all.

    DTensor shards as torch.chunk does: the first ranks have ceil(V / tp) tokens, and the last ranks fewer or none.
    """
    if not isinstance(logits, DTensor):
        return VocabularyShard(logits=logits)
    assert logits.placements == (Shard(logits.ndim - 1),)
    mesh, whole, local = logits.device_mesh, logits.shape[-1], logits.to_local()
    size = math.ceil(whole / mesh.size())
    start = min(mesh.get_local_rank() * size, whole)
    assert local.shape[-1] == min(size, whole - start)
    return VocabularyShard(logits=local, start=start, group=mesh.get_group())


def _layer_plan(quirks: FamilyQuirks, *, stream: Placement, sequence: bool) -> dict[str, ParallelStyle]:
    is_routed, is_fused = quirks.has_routers, "self_attn.qkv_proj" in quirks.whole_outputs
    columns = () if is_fused else _HEADS if is_routed else (*_HEADS, *_FEED_FORWARD)
    rows = ("self_attn.o_proj",) if is_routed else ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in rows}
    plan |= {name: ColwiseParallel(output_layouts=Replicate()) for name in quirks.whole_outputs}
    plan |= {name: RowwiseParallel(input_layouts=Replicate(), output_layouts=stream) for name in quirks.recut_inputs}
    if quirks.head_dimension is not None:
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            plan[name] = SequenceParallel(sequence_dim=quirks.head_dimension, use_local_output=True)
    if sequence:
        whole = Replicate()
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,))
        if is_routed:  # all ranks run whole experts and keep their slice; the output includes routers' weights
            plan["mlp"] = PrepareModuleInputOutput(
                input_layouts=(stream,),
                desired_input_layouts=(whole,),
                use_local_input=True,
                output_layouts=(whole, None),
                desired_output_layouts=(stream, None),  # type: ignore[arg-type]  # torch takes None for no tensor
            )
        plan |= {name: SequenceParallel(use_local_output=True) for name in quirks.stream_norms}
    return plan


def _cut_sinks(attention: Any, mesh: DeviceMesh) -> None:
    """Leaves each rank the sinks of its heads, (H / tp,), which the model's code takes as a plain tensor."""
    # The model has no numbers yet, so nothing is sent.
    cut = distribute_tensor(attention.sinks.detach(), mesh, [Shard(0)], src_data_rank=None)
    attention.register_parameter("sinks", torch.nn.Parameter(cut))
    inner = attention.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        sinks = attention.sinks
        attention._parameters["sinks"] = sinks.to_local()
        try:
            return inner(*arguments, **options)
        finally:
            attention._parameters["sinks"] = sinks

    attention.forward = forward


def _with_adapters(
    layer: torch.nn.Module, plan: dict[str, ParallelStyle], *, sequence: bool
) -> dict[str, ParallelStyle]:
    """Adds the adapters of linear layers to the plan of a layer; they are sharded as their layer is.

    If a layer is sharded along its outputs, so is B; if it is sharded along its inputs, so is A. The other matrix,
    between the two, is whole on every rank.
    """
    found: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        if not is_adapted(layer.get_submodule(name)):
            found[name] = style
            continue
        found[f"{name}.base_layer"] = style
        if isinstance(style, ColwiseParallel):
            found[f"{name}.lora_B.{NAME}"] = style
            if sequence:  # attention and MLP pass the whole sequence as a DTensor
                found[f"{name}.lora_A.{NAME}"] = PrepareModuleInput(
                    input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),), use_local_output=True
                )
        else:
            assert isinstance(style, RowwiseParallel)
            found[f"{name}.lora_A.{NAME}"] = RowwiseParallel(input_layouts=style.input_layouts[0])
            if sequence:
                found[f"{name}.lora_B.{NAME}"] = PrepareModuleOutput(
                    output_layouts=Replicate(), desired_output_layouts=Shard(1)
                )
    return found


def _with_adapter(model: PreTrainedModel, key: str, style: str) -> list[tuple[str, str]]:
    """Returns the keys and styles for a key of a model's plan if linear layers may have adapters."""
    named = _matching(model, key)
    if not any(map(is_adapted, named)):
        return [(key, style)]
    assert all(map(is_adapted, named)), "a plan treats all layers alike"
    part = "lora_B" if "colwise" in style else "lora_A"
    return [(f"{key}.base_layer", style), (f"{key}.{part}.{NAME}", style)]


def _untie(model: PreTrainedModel) -> bool:
    """Gives a tied head its own weight, because plans replace the parameters of both modules separately.

    Returns whether the head was tied.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    head.weight = torch.nn.Parameter(embedding.weight.detach().clone())
    return True


def _tie(model: PreTrainedModel) -> None:
    """Ties the head to the embedding again, after both weights were sharded along the vocabulary."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight.placements == embedding.weight.placements
    head.weight = embedding.weight


def _matching(model: torch.nn.Module, key: str) -> list[torch.nn.Module]:
    """Returns the modules that a plan's key names; ``*`` in the key stands for a layer's number."""
    pattern = re.compile(re.escape(key).replace(r"\*", r"\d+"))
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]


def _sum_gradient_over(module: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Sums the gradients of the module's parameters over ``group``, for each micro-batch before it is accumulated.

    The hook must be on the parameter that autograd sees, and FSDP2 may replace that parameter between steps.
    """
    hooked: dict[str, torch.nn.Parameter] = {}

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    def attach(module: torch.nn.Module, _: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if torch.is_grad_enabled() and parameter.requires_grad and hooked.get(name) is not parameter:
                parameter.register_hook(summed)
                hooked[name] = parameter

    module.register_forward_pre_hook(attach)


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
