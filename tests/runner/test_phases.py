"""Programs: cells of several phases are written down without gaps, hand over what the next phase can read, and have
ids."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.backends.protocol import find_backend
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.inputs import FrozenInputs
from conformance.matrix.cell import Cell, Handover, Phase, PhaseSpec
from conformance.matrix.profile import Overrides, Profile, expand, load_profile
from conformance.runner import phases
from conformance.runtime import Outcome
from conformance.spec.layout import Layout
from conformance.spec.scenario import load_scenario

SCENARIO = load_scenario(FIXTURES / "scenarios" / "sft-warmup.toml", model="models/llama", precision="exact")  # 5 steps


def phase(steps: int, save: Handover | None = None, *, backend: str = "fsdp2", layout: str = "dp2") -> Phase:
    return Phase(backend=find_backend(backend), layout=Layout.parse(layout), steps=steps, save=save)


def cell(*phases: Phase, program: str = "mine") -> Cell:
    return Cell(scenario=SCENARIO, phases=phases, program=program)


# --- cells -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        (
            [phase(2, "checkpoint"), phase(2)],
            "phases of program 'mine' have 4 steps and scenario sft-warmup has 5; change one of them, or leave out",
        ),
        ([phase(2, "checkpoint"), phase(4)], "have 6 steps and scenario sft-warmup has 5"),
        (
            [phase(5, "checkpoint")],
            "the last phase of program 'mine' saves, but no phase follows; add a phase, or leave out its save",
        ),
        ([phase(2, "export"), phase(3, "export")], "the last phase of program 'mine' saves, but no phase follows"),
        ([phase(2), phase(3)], 'saves nothing for the next; give it save = "checkpoint", "state" or "export"'),
        (
            [phase(2, "checkpoint"), phase(3, backend="megatron")],
            'loads a checkpoint of fsdp2 into megatron, which cannot read it; use save = "state" or "export"',
        ),
        (
            [phase(4, "checkpoint"), phase(1)],
            "one step after a checkpoint, but lost optimizer state shows at the second; use at least two",
        ),
        ([phase(2, "export"), phase(2, "checkpoint"), phase(1)], "one step after a checkpoint"),
        ([phase(4, "state"), phase(1, backend="megatron")], "one step after a state"),
    ],
)
def test_phases_that_cannot_go_on_from_each_other_are_refused(phases: list[Phase], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cell(*phases)


@pytest.mark.parametrize(
    "phases",
    [
        [phase(5)],
        [phase(2, "checkpoint"), phase(3, layout="tp2")],
        [phase(0, "checkpoint"), phase(5)],
        [phase(4, "export"), phase(1)],
        [phase(2, "export"), phase(1, "export", backend="megatron"), phase(2, backend="deepspeed")],
        [phase(2, "checkpoint"), phase(0, "export"), phase(3)],
        [phase(2, "state"), phase(3, backend="megatron")],
    ],
)
def test_phases_that_can_are_not(phases: list[Phase]) -> None:
    assert cell(*phases).phases == tuple(phases)


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([phase(2, "checkpoint"), phase(3)], "sft-warmup/llama/fsdp2/dp2/exact/mine"),
        ([phase(2, "checkpoint"), phase(3, layout="tp2")], "sft-warmup/llama/fsdp2/dp2-to-tp2/exact/mine"),
        ([phase(2, "export"), phase(3, backend="megatron")], "sft-warmup/llama/fsdp2-to-megatron/dp2/exact/mine"),
        (
            [phase(2, "export"), phase(2, "export", layout="tp2"), phase(1, layout="dp2.zero2")],
            "sft-warmup/llama/fsdp2/dp2-to-tp2-to-dp2.zero2/exact/mine",
        ),
        (
            [phase(1, "export"), phase(1, "export", layout="tp2"), phase(3)],
            "sft-warmup/llama/fsdp2/dp2-to-tp2-to-dp2/exact/mine",
        ),
    ],
)
def test_an_id_names_backends_and_layouts_in_turn_and_once_if_they_are_the_same(
    phases: list[Phase], expected: str
) -> None:
    assert str(cell(*phases)) == expected
    assert cell(*phases).slug == expected.replace("/", "_")


def test_phases_count_on_where_the_one_before_ended_and_only_exports_begin_anew() -> None:
    found = cell(phase(1, "export"), phase(2, "checkpoint"), phase(2, layout="dp2.tp2"))
    assert found.first_steps == (0, 1, 3)
    assert found.restarts == (1,)
    assert found.world_size == 4
    assert cell(phase(5)).restarts == ()


# --- profiles --------------------------------------------------------------------------------------------------------


def profile(tmp_path: Path, table: str, programs: str = "") -> Profile:
    """A profile with one table; ``table`` are the lines that differ between tests."""
    file = tmp_path / "mine.toml"
    common = 'scenarios = ["sft-warmup"]\nmodels = ["llama"]\nprecisions = ["exact"]\n'
    file.write_text(f'description = "x"\n[programs]\n{programs}\n[[cells]]\n{common}{table}\n')
    return load_profile(str(file))


def ids(profile: Profile, backends: Sequence[str] = ("fsdp2", "megatron", "deepspeed")) -> list[str]:
    return [str(cell) for cell in expand(profile, [find_backend(name) for name in backends], Overrides())]


RESUME = 'mine = [{ steps = 2, save = "checkpoint" }, { steps = 3 }]'
EXPORT = 'mine = [{ steps = 2, save = "export" }, {}]'


def test_the_last_phase_has_the_steps_that_are_left(tmp_path: Path) -> None:
    (found,) = expand(
        profile(tmp_path, 'layouts = ["dp2"]\nprogram = "mine"', EXPORT), [find_backend("fsdp2")], Overrides()
    )
    assert [phase.steps for phase in found.phases] == [2, 3]
    assert found.program == "mine"


@pytest.mark.parametrize(
    ("table", "programs", "message"),
    [
        ('layouts = ["dp2"]\nprogram = "typo"', RESUME, r"names the program 'typo', .* does not have \(known: mine\)"),
        ('layouts = ["dp2"]\nprogram = "mine"', "", r"names the program 'mine', .* does not have \(known: none\)"),
        (
            'layouts = ["dp2-to-dp4-to-dp8"]\nprogram = "mine"',
            RESUME,
            "3 layouts for a program of 2 phases; give one for all, or one for each",
        ),
        ('layouts = ["dp2-to-dp4"]', "", "2 layouts for a program of 1 phases"),
        (
            'layouts = ["dp2"]\nbackends = ["fsdp2-to-megatron-to-deepspeed"]\nprogram = "mine"',
            EXPORT,
            "3 backends for a program of 2 phases",
        ),
        (
            'layouts = ["dp2"]\nbackends = ["fsdp2-to-megatron"]\nprogram = "mine"',
            RESUME,
            "loads a checkpoint of fsdp2",
        ),
        (
            'layouts = ["dp2"]\nprogram = "mine"',
            'mine = [{ save = "checkpoint" }, { steps = 3 }]',
            "only the last phase of a program may leave out its steps",
        ),
        (
            'layouts = ["dp2"]\nprogram = "mine"',
            'mine = [{ steps = 2, save = "checkpoint" }, { steps = 2 }]',
            "have 4 steps and scenario sft-warmup has 5",
        ),
        (
            'layouts = ["dp2"]\nprogram = "mine"',
            'mine = [{ steps = 6, save = "checkpoint" }, {}]',
            "phases of program 'mine' before the last have 6 steps and scenario sft-warmup has 5; give them fewer",
        ),
    ],
)
def test_a_program_that_does_not_fit_its_table_is_refused(
    tmp_path: Path, table: str, programs: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ids(profile(tmp_path, table, programs))


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (
            'mine = [{ steps = 2, save = "pickle" }, {}]',
            r"programs.mine.0.save: Input should be 'checkpoint', 'state', 'exp",
        ),
        ("mine = [{ steps = -1 }, {}]", "programs.mine.0.steps: Input should be greater than or equal to 0"),
        ("mine = [{ step = 2 }, {}]", "programs.mine.0.step: there is no such key"),
    ],
)
def test_a_wrong_value_of_a_program_is_named(tmp_path: Path, programs: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profile(tmp_path, 'layouts = ["dp2"]\nprogram = "mine"', programs)


def test_a_chain_is_left_out_unless_all_its_backends_are_asked_for(tmp_path: Path) -> None:
    chain = 'layouts = ["dp2-to-tp2"]\nbackends = ["fsdp2", "fsdp2-to-megatron"]\nprogram = "mine"'
    own = "sft-warmup/llama/fsdp2/dp2-to-tp2/exact/mine"
    both = "sft-warmup/llama/fsdp2-to-megatron/dp2-to-tp2/exact/mine"
    found = profile(tmp_path, chain, EXPORT)
    assert ids(found, ["fsdp2"]) == [own]
    assert ids(found, ["megatron"]) == []
    assert ids(found, ["megatron", "fsdp2"]) == [own, both]


def test_two_scenario_files_of_one_name_are_not_taken_for_one(tmp_path: Path) -> None:
    text = (FIXTURES / "scenarios" / "sft-sgd.toml").read_text()
    files = [tmp_path / folder / "tiny.toml" for folder in ("a", "b")]
    for file, steps in zip(files, (5, 4), strict=True):
        file.parent.mkdir()
        file.write_text(text.replace("steps = 5", f"steps = {steps}"))
    both = ", ".join(f'"{file}"' for file in files)
    table = f'layouts = ["dp2"]\n[[cells]]\nscenarios = [{both}]\nmodels = ["llama"]\nprecisions = ["exact"]\n'
    with pytest.raises(UsageError, match=r"two different cells have the id tiny/llama/fsdp2/dp2/exact; rename one"):
        ids(profile(tmp_path, table + 'layouts = ["dp2"]'), ["fsdp2"])


def test_a_cell_that_two_tables_name_is_run_once(tmp_path: Path) -> None:
    again = '[[cells]]\nscenarios = ["sft-warmup"]\nmodels = ["llama"]\nprecisions = ["exact"]\nlayouts = ["dp2"]'
    assert len(ids(profile(tmp_path, f'layouts = ["dp2"]\n{again}'), ["fsdp2"])) == 1


# --- what a phase reaches --------------------------------------------------------------------------------------------


@dataclass
class Ranks:
    """Stands in for a pool: each phase writes a record, and what it saves. ``seen``: what it finds of earlier ones."""

    folder: Path
    control: Outcome | None = None
    seen: list[list[str]] = field(default_factory=list)

    def run(self, *, kwargs: dict[str, Any], keep: bool, **_: Any) -> Outcome:
        spec = PhaseSpec.from_json(kwargs["spec"])
        self.seen.append(sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.bin")))
        done = Outcome(state="done", reason="", kind="", rank=None, seconds=0.0, results=[{}])
        if "control" in spec.record.parts and self.control:
            return self.control
        spec.record.mkdir(parents=True)
        (spec.record / "of.bin").touch()
        digest = "same" if self.control is None else (spec.load or ("", Path()))[1].name
        lines = [{"type": "step", "step": spec.first_step - 1, "tensors": {"file": "a", "sha256": digest}}]
        (spec.record / "lines").write_text(json.dumps(lines))
        if spec.save:
            assert not keep, "nothing of a phase that saves may live on"
            spec.save[1].mkdir()
            (spec.save[1] / "tensors.bin").write_bytes(bytes(range(8)))
        return done


@pytest.mark.parametrize("came", ["same", "failed"])
def test_a_phase_reaches_nothing_of_the_one_before(tmp_path: Path, came: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Outcome(state="failed", reason="damaged", kind="raised", rank=0, seconds=0.0, results=[])
    ranks, folder = Ranks(tmp_path, control=failure if came == "failed" else None), tmp_path / "out" / "legs"

    def lines_of(record: Path) -> Any:
        return SimpleNamespace(loaded=json.loads((record / "lines").read_text())[0])

    monkeypatch.setattr(phases, "read_lines", lines_of)
    monkeypatch.setattr(phases, "with_other_numbers", lambda model, path: path)
    asked = cell(phase(2, "checkpoint"), phase(3))
    inputs = FrozenInputs(models={"policy": tmp_path / "model"}, batches=tmp_path / "batches")
    (hidden := tmp_path / "out" / "earlier").mkdir(parents=True)
    (hidden / "old.bin").touch()
    options: Any = {"device": "cpu", "budget_s": 1.0, "fresh": False, "aside": tmp_path / "aside", "hidden": hidden}
    ended = phases.run_phases(ranks, asked, inputs, folder, controlled=True, **options)  # type: ignore[arg-type]
    assert not ended.failure
    before = "aside/0/record/of.bin"
    assert ranks.seen[0] == ["aside/earlier/old.bin"]
    assert ranks.seen[1] == [before, "aside/earlier/old.bin", "out/legs/1/loaded/tensors.bin"]
    copy = "out/legs/1/control/loaded/tensors.bin"
    assert copy in ranks.seen[2]
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.bin"))
    saved = "out/legs/0/saved/tensors.bin"
    assert left == ["out/earlier/old.bin", "out/legs/0/record/of.bin", saved, "out/legs/1/record/of.bin"]
    assert (tmp_path / saved).read_bytes() == bytes(range(8))
    assert json.loads((folder / "1" / "record" / "control.json").read_text()) == {"control": came}


def test_a_control_changes_tensors_and_leaves_their_structure(tmp_path: Path) -> None:
    for name, changes in (("a.safetensors", True), ("rank.pt", True), ("config.json", False)):
        (file := tmp_path / name).write_bytes(bytes(range(80)))
        assert phases.change_tensors(file) == changes
        content = file.read_bytes()
        assert [at for at in range(80) if content[at] != at] == (list(range(20, 60)) if changes else [])
