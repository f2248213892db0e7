"""The oracle's model of float8: its rounding is that of the formats, and its products are those of the recipe."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from test_oracle import BATCH, FLOAT64, document, folder, policy_model
from torch import Tensor

from conformance.bisect.locate import references
from conformance.models.families import read_architecture
from conformance.oracle.defects import variant_of
from conformance.oracle.float8 import (
    E4M3,
    E5M2,
    RECIPES,
    Cast,
    Format,
    Magnitudes,
    Product,
    TEMagnitudes,
    WithFloat8Products,
    rounded,
    scale_of,
)
from conformance.oracle.step import observe
from conformance.spec.batch import Batch, Row
from conformance.spec.conventions import Float8Products
from conformance.spec.layout import Float8Recipe
from conformance.spec.offline import Sft
from conformance.spec.scenario import parse_scenario

FORMATS = [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)]


def drawn(*shape: int) -> Tensor:
    """Numbers of many sizes."""
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x * torch.exp(2 * torch.randn(*shape, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize(("format", "dtype"), FORMATS)
def test_rounding_is_that_of_the_dtype(format: Format, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    numbers = every[every.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, ties, ties.nextafter(ties * 2), drawn(2000) * 100])
    x = x.clamp(-format.largest, format.largest)
    assert torch.equal(rounded(x, format), x.to(dtype).double())
    assert rounded(torch.tensor([1e9, -1e9]), format).tolist() == [format.largest, -format.largest]


def test_what_is_near_a_tie_rounds_the_other_way() -> None:
    x = torch.tensor([1.0625 + 2e-4, 1.0625 - 2e-4, 1.05, 1.125])  # 1 and 1.125 are numbers of e4m3
    assert rounded(x, E4M3).tolist() == [1.125, 1.0, 1.0, 1.125]
    assert rounded(x, E4M3, near=1e-3).tolist() == [1.0, 1.125, 1.0, 1.125]


@pytest.mark.parametrize("powers", [False, True])
def test_a_scale_takes_the_largest_number_to_the_end(powers: bool) -> None:
    x = drawn(5, 7)
    x[2] = 0.0
    ends = (x * scale_of(x, E4M3, dim=1, powers=powers)).abs().amax(1)
    ends = ends[ends > 0]
    assert len(ends) == 4
    assert bool(((ends > 224) & (ends <= 448)).all() if powers else ends.allclose(torch.full_like(ends, 448.0)))


def by_dtype(x: Tensor, dtype: torch.dtype, dim: int | None, *, powers: bool) -> Tensor:
    """Casts by torch's dtype, one row after another."""
    if dim is not None:
        parts = [by_dtype(part, dtype, None, powers=powers) for part in x.unbind(1 - dim)]
        return torch.stack(parts, 1 - dim)
    scale = torch.finfo(dtype).max / x.abs().max()
    scale = 2.0 ** torch.floor(torch.log2(scale)) if powers else scale
    return (x * scale).to(dtype).double() / scale


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if not recipe.block + recipe.history])
def test_products_have_the_operands_of_the_recipe(name: str) -> None:
    x, weight, gradient = drawn(12, 32).requires_grad_(), drawn(16, 32).requires_grad_(), drawn(12, 16)
    y: Tensor = Product.apply(x, weight, Cast(recipe=RECIPES[name]))  # type: ignore[no-untyped-call]
    y.backward(gradient)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    tokens, features, powers = (None, None, False) if name == "fp8tensor" else (1, 0, True)
    of_gradient = e5m2 if name == "fp8tensor" else e4m3
    with torch.no_grad():

        def cast(x: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
            return by_dtype(x, dtype, dim, powers=powers)

        assert y.allclose(cast(x, e4m3, tokens) @ cast(weight, e4m3, tokens).T, rtol=1e-13)
        columns = None if name == "fp8rowhp" else features
        expected = cast(gradient, of_gradient, tokens) @ cast(weight, e4m3, columns)
        assert x.grad is not None
        assert x.grad.allclose(expected, rtol=1e-13)
        expected = cast(gradient, of_gradient, features).T @ cast(x, e4m3, features)
        assert weight.grad is not None
        assert weight.grad.allclose(gradient.T @ x if name == "fp8rowhp" else expected, rtol=1e-13)


def test_each_block_has_a_scale_of_its_own() -> None:
    x, weight, gradient = drawn(64, 96).requires_grad_(), drawn(32, 96).requires_grad_(), drawn(64, 32)
    y: Tensor = Product.apply(x, weight, Cast(recipe=RECIPES["fp8mx"]))  # type: ignore[no-untyped-call]
    y.backward(gradient)

    def cast(x: Tensor, dim: int) -> Tensor:
        parts = [by_dtype(part.float().double(), torch.float8_e4m3fn, dim, powers=True) for part in x.split(32, dim)]
        return torch.cat(parts, dim)

    with torch.no_grad():
        assert y.allclose(cast(x, 1) @ cast(weight, 1).T, rtol=1e-13)
        assert x.grad is not None
        assert x.grad.allclose(cast(gradient, 1) @ cast(weight, 0), rtol=1e-13)
        assert weight.grad is not None
        assert weight.grad.allclose(cast(gradient, 0).T @ cast(x, 0), rtol=1e-13)


def test_blocks_of_128_end_where_the_tensor_does() -> None:
    """Rows of blocks of inputs and gradients, and squares of weights, neither of which divide the sizes."""
    x, weight, gradient = drawn(176, 192).requires_grad_(), drawn(336, 192).requires_grad_(), drawn(176, 336)
    y: Tensor = Product.apply(x, weight, Cast(recipe=RECIPES["fp8block"]))  # type: ignore[no-untyped-call]
    y.backward(gradient)

    def rows(x: Tensor, dim: int) -> Tensor:
        return torch.cat([by_dtype(part, torch.float8_e4m3fn, dim, powers=True) for part in x.split(128, dim)], dim)

    with torch.no_grad():
        squares = torch.cat(
            [
                torch.cat([by_dtype(part, torch.float8_e4m3fn, None, powers=True) for part in band.split(128, 1)], 1)
                for band in weight.split(128)
            ]
        )
        assert y.allclose(rows(x, 1) @ squares.T, rtol=1e-13)
        assert x.grad is not None
        assert x.grad.allclose(rows(gradient, 1) @ squares, rtol=1e-13)
        assert weight.grad is not None
        assert weight.grad.allclose(rows(gradient, 0).T @ rows(x, 0), rtol=1e-13)


def test_a_factor_of_gradients_changes_no_power_of_two_and_every_fixed_scale() -> None:
    gradient = drawn(8, 32)
    for name, is_fixed in (("fp8block", False), ("fp8delayed", True)):
        held = TEMagnitudes(4, E5M2.largest, once=False)
        cast, doubled = (Cast(recipe=RECIPES[name], magnitudes={"gradient": held}, factor=f) for f in (1.0, 2.0**-20))
        same = torch.equal(cast(gradient, E5M2, 1, "gradient"), doubled(gradient, E5M2, 1, "gradient"))
        assert same is not is_fixed


def test_transformer_engine_scales_by_1_at_first_and_casts_weights_once_a_step() -> None:
    """A magnitude of zero changes nothing: here those of weights, which are not cast in five of six micro-batches."""
    of_input, of_weight = (TEMagnitudes(4, 448.0, once=once) for once in (False, True))
    inputs, weights = [], []
    for step, own in enumerate((2.0, 8.0)):
        for batch in range(6):
            inputs.append(of_input.largest(torch.tensor(own + batch)).item())
            weights.append(of_weight.largest(torch.tensor(own)).item())
            for held in (of_input, of_weight):
                held.end_micro_batch(ends_step=batch == 5)
        assert weights[6 * step :] == [weights[6 * step]] * 6, "cast once"
    assert inputs == [448.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    assert weights == [448.0] * 6 + [2.0] * 6


def test_a_rollout_counts_in_the_micro_batch_that_ends_next() -> None:
    """Passes without gradients note magnitudes and move nothing: those of the policy end with its first micro-batch,
    those of other models before. Weights are cast anew for each mini-batch of a rollout, by the same scale."""
    variant = WithFloat8Products(
        Float8Products(recipe="fp8delayed", transformer_engine=True, multiple=1, micro_batches=2)
    )
    ones = {"self_attn.o_proj.weight": torch.ones(16, 16, dtype=torch.float64)}
    scaled: dict[tuple[str, str], list[float]] = defaultdict(list)

    def run(role: str, magnitude: float) -> None:
        variant.runs(role)
        module = variant.products(lambda name, f, x: f(x), ones, FLOAT64, layer=0, layers=1)
        module("self_attn.o_proj", lambda x: x, torch.full((1, 16), magnitude, dtype=torch.float64))
        for operand, held in variant._magnitudes[f"{role} 0.self_attn.o_proj"].items():
            scaled[role, operand].append(float(held.largest(torch.zeros([]))))

    def updates(role: str, *magnitudes: float) -> None:
        for magnitude in magnitudes:
            variant.runs(role)
            variant.carried({})
            run(role, magnitude)

    for step in range(2):
        variant.micro_batches((), BATCH)
        for role in ("reference", "policy", "critic"):
            run(role, 2.0 + step)
            run(role, 9.0 + step)
        variant.rollout([])
        variant.micro_batches((), BATCH)
        updates("policy", 4.0, 5.0)
        updates("critic", 4.0, 5.0)
    first, begun = [448.0, 448.0], [448.0] * 2
    assert scaled["reference", "input"] == [*first, 9.0, 9.0]
    assert scaled["policy", "input"] == [*first, *[448.0, 9.0], *[9.0, 9.0], *[9.0, 10.0]]
    assert scaled["critic", "input"] == [*first, *[9.0, 9.0], *[9.0, 9.0], *[10.0, 10.0]]
    assert scaled["policy", "weight"] == [*begun, *begun, 1.0, 1.0, 1.0, 1.0]
    assert scaled["critic", "weight"] == [*begun, *[1.0] * 6]


def test_weights_are_scaled_by_the_last_steps_in_which_they_were_cast() -> None:
    """Of three micro-batches each, by the kernel kernel_bulk of TransformerEngine's delayed_scaling.cu."""
    held, scaled = TEMagnitudes(4, 448.0, once=True), []
    for own in (8.0, 1.0, 2.0, 1.0, 1.0, 1.0, 0.0, 4.0, 4.0):
        for batch in range(3):
            scaled.append(held.largest(torch.tensor(own)).item())
            held.end_micro_batch(ends_step=batch == 2)
    assert scaled[::3] == [448.0, 8.0, 8.0, 8.0, 8.0, 2.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize("recipe", ["fp8tensor", "fp8block"])
def test_queries_keys_and_values_are_one_matrix_of_groups(recipe: Float8Recipe) -> None:
    """Each key-value head follows its queries, so that blocks of 128 rows hold some of all three."""
    architecture = read_architecture(folder("llama-even"))
    variant = WithFloat8Products(Float8Products(recipe=recipe, transformer_engine=True, data_ranks=2))
    variant.architecture(architecture)
    names = [f"self_attn.{name}_proj" for name in "qkv"]
    matrices = [drawn(rows, 192).requires_grad_() for rows in (128, 64, 64)]
    scaled = [matrix.detach().mul(factor).requires_grad_() for matrix, factor in zip(matrices, (1, 9, 80), strict=True)]
    weights = {f"{name}.weight": matrix for name, matrix in zip(names, scaled, strict=True)}
    run = variant.products(lambda name, f, x: f(x), weights, FLOAT64, layer=0, layers=1)
    x = drawn(48, 192).requires_grad_()
    found = [run(name, lambda x: x, x) for name in names]
    gradients = [drawn(48, len(matrix)) * 10.0**place for place, matrix in enumerate(scaled)]
    torch.autograd.backward(found, gradients)

    def grouped(parts: list[Tensor], dim: int) -> Tensor:
        return torch.cat(
            [part for of_group in zip(*(p.chunk(4, dim) for p in parts), strict=True) for part in of_group], dim
        )

    alone, fused = (t.detach().requires_grad_() for t in (x, grouped(scaled, 0)))
    y: Tensor = Product.apply(alone, fused, Cast(recipe=RECIPES[recipe], factor=2.0))  # type: ignore[no-untyped-call]
    y.backward(grouped(gradients, 1))
    assert y.allclose(grouped(found, 1), rtol=1e-13)
    assert x.grad is not None
    assert alone.grad is not None
    assert alone.grad.allclose(x.grad, rtol=1e-12)
    assert fused.grad is not None
    assert fused.grad.allclose(grouped([m.grad for m in scaled if m.grad is not None], 0), rtol=1e-12)


@pytest.mark.parametrize("recipe", ["fp8tensor", "fp8block"])
def test_tensor_parallel_ranks_cast_their_parts(recipe: Float8Recipe) -> None:
    """Of gate and up each of two ranks holds rows, of down columns."""
    convention = Float8Products(recipe=recipe, transformer_engine=True, tensor_ranks=2)
    sizes = {"mlp.gate_proj": (352, 192), "mlp.up_proj": (352, 192), "mlp.down_proj": (192, 352)}
    weights = {f"{name}.weight": drawn(*shape).requires_grad_() for name, shape in sizes.items()}
    x, z = drawn(48, 192).requires_grad_(), drawn(48, 352).requires_grad_()
    run = WithFloat8Products(convention).products(lambda name, f, x: f(x), weights, FLOAT64, layer=0, layers=1)
    gate, up, down = (run(name, lambda x: x, z if "down" in name else x) for name in sizes)
    of_gate, of_up, of_down = drawn(48, 352), 3 * drawn(48, 352), drawn(48, 192)
    torch.autograd.backward([gate, up, down], [of_gate, of_up, of_down])

    def of_rank(rank: int) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Returns product and gradients of input and weight: of gate and up together, and of down."""
        both = torch.cat([weights[f"mlp.{name}_proj.weight"].detach().chunk(2)[rank] for name in ("gate", "up")])
        part = weights["mlp.down_proj.weight"].detach().chunk(2, 1)[rank]
        found = []
        for x_, w_, gradient in (
            (x.detach(), both, torch.cat([one.chunk(2, 1)[rank] for one in (of_gate, of_up)], 1)),
            (z.detach().chunk(2, 1)[rank], part, of_down),
        ):
            x_, w_ = x_.clone().requires_grad_(), w_.clone().requires_grad_()
            y: Tensor = Product.apply(x_, w_, Cast(recipe=RECIPES[recipe]))  # type: ignore[no-untyped-call]
            y.backward(gradient)
            assert x_.grad is not None
            assert w_.grad is not None
            found.append((y, x_.grad, w_.grad))
        return found[0], found[1]

    (one, first), (two, second) = of_rank(0), of_rank(1)
    assert x.grad is not None
    assert z.grad is not None
    for name, found, due in (
        ("gate", gate, torch.cat([one[0][:, :176], two[0][:, :176]], 1)),
        ("up", up, torch.cat([one[0][:, 176:], two[0][:, 176:]], 1)),
        ("down", down, first[0] + second[0]),
        ("gradient of x", x.grad, one[1] + two[1]),
        ("gradient of z", z.grad, torch.cat([first[1], second[1]], 1)),
        ("gradient of gate", weights["mlp.gate_proj.weight"].grad, torch.cat([one[2][:176], two[2][:176]])),
        ("gradient of down", weights["mlp.down_proj.weight"].grad, torch.cat([first[2], second[2]], 1)),
    ):
        assert found is not None
        assert found.allclose(due, rtol=1e-12, atol=1e-14), name


def test_rows_of_megatron_are_filled_up_together() -> None:
    """16 is a multiple of neither row's length, and of their sum after 7 more tokens."""
    rows = tuple(Row(i, (document(i, length, 2),)) for i, length in enumerate((17, 24)))
    batch = Batch(step=0, max_len=64, rows=rows)
    variant = WithFloat8Products(Float8Products(transformer_engine=True, multiple=16))
    ((first, last),) = variant.micro_batches([rows], batch)
    assert [first.length, last.length] == [17, 31]
    assert last.documents[-1].tokens == (0,) * 7
    batch_of_stages = replace(batch, rows=(Row(0, (document(0, 9, 2),)), rows[1]))
    for one_length, lengths in ((False, [16, 32]), (True, [32, 32])):
        convention = Float8Products(transformer_engine=True, multiple=16, micro_batches=2, one_length=one_length)
        found = WithFloat8Products(convention).micro_batches([], batch_of_stages)
        assert [row.length for (row,) in found] == lengths
    apart = WithFloat8Products(Float8Products(multiple=16))
    assert [row.length for (*part,) in apart.micro_batches([rows], batch) for row in part] == [32, 32]


def test_delayed_scales_follow_from_four_micro_batches() -> None:
    magnitudes, scaled = Magnitudes(4), []
    for own in (2.0, 8.0, 1.0, 1.0, 1.0, 1.0, 16.0):
        scaled.append(magnitudes.largest(torch.tensor([own, -own / 2])).item())
        magnitudes.end_micro_batch(ends_step=False)
    assert scaled == [2.0, 2.0, 8.0, 8.0, 8.0, 8.0, 1.0]  # the first by its own, as no history was there


def test_a_joined_micro_batch_is_its_documents() -> None:
    """With both layers left out, nothing is cast."""
    variant = variant_of((Float8Products(ends=True, multiple=32, data_ranks=2),))
    plain, joined = (observe(BATCH, [policy_model("qwen3")], Sft(), FLOAT64, *more) for more in ((), (variant,)))
    for name, gradient in plain.gradients["policy"].items():
        assert gradient.allclose(joined.gradients["policy"][name], rtol=1e-9, atol=1e-15), name
    cast = observe(BATCH, [policy_model("qwen3")], Sft(), FLOAT64, variant_of((Float8Products(data_ranks=2),)))
    assert any(
        not g.allclose(cast.gradients["policy"][name], rtol=1e-3) for name, g in plain.gradients["policy"].items()
    )


def test_modules_of_a_joined_micro_batch_are_captured() -> None:
    values = {"name": "x", "model": str(folder("qwen3")), "precision": "exact", "steps": 1}
    scenario = parse_scenario({**values, "optimizer": {"name": "sgd", "lr": 0.1}})
    joined = Float8Products(ends=True, multiple=32, data_ranks=2)
    alone, together = (
        references(
            scenario=scenario,
            models={"policy": folder("qwen3")},
            batches=[BATCH],
            step=0,
            weights=lambda step, role: None,
            defects=defects,
        )["policy"]
        for defects in ((), (joined,))
    )
    assert torch.equal(alone.known, together.known)
    assert alone.order == together.order
    assert alone.values.keys() == together.values.keys()
    for key, value in alone.values.items():
        assert value.allclose(together.values[key], rtol=1e-9, atol=1e-13), key
