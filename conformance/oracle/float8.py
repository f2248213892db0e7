"""Models training in float8: operands are scaled, rounded to 8 bits, and multiplied without further error.

Formats and saturation are those of Micikevicius et al. (arXiv 2209.05433, sections 3 and 4): e4m3 ends at 448 and e5m2
at 57344, and numbers beyond the end become the end. The scale of a tensor, a row, or a block of a row maps its largest
magnitude to the end of the format; with powers of two it is the next lower power. Blocks of 32 are those of MXFP8
(Rouhani et al., arXiv 2310.10537), with scales as in Mishra et al. (arXiv 2506.08027); those of 128 are DeepSeek-V3's
(arXiv 2412.19437, section 3.3.2). A scaled operand is a float32 number before it is rounded, to nearest with ties to
even. In float64 two implementations of one recipe therefore round alike, and what is left is their mistakes.

With delayed scaling, as TransformerEngine and torchao name it, the largest magnitude is that of the last micro-batches,
over all ranks.

Megatron's layers multiply by the weights of queries, keys and values at once, and by those of gate and up. Scales of
tensors and of blocks are therefore shared between these. Each group of queries is followed by its keys and its values.
Tensor-parallel ranks cast their parts of matrices: of queries, keys, values, gate and up rows, of the others columns.

The noise run by the plain formula rounds what lies as near to a tie as the rounding of its dtype the other way, and in
passes over a rollout the other noise run does. Other honest runs may round each of these either way.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from conformance.models.components import Architecture
from conformance.oracle.primitives import Function, Module, Policy, Variant, Weights
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.conventions import Float8Products
from conformance.spec.observables import POLICY

Operand = Literal["input", "weight", "gradient"]
# GPUs add products of float8 up in few bits: on an H200, TransformerEngine's are 1.3e-4 to 3.3e-4 of their norm off.
# What is so near to a tie may be rounded the other way, and moves gradients as much as such products do.
KERNEL_ROUNDING = 2.0**-15
MULTIPLE = 16  # hardware multiplies matrices of float8 whose sizes are multiples of this


@dataclass(frozen=True)
class Format:
    """Describes a float8 format. mantissa: stored bits. smallest: exponent of its smallest normal number."""

    mantissa: int
    smallest: int
    largest: float


E4M3, E5M2 = Format(3, -6, 448.0), Format(2, -14, 57344.0)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Says how the operands of the three products of a linear layer are cast.

    gradient: the format of gradients of outputs; inputs and weights are e4m3. by_row: a scale for each row of the first
    operand and each column of the second, instead of one for a tensor. block: with by_row, a scale for each so many
    numbers of them; 0: for all. square: weights have a scale for each block x block. powers: scales are powers of two.
    whole_weight: the weight has one scale in the product for the gradient of the input. of_weight: whether the product
    for the gradient of the weight is in float8. history: the number of micro-batches before, by whose largest magnitude
    an operand is scaled; 0: by its own. multiple: sizes of matrices have to be multiples of it.
    """

    gradient: Format
    by_row: bool
    powers: bool
    whole_weight: bool
    of_weight: bool
    block: int = 0
    square: bool = False
    history: int = 0
    multiple: int = MULTIPLE


RECIPES = {
    "fp8tensor": Recipe(gradient=E5M2, by_row=False, powers=False, whole_weight=True, of_weight=True),
    "fp8row": Recipe(gradient=E4M3, by_row=True, powers=True, whole_weight=False, of_weight=True),
    "fp8rowhp": Recipe(gradient=E4M3, by_row=True, powers=True, whole_weight=True, of_weight=False),
    "fp8delayed": Recipe(gradient=E5M2, by_row=False, powers=False, whole_weight=True, of_weight=True, history=4),
    "fp8block": Recipe(
        gradient=E4M3, by_row=True, powers=True, whole_weight=False, of_weight=True, block=128, square=True
    ),
    "fp8mx": Recipe(gradient=E4M3, by_row=True, powers=True, whole_weight=False, of_weight=True, block=32, multiple=32),
}


def scale_of(x: Tensor, format: Format, *, dim: int | None, powers: bool) -> Tensor:
    """Returns the largest number of the format over the largest magnitude: of ``x``, or along ``dim``."""
    return _scale(x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True), format, powers=powers)


def _scale(magnitude: Tensor, format: Format, *, powers: bool) -> Tensor:
    scale = format.largest / torch.where(magnitude == 0, format.largest, magnitude)
    if not powers:
        return scale
    _, exponent = torch.frexp(scale)  # scale = m * 2^exponent with 0.5 <= m < 1
    return torch.ldexp(torch.ones_like(scale), exponent - 1)


def rounded(x: Tensor, format: Format, *, near: float = 0.0) -> Tensor:
    """Returns ``x`` rounded to the format, as float64. ``near``: relative distance from a tie below which the other
    neighbour is returned."""
    x = x.float().double().clamp(-format.largest, format.largest)
    _, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), (exponent - 1).clamp(min=format.smallest) - format.mantissa)
    units = x / step
    nearest = units.round()  # ties to even
    if near:
        other = torch.where(units < nearest, nearest - 1, nearest + 1)
        flips = (0.5 - (units - nearest).abs()) * step <= near * x.abs()
        nearest = torch.where(flips & (units != nearest), other, nearest)
    return (nearest * step).clamp(-format.largest, format.largest)


def magnitudes_of_blocks(x: Tensor, block: int, dims: Sequence[int]) -> Tensor:
    """Returns, for each number, the largest magnitude in its block, of which the last one may be smaller. ``dims``:
    along which blocks have this size; along another one they have size 1."""
    found = x.abs()
    for dim in dims:
        found = torch.cat([part.amax(dim, keepdim=True).expand_as(part) for part in found.split(block, dim)], dim)
    return found


class Magnitudes:
    """Holds the largest magnitudes that an operand had in the micro-batches before, of all data ranks.

    In the first micro-batch it is scaled by its own, which then counts twice: as torchao fills the history.
    """

    def __init__(self, length: int) -> None:
        self._before: deque[Tensor] = deque(maxlen=length)

    def largest(self, x: Tensor) -> Tensor:
        """Returns the magnitude by which ``x`` is scaled, and notes its own."""
        self._own = x.abs().amax()
        if not self._before:
            self._before.append(self._own)
        return torch.stack(tuple(self._before)).amax()

    def end_micro_batch(self, *, ends_step: bool) -> None:
        self._before.append(self._own)


class TEMagnitudes(Magnitudes):
    """Holds them as TransformerEngine does: the first scale is 1, and a magnitude of 0 is no part of the history.

    once: the operand is cast in the first micro-batch of a step only, as weights are; in others its magnitude is 0.
    Passes without gradients, as over a rollout, end no micro-batch: the next one to end has their magnitudes as well.
    """

    def __init__(self, length: int, end: float, *, once: bool) -> None:
        super().__init__(length)
        self._scaled_by, self._once, self._is_cast = torch.tensor(end), once, False
        self._next, self._own = self._scaled_by, torch.zeros([])

    def largest(self, x: Tensor) -> Tensor:
        if not self._is_cast:
            self._scaled_by, self._own = self._next.to(x), torch.maximum(self._own.to(x), x.abs().amax())
        return self._scaled_by

    def end_micro_batch(self, *, ends_step: bool) -> None:
        if self._own > 0:
            self._before.append(self._own)
            self._next = torch.stack(tuple(one.to(self._own) for one in self._before)).amax()
        self._is_cast = self._once and not ends_step
        self._own = torch.zeros_like(self._own)


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Casts operands by a recipe. near: see ``rounded``. magnitudes: of a layer's operands with histories. factor:
    gradients are multiplied by it when they are cast, and divided afterwards."""

    recipe: Recipe
    near: float = 0.0
    magnitudes: Mapping[Operand, Magnitudes] = field(default_factory=dict)
    factor: float = 1.0

    def __call__(self, x: Tensor, format: Format, dim: int, operand: Operand) -> Tensor:
        """Returns the numbers that ``x`` has in float8, unscaled, in float32 or wider. ``dim``: along which a row has
        its scale."""
        recipe, factor = self.recipe, self.factor if operand == "gradient" else 1.0
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) * factor
        if recipe.block:
            wide = wide.float().to(wide.dtype)
            dims = (0, 1) if recipe.square and operand == "weight" else (dim,)
            magnitude = magnitudes_of_blocks(wide, recipe.block, dims)
            scale = _scale(magnitude, format, powers=recipe.powers)
        elif recipe.history:
            scale = _scale(self.magnitudes[operand].largest(wide), format, powers=recipe.powers)
        else:
            scale = scale_of(wide, format, dim=dim if recipe.by_row else None, powers=recipe.powers)
        return (rounded(wide * scale, format, near=self.near) / (scale * factor)).to(wide.dtype)


class Product(torch.autograd.Function):
    """Computes x W^T, and both gradients, from operands (T, K) and (N, K) that ``cast`` has cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: Cast) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cast = cast
        return (cast(x, E4M3, 1, "input") @ cast(weight, E4M3, 1, "weight").T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), (gradient,), cast = ctx.saved_tensors, gradients, ctx.cast
        recipe = cast.recipe
        whole = replace(cast, recipe=replace(recipe, by_row=False)) if recipe.whole_weight else cast
        of_input = cast(gradient, recipe.gradient, 1, "gradient") @ whole(weight, E4M3, 0, "weight")
        if recipe.of_weight:
            gradient, x = cast(gradient, recipe.gradient, 0, "gradient"), cast(x, E4M3, 0, "input")
        of_weight = gradient.T @ x
        return of_input.to(weight.dtype), of_weight.to(weight.dtype), None


class WithFloat8Products(Variant):
    """Multiplies in float8. A micro-batch goes through the model as a whole, because its tokens share scales."""

    def __init__(self, convention: Float8Products) -> None:
        self._of, self._recipe = convention, RECIPES[convention.recipe]
        self._magnitudes: dict[str, dict[Operand, Magnitudes]] = defaultdict(self._new_magnitudes)
        self._role, self._groups = "", 1
        self._is_open: set[str] = set()  # roles of models in a micro-batch of an update

    def _new_magnitudes(self) -> dict[Operand, Magnitudes]:
        if not (length := self._recipe.history):
            return {}
        if not self._of.transformer_engine:
            return {operand: Magnitudes(length) for operand in get_args(Operand)}
        ends = {"input": E4M3, "weight": E4M3, "gradient": self._recipe.gradient}
        return {
            operand: TEMagnitudes(length, ends[operand].largest, once=operand == "weight")
            for operand in get_args(Operand)
        }

    def architecture(self, a: Architecture) -> Architecture:
        self._groups = getattr(a.layers[0].attention, "kv_heads", 1)
        return a

    def joins(self, joins: bool) -> bool:
        return True

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        """Returns each micro-batch of each data rank, its rows filled up by documents of token 0: to one length or,
        where they lie end to end, together.

        Where all ranks share scales, their rows go through the model together.
        """
        self._end_micro_batch(*self._is_open, ends_step=True)
        self._is_open.clear()
        ranks, count = self._of.data_ranks, self._of.micro_batches
        own = [batch.micro_batches(dp_rank=rank, dp_size=ranks, accumulation=count) for rank in range(ranks)]
        filled = [
            [self._filled(rows, of_rank if self._of.one_length else [rows]) for rows in of_rank] for of_rank in own
        ]
        if self._recipe.history:
            return [[row for rows in at_once for row in rows] for at_once in zip(*filled, strict=True)]
        return [rows for parts in filled for rows in parts]

    def _filled(self, rows: Sequence[Row], alike: Sequence[Sequence[Row]]) -> list[Row]:
        """Fills the rows of a micro-batch up; ``alike``: those of which the longest decides."""
        if self._of.transformer_engine:
            longest = max(sum(row.length for row in one) for one in alike)
            length = -(-longest // self._of.multiple) * self._of.multiple
            return [*rows[:-1], _longer(rows[-1], length - sum(row.length for row in rows))]
        length = -(-max(row.length for row in rows) // self._of.multiple) * self._of.multiple
        return [_longer(row, length - row.length) for row in rows]

    def carried(self, gradients: Weights) -> Weights:
        """Ends the micro-batch before this one in the histories of the model."""
        self._end_micro_batch(*{self._role} & self._is_open, ends_step=False)
        self._is_open.add(self._role)
        return gradients

    def rollout(self, batches: list[Batch]) -> list[Batch]:
        """Ends the passes over a rollout in the histories of all models but the policy, as its first micro-batch does
        in TransformerEngine, which updates the histories of all models at once."""
        self._end_micro_batch(*{key.partition(" ")[0] for key in self._magnitudes} - {POLICY.name}, ends_step=True)
        return batches

    def _end_micro_batch(self, *roles: str, ends_step: bool) -> None:
        for key, of_layer in self._magnitudes.items():
            for magnitudes in of_layer.values() if key.partition(" ")[0] in roles else ():
                magnitudes.end_micro_batch(ends_step=ends_step)

    def runs(self, role: str) -> str:
        self._role = role
        return role

    def products(self, module: Module, weights: Weights, policy: Policy, *, layer: int, layers: int) -> Module:
        if self._of.ends and layer in (0, layers - 1):
            return module
        is_noise = policy.flips_ties
        near = torch.finfo(policy.compute).eps / 2 if is_noise else 0.0
        near = max(near, KERNEL_ROUNDING) if is_noise and self._of.transformer_engine else near
        factor = float(self._of.data_ranks) if self._of.transformer_engine else 1.0
        at_once: dict[str, Tensor] = {}  # what products give of the other modules of their group
        role = self._role

        def run(name: str, function: Function, x: Tensor) -> Tensor:
            group = next((group for group in FUSED if self._of.transformer_engine and name in group), (name,))
            found = [weights.get(f"{one}.weight") for one in group]
            matrices = [one for one in found if one is not None and one.ndim == 2]
            if not matrices or any(size % self._recipe.multiple for one in matrices for size in one.shape):
                return module(name, function, x)
            # Histories are those of all ranks, so that parts of a tensor share scales.
            parts = 1 if self._recipe.history else self._of.tensor_ranks
            magnitudes = self._magnitudes[f"{role} {layer}.{group[0]}"]
            cast = Cast(recipe=self._recipe, near=near, magnitudes=magnitudes, factor=factor)
            bias = weights.get(f"{name}.bias")

            def product(x: Tensor) -> Tensor:
                if name not in at_once:
                    order = _order(matrices, self._groups if len(group) == 3 else parts, x.device)
                    y = _product(x, torch.cat(matrices)[order], cast, by_rows=len(group) > 1, parts=parts)
                    found = y[:, order.argsort()].split([len(one) for one in matrices], dim=1)
                    at_once.update(zip(group, found, strict=True))
                own = at_once.pop(name)
                return own if bias is None else own + bias

            return module(name, product, x)

        return run


# Modules whose weights are one matrix in Megatron.
FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)


def _product(x: Tensor, weight: Tensor, cast: Cast, *, by_rows: bool, parts: int) -> Tensor:
    """Multiplies as tensor-parallel ranks do, each of which casts its part of the weight, and of the input or the
    gradient: its rows, or with columns its share of the sum."""
    if by_rows:
        found = [Product.apply(x, one, cast) for one in weight.chunk(parts)]  # type: ignore[no-untyped-call]
        return torch.cat(found, 1)
    both = zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
    return sum((Product.apply(*pair, cast) for pair in both), torch.zeros([]).to(x))  # type: ignore[no-untyped-call]


def _longer(row: Row, rest: int) -> Row:
    if not rest:
        return row
    return replace(row, documents=(*row.documents, Document((0,) * rest, (False,) * rest)))


def _order(matrices: Sequence[Tensor], groups: int, device: torch.device) -> Tensor:
    """Returns in which order the rows of matrices below each other are cast: a part of each, ``groups`` times."""
    places = torch.arange(sum(map(len, matrices)), device=device).split([len(one) for one in matrices])
    return torch.cat([part for parts in zip(*(one.chunk(groups) for one in places), strict=True) for part in parts])
