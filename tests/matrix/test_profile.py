"""Profiles: quick covers each pair of factors, ids are stable and unique, and selections that fit nothing say so."""

import dataclasses
import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive

from conformance.backends.faults import catalogue
from conformance.backends.protocol import Supported, find_backend
from conformance.core.errors import UsageError
from conformance.matrix.cell import Cell
from conformance.matrix.options import Demands, Portion, Ranks, Selection
from conformance.matrix.plan import make_plan
from conformance.matrix.profile import Overrides, expand, load_profile, profile_names, select, select_cells
from conformance.spec.layout import Layout

BACKENDS = ("fsdp2", "deepspeed", "megatron")
FAMILIES = ("pangu", "llama", "qwen3", "gemma3")


@cache
def cells_of(profile: str, *backends: str) -> list[Cell]:
    return expand(load_profile(profile), [find_backend(name) for name in backends or BACKENDS], Overrides())


def layouts_of(profile: str, backend: str) -> list[Layout]:
    return [phase.layout for cell in cells_of(profile, backend) for phase in cell.phases]


@cache
def factors(cell: Cell) -> set[tuple[str, object]]:
    """What a cell of one layout covers: family, axes, world size, precision, accumulation."""
    layout, scenario = cell.phases[0].layout, cell.scenario
    axes = {axis for axis in ("dp", "rep", "tp", "sp") if getattr(layout, axis) > 1}
    return {
        ("family", scenario.model_name),
        ("worker_group", layout.world_size),
        ("precision", scenario.precision),
        ("accumulation", scenario.accumulation),
        *(("axis", axis) for axis in axes),
    }


LEVELS = {
    "family": FAMILIES,
    "axis": ("dp", "rep", "tp", "sp"),
    "worker_group": (2, 4),
    "precision": ("exact", "fp32"),
    "accumulation": (1, 3),
}
PAIRS = [
    ((a, x), (b, y)) for a, b in itertools.combinations(LEVELS, 2) for x, y in itertools.product(LEVELS[a], LEVELS[b])
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0][1]}-{pair[1][1]}")
def test_quick_has_each_pair_of_factors_somewhere(pair: tuple[tuple[str, object], tuple[str, object]]) -> None:
    assert any(set(pair) <= factors(cell) for cell in cells_of("quick", "fsdp2"))


def test_quick_has_eight_ranks_once_along_three_axes() -> None:
    large = [cell.phases[0].layout for cell in cells_of("quick") if cell.world_size == 8]
    assert [(layout.dp, layout.tp, layout.sp) for layout in large] == [(2, 2, 2)]


def test_no_fault_needs_more_than_four_ranks() -> None:
    """So quick's further worlds of eight ranks would catch nothing that smaller ones do not."""
    layouts = [layout for fault in catalogue().values() for layout in fault.cells.layouts.values()]
    assert max(Layout.parse(layout).world_size for layout in layouts) == 4


def test_quick_runs_every_zero_stage_autotp_a_ring_and_ulysses_on_deepspeed() -> None:
    layouts = layouts_of("quick", "deepspeed")
    assert {layout.zero for layout in layouts} == {None, 0, 1, 2}  # without a stage it is 3
    assert all(any(getattr(layout, axis) > 1 for layout in layouts) for axis in ("dp", "tp", "sp", "ulysses"))


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed", "megatron"])
def test_quick_runs_bf16_and_exact_on_every_backend(backend: str) -> None:
    assert {cell.scenario.precision for cell in cells_of("quick", backend)} >= {"exact", "bf16"}


def test_quick_profile_covers_megatron_parallelism() -> None:
    layouts = layouts_of("quick", "megatron")
    assert any(layout.zero == 1 for layout in layouts)
    assert any("seqpar" in layout.options for layout in layouts)
    assert all(any(getattr(layout, axis) > 1 for layout in layouts) for axis in ("dp", "tp", "sp", "pp", "vpp"))


def test_quick_sets_all_three_backends_side_by_side() -> None:
    groups = [
        {(cell.layout, cell.variant, cell.scenario.name, cell.scenario.model) for cell in cells_of("quick", backend)}
        for backend in BACKENDS
    ]
    assert set.intersection(*groups)


LARGE = ("full", "nightly")
PROFILES = [exhaustive(name) if name in LARGE else name for name in profile_names()]


@cache
def cells_of_named_tables(profile: str) -> list[Cell]:
    """Cells of the tables that name their backends."""
    whole = load_profile(profile)
    named = tuple(table for table in whole.cells if table.backends)
    return expand(dataclasses.replace(whole, cells=named), [find_backend(name) for name in BACKENDS], Overrides())


@pytest.mark.parametrize("profile", [profile for profile in PROFILES if profile != "frameworks"])  # names no backend
@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_that_name_a_backend_hold_cells_that_it_supports(
    monkeypatch: pytest.MonkeyPatch, profile: str, backend: str
) -> None:
    """On a machine that has what the profile is for: TransformerEngine, GPUs that multiply in float8, torchao 0.18, and
    the newest torch."""
    monkeypatch.setattr("impl.megatron.refusals.is_installed", lambda package: True)
    monkeypatch.setattr("impl.megatron.refusals.machine_refused", lambda layout: "")
    monkeypatch.setattr("impl.megatron.refusals.is_older", lambda *version: False)
    monkeypatch.setattr("impl.fsdp2.adapter.is_older", lambda *version: False)
    monkeypatch.setattr("impl.fsdp2.adapter.find_spec", lambda package: True)
    monkeypatch.setattr("impl.fsdp2.float8.find_spec", lambda package: True)
    monkeypatch.setattr("impl.fsdp2.float8.package_version", lambda package: "0.18.0")
    monkeypatch.setattr("impl.fsdp2.float8.is_older", lambda package, *version: version > (0, 18))
    mine = [cell for cell in cells_of_named_tables(profile) if backend in {phase.backend.name for phase in cell.phases}]
    assert mine
    adapter = find_backend(backend).load()
    for cell in mine:
        for layout in {phase.layout for phase in cell.phases if phase.backend.name == backend}:
            assert isinstance(adapter.supports(cell.scenario, layout), Supported), str(cell)
            assert not cell.scenario.data.rows % (layout.data * cell.scenario.accumulation), str(cell)


def test_quick_has_packed_and_padded_rows_sgd_and_adamw_clipping_on_and_off() -> None:
    scenarios = [cell.scenario for cell in cells_of("quick", "fsdp2")]
    assert {s.data.packed for s in scenarios} == {True, False}
    assert {s.optimizer.name for s in scenarios} == {"sgd", "adamw"}
    assert {s.optimizer.max_grad_norm is None for s in scenarios} == {True, False}


@pytest.mark.parametrize("profile", PROFILES)
def test_ids_are_unique_sorted_and_the_same_every_time(profile: str) -> None:
    cells = cells_of(profile)
    ids = [str(cell) for cell in cells]
    assert len(set(ids)) == len(ids) == len({cell.slug for cell in cells})
    assert ids == [str(c) for c in sorted(cells, key=lambda c: (c.backend, c.world_size, str(c)))]
    cells_of.cache_clear()
    assert ids == [str(cell) for cell in cells_of(profile)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
def test_nightly_uses_one_two_four_and_eight_gpus_and_gpu_no_more_than_four(backend: str) -> None:
    """So that packing has something to fill every gap with, and a machine with four GPUs runs all of its profile."""
    adapter = find_backend(backend).load()
    for profile, sizes in (("nightly", {1, 2, 4, 8}), ("gpu", {2, 4})):
        cells = cells_of(profile, backend)
        assert {cell.world_size for cell in cells} == sizes
        for size in sizes:
            phases = ((cell.scenario, cell.phases[0].layout) for cell in cells if cell.world_size == size)
            assert any(isinstance(adapter.supports(scenario, layout), Supported) for scenario, layout in phases)
        scenarios = {cell.scenario for cell in cells}
        assert any(scenario.lora for scenario in scenarios)
        assert {"qwen3-moe", "mixtral"} <= {scenario.model_name for scenario in scenarios}
        assert {"sft", "grpo", "ppo"} <= {scenario.objective.kind for scenario in scenarios}
        assert {"exact", "fp32", "bf16", "fp16"} <= {scenario.precision for scenario in scenarios}


@pytest.mark.exhaustive
def test_nightly_is_a_plan_of_cells_that_other_profiles_have() -> None:
    """Which are run on CPUs: what differs at night is then about GPUs, or is seen in the morning on a laptop."""
    plan = make_plan(Selection(profile="nightly", backend=BACKENDS), Demands(), Portion(), ranks=Ranks(device="cuda"))
    others = {str(cell) for profile in ("full", "families", "gpu") for cell in cells_of(profile)}
    assert not {str(cell) for cell in plan.cells} - others


def test_quick_saves_and_goes_on_in_the_middle_of_a_warm_up_on_every_backend() -> None:
    for backend in BACKENDS:
        resumed = [cell for cell in cells_of("quick", backend) if cell.program == "resume"]
        assert resumed
        for cell in resumed:
            first, second = cell.phases
            assert first.save == "checkpoint"
            assert 0 < first.steps <= cell.scenario.schedule.warmup_steps
            assert second.steps >= 2


def test_a_profile_may_run_the_first_steps_of_every_scenario(tmp_path: Path) -> None:
    file = tmp_path / "short.toml"
    file.write_text("""
        description = "short"
        steps = 2
        [[cells]]
        scenarios = ["sft-sgd"]
        models = ["llama"]
        layouts = ["dp2"]
        precisions = ["exact"]
    """)
    (cell,) = expand(load_profile(str(file)), [find_backend("fsdp2")], Overrides())
    assert [phase.steps for phase in cell.phases] == [cell.scenario.steps] == [2]
    file.write_text(file.read_text() + "steps = 3\n")
    (cell,) = expand(load_profile(str(file)), [find_backend("fsdp2")], Overrides())
    assert cell.scenario.steps == 3, "of a table, in the place of the profile's"
    file.write_text(file.read_text().removesuffix("steps = 3\n"))
    file.write_text(file.read_text().replace("steps = 2\n", "steps = 99\n", 1))
    (cell,) = expand(load_profile(str(file)), [find_backend("fsdp2")], Overrides())
    assert cell.scenario.steps == 5


def test_the_first_pattern_that_fits_gives_the_steps_of_a_cell_unless_its_table_does(tmp_path: Path) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text("""
        description = "tiers"
        steps = 4
        steps_of = { "sft-sgd/llama/exact" = 3, "*/exact" = 2, "*/bf16" = 1 }
        [[cells]]
        scenarios = ["sft-sgd"]
        models = ["llama", "qwen3"]
        layouts = ["dp2"]
        precisions = ["exact", "fp32", "bf16"]
    """)

    def steps(model: str | None = None) -> set[tuple[str, str, int]]:
        cells = expand(load_profile(str(file)), [find_backend("fsdp2")], Overrides(model=model))
        return {(cell.scenario.model_name, cell.scenario.precision, cell.scenario.steps) for cell in cells}

    assert {("llama", "exact", 3), ("qwen3", "exact", 2), ("llama", "fp32", 4), ("qwen3", "bf16", 1)} <= steps()
    assert {("gemma3", "exact", 3), ("gemma3", "bf16", 1)} <= steps("models/gemma3")  # a user's model: the most
    file.write_text(file.read_text() + "steps = 5\n")
    assert {number for _, _, number in steps()} == {5}


@pytest.mark.parametrize("profile", PROFILES)
def test_cells_that_are_compared_with_each_other_have_the_same_steps_and_rows(profile: str) -> None:
    """Side by side, a cell of another oracle run is left out, and its group is incomplete."""
    sizes: dict[tuple[str, str, str], set[tuple[int, int]]] = {}
    for scenario in (cell.scenario for cell in cells_of(profile)):
        key = scenario.name, scenario.model_name, scenario.precision
        sizes.setdefault(key, set()).add((scenario.steps, scenario.data.rows))
    assert {key: found for key, found in sizes.items() if len(found) > 1} == {}


def test_full_draws_among_steps_in_every_exact_cell_and_begins_second_rollouts() -> None:
    exact = [cell for cell in cells_of("full") if cell.scenario.precision == "exact"]
    steps = {(cell.backend, cell.scenario.name, cell.scenario.model_name, cell.scenario.steps) for cell in exact}
    assert set(itertools.product(BACKENDS, ("grpo", "ppo"), ("llama", "qwen3"), [5])) <= steps
    # A phase of two steps has one step to draw from, so a backend could know which weights are not read.
    assert {cell.scenario.name for cell in exact if not cell.program and cell.scenario.steps < 3} == {"sft-long"}


def test_a_profile_may_choose_rows_and_the_data_of_scenarios_that_name_none() -> None:
    profile = dataclasses.replace(load_profile("full"), rows=6, data="data/varied_problems.jsonl")
    table = dataclasses.replace(profile.cells[0], models=("llama",), layouts=("dp2",), scenarios=("sft-packed", "grpo"))
    cells = expand(dataclasses.replace(profile, cells=(table,)), [find_backend("fsdp2")], Overrides())
    chosen = {cell.scenario.name: cell.scenario.data for cell in cells}
    assert (chosen["sft-packed"].path, chosen["grpo"].path) == (profile.data, "data/rollouts/{model}.jsonl")
    assert {data.rows for data in chosen.values()} == {6}
    own = Overrides(data=(("path", "data/word_problems.jsonl"), ("rows", 12)))
    table = dataclasses.replace(table, scenarios=("sft-packed",))
    for cell in expand(dataclasses.replace(profile, cells=(table,)), [find_backend("fsdp2")], own):
        assert (cell.scenario.data.path, cell.scenario.data.rows) == ("data/word_problems.jsonl", 12)
    with pytest.raises(UsageError, match=r"data\.rows=7 is not divisible by accumulation=3"):
        expand(dataclasses.replace(profile, rows=7, cells=(table,)), [find_backend("fsdp2")], Overrides())


def test_full_profile_transfers_checkpoints_and_weights() -> None:
    chains = [cell for cell in cells_of("full") if len({(phase.backend, phase.layout) for phase in cell.phases}) > 1]
    handed = {(a.save, a.backend.name, b.backend.name) for c in chains for a, b in itertools.pairwise(c.phases)}
    assert {("checkpoint", "fsdp2", "fsdp2"), ("checkpoint", "megatron", "megatron")} <= handed
    exported = {(giver, taker) for save, giver, taker in handed if save == "export" and giver != taker}
    assert {giver for giver, _ in exported} == {taker for _, taker in exported} == set(BACKENDS)


def test_a_table_with_two_lists_of_layouts_goes_from_each_to_each(tmp_path: Path) -> None:
    file = tmp_path / "ways.toml"
    file.write_text("""
        description = "ways"
        [programs]
        state = [{ steps = 2, save = "state" }, {}]
        [[cells]]
        scenarios = ["sft-sgd"]
        models = ["llama"]
        layouts = ["dp2", "tp2"]
        to = ["dp2", "sp2"]
        precisions = ["exact"]
        program = "state"
    """)
    cells = expand(load_profile(str(file)), [find_backend("fsdp2")], Overrides())
    assert {cell.layout for cell in cells} == {"dp2", "dp2-to-sp2", "tp2-to-dp2", "tp2-to-sp2"}
    assert [str(phase.layout) for phase in cells[-1].phases] == ["tp2", "sp2"]


def test_checkpoints_has_every_backend_hand_its_state_to_every_other() -> None:
    cells = [cell for cell in cells_of("checkpoints") if cell.program == "state"]
    assert {tuple(phase.backend.name for phase in cell.phases) for cell in cells} == {
        *itertools.product(BACKENDS, BACKENDS)
    }
    for backend in BACKENDS:
        own = [cell for cell in cells if cell.backend == backend and cell.scenario.name == "sft-warmup"]
        ways = {tuple(str(phase.layout) for phase in cell.phases) for cell in own if cell.scenario.precision == "exact"}
        assert len({one for one, _ in ways}) >= 6
        assert len(ways) >= 36


def test_an_id_names_scenario_model_backend_layout_and_precision() -> None:
    assert "sft-padded/gemma3/fsdp2/dp2.tp2.sp2/exact" in [str(cell) for cell in cells_of("quick")]


def test_the_users_model_and_data_replace_the_profiles_own() -> None:
    overrides = Overrides(model="models/llama", seed=3, data=(("path", "my.jsonl"), ("input_key", "q")))
    cells = expand(load_profile("quick"), [find_backend("fsdp2")], overrides)
    assert {cell.scenario.model for cell in cells} == {"models/llama"}
    assert {(c.scenario.data.path, c.scenario.data.input_key, c.scenario.seed) for c in cells} == {("my.jsonl", "q", 3)}
    assert all(str(cell).endswith("/seed3") for cell in cells)


def test_with_one_model_the_longest_of_equal_cells_stays() -> None:
    profile = load_profile("quick")
    table = dataclasses.replace(profile.cells[0], scenarios=("sft-packed",), steps=1)
    for steps in ((1, 2, 1), (2, 1)):
        tables = tuple(dataclasses.replace(table, steps=own) for own in steps)
        two = dataclasses.replace(profile, cells=tables)
        cells = expand(two, [find_backend("fsdp2")], Overrides(model="models/llama"))
        assert {cell.scenario.steps for cell in cells} == {2}


def test_options_of_the_user_reach_every_cell() -> None:
    for packed, stride in ((True, 2), (False, None)):
        cells = select_cells(Selection(backend=("fsdp2",), packing_samples=packed, ring_head_stride=stride))
        plain = {cell.scenario.name: cell.scenario.data.packed for cell in cells_of("quick", "fsdp2")}
        assert all(cell.scenario.data.packed == (packed or plain[cell.scenario.name]) for cell in cells)
        for layout in (phase.layout for cell in cells for phase in cell.phases):
            assert layout.stride == ((stride or 1) if layout.gathers else 1)


@pytest.mark.parametrize(
    ("record", "kept"),
    [({"question": "2?", "answer": "2"}, "samples"), ({"prompt_ids": [1], "completion_ids": [2]}, "rollouts")],
)
def test_cells_that_cannot_read_the_data_are_left_out(
    record: dict[str, Any], kept: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "mine.jsonl").write_text(json.dumps(record))
    cells = select_cells(Selection(backend=("fsdp2",), data=str(file)))
    assert {cell.scenario.objective.reads for cell in cells} == {kept}
    count = len(cells_of("quick", "fsdp2"))
    assert f"left out {count - len(cells)} of {count} cells" in caplog.text
    left_out = {cell.scenario.name for cell in cells_of("quick", "fsdp2")} - {cell.scenario.name for cell in cells}
    assert ", ".join(sorted(left_out)) in caplog.text


def test_cells_that_the_user_names_are_not_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file := tmp_path / "mine.jsonl").write_text('{"question": "2?", "answer": "2"}')
    cells = select_cells(Selection(backend=("fsdp2",), data=str(file), cells=("grpo*",)))
    assert {cell.scenario.name for cell in cells} == {"grpo"}
    assert not caplog.text


def test_a_pattern_need_not_name_seed_and_faults() -> None:
    overrides = Overrides(seed=3)
    cells = expand(load_profile("quick"), [find_backend("fsdp2")], overrides, faults=("cleared-gradients",))
    assert [str(cell) for cell in select(cells, ["sft-packed/pangu/fsdp2/dp2/exact"])] == [
        "sft-packed/pangu/fsdp2/dp2/exact/seed3/fault-cleared-gradients"
    ]


def test_braces_in_a_pattern_stand_for_either_text() -> None:
    chosen = select(cells_of("quick"), ["sft-*/*/fsdp2/dp{2.{tp2,sp2},4}*/exact"])
    assert [str(cell) for cell in chosen] == [
        "sft-padded/pangu/fsdp2/dp4.rep2/exact",
        "sft-sgd/llama/fsdp2/dp2.tp2.seqpar/exact",
        "sft-padded/gemma3/fsdp2/dp2.tp2.sp2/exact",
    ]


def test_whole_ids_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = cells_of("quick")
    monkeypatch.setattr("fnmatch.filter", lambda *_: pytest.fail("a search of all ids for each whole id"))
    assert select(cells, [str(cell) for cell in reversed(cells)]) == list(cells)


def test_a_pattern_that_matches_nothing_shows_what_ids_look_like() -> None:
    with pytest.raises(UsageError, match=r"no cell matches '\*/gpt2/\*'; ids look like grpo"):
        select(cells_of("quick"), ["*/gpt2/*"])


def test_an_unknown_profile_lists_the_known_ones() -> None:
    known = ", ".join(profile_names())
    with pytest.raises(UsageError, match=rf"no profile 'slow'; known: {known}, or give a .toml file"):
        load_profile("slow")
    with pytest.raises(UsageError, match=r"there is no profile 'slow\.toml' in /"):
        load_profile("slow.toml")
    assert {"full", "gpu", "quick", "side-by-side"} <= set(profile_names())


def test_a_broken_profile_is_named_with_its_field(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('description = "x"\n[[cells]]\nscenarios = ["sft-sgd"]\nmodels = ["llama"]\nlayouts = ["dp2"]\n')
    with pytest.raises(UsageError, match=r"mine.toml is not a valid profile:\n  cells.0.precisions: is missing"):
        load_profile(str(file))


TABLE = """
description = "one table"
[[cells]]
scenarios = ["sft-sgd"]
models = ["llama"]
layouts = ["dp2"]
precisions = ["exact"]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('layouts = ["dp2"]', 'layouts = ["dp2", "dp02"]', r"cells.0.layouts.1: .*layout 'dp02': the size in 'dp02'"),
        ('layouts = ["dp2"]', 'layouts = ["dp2-to-"]', r"cells.0.layouts.0: .*'' is neither an axis"),
        ('layouts = ["dp2"]', 'layouts = ["dp999999999"]', r"cells.0.layouts.0: .*more than any machine has"),
        ('layouts = ["dp2"]', "layouts = []", r"cells.0.layouts: the list is empty; give at least one"),
        ('models = ["llama"]', "models = []", r"cells.0.models: the list is empty; give at least one"),
        ('description = "one table"', 'description = "one"\nsteps = "2"', r"steps: Input should be a valid integer"),
        (
            'description = "one table"',
            'description = "one"\nsteps = 0',
            r"steps: Input should be greater than or equal",
        ),
        (
            'description = "one table"',
            'description = "one"\nprograms = {none = []}',
            r"programs.none: the list is empty; give at least one",
        ),
        (
            'description = "one table"',
            'description = "one"\nprograms = {two = [{steps = true}]}',
            r"programs.two.0.steps: Input should be a valid integer",
        ),
        ('scenarios = ["sft-sgd"]', 'scenarios = ["nothing"]', r"profile .*mine.toml: no scenario file .*nothing.toml"),
        ('scenarios = ["sft-sgd"]', 'scenarios = ["\\u0000"]', r"profile .*mine.toml: .* cannot be read: .*null byte"),
        ('layouts = ["dp2"]', 'layouts = ["dp2-to-dp4"]', r"profile .*mine.toml: 2 layouts for a program of 1 phases"),
        (
            'models = ["llama"]',
            'models = ["llama"]\nprogram = "x"',
            r"profile .*mine.toml: a table names the program 'x'",
        ),
    ],
)
def test_a_wrong_value_of_a_profile_is_named_with_the_file(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TABLE)
    assert len(select_cells(Selection(profile=str(file), backend=("fsdp2",)))) == 1
    file.write_text(TABLE.replace(old, new))
    with pytest.raises(UsageError, match=message) as error:
        select_cells(Selection(profile=str(file), backend=("fsdp2",)))
    assert "mine.toml" in str(error.value)


def test_a_stride_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="stride=0: every axis of a layout needs at least one rank"):
        select_cells(Selection(backend=("fsdp2",), ring_head_stride=0))


def test_trust_in_code_reaches_every_cell_and_its_reproduce_command() -> None:
    for trusted in (True, False):
        selection = Selection(backend=("fsdp2",), trust_remote_code=trusted)
        assert {cell.scenario.trust_remote_code for cell in select_cells(selection)} == {trusted}
        assert ("--trust-remote-code" in selection.arguments()) == trusted
