"""Layout: HOW ranks are arranged, and options that change communication but not the result.

A layout is written as a short id such as ``dp2.tp2`` or ``dp4.rep2.lastsync``, which is part of a cell's id. Errors of
validation name the numbers that do not fit and suggest a layout that does.
"""

import dataclasses
import math
import re
from dataclasses import dataclass

from conformance.core.errors import UsageError, shown

AXES = {
    "dp": "data-parallel ranks (replicas x shards)",
    "rep": "replicas among the data-parallel ranks; hybrid sharding where 1 < rep",
    "ep": "expert-parallel ranks: each has rows of its own, and experts of its own in every layer",
    "tp": "tensor-parallel ranks",
    "sp": "ring (context) parallel ranks",
    "ulysses": "ranks that exchange sequence slices for attention heads (DeepSpeed-Ulysses)",
    "stride": "key-value heads that a ring gathers at a time (--ring_head_stride)",
    "pp": "pipeline stages",
    "vpp": "virtual pipeline stages of each rank (interleaved schedule)",
}
OPTIONS = {
    "plan": "tensor parallelism by an explicit plan of the backend instead of the model's own",
    "seqpar": "sequence-parallel norms and residuals between tensor-parallel blocks",
    "losspar": "cross-entropy on vocabulary shards, logits never gathered",
    "ring": "keys and values passed around the ring, each document in contiguous pieces (default: gathered, llama3)",
    "zigzag": "as ring, each document cut so that causal attention is the same work on all ranks",
    "torchcp": "PyTorch's own context parallel",
    "lastsync": "gradients reduced at the last micro-batch only",
    "ckpt": "activation checkpointing",
    "compile": "layers compiled by torch.compile",
    "te": "layers of TransformerEngine, in half precision with its attention, instead of the backend's own",
    "offload": "parameters, gradients and optimizer state kept on the CPU",
    "leaf": "weights that ZeRO-3 cuts gathered for a layer at a time, not for each module in it",
    "overlap": "gradients reduced, and parameters gathered where they are cut, while ranks compute",
    "ownopt": "the optimizer that the backend builds itself from its configuration, instead of torch's",
    "shipped": "the library's own behaviour where the backend corrects it by default",
}
_NEEDS_TP = ("plan", "seqpar", "losspar")
_RINGS = ("ring", "zigzag", "torchcp")  # each replaces the default kind of ring, so a layout has at most one
ZERO = "zero"  # prefix of the part of an id that names the ZeRO stage
MOST_RANKS = 2**16  # no machine has more ranks; a larger number is a typing error


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes, a ZeRO stage, and a sorted tuple of OPTIONS. World size = dp x ep x tp x sp x
    ulysses x pp.

    ``zero``: what is sharded over the data-parallel ranks (Rajbhandari et al., arXiv 1910.02054): 0 nothing, 1 the
    optimizer's state, 2 also gradients, 3 also parameters. None: the backend's default.
    Raises UsageError if an axis is not positive, if there are more ranks than MOST_RANKS, if ``rep`` does not divide
    ``dp``, for an unknown ZeRO stage, and for an option that is unknown, has no axis to act on, or contradicts another.
    """

    dp: int = 1
    rep: int = 1
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
        if (most := max(self.world_size, self.rep, self.stride, self.vpp)) > MOST_RANKS:
            raise UsageError(f"{most} ranks or parts are more than any machine has ({MOST_RANKS}); use smaller numbers")
        if self.dp % self.rep:
            raise UsageError(
                f"rep={self.rep} does not divide dp={self.dp} (dp counts replicas x shards); "
                f"use rep{_divisor(self.dp, self.rep)}"
            )
        if self.zero not in (None, 0, 1, 2, 3):
            raise UsageError(f"there is no ZeRO stage {self.zero}; use zero0, zero1, zero2 or zero3, or leave it out")
        for option in self.options:
            if option not in OPTIONS:
                raise UsageError(f"unknown layout option {option!r}; known: {', '.join(OPTIONS)}")
            if option in _NEEDS_TP and self.tp == 1:
                raise UsageError(f"option {option} needs tensor parallelism; add tp2 or leave it out")
            if option in _RINGS and self.sp == 1:
                raise UsageError(f"option {option} needs a ring; add sp2 or leave it out")
        if len(rings := [option for option in self.options if option in _RINGS]) > 1:
            raise UsageError(f"options {', '.join(rings)} are different rings; keep one of them")
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
        """Read an id such as ``dp2.tp2.seqpar``; the order of its parts does not matter.

        Sizes are ASCII digits without leading zeros, so that a size has one spelling. Raises UsageError for other text.
        """
        axes: dict[str, int] = {}
        options: list[str] = []
        for part in text.split("."):
            match = re.fullmatch(r"([a-z]+)(\d+)", part)
            if match and match[1] in (*AXES, ZERO):
                if match[1] in axes:
                    raise UsageError(f"layout {shown(text)} names {match[1]} twice")
                if not re.fullmatch(r"0|[1-9][0-9]{0,8}", match[2]):
                    raise UsageError(
                        f"layout {shown(text)}: the size in {shown(part)} has to be ASCII digits without leading "
                        f"zeros, and below a billion; e.g. {match[1]}2"
                    )
                axes[match[1]] = int(match[2])
            elif part in OPTIONS:
                options.append(part)
            else:
                raise UsageError(
                    f"layout {shown(text)}: {shown(part)} is neither an axis with a size ({', '.join(AXES)}; "
                    f"e.g. dp2), a ZeRO stage (zero0 to zero3) nor an option ({', '.join(OPTIONS)})"
                )
        return cls(**axes, options=tuple(options))

    @classmethod
    def for_world(cls, world_size: int, *, rep: int = 1, tp: int = 1, sp: int = 1, pp: int = 1) -> "Layout":
        """The layout of ``world_size`` ranks in which dp = world_size / (sp x tp x pp).

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
        """Whether a ring's ranks gather keys and values, ``stride`` heads at a time, instead of passing them around."""
        return self.sp > 1 and not set(_RINGS) & set(self.options)

    @property
    def world_size(self) -> int:
        return self.data * self.tp * self.sp * self.ulysses * self.pp

    @property
    def data(self) -> int:
        """The ranks that have rows of their own."""
        return self.dp * self.ep

    def validate(
        self, *, heads: int, kv_heads: int, layers: int, rows: int, accumulation: int, experts: int = 0
    ) -> None:
        """Raises UsageError, which suggests a layout that works, if the layout does not fit a model and a scenario.

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
        if rows % (self.data * accumulation):
            whole = max(1, rows // accumulation)
            ep = self.ep if whole % self.ep == 0 else _divisor(math.gcd(whole, experts), self.ep)
            better = dataclasses.replace(self, dp=_divisor(max(1, whole // ep), self.dp), ep=ep, rep=1)
            ranks = f"dp={self.dp}" if self.ep == 1 else f"dp={self.dp} x ep={self.ep}"
            raise UsageError(
                f"{rows} rows per step cannot be divided over {ranks} x accumulation={accumulation}; "
                f"{better} would work, or data.rows={-(-rows // (self.data * accumulation)) * self.data * accumulation}"
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


def _divisor(number: int, at_most: int) -> int:
    """Largest divisor of ``number`` that is at most ``at_most``."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)
