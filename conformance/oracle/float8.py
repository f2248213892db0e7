"""Models training in float8: operands are scaled, rounded to 8 bits, and multiplied without further error.

Formats and saturation are those of Micikevicius et al. (arXiv 2209.05433, sections 3 and 4): e4m3 ends at 448 and e5m2
at 57344, and numbers beyond the end become the end. The scale of a tensor, a row, or a block of a row maps its largest
magnitude to the end of the format; with powers of two it is the next lower power. Blocks are those of MXFP8 (Rouhani et
al., arXiv 2310.10537), with scales as in Mishra et al. (arXiv 2506.08027). A scaled operand is a float32 number before
it is rounded, to nearest with ties to even. In float64 two implementations of one recipe therefore round alike, and
what is left is their mistakes.

With delayed scaling, as TransformerEngine and torchao name it, the largest magnitude is that of the last micro-batches,
over all ranks.

The noise run by the plain formula rounds what lies as near to a tie as the rounding of its dtype the other way. Other
honest runs may round each of these either way.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from conformance.oracle.primitives import Function, Module, Policy, Variant, Weights
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.conventions import Float8Products

Operand = Literal["input", "weight", "gradient"]
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
    numbers of them; 0: for all. powers: scales are powers of two. whole_weight: the weight has one scale in the product
    for the gradient of the input. of_weight: whether the product for the gradient of the weight is in float8. history:
    the number of micro-batches before, by whose largest magnitude an operand is scaled; 0: by its own.
    """

    gradient: Format
    by_row: bool
    powers: bool
    whole_weight: bool
    of_weight: bool
    block: int = 0
    history: int = 0

    @property
    def multiple(self) -> int:
        """Returns the number that sizes of matrices have to be multiples of."""
        return self.block or MULTIPLE


RECIPES = {
    "fp8tensor": Recipe(gradient=E5M2, by_row=False, powers=False, whole_weight=True, of_weight=True),
    "fp8row": Recipe(gradient=E4M3, by_row=True, powers=True, whole_weight=False, of_weight=True),
    "fp8rowhp": Recipe(gradient=E4M3, by_row=True, powers=True, whole_weight=True, of_weight=False),
    "fp8delayed": Recipe(gradient=E5M2, by_row=False, powers=False, whole_weight=True, of_weight=True, history=4),
    "fp8mx": Recipe(gradient=E4M3, by_row=True, powers=True, whole_weight=False, of_weight=True, block=32),
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

    def end_micro_batch(self) -> None:
        self._before.append(self._own)


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Casts operands by a recipe. near: see ``rounded``. magnitudes: of a layer's operands with histories."""

    recipe: Recipe
    near: float = 0.0
    magnitudes: Mapping[Operand, Magnitudes] = field(default_factory=dict)

    def __call__(self, x: Tensor, format: Format, dim: int, operand: Operand) -> Tensor:
        """Returns the numbers that ``x`` has in float8, unscaled, in float32 or wider. ``dim``: along which a row has
        its scale."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.recipe.block:
            blocks = wide.float().to(wide.dtype).unflatten(dim, (-1, self.recipe.block))
            whole = replace(self, recipe=replace(self.recipe, block=0))
            return whole(blocks, format, dim + 1, operand).flatten(dim, dim + 1)
        if self.recipe.history:
            scale = _scale(self.magnitudes[operand].largest(wide), format, powers=self.recipe.powers)
        else:
            scale = scale_of(wide, format, dim=dim if self.recipe.by_row else None, powers=self.recipe.powers)
        return (rounded(wide * scale, format, near=self.near) / scale).to(wide.dtype)


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
        self._of = convention
        length = RECIPES[convention.recipe].history
        self._magnitudes: dict[str, dict[Operand, Magnitudes]] = defaultdict(
            lambda: {operand: Magnitudes(length) for operand in get_args(Operand)} if length else {}
        )

    def joins(self, joins: bool) -> bool:
        return True

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        """Returns each micro-batch of each data rank, its rows filled up to one length by documents of token 0.

        Where all ranks share scales, their rows go through the model together.
        """
        ranks, count = self._of.data_ranks, self._of.micro_batches
        own = [batch.micro_batches(dp_rank=rank, dp_size=ranks, accumulation=count) for rank in range(ranks)]
        filled = [[self._filled(rows) for rows in parts] for parts in own]
        if RECIPES[self._of.recipe].history:
            return [[row for rows in at_once for row in rows] for at_once in zip(*filled, strict=True)]
        return [rows for parts in filled for rows in parts]

    def _filled(self, rows: Sequence[Row]) -> list[Row]:
        length = -(-max(row.length for row in rows) // self._of.multiple) * self._of.multiple
        return [
            replace(row, documents=(*row.documents, Document((0,) * rest, (False,) * rest)))
            if (rest := length - row.length)
            else row
            for row in rows
        ]

    def carried(self, gradients: Weights) -> Weights:
        """Ends the micro-batch before this one in the histories."""
        for of_layer in self._magnitudes.values():
            for magnitudes in of_layer.values():
                magnitudes.end_micro_batch()
        return gradients

    def products(self, module: Module, weights: Weights, policy: Policy, *, layer: int, layers: int) -> Module:
        if self._of.ends and layer in (0, layers - 1):
            return module
        is_noise = policy.compute != torch.float64 and not policy.fused
        near = torch.finfo(policy.compute).eps / 2 if is_noise else 0.0
        recipe = RECIPES[self._of.recipe]

        def run(name: str, function: Function, x: Tensor) -> Tensor:
            weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
            if weight is None or weight.ndim != 2 or any(size % recipe.multiple for size in weight.shape):
                return module(name, function, x)
            cast = Cast(recipe=recipe, near=near, magnitudes=self._magnitudes[f"{layer}.{name}"])

            def product(x: Tensor) -> Tensor:
                y: Tensor = Product.apply(x, weight, cast)  # type: ignore[no-untyped-call]
                return y if bias is None else y + bias

            return module(name, product, x)

        return run
