"""The matrix: quick covers each pair of factors, ids are stable and unique, and selections that fit nothing say so."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from conformance.backend import Supported, find_backend
from conformance.plan.cell import Cell
from conformance.plan.profile import Overrides, expand, load_profile, profile_names, select

BACKENDS = ("fsdp2", "deepspeed", "megatron")
FAMILIES = ("pangu", "llama", "qwen3", "gemma3")


def cells_of(profile: str) -> list[Cell]:
    return expand(load_profile(profile), [find_backend("fsdp2")], Overrides())


def factors(cell: Cell) -> set[tuple[str, object]]:
    """What a cell covers: family, axes, world size, precision, accumulation."""
    layout, scenario = cell.layout, cell.scenario
    axes = {axis for axis in ("dp", "rep", "tp", "sp") if getattr(layout, axis) > 1}
    return {
        ("family", scenario.model_name),
        ("world", layout.world_size),
        ("precision", scenario.precision),
        ("accumulation", scenario.accumulation),
        *(("axis", axis) for axis in axes),
    }


LEVELS = {
    "family": FAMILIES,
    "axis": ("dp", "rep", "tp", "sp"),
    "world": (2, 4, 8),
    "precision": ("exact", "fp32"),
    "accumulation": (1, 3),
}
PAIRS = [
    ((a, x), (b, y)) for a, b in itertools.combinations(LEVELS, 2) for x, y in itertools.product(LEVELS[a], LEVELS[b])
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0][1]}-{pair[1][1]}")
def test_quick_has_each_pair_of_factors_somewhere(pair: tuple[tuple[str, object], tuple[str, object]]) -> None:
    assert any(set(pair) <= factors(cell) for cell in cells_of("quick"))


def test_quick_runs_every_zero_stage_autotp_a_ring_and_ulysses_on_deepspeed() -> None:
    layouts = [c.layout for c in expand(load_profile("quick"), [find_backend("deepspeed")], Overrides())]
    assert {layout.zero for layout in layouts} == {None, 0, 1, 2}  # without a stage it is 3
    assert all(any(getattr(layout, axis) > 1 for layout in layouts) for axis in ("dp", "tp", "sp", "ulysses"))


def test_quick_runs_pipelines_sequence_parallelism_a_ring_and_the_distributed_optimizer_on_megatron() -> None:
    layouts = [c.layout for c in expand(load_profile("quick"), [find_backend("megatron")], Overrides())]
    assert any(layout.zero == 1 for layout in layouts)
    assert any("seqpar" in layout.options for layout in layouts)
    assert all(any(getattr(layout, axis) > 1 for layout in layouts) for axis in ("dp", "tp", "sp", "pp", "vpp"))


def test_quick_sets_all_three_backends_side_by_side() -> None:
    groups = [
        {(str(c.layout), c.scenario.name, c.scenario.model, c.scenario.precision) for c in cells}
        for cells in (expand(load_profile("quick"), [find_backend(b)], Overrides()) for b in BACKENDS)
    ]
    assert set.intersection(*groups)


@pytest.mark.parametrize("profile", profile_names())
@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_that_name_a_backend_hold_cells_that_it_supports(profile: str, backend: str) -> None:
    entry = find_backend(backend)
    mine = dataclasses.replace(
        load_profile(profile), cells=tuple(t for t in load_profile(profile).cells if backend in t.backends)
    )
    for cell in expand(mine, [entry], Overrides()):
        assert isinstance(entry.load().supports(cell.scenario, cell.layout), Supported), str(cell)


def test_quick_has_packed_and_padded_rows_sgd_and_adamw_clipping_on_and_off() -> None:
    scenarios = [cell.scenario for cell in cells_of("quick")]
    assert {s.data.packed for s in scenarios} == {True, False}
    assert {s.optimizer.name for s in scenarios} == {"sgd", "adamw"}
    assert {s.optimizer.max_grad_norm is None for s in scenarios} == {True, False}


@pytest.mark.parametrize("profile", profile_names())
def test_ids_are_unique_sorted_and_the_same_every_time(profile: str) -> None:
    ids = [str(cell) for cell in cells_of(profile)]
    assert len(set(ids)) == len(ids)
    assert ids == [str(cell) for cell in cells_of(profile)]
    assert len({cell.slug for cell in cells_of(profile)}) == len(ids)


def test_quick_has_a_resume_and_a_warm_up() -> None:
    scenarios = [cell.scenario for cell in cells_of("quick")]
    assert any(scenario.resume_after for scenario in scenarios)
    assert any(scenario.schedule.warmup_steps for scenario in scenarios)


def test_an_id_names_scenario_model_backend_layout_and_precision() -> None:
    assert "sft-packed/qwen3/fsdp2/dp2.tp2.sp2.lastsync/exact" in [str(cell) for cell in cells_of("quick")]


def test_the_users_model_and_data_replace_the_profiles_own() -> None:
    overrides = Overrides(model="models/llama", seed=3, data=(("path", "my.jsonl"), ("input_key", "q")))
    cells = expand(load_profile("quick"), [find_backend("fsdp2")], overrides)
    assert {cell.scenario.model for cell in cells} == {"models/llama"}
    assert {(c.scenario.data.path, c.scenario.data.input_key, c.scenario.seed) for c in cells} == {("my.jsonl", "q", 3)}
    assert all(str(cell).endswith("/seed3") for cell in cells)


def test_a_pattern_need_not_name_seed_and_faults() -> None:
    overrides = Overrides(seed=3)
    cells = expand(load_profile("quick"), [find_backend("fsdp2")], overrides, faults=("cleared-gradients",))
    assert [str(cell) for cell in select(cells, ["sft-packed/pangu/fsdp2/dp2/exact"])] == [
        "sft-packed/pangu/fsdp2/dp2/exact/seed3/fault-cleared-gradients"
    ]


def test_a_pattern_that_matches_nothing_shows_what_ids_look_like() -> None:
    with pytest.raises(ValueError, match=r"no cell matches '\*/gpt2/\*'; ids look like sft-"):
        select(cells_of("quick"), ["*/gpt2/*"])


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no profile 'slow'; known: full, gpu, quick, side-by-side, or give a .toml file"
    ):
        load_profile("slow")


def test_a_broken_profile_is_named_with_its_field(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('description = "x"\n[[cells]]\nscenarios = ["sft-sgd"]\nmodels = ["llama"]\nlayouts = ["dp2"]\n')
    with pytest.raises(ValueError, match=r"mine.toml is not a valid profile:\n  cells.0.precisions: Field required"):
        load_profile(str(file))
