"""Describes how ranks are arranged, and options that change communication but not the result.

A layout is written as a short id such as ``dp2.tp2`` or ``dp4.rep2.lastsync``, which is part of a cell's id. Validation
errors name the numbers that do not fit, and suggest a layout that fits.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from conformance.core.errors import UsageError, shown


@dataclass(frozen=True)
class Term:
    """Explains an axis or option in one line. ``elsewhere``: its names in other frameworks."""

    meaning: str
    elsewhere: str = ""


AXES: Mapping[str, Term] = {
    "dp": Term(
        "data-parallel ranks (replicas x shards)",
        "Megatron data_parallel_size; torchtitan data_parallel_shard_degree x data_parallel_replicate_degree",
    ),
    "rep": Term(
        "replicas among the data-parallel ranks; 1 < rep < dp is hybrid sharding (HSDP)",
        "torchtitan data_parallel_replicate_degree; DeepSpeed mics_shard_size",
    ),
    "hpz": Term(
        "ranks that keep a second copy of the weights between them, from a forward pass to the update, and gather it "
        "in backward passes (ZeRO++ hpZ, arXiv 2306.10209)",
        "DeepSpeed zero_hpz_partition_size",
    ),
    "ep": Term(
        "expert-parallel ranks: each has its own rows, and its own experts in every layer",
        "Megatron expert_model_parallel_size; torchtitan expert_parallel_degree; DeepSpeed ep_size",
    ),
    "tp": Term(
        "tensor-parallel ranks",
        "Megatron tensor_model_parallel_size; torchtitan tensor_parallel_degree; DeepSpeed autotp_size",
    ),
    "sp": Term(
        "context-parallel ranks: each holds a part of every sequence, and attention is exact over all parts",
        "cp; Megatron context_parallel_size; torchtitan context_parallel_degree; OpenRLHF ring_attn_size",
    ),
    "ulysses": Term(
        "ranks that exchange sequence slices for attention heads (all-to-all)",
        "DeepSpeed sequence_parallel_size; verl ulysses_sequence_parallel_size",
    ),
    "stride": Term(
        "key-value heads that context-parallel ranks gather at a time (--ring-head-stride)",
        "ring_flash_attn heads_k_stride; OpenRLHF ring_head_stride",
    ),
    "pp": Term("pipeline stages", "Megatron pipeline_model_parallel_size; torchtitan pipeline_parallel_degree"),
    "vpp": Term(
        "virtual pipeline stages of each rank (interleaved schedule)",
        "Megatron virtual_pipeline_model_parallel_size",
    ),
}
ZERO_STAGES: Mapping[int, Term] = {
    0: Term("nothing is sharded over data-parallel ranks", "DDP; FSDP NO_SHARD"),
    1: Term(
        "the optimizer state is sharded",
        "Megatron use_distributed_optimizer, with Muon use_layer_wise_distributed_optimizer (whole parameters)",
    ),
    2: Term("gradients are sharded as well", "FSDP SHARD_GRAD_OP"),
    3: Term("parameters are sharded as well", "FSDP FULL_SHARD"),
}
OPTIONS: Mapping[str, Term] = {
    "plan": Term("tensor parallelism by the backend's explicit plan instead of the model's own plan"),
    "seqpar": Term(
        "norms and residuals between tensor-parallel blocks are sharded along the sequence",
        "Megatron sequence_parallel; torch SequenceParallel",
    ),
    "losspar": Term(
        "cross-entropy on vocabulary shards; logits are never gathered",
        "torch loss_parallel; Megatron vocab_parallel_cross_entropy",
    ),
    "ring": Term(
        "context parallelism that passes keys and values around a ring, with each document in contiguous parts "
        "(default: keys and values are gathered, as for Llama 3)",
        "ring_flash_attn ring",
    ),
    "zigzag": Term(
        "a ring with each document cut so that causal attention is equal work on all ranks",
        "ring_flash_attn zigzag; Megatron cp_comm_type p2p",
    ),
    "torchcp": Term("PyTorch's own context parallelism", "torch context_parallel; torchtitan context_parallel_degree"),
    "ddp": Term(
        "PyTorch's DistributedDataParallel: each rank holds the whole model, and gradients are averaged in buckets",
        "torch DistributedDataParallel; Accelerate MULTI_GPU",
    ),
    "fsdp1": Term(
        "PyTorch's FullyShardedDataParallel, with original parameters and each layer wrapped; with zero2, weights stay "
        "gathered until the backward pass ends",
        "torch FullyShardedDataParallel FULL_SHARD, with zero2 SHARD_GRAD_OP, with rep HYBRID_SHARD",
    ),
    "mfsdp": Term(
        "Megatron-FSDP: layers' optimizer state, with zero2 gradients, with zero3 weights lie in flat buffers that "
        "data-parallel ranks share out",
        "Megatron use_megatron_fsdp, data_parallel_sharding_strategy; megatron_fsdp fully_shard",
    ),
    "lastsync": Term(
        "gradients are reduced at the last micro-batch only",
        "FSDP no_sync, set_requires_gradient_sync; DDP no_sync",
    ),
    "manual": Term(
        "the caller, not the library, says which micro-batch is the last; gradients are reduced over replicas after it",
        "DeepSpeed set_gradient_accumulation_boundary; FSDP2 set_requires_all_reduce; Megatron no_sync, grad_sync_func",
    ),
    "buckets": Term(
        "gradients are reduced in many small buckets, where a tiny model would have one",
        "DeepSpeed reduce_bucket_size; Megatron bucket_size (overlap has several)",
    ),
    "pertoken": Term(
        "the library divides gradients by the number of target tokens, which it counts",
        "Megatron calculate_per_token_loss",
    ),
    "varlen": Term(
        "micro-batches of a pipeline keep their own lengths, which stages send to each other, instead of one length",
        "Megatron variable_seq_lengths",
    ),
    "ckpt": Term(
        "activation recomputation: a layer's forward pass is repeated in the backward pass",
        "activation checkpointing; Megatron recompute_granularity; transformers gradient_checkpointing",
    ),
    "reentrant": Term(
        "a recomputed layer has a backward pass of its own inside the model's", "torch checkpoint(use_reentrant=True)"
    ),
    "dropout": Term(
        "layers draw masks of dropout, at a rate (1e-15) that drops nothing, so that results do not change",
        "Megatron hidden_dropout; transformers attention_dropout; peft lora_dropout",
    ),
    "compile": Term("layers are compiled by torch.compile", "torchtitan compile.enable"),
    "te": Term(
        "layers of TransformerEngine (in half precision with its attention) instead of the backend's own",
        "Megatron transformer_impl transformer_engine",
    ),
    "remainders": Term(
        "a float32 master is kept as the bf16 parameter, which is its upper half, rounded, and its lower 16 bits",
        "Megatron use_precision_aware_optimizer, store_param_remainders; TransformerEngine FusedAdam",
    ),
    "fp8tensor": Term(
        "linear layers multiply in float8 (e4m3, gradients in e5m2), with one scale for each tensor of a rank's "
        "micro-batch",
        "torchao recipe tensorwise; TransformerEngine Float8CurrentScaling; Megatron fp8_recipe tensorwise",
    ),
    "fp8row": Term(
        "linear layers multiply in float8 (e4m3), with a scale for each row, a power of two", "torchao recipe rowwise"
    ),
    "fp8rowhp": Term(
        "as fp8row, but gradients of weights are multiplied in the precision of the cell, and gradients of inputs with "
        "one scale for the weight",
        "torchao recipe rowwise_with_gw_hp",
    ),
    "fp8delayed": Term(
        "as fp8tensor, but with scales from the largest magnitudes of the 4 micro-batches before, of all ranks",
        "torchao ScalingType.DELAYED (until 0.9), history_len; TransformerEngine DelayedScaling, amax_history_len",
    ),
    "fp8block": Term(
        "linear layers multiply in float8 (e4m3): each 128 numbers along the sum have a scale, a power of two, and of "
        "weights each 128 x 128",
        "TransformerEngine Float8BlockScaling; Megatron fp8_recipe blockwise; DeepSeek-V3",
    ),
    "fp8mx": Term(
        "linear layers multiply in MXFP8 (e4m3): each 32 numbers along the sum have a scale, a power of two by which "
        "none of them becomes too large",
        "torchao MXFP8Linear, recipe mxfp8_rceil",
    ),
    "fp8ends": Term(
        "the first and the last layer multiply in the precision of the cell, not in float8",
        "Megatron first_last_layers_bf16",
    ),
    "fp8gather": Term(
        "weights are gathered in float8, with scales that ranks agree on after each update",
        "torchao enable_fsdp_float8_all_gather, precompute_float8_dynamic_scale_for_fsdp",
    ),
    "offload": Term(
        "parameters, gradients and optimizer state are kept on the CPU",
        "FSDP CPUOffloadPolicy; DeepSpeed offload_optimizer, offload_param",
    ),
    "leaf": Term(
        "ZeRO-3 gathers weights once for each layer instead of for each module", "DeepSpeed set_z3_leaf_modules"
    ),
    "overlap": Term(
        "gradients are reduced, and sharded parameters are gathered, while ranks compute",
        "Megatron overlap_grad_reduce, overlap_param_gather; DeepSpeed overlap_comm",
    ),
    "ownopt": Term(
        "the backend builds the optimizer from its configuration, instead of using torch's", "DeepSpeed FusedAdam"
    ),
    "ownaux": Term(
        "the load-balancing loss of experts is the library's own, of each layer and micro-batch",
        "Megatron moe_aux_loss_coeff",
    ),
    "globalaux": Term(
        "the load-balancing loss of experts is the library's own, with the counts of all ranks and of the step so far",
        "Megatron moe_router_load_balancing_type global_aux_loss",
    ),
    "shipped": Term("the library's own behavior where the backend corrects a defect by default"),
}
ALIASES = {"cp": "sp"}  # accepted in ids; an id is written with the axis itself
Float8Recipe = Literal["fp8tensor", "fp8row", "fp8rowhp", "fp8delayed", "fp8block", "fp8mx"]
FLOAT8: tuple[Float8Recipe, ...] = get_args(Float8Recipe)  # a layout has at most one
OWN_BALANCE = ("ownaux", "globalaux")
_NEEDS_TP = ("plan", "seqpar", "losspar")
WRAPPERS = ("ddp", "fsdp1", "mfsdp")  # each replaces what reduces gradients, so a layout has at most one
# Parts of DeepSpeed that were tried.
NOT_BUILT = {
    "qwz": "ZeRO++ quantizes weights on GPUs only, by kernels that read float16; use hpz2, or zero3",
    "qgz": "ZeRO++ quantizes gradients on GPUs only, by kernels that read float16; use hpz2, or zero3",
    "superoffload": "SuperOffload runs on NVIDIA's GPUs only; use offload",
    "zenflow": "ZenFlow lets gradients wait by design, and takes no other optimizer than its own AdamW; use offload",
}
_RINGS = ("ring", "zigzag", "torchcp")  # each replaces the default context parallelism, so a layout has at most one
DROPOUT_RATE = 1e-15  # of the option dropout: float64 rounds the factor 1 / (1 - rate) to about 1
ZERO = "zero"  # prefix of the ZeRO stage in an id
MOST_RANKS = 2**16  # no machine has more ranks; a larger number is a typing error


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Holds sizes of the mesh axes, a ZeRO stage, and a sorted tuple of OPTIONS.

    The world size is dp x ep x tp x sp x ulysses x pp. ``zero``: the ZeRO stage (Rajbhandari et al., arXiv 1910.02054;
    see ZERO_STAGES); None: the backend's default.
    Raises UsageError if an axis is not positive, if there are more ranks than MOST_RANKS, if ``rep`` does not divide
    ``dp``, if ``hpz`` does not divide the ranks that share weights or the stage is not 3, for an unknown ZeRO stage,
    and for an option that is unknown, has no axis to act on, or contradicts another.
    """

    dp: int = 1
    rep: int = 1
    hpz: int = 1
    ep: int = 1
    tp: int = 1
    sp: int = 1
    ulysses: int = 1
    stride: int = 1
    pp: int = 1
    vpp: int = 1
    zero: int | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for axis in AXES:
            if (size := getattr(self, axis)) < 1:
                raise UsageError(
                    f"{axis}={size}: every axis of a layout needs at least one rank; use {axis}1 or leave it out"
                )
        if (most := max(self.world_size, self.rep, self.hpz, self.stride, self.vpp)) > MOST_RANKS:
            raise UsageError(f"{most} ranks or parts are more than any machine has ({MOST_RANKS}); use smaller numbers")
        if self.dp % self.rep:
            raise UsageError(
                f"rep={self.rep} does not divide dp={self.dp} (dp counts replicas x shards); "
                f"use rep{_divisor(self.dp, self.rep)}"
            )
        if (shards := self.dp * self.sp * self.ulysses) % self.hpz:
            raise UsageError(
                f"hpz={self.hpz} does not divide dp x sp x ulysses={shards}, the ranks that share weights; "
                f"use hpz{_divisor(shards, self.hpz)}"
            )
        if self.hpz > 1 and self.zero in (0, 1, 2):
            raise UsageError(
                f"zero{self.zero} shards no weights, of which hpz keeps a copy; use zero3, or leave hpz out"
            )
        if self.zero is not None and self.zero not in ZERO_STAGES:
            raise UsageError(f"there is no ZeRO stage {self.zero}; use zero0, zero1, zero2 or zero3, or leave it out")
        for option in self.options:
            if option not in OPTIONS:
                raise UsageError(_not_built(option) or f"unknown layout option {option!r}; known: {', '.join(OPTIONS)}")
            if option in _NEEDS_TP and self.tp == 1:
                raise UsageError(f"option {option} needs tensor parallelism; add tp2 or leave it out")
            if option == "varlen" and self.pp == 1:
                raise UsageError("option varlen is for pipeline stages; add pp2 or leave it out")
            if option == "fp8ends" and not self.float8:
                raise UsageError(f"option fp8ends leaves layers out of float8; add one of {', '.join(FLOAT8)}")
            if option == "fp8gather" and "fp8tensor" not in self.options:
                raise UsageError("option fp8gather needs one scale for each weight; add fp8tensor or leave it out")
            if option == "reentrant" and "ckpt" not in self.options:
                raise UsageError("option reentrant is a way to recompute activations; add ckpt or leave it out")
            if option in _RINGS and self.sp == 1:
                raise UsageError(f"option {option} needs a ring; add sp2 or leave it out")
            if option == "ddp" and (self.zero is not None or self.rep > 1):
                raise UsageError("with ddp every rank is a replica; leave zero and rep out, or use fsdp1")
        for kinds, what in (
            (_RINGS, "rings"),
            (FLOAT8, "recipes of float8"),
            (OWN_BALANCE, "load-balancing losses"),
            (WRAPPERS, "wrappers of a model"),
        ):
            if len(found := [option for option in self.options if option in kinds]) > 1:
                raise UsageError(f"options {', '.join(found)} are different {what}; keep one of them")
        if self.stride > 1 and not self.gathers:
            raise UsageError(
                f"stride={self.stride} is for rings that gather keys and values; "
                f"use sp2 without {' or '.join(_RINGS)}, or leave it out"
            )
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"vpp={self.vpp} divides the work of pipeline stages further; add pp2 or leave it out")
        object.__setattr__(self, "options", tuple(sorted(set(self.options), key=list(OPTIONS).index)))

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Reads an id such as ``dp2.tp2.seqpar``; its parts may be in any order, and ``cp`` is accepted for ``sp``.

        Sizes are ASCII digits without leading zeros, so that a size has one spelling. Raises UsageError for other text.
        """
        axes: dict[str, int] = {}
        options: list[str] = []
        for part in text.split("."):
            match = re.fullmatch(r"([a-z]+)(\d+)", part)
            axis = ALIASES.get(match[1], match[1]) if match else ""
            if match and axis in (*AXES, ZERO):
                if axis in axes:
                    raise UsageError(f"layout {shown(text)} names {axis} twice")
                if not re.fullmatch(r"0|[1-9][0-9]{0,8}", match[2]):
                    raise UsageError(
                        f"layout {shown(text)}: the size in {shown(part)} has to be ASCII digits without leading "
                        f"zeros, and below a billion; e.g. {match[1]}2"
                    )
                axes[axis] = int(match[2])
            elif part in OPTIONS:
                options.append(part)
            else:
                if re.fullmatch(rf"((?:{'|'.join((*AXES, *ALIASES, ZERO))})[0-9]+){{2,}}", part):
                    near = re.sub("(?<=[0-9])(?=[a-z])", ".", part)
                    raise UsageError(f"layout {shown(text)}: {shown(part)} lacks dots between its axes; give {near}")
                raise UsageError(
                    _not_built(part)
                    or f"layout {shown(text)}: {shown(part)} is neither an axis with a size ({', '.join(AXES)}; "
                    f"e.g. dp2), a ZeRO stage (zero0 to zero3) nor an option ({', '.join(OPTIONS)})"
                )
        return cls(**axes, options=tuple(options))

    @classmethod
    def for_world(cls, world_size: int, *, rep: int = 1, tp: int = 1, sp: int = 1, pp: int = 1) -> "Layout":
        """Builds the layout of ``world_size`` ranks in which dp = world_size / (sp x tp x pp).

        Raises UsageError if ``world_size`` is not divisible by sp x tp x pp.
        """
        model = tp * sp * pp
        if world_size < model or world_size % model:
            raise UsageError(
                f"world size {world_size} is not divisible by sp x tp x pp = {sp} x {tp} x {pp} = {model}; "
                f"use {max(model, world_size // model * model)} ranks, or e.g. {Layout(dp=max(1, world_size))}"
            )
        return cls(dp=world_size // model, rep=rep, tp=tp, sp=sp, pp=pp)

    def __str__(self) -> str:
        sizes = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        stage = [] if self.zero is None else [f"{ZERO}{self.zero}"]
        return ".".join([*(sizes or ["dp1"]), *stage, *self.options])

    @property
    def gathers(self) -> bool:
        """Tells whether context-parallel ranks gather keys and values, ``stride`` heads at a time, and use no ring."""
        return self.sp > 1 and not set(_RINGS) & set(self.options)

    @property
    def float8(self) -> Float8Recipe | None:
        """Returns the recipe of float8 that linear layers multiply by."""
        return next((recipe for recipe in FLOAT8 if recipe in self.options), None)

    @property
    def scales_by_histories(self) -> bool:
        """Tells whether TransformerEngine scales by magnitudes of micro-batches before, which a resume has to go on
        with."""
        return {"te", "fp8delayed"} <= {*self.options}

    def stage(self, default: int | None) -> int | None:
        """Returns the ZeRO stage, of a backend that has the stage ``default`` if a layout names none."""
        return 0 if "ddp" in self.options else default if self.zero is None else self.zero

    @property
    def wrapper(self) -> str | None:
        """Returns the option that names the wrapper of the model."""
        return next((wrapper for wrapper in WRAPPERS if wrapper in self.options), None)

    @property
    def world_size(self) -> int:
        return self.data * self.tp * self.sp * self.ulysses * self.pp

    @property
    def data(self) -> int:
        """Returns the number of ranks that have different rows."""
        return self.dp * self.ep

    def validate(
        self,
        *,
        heads: int,
        kv_heads: int,
        layers: int,
        rows: int,
        accumulation: int,
        experts: int = 0,
        rows_together: int = 1,
    ) -> None:
        """Checks the layout against a model and a scenario. Raises UsageError, which suggests a layout that works.

        heads, kv_heads, layers, experts: of the model. rows: rows per optimizer step. accumulation: micro-batches per
        step.
        """
        sizes = {"heads": heads, "kv_heads": kv_heads, "layers": layers, "rows": rows, "accumulation": accumulation}
        if nothing := [name for name, size in sizes.items() if size < 1]:
            raise UsageError(f"a layout cannot cut what is not there: {', '.join(nothing)} has to be at least 1")
        self._validate_stages(layers=layers, accumulation=accumulation)
        if heads % self.tp or kv_heads % self.tp:
            better = dataclasses.replace(self, tp=_divisor(kv_heads, self.tp), options=())
            raise UsageError(
                f"tp={self.tp} must divide the model's {heads} attention heads and its {kv_heads} key-value heads "
                f"(a head is not cut); {better} would work"
            )
        # Ulysses divides the heads over its ranks; if there are too few key-value heads, it copies them.
        rank_heads, rank_kv_heads = heads // self.tp, kv_heads // self.tp
        if rank_heads % self.ulysses or (rank_kv_heads % self.ulysses and self.ulysses % rank_kv_heads):
            better = dataclasses.replace(self, ulysses=_divisor(rank_kv_heads, self.ulysses))
            raise UsageError(
                f"ulysses={self.ulysses} must divide a rank's {rank_heads} attention heads, and divide its "
                f"{rank_kv_heads} key-value heads or be a multiple of them; {better} would work"
            )
        attended = max(1, rank_kv_heads // self.ulysses)
        if attended % self.stride:
            better = dataclasses.replace(self, stride=_divisor(attended, self.stride))
            raise UsageError(
                f"stride={self.stride} must divide a rank's {attended} key-value heads; {better} would work"
            )
        if self.ep > 1 and (not experts or experts % self.ep):
            better = dataclasses.replace(self, ep=_divisor(experts, self.ep) if experts else 1)
            raise UsageError(
                f"ep={self.ep} must divide the model's {experts or 'missing'} experts; {better} would work"
            )
        parts = accumulation * rows_together
        if rows % (self.data * parts):
            whole = max(1, rows // parts)
            ep = self.ep if whole % self.ep == 0 else _divisor(math.gcd(whole, experts), self.ep)
            better = dataclasses.replace(self, dp=_divisor(max(1, whole // ep), self.dp), ep=ep, rep=1)
            ranks = f"dp={self.dp}" if self.ep == 1 else f"dp={self.dp} x ep={self.ep}"
            raise UsageError(
                f"{rows} rows per step cannot be divided over {ranks} x accumulation={accumulation}"
                f"{' in whole pairs' if rows_together > 1 else ''}; "
                f"{better} would work, or data.rows={-(-rows // (self.data * parts)) * self.data * parts}"
            )

    def _validate_stages(self, *, layers: int, accumulation: int) -> None:
        if self.pp * self.vpp > layers + 2:
            pp = min(self.pp, layers + 2)
            better = dataclasses.replace(self, pp=pp, vpp=(layers + 2) // pp if pp > 1 else 1)
            raise UsageError(
                f"pp={self.pp} x vpp={self.vpp} = {self.pp * self.vpp} stages need as many parts, and the model has "
                f"{layers} layers, an embedding and a head; {better} would work"
            )
        if self.vpp > 1 and accumulation < self.pp:
            better = dataclasses.replace(self, vpp=1)
            raise UsageError(
                f"vpp={self.vpp} needs at least as many micro-batches as pp={self.pp}, and accumulation is "
                f"{accumulation}; {better} would work, or a scenario with accumulation of {self.pp} or more"
            )


def _not_built(option: str) -> str:
    """Returns why an option that people may look for is not built in, and what to use instead; empty for another."""
    if option.startswith("fp8"):
        return f"no recipe of float8 is named {shown(option)}; known: {', '.join(FLOAT8)}, fp8ends and fp8gather"
    reason = NOT_BUILT.get(option.lower(), "")
    return reason and f"{shown(option)} is not built in: {reason} (docs/explanations/architecture.md, DeepSpeed)"


def _divisor(number: int, at_most: int) -> int:
    """Returns the largest divisor of ``number`` that is at most ``at_most``."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)
