"""Computes attention over context-parallel ranks for any Hugging Face model, through transformers' attention interface.

A model loaded with ``attn_implementation=NAME`` calls ``_attend`` in every layer, and passes on the keyword argument
``ring``, the placement of the micro-batch. Sources: Ring Attention (arXiv 2310.01889), its zigzag form
(github.com/zhuzilin/ring-flash-attention issue 2), all-gathered keys and values (arXiv 2407.21783 section 3.3.2).

A sink is a learned score per head, without a value, in each softmax. flash-attn's kernels do not support it. A sink s
only adds exp(s) to the denominator, so attention without it, times sigmoid(log-sum-exp - s), is attention with it
(arXiv 2508.10925 section 2.2). In the backward pass, the kernels get the output and the log-sum-exp with the sink, and
compute the probabilities of keys from them (FlashAttention-2, arXiv 2307.08691, algorithm 2). The gradient of s is
-p (dout . out), with p the probability of the sink.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from conformance.spec.layout import Layout
from impl.context_parallel import sequence_sharding
from impl.context_parallel.flash_attn_shim import HEAD_SIZES, kernel
from impl.context_parallel.sequence_sharding import Placement
from impl.interface.distributed import moved
from impl.interface.micro_batches import MicroBatch, Outputs
from impl.interface.trainable import ContextConfig


class _WithSinks(torch.autograd.Function):
    """Computes causal attention of ``q`` (Q, heads, E) over all ranks' ``k``, ``v`` (K, kv_heads, E) with sinks.

    The result has the dtype of ``q``. ``sinks``: (heads,). ``documents``: arguments of the package's function that
    describe the documents. ``window``: as in Ring.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        documents: tuple[Any, ...],
        group: dist.ProcessGroup,
        scale: float,
        window: tuple[int, int],
    ) -> Tensor:
        from impl.context_parallel import ring_functions  # needs ring_flash_attn, an optional dependency

        ctx.options = {"softmax_scale": scale, "causal": True, "window_size": window}
        ctx.documents, ctx.group = documents, group
        without_sinks, lse_HQ = ring_functions.llama3.llama3_flash_attn_varlen_forward(
            group, q, k.contiguous(), v.contiguous(), *documents, **ctx.options
        )
        score_H1 = sinks[:, None].to(lse_HQ.dtype)
        # exp(lse - whole) and exp(score - whole) would both inherit the rounding error of whole.
        out: Tensor = (without_sinks * torch.sigmoid(lse_HQ - score_H1).T[..., None]).to(q.dtype)
        share_HQ = torch.sigmoid(score_H1 - lse_HQ)
        ctx.save_for_backward(q, k, v, out, torch.logaddexp(lse_HQ, score_H1), share_HQ)
        ctx.dtype = sinks.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from impl.context_parallel import ring_functions

        q, k, v, out, whole_HQ, share_HQ = ctx.saved_tensors
        dq, dk, dv = ring_functions.llama3.llama3_flash_attn_varlen_backward(
            ctx.group, dout, q, k.contiguous(), v.contiguous(), out, whole_HQ, *ctx.documents, **ctx.options
        )
        wide = whole_HQ.dtype
        dsinks = -(share_HQ * (dout.to(wide) * out.to(wide)).sum(dim=-1).T).sum(dim=-1)
        return dq, dk, dv, dsinks.to(ctx.dtype), None, None, None, None


NAME = "parity_ring"  # the attention implementation that models are loaded with
RingKind = Literal["llama3", "ring", "zigzag", "torchcp"]


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """Configures context-parallel attention.

    kind: ``llama3`` gathers keys and values, ``ring`` and ``zigzag`` pass them around, ``torchcp`` is PyTorch's own.
    packed: rows hold several documents. shipped: keeps the upstream behaviour of ring and zigzag. head_stride:
    key-value heads that llama3 gathers at a time. multiple: tokens per row and rank are a multiple of it.
    """

    kind: RingKind
    packed: bool
    shipped: bool
    head_stride: int
    multiple: int


def ring_kind(layout: Layout) -> RingKind:
    """Returns the kind of context parallelism of a layout."""
    kinds: tuple[RingKind, ...] = ("ring", "zigzag", "torchcp")
    return next((kind for kind in kinds if kind in layout.options), "llama3")


class RingAttention:
    """Splits micro-batches over context-parallel ranks, attends over all ranks, and gathers the results.

    ``slices``: process group of the Ulysses ranks that share this rank's position in the ring. Each holds an equal
    slice of the position's tokens. Ulysses itself gathers the slices for attention, so ``config.multiple`` must be a
    multiple of the group's size.
    """

    def __init__(
        self, group: dist.ProcessGroup, config: RingConfig, *, slices: dist.ProcessGroup | None = None
    ) -> None:
        self.group, self.config, self.slices = group, config, slices
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.function, self.varlen = _function(config)

    def resolved(self, device: str, compute: torch.dtype) -> dict[str, Any]:
        """Returns the configuration in use, as JSON values."""
        return {**vars(self.config), "kernel": kernel(torch.device(device), compute)}

    def shard(self, inputs: MicroBatch, *, multiple: int | None = None) -> tuple[MicroBatch, "Ring"]:
        """Returns this rank's part of a micro-batch, and the argument ``ring`` for the model.

        ``multiple`` replaces the configured value, to give several micro-batches the same length. The placement is
        computed on the CPU, from the ``origin`` of ``inputs``, or from a copy if it has none.
        """
        kind, packed = self.config.kind, self.config.packed
        placement = sequence_sharding.place(
            inputs.origin or inputs.to("cpu"),
            split="slices" if kind == "llama3" else "documents" if packed else "rows",
            size=self.size,
            zigzag=kind in ("zigzag", "torchcp"),
            multiple=multiple or self.config.multiple,
        )
        device = inputs.tokens.device
        source = placement.source[self.rank]
        if self.slices:
            source = source.chunk(dist.get_world_size(self.slices), dim=1)[dist.get_rank(self.slices)]
        return sequence_sharding.shard_inputs(inputs, moved(source, device)), Ring(self, placement, device)

    def restore(self, own: Tensor, ring: "Ring", *, rows: int, length: int) -> Tensor:
        """Gathers the outputs of all tokens, (rows, length) and 0 in padding, on all ranks, from each rank's ``own``.

        Differentiable. The backward pass returns the local slice of the gradient without a reduction: every rank
        evaluates the same loss, so each token counts exactly once, and the gradients of parameters must be *summed*
        over context-parallel ranks.
        """
        if self.slices:
            own = torch.cat(_gather(own, self.slices).unbind(), dim=1)
        parts = _gather(own, self.group)
        return sequence_sharding.restore(parts, ring.source, rows=rows, length=length)


class Ring:
    """Attends within one micro-batch that is placed on context-parallel ranks; every layer calls it."""

    def __init__(self, attention: RingAttention, placement: Placement, device: torch.device) -> None:
        self.source = moved(placement.source, device)
        self._attention = attention
        self._documents: tuple[Any, ...] = ()  # arguments of the functions for documents laid end to end
        self._equal = 0  # on a single rank, the number of documents if they are equally long
        if attention.config.kind == "llama3":
            from impl.context_parallel import ring_functions

            assert placement.starts is not None
            # These starts are on the CPU: the package reads them one by one, and would wait for a GPU each time.
            starts_q, starts_k, *longest, own_keys = ring_functions.llama3.llama3_flash_attn_prepare_cu_seqlens(
                placement.starts, causal=True, rank=attention.rank, world_size=attention.size
            )
            starts = (moved(starts_q, device), moved(starts_k, device))
            self._documents = (*starts, *longest, attention.config.head_stride, own_keys)
            lengths = placement.starts.diff()
            self._equal = len(lengths) if attention.size == 1 and bool((lengths == lengths[0]).all()) else 0
        elif placement.starts is not None:
            longest = int((placement.starts[1:] - placement.starts[:-1]).max())
            self._documents = (moved(placement.starts, device), longest)

    @property
    def documents(self) -> tuple[Tensor, int]:
        """Returns the starts of documents laid end to end, int32 (documents + 1,), and the longest length in tokens.

        The last number is the end of the last document. Only for a single rank.
        """
        assert self._attention.config.kind == "llama3"
        assert self._attention.size == 1
        starts, _, longest, *_ = self._documents
        return starts, longest

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: tuple[int, int],
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Computes causal attention of ``q`` (rows, length, heads, E) over all ranks' keys and values.

        ``k``: (rows, length, kv_heads, E). ``v``: (rows, length, kv_heads, V). ``window``: how many keys a query sees
        before and after its own, -1 is no limit. ``sinks``: (heads,), for llama3 only. Returns (rows, length, heads,
        V).
        """
        size, largest = v.shape[-1], max(q.shape[-1], v.shape[-1])
        width = math.ceil(largest / HEAD_SIZES) * HEAD_SIZES
        if q.shape[-1] == size == width:
            return self._attend(q, k, v, scale=scale, window=window, sinks=sinks)
        # Kernels need one head size, a multiple of HEAD_SIZES. Values of latent attention have another size than
        # queries; padding with zeros changes nothing.
        q, k, v = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        return self._attend(q, k, v, scale=scale, window=window, sinks=sinks)[..., :size]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: tuple[int, int], sinks: Tensor | None
    ) -> Tensor:
        if self._equal and window == (-1, -1) and sinks is None and kernel(q.device, q.dtype) != "plain":
            # A single rank: PyTorch may choose a faster kernel than those for documents laid end to end.
            q_rows, k_rows, v_rows = (x.view(self._equal, -1, *x.shape[2:]).transpose(1, 2) for x in (q, k, v))
            rows = scaled_dot_product_attention(q_rows, k_rows, v_rows, is_causal=True, scale=scale, enable_gqa=True)
            return rows.transpose(1, 2).reshape(q.shape)
        options = (0.0, scale, True, window, None, False, False, self._attention.group)
        apply = self._attention.function.apply
        if self._attention.varlen:
            documents = self._documents
            if self._attention.config.kind == "llama3" and self._attention.size == 1:
                documents = (*documents[:4], k.shape[-2], documents[5])  # no gathering, so all heads at a time
            if sinks is not None:
                if self._attention.config.kind != "llama3":
                    raise ValueError(
                        "only default context parallelism has attention sinks; leave ring, zigzag and torchcp out"
                    )
                arguments = (q[0], k[0], v[0], sinks, documents, self._attention.group, scale, window)
                out: Tensor = _WithSinks.apply(*arguments)  # type: ignore[no-untyped-call]
            else:
                out = apply(q[0], k[0], v[0], *documents, *options)  # type: ignore[no-untyped-call]
            return out[None]
        dense: Tensor = apply(q, k, v, *options)  # type: ignore[no-untyped-call]
        return dense


def _function(config: RingConfig) -> tuple[type[torch.autograd.Function], bool]:
    """Returns the autograd function, and whether it takes documents laid end to end."""
    from impl.context_parallel import ring_functions  # needs ring_flash_attn, an optional dependency
    from impl.context_parallel.ring_functions import ContextParallelAttention

    match config.kind, config.packed:
        case "llama3", _:
            return ring_functions.llama3.Llama3FlashAttnVarlenFunc, True
        case "torchcp", _:
            return ContextParallelAttention, False
        case "ring", True:
            function, varlen = ring_functions.ring_varlen.RingFlashAttnVarlenFunc, True
        case "ring", _:
            function, varlen = ring_functions.ring.RingFlashAttnFunc, False
        case "zigzag", True:
            function, varlen = ring_functions.zigzag_varlen.ZigZagRingFlashAttnVarlenFunc, True
        case _:
            function, varlen = ring_functions.zigzag.ZigZagRingFlashAttnFunc, False
    return (function if config.shipped else ring_functions.corrected(function)), varlen


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gathers (rows, length) to (size, rows, length); backward returns the gradient of the rank's own part only."""
    parts: Tensor = _Gather.apply(own, group, dist.get_rank(group))  # type: ignore[no-untyped-call]
    return parts


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup, rank: int) -> Tensor:
        ctx.rank = rank
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.rank], None, None


def _attend(
    module: torch.nn.Module,
    query: Tensor,  # (rows, heads, length, E)
    key: Tensor,  # (rows, kv_heads, length, E)
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ring: Ring | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes attention for transformers' interface; returns (rows, length, heads, E).

    Raises ValueError for a model that does not pass ``ring`` on, and for dropout and softcap.
    """
    if ring is None:
        raise ValueError(
            f"{type(module).__name__} did not get the argument 'ring': this model does not pass keyword arguments to "
            f"its attention layers; use sp1"
        )
    if dropout or softcap:
        raise ValueError(
            f"{type(module).__name__} uses dropout or softcap, which context parallelism does not support; use sp1"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    # Under autocast, queries and keys leave the rotary embedding in float32, and values are in half precision. Kernels
    # take one dtype, and their own products must not be cast.
    q, k, v = (x.transpose(1, 2).to(value.dtype) for x in (query, key, value))
    with torch.autocast(q.device.type, enabled=False):
        return ring(q, k, v, scale=scale, window=window, sinks=s_aux), None


def register() -> None:
    """Registers the attention function NAME with transformers, without a mask, because Ring separates documents."""
    AttentionInterface.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)


class MeshContext(Protocol):
    """Lists the part of a context that one model needs: configuration, device mesh and context-parallel attention."""

    config: ContextConfig
    mesh: DeviceMesh
    ring: RingAttention | None

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor: ...


class ModelOutputs(Protocol):
    """Returns the outputs of the tokens in ``inputs``; ``options`` are keyword arguments for the model."""

    def __call__(self, inputs: MicroBatch, **options: Ring) -> Outputs: ...


def forward_over_ring(ring: RingAttention | None, inputs: MicroBatch, outputs: ModelOutputs) -> Outputs:
    """Returns the outputs of a whole micro-batch on all context-parallel ranks; ``outputs`` gets this rank's part."""
    if ring is None:
        return outputs(inputs)
    own, placement = ring.shard(inputs)
    rows, length = inputs.labels.shape
    return outputs(own, ring=placement).each(lambda tensor: ring.restore(tensor, placement, rows=rows, length=length))
