"""Claims about TransformerEngine's float8: how each rank casts, scales and multiplies, and goes on after a resume."""

import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evidence_ranks import LINEAR
from safetensors import safe_open
from safetensors.torch import save_file

from conformance.judge.measurements import _float8_state
from conformance.judge.step_evidence import Step
from conformance.judge.work_evidence import CASTS, sums_of, work_claims, wrong_operands
from conformance.judge.work_evidence import _te_casts as te_claims
from conformance.spec.layout import Float8Recipe, Layout
from conformance.spec.scenario import parse_scenario
from impl.megatron.refusals import RECIPES


def casts(
    recipe: str,
    *,
    changes: dict[str, str] | None = None,
    powers: bool | None = None,
    own: bool = True,
    same: bool = True,
    counts: dict[str, int] | None = None,
) -> Any:
    """What a rank's evidence says of operands of four products forward and eight backward. ``changes``: a format or a
    kind of scale, and what is in its place. ``counts``: other numbers of operands."""
    by_power = recipe == "fp8block" if powers is None else powers
    numbers = {"input": 8, "weight": 8, "gradient": 8} | (counts or {})
    found = [[*cast, by_power, own, same, numbers[cast[0]]] for cast in sorted(CASTS[recipe])]
    return [
        [(changes or {}).get(value, value) if isinstance(value, str) else value for value in cast] for cast in found
    ]


def mostly_by_powers(recipe: str) -> Any:
    """Of eight operands of a kind one has another scale."""
    return [[*cast[:6], 7 if cast[3] else 1] for powers in (False, True) for cast in casts(recipe, powers=powers)]


def with_zeros(recipe: str) -> Any:
    """Of eight gradients six are zero."""
    found = [[*cast, 2 if cast[0] == "gradient" else count] for *cast, count in casts(recipe)]
    return [*found, *([*cast[:3], None, *cast[4:-1], 6] for cast in found if cast[0] == "gradient")]


# Of a rank with four products forward, and histories of two operands in which another rank had the larger second one.
UPDATES = {"forward": 3, "backward": 2}  # of three micro-batches, of which one has no targets on any rank
ONE = {
    "float8_scales": "same",
    "float8_scale_ratios": [1.0, 1.0],
    "float8_amaxes": [[3.0, 3.0], [1.0, 2.0]],
    "float8_updates": UPDATES,
    "te": 4,
}
OTHER = ONE | {"float8_amaxes": [[2.0, 3.0], [2.0, 2.0]]}


@pytest.mark.parametrize(
    ("recipe", "rank", "wrong"),
    [
        *((recipe, {}, set()) for recipe in RECIPES),
        ("fp8tensor", {"float8_casts": []}, {"operands are cast as the recipe says"}),
        ("fp8tensor", {"float8_casts": casts("fp8tensor", changes={"e5m2": "e4m3fn"})}, {"operands are cast"}),
        ("fp8block", {"float8_casts": casts("fp8block", changes={"squares": "rows"})}, {"operands are cast"}),
        ("fp8tensor", {"float8_casts": casts("fp8tensor", powers=True)}, {"scales are not rounded to powers"}),
        ("fp8block", {"float8_casts": casts("fp8block", powers=False)}, {"scales are rounded to powers"}),
        (
            "fp8tensor",
            {"float8_casts": mostly_by_powers("fp8tensor")},
            {"scales are not rounded to powers"},
        ),
        *(
            (recipe, {"float8_casts": with_zeros(recipe)}, set())  # of a micro-batch without targets
            for recipe in RECIPES
        ),
        ("fp8tensor", {"float8_casts": casts("fp8tensor", own=False)}, {"scales are those of the operands"}),
        *(
            (recipe, {"float8_casts": casts(recipe, same=False)}, {"backward products multiply by the numbers"})
            for recipe in RECIPES
        ),
        ("fp8delayed", {"float8_casts": casts("fp8delayed", own=False)}, {"scales are those that updates gave"}),
        ("fp8delayed", {"float8_scales": "other"}, {"ranks scale alike", "histories hold the largest"}),
        *(
            ("fp8delayed", {"float8_scale_ratios": ratios}, {"scales follow from the histories"})
            for ratios in ([0.5, 1.0], [1.0, 1.01], [1.0, math.nan], ["nan", 1.0], [])
        ),
        ("fp8delayed", {"float8_scale_ratios": [1 - 2.0**-22, 1 + 2.0**-22]}, set()),
        *(
            ("fp8delayed", {"float8_amaxes": amaxes}, {"histories hold the largest magnitudes of all"})
            for amaxes in ([[3.0, 3.0], [1.0, 1.0]], [[3.0, 3.0], [3.0, 2.0]], [[3.0, 3.0]], [])
        ),
        *(
            ("fp8delayed", {"float8_updates": UPDATES | changes}, {"histories are updated once a micro-batch"})
            for changes in ({"forward": 6}, {"forward": 2}, *({"backward": count} for count in (0, 1, 3, 6)))
        ),
        # Gradients of weights, or of inputs, are multiplied in high precision
        ("fp8tensor", {"float8_casts": casts("fp8tensor", counts={"input": 4, "gradient": 4})}, {"products for grad"}),
        ("fp8block", {"float8_casts": casts("fp8block", counts={"weight": 4, "gradient": 4})}, {"products for grad"}),
        ("fp8tensor", {"te": 5}, {"forward products of these layers", "products for grad"}),  # one in high precision
        # Layers are recomputed, in float8 or not
        ("fp8block", {"float8_casts": casts("fp8block", counts={"input": 12, "weight": 12}), "again": 4}, set()),
        ("fp8block", {"again": 4}, {"forward products of these layers"}),
    ],
)
def test_casts_are_those_of_the_recipe(recipe: Float8Recipe, rank: dict[str, Any], wrong: set[str]) -> None:
    found = broken(recipe, [ONE | {"float8_casts": casts(recipe)} | rank, OTHER | {"float8_casts": casts(recipe)}])
    due = {claim for claim in found if any(claim.startswith(start) for start in wrong)}
    if rank.get("float8_casts") != []:  # of which other claims do not hold either
        assert found == due
    assert len(due) == len(wrong)


def broken(
    recipe: str,
    ranks: list[dict[str, Any]],
    *,
    kept: Fraction = Fraction(1),
    frozen: bool = False,
    stages: int = 1,
) -> set[str]:
    claims = te_claims(recipe, ranks, kept=kept, frozen=frozen, stages=stages, updates=UPDATES)
    return {claim for claim, holds, _ in claims if not holds}


def test_stages_have_scales_of_their_own() -> None:
    cast = {"float8_casts": casts("fp8delayed")}
    first, second = [ONE | cast, OTHER | cast], [one | cast | {"float8_scales": "of 2"} for one in (ONE, OTHER)]
    assert not broken("fp8delayed", [*first, *second], stages=2)
    assert broken("fp8delayed", [*first, *second]) == {"ranks scale alike"}
    assert broken("fp8delayed", [*first, *first], stages=2) == {"ranks scale alike"}
    assert broken("fp8delayed", [*first, second[0], second[1] | {"float8_scales": "of 3"}], stages=2) == {
        "ranks scale alike",
        "histories hold the largest magnitudes of all ranks",
    }
    larger = second[0] | {"float8_amaxes": [[3.5, 3.0], [1.0, 2.0]]}
    assert broken("fp8delayed", [*first, larger, second[1]], stages=2) == {
        "histories hold the largest magnitudes of all ranks"
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_rank_multiplies_in_float8_itself(recipe: Float8Recipe) -> None:
    one = ONE | {"float8_casts": casts(recipe), "float8_amaxes": [[3.0, 3.0]]}
    assert "forward products of these layers are in float8" in broken(recipe, [one, one | {"float8_casts": []}])
    assert not broken(recipe, [one | {"te": 12}], kept=Fraction(1, 3))  # fp8ends, of three layers
    assert broken(recipe, [one | {"te": 12}])
    part = casts(recipe, counts={"input": 4, "gradient": 4})
    assert not broken(recipe, [one | {"float8_casts": part}], frozen=True)


@pytest.mark.parametrize(
    ("targets", "due"),
    [
        ([[5, 5, 5], [5, 5, 5]], 3),
        ([[5, 5, 5], [5, 0, 0]], 3),  # other ranks' gradients count
        ([[5, 0, 5], [0, 0, 5]], 2),
        ([[0, 0, 5], [0, 0, 0]], 1),
    ],
)
def test_gradients_of_each_micro_batch_with_targets_update_histories(targets: list[list[int]], due: int) -> None:
    """As a library that updates them once a step, of the largest gradients of all micro-batches, does not."""
    own: Any = {"optimizer": {"name": "sgd", "lr": 0.1}, "accumulation": 3}
    scenario = parse_scenario({"name": "x", "model": "m", "precision": "fp32"} | own)
    rows = [
        [[[3 * rank + place, 9, 0], [9, 9, count]] for place, count in enumerate(of)] for rank, of in enumerate(targets)
    ]
    kept = []
    for backward in range(5):
        ranks = [
            one
            | {"float8_casts": casts("fp8delayed", counts=dict.fromkeys(("input", "weight", "gradient"), 24))}
            | {"float8_updates": {"forward": 3, "backward": backward}}
            | {"te": 12, "step": 0, "rows": [], "float8_moved": {"forward": 8, "backward": 4}}
            for one in (ONE, OTHER)
        ]
        claims = work_claims(
            Layout.parse("dp2.te.fp8delayed"), Step(ranks, rows), scenario, LINEAR, layers=2, experts=0
        )
        kept += [backward] * all(holds for _, holds, _ in claims)
    assert kept == [due]


def test_histories_that_were_not_seen_hold_no_claim() -> None:
    one = {"float8_casts": casts("fp8delayed"), "te": 4}
    unseen = {
        "ranks scale alike",
        "scales follow from the histories",
        "histories are updated once a micro-batch",
    }
    assert broken("fp8delayed", [one]) == {*unseen, "histories hold the largest magnitudes of all ranks"}


def test_passes_over_rollouts_have_no_backward_products() -> None:
    """Of three passes one is trained, so that of twelve products forward four have gradients."""
    rank = {"te": 12, "float8_casts": casts("fp8tensor", counts={"input": 16, "weight": 16})}
    third = te_claims("fp8tensor", [rank], kept=Fraction(1), frozen=False, updates=UPDATES, trained=Fraction(1, 3))
    assert all(holds for _, holds, _ in third)
    assert broken("fp8tensor", [rank]) == {"products for gradients are in float8 as well"}


@pytest.mark.parametrize(
    ("counts", "holds"),
    [
        ({"input": 4, "weight": 8, "gradient": 4}, True),
        ({"input": 4, "weight": 7, "gradient": 3}, True),  # the first layer's input needs no gradient
        ({"input": 4, "weight": 5, "gradient": 1}, False),
        ({"input": 8, "weight": 8, "gradient": 8}, False),  # weights have gradients
    ],
)
def test_frozen_weights_have_no_gradients_beside_adapters(counts: dict[str, int], holds: bool) -> None:
    rank = {"te": 4, "float8_casts": casts("fp8tensor", counts=counts)}
    claims = te_claims("fp8tensor", [rank], kept=Fraction(1), frozen=True, updates=UPDATES, adapted=1)
    wrong = {claim for claim, found, _ in claims if not found}
    assert wrong == (
        set() if holds else {"products for gradients of inputs are in float8, and frozen weights have none"}
    )


def test_recomputed_adapters_are_no_products_of_the_library() -> None:
    rank = {"te": 4, "again": 14, "float8_casts": casts("fp8tensor", counts={"input": 8, "weight": 12, "gradient": 4})}
    for adapted, holds in ((1, True), (0, False)):
        claims = te_claims("fp8tensor", [rank], kept=Fraction(1), frozen=True, updates=UPDATES, adapted=adapted)
        found = dict(claim[:2] for claim in claims)
        assert found["forward products of these layers are in float8"] is holds


def test_stages_leave_out_layers_of_their_own() -> None:
    """Of three layers the first is on the first stage, and the other two are on the last one."""
    ranks = [{"te": 4, "float8_casts": []}, {"te": 8, "float8_casts": casts("fp8tensor")}]
    claims = te_claims("fp8tensor", ranks, kept=Fraction(1, 3), frozen=False, updates=UPDATES, stages=2)
    assert {claim for claim, holds, _ in claims if not holds} == set()
    ranks[1] = ranks[1] | {"te": 12}
    claims = te_claims("fp8tensor", ranks, kept=Fraction(1, 3), frozen=False, updates=UPDATES, stages=2)
    assert "forward products of these layers are in float8" in {claim for claim, holds, _ in claims if not holds}


@pytest.mark.parametrize(
    ("gathered", "holds"),
    [
        ([[[[0, 1], "a", 4]], [[[0, 1], "a", 4]], [[[2, 3], "b", 4]], [[[2, 3], "b", 4]]], True),
        ([[[[0, 1], "a", 4]], [[[0, 1], "c", 4]], [[[2, 3], "b", 4]], [[[2, 3], "b", 4]]], False),
        ([[[[0, 1], "a", 4]], [[[0, 1], "a", 5]], [[[2, 3], "b", 4]], [[[2, 3], "b", 4]]], False),
        ([[[[0, 1], "a", 4]], [], [[[2, 3], "b", 4]], [[[2, 3], "b", 4]]], False),
        ([[], [], [], []], False),
    ],
)
def test_parts_of_gathered_operands_have_one_scale(gathered: list[Any], holds: bool) -> None:
    ranks = [{"te": 4, "float8_casts": casts("fp8tensor"), "float8_gathered": one} for one in gathered]
    claims = te_claims("fp8tensor", ranks, kept=Fraction(1), frozen=False, updates=UPDATES, gathers=True)
    assert {claim for claim, found, _ in claims if not found} == (
        set() if holds else {"operands that ranks gather have one scale"}
    )


def test_histories_of_all_operands_move() -> None:
    """As those of one of two models or chunks do not, if it notes its magnitudes in those of the other one."""
    moved = {"forward": Fraction(2, 3), "backward": Fraction(1, 3)}
    for found, adapted, holds in (
        ({"forward": 8, "backward": 4}, 0, True),
        ({"forward": 4, "backward": 4}, 0, False),
        ({"forward": 8, "backward": 3}, 0, False),
        ({"forward": 8, "backward": 3}, 1, True),
        ({}, 0, False),
    ):
        rank = ONE | {"te": 12, "float8_casts": casts("fp8delayed"), "float8_moved": found}
        claims = te_claims(
            "fp8delayed", [rank], kept=Fraction(1), frozen=True, updates=UPDATES, moved=moved, adapted=adapted
        )
        seen = [good for claim, good, _ in claims if claim.startswith("histories of all operands are updated")]
        assert all(seen) is holds
        assert len(seen) == 2


def shown_phase(path: Path, layout: str, rank: dict[str, Any], *, ranks: int = 1) -> Any:
    """A phase whose weights as loaded are those of two matrices of three layers, and of an adapter."""
    numbers = torch.Generator().manual_seed(1)
    names = [f"model.layers.{n}.{name}.weight" for n in range(3) for name in ("self_attn.o_proj", "mlp.down_proj")]
    names += [f"model.layers.1.mlp.down_proj.lora_{part}.weight" for part in "AB"]
    weights = {f"weight/{name}": torch.randn(8, 4, generator=numbers) for name in names}
    save_file(weights, path / "weights.safetensors")
    seen = {key: [sums for name in of for sums in parts(weights[f"weight/{name}"], ranks)] for key, of in rank.items()}
    return SimpleNamespace(
        layout=Layout.parse(layout),
        header={"first_step": 0},
        footer={
            "evidence": [{"step": 0, **{key: found[n::ranks] for key, found in seen.items()}} for n in range(ranks)]
        },
        loaded=SimpleNamespace(open=lambda: safe_open(path / "weights.safetensors", "pt")),
        steps=[],
    )


def parts(weight: torch.Tensor, ranks: int) -> list[tuple[int, int, float, float]]:
    return [sums_of(part.double()) for part in weight.chunk(ranks, 1)]


def matrices(*layers: int) -> list[str]:
    return [f"model.layers.{n}.{name}.weight" for n in layers for name in ("self_attn.o_proj", "mlp.down_proj")]


@pytest.mark.parametrize("layout", ["pp2.te.fp8tensor.fp8ends", "tp2.te.fp8tensor.fp8ends"])
@pytest.mark.parametrize(
    ("left_out", "where"), [((0, 2), ""), ((1, 2), "[1, 2]"), ((0, 1, 2), "[0, 1, 2]"), ((), "[]")]
)
def test_the_layers_that_are_left_out_are_known_by_their_weights(
    tmp_path: Path, layout: str, left_out: tuple[int, ...], where: str
) -> None:
    """Of tensor-parallel ranks by their parts; as many products are in float8 whichever layers are left out."""
    ranks = Layout.parse(layout).tp
    phase = shown_phase(tmp_path, layout, {"float8_left_out": matrices(*left_out)}, ranks=ranks)
    found = [*wrong_operands(phase, parse_scenario(SGD), 3)]
    assert found == [("the first and the last layer are left out of float8", 0, where and f"observed layers {where}")]


@pytest.mark.parametrize(("matrices", "names"), [("AB", ""), ("A", "down_proj"), ("", "down_proj")])
def test_adapters_are_known_by_their_numbers(tmp_path: Path, matrices: str, names: str) -> None:
    operands = [f"model.layers.1.mlp.down_proj.lora_{part}.weight" for part in matrices]
    phase = shown_phase(tmp_path, "dp2.te.fp8tensor", {"operands": operands})
    scenario = parse_scenario(SGD | {"lora": {"r": 4, "lora_alpha": 4, "target_modules": ["down_proj"]}})
    ((claim, step, where),) = wrong_operands(phase, scenario, 3)
    assert (claim, step) == ("adapters multiply as they are, and not in float8", 0)
    assert names in where
    assert bool(names) is bool(where)


SGD: Any = {"name": "x", "model": "m", "precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}


def of_layers(*, layers: int = 2) -> dict[str, list[list[float]]]:
    """Scales and histories of three forward operands of each layer and two backward ones, all different."""
    return {
        direction: [[1.5 + place, 0.0, 3.0 + place, 0.25 * place] for place in range(count * layers)]
        for direction, count in (("forward", 3), ("backward", 2))
    }


def changed(direction: str, place: int, number: int, value: float) -> dict[str, list[list[float]]]:
    found = of_layers()
    found[direction][place][number] = value
    return found


@pytest.mark.parametrize(
    ("loaded", "names"),
    [
        (of_layers(), ()),
        ({}, ("float8 scales and histories of 0 of 6 forward operands on rank 1",)),  # it was not saved
        (of_layers(layers=1), ("float8 scales and histories of 3 of 6 forward operands on rank 1",)),
        (changed("forward", 4, 0, 5.5 * (1 + 2**-52)), ("float8 scale of the weight of linear layer 2 on rank 1",)),
        (changed("backward", 0, 2, 0.0), ("float8 history of the gradient of linear layer 1 on rank 1",)),
        (changed("forward", 0, 3, math.nan), ("float8 history of the input of linear layer 1 on rank 1",)),
        (changed("forward", 0, 1, 1e-9), ("float8 history of the input of linear layer 1 on rank 1",)),
        (
            {name: [[1.0, 0, 0, 0] for _ in values] for name, values in of_layers().items()},  # begun anew
            (
                "float8 scale of the input of linear layer 1 on rank 1",
                "float8 history of the input of linear layer 1 on rank 1",
            ),
        ),
        (
            {name: values[: len(values) // 2] * 2 for name, values in of_layers().items()},  # of the first layer
            (
                "float8 scale of the input of linear layer 2 on rank 1",
                "float8 history of the input of linear layer 2 on rank 1",
            ),
        ),
        (
            {name: [values[0][:3], *values[1:]] for name, values in of_layers().items()},  # of another length
            ("float8 scale of the input of linear layer 1 on rank 1",),
        ),
    ],
)
def test_a_resume_goes_on_with_scales_and_histories(loaded: dict[str, Any], names: tuple[str, ...]) -> None:
    before: Any = SimpleNamespace(footer={"float8_saved": [of_layers(), of_layers()]})
    after: Any = SimpleNamespace(footer={"evidence": [{"float8_began": of_layers()}, {"float8_began": loaded}]})
    wrong = [one for one in _float8_state("training state", before, after, 2) if one.error]
    assert bool(wrong) is bool(names)
    assert [one.tensor for one in wrong[: len(names)]] == [*names]
    assert {(one.stage, one.step, one.fixed) for one in wrong} <= {("training state", 2, 0.0)}


def test_a_state_that_was_not_seen_is_not_equal() -> None:
    nothing: Any = SimpleNamespace(footer={"evidence": [{}, {}]})
    assert all(math.isinf(one.error) for one in _float8_state("training state", nothing, nothing, 2))
    assert [*_float8_state("training state", nothing, nothing, 2)]
