"""Reach: the built-in profiles reach every shard of the vocabulary, long positions, cuts, masks and padding.

A change of the fixtures that loses some of this would leave every cell green, and blind.
"""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conformance.backends.protocol import find_backend
from conformance.cli.main import main
from conformance.matrix.cell import Cell
from conformance.matrix.profile import Overrides, expand, load_profile, profile_names
from conformance.runner.coverage import Coverage, DocumentReach, ShardReach, measure_coverage

pytestmark = pytest.mark.slow

BACKENDS = ("fsdp2", "deepspeed", "megatron")
# Quick is cut to three steps; the others train the same documents, so they are measured together.
PROFILES = {"quick": ["quick"], "others": sorted(set(profile_names()) - {"quick"})}


def cells_of(profile: str) -> list[Cell]:
    return expand(load_profile(profile), [find_backend(name) for name in BACKENDS], Overrides())


@cache
def coverage_of(profiles: str) -> Coverage:
    return measure_coverage(cell for profile in PROFILES[profiles] for cell in cells_of(profile))


def scored(profiles: str) -> set[str]:
    """Names the scenarios whose trained models score tokens, and thus predict none."""
    return {
        cell.scenario.name
        for profile in PROFILES[profiles]
        for cell in cells_of(profile)
        if all(role.head == "value" for role in cell.scenario.objective.roles if role.trained)
    }


def is_odd(reach: DocumentReach | ShardReach) -> bool:
    return reach.model.endswith("-odd")


def documents_of(profiles: str, scenario: str) -> list[DocumentReach]:
    found = [reach for reach in coverage_of(profiles).documents if reach.scenario == scenario]
    assert found
    return found


@pytest.mark.parametrize("profiles", ["quick", pytest.param("others", marks=pytest.mark.exhaustive)])
def test_every_vocabulary_shard_has_inputs_and_targets(profiles: str) -> None:
    shards = coverage_of(profiles).shards
    assert {shard.tp for shard in shards} >= ({1, 2} if profiles == "quick" else {1, 2, 4})
    predicts_nothing = scored(profiles)
    for shard in shards:
        targets = shard.inputs if shard.scenario in predicts_nothing else shard.targets
        assert min(shard.inputs, targets) > 1 or (is_odd(shard) and not shard.rows), shard
        assert is_odd(shard) or (shard.padding > 0) == (shard.padded and shard.shard == shard.tp - 1), shard
    assert any(shard.padding for shard in shards if not shard.padded), (
        "no shard of a vocabulary that ranks do not divide"
    )


@pytest.mark.parametrize("profiles", ["quick", pytest.param("others", marks=pytest.mark.exhaustive)])
def test_packed_documents_use_half_of_the_vocabulary_and_the_padding_token(profiles: str) -> None:
    for reach in documents_of(profiles, "sft-packed"):
        if reach.model.startswith("qwen2"):
            continue  # whatever a folder says, transformers gives it its own tokenizer, which merges fewer pairs
        assert reach.inputs >= 50, reach
        assert reach.targets >= 40, reach
        assert min(reach.pad_inputs, reach.pad_targets) > 0, reach


@pytest.mark.parametrize("profiles", ["quick", pytest.param("others", marks=pytest.mark.exhaustive)])
def test_documents_go_beyond_256_and_1024_positions_and_windows(profiles: str) -> None:
    for reach in documents_of(profiles, "sft-long"):
        assert reach.beyond_256 > 1000, reach
        assert reach.beyond_1024 > 50, reach
    windowed = [reach for reach in coverage_of(profiles).documents if reach.window]
    further = {"gpt-oss", "mistral", "phi3", "qwen2-yarn"} if profiles == "others" else set()
    assert {reach.model for reach in windowed if not is_odd(reach)} == {"gemma2", "gemma3", "mixtral"} | further
    assert all(reach.beyond_window > reach.documents / 2 for reach in windowed)


@pytest.mark.parametrize("profiles", ["quick", pytest.param("others", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("scenario", ["sft-padded", "sft-sgd", "sft-long"])
def test_documents_longer_than_a_row_are_cut(profiles: str, scenario: str) -> None:
    assert all(0 < reach.cut < reach.documents / 4 for reach in documents_of(profiles, scenario))


@pytest.mark.parametrize("profiles", ["quick", pytest.param("others", marks=pytest.mark.exhaustive)])
def test_rows_micro_batches_and_ranks_without_targets_and_padding_occur(profiles: str) -> None:
    # Of reinforcement learning, responses lack tokens, not rows targets.
    cuts = [cut for cut in coverage_of(profiles).cuts if cut.scenario.startswith("sft")]
    assert all(0 < cut.rows_masked < cut.rows / 2 for cut in cuts)
    assert any(cut.micro_batches_masked for cut in cuts)
    assert any(cut.ranks_masked for cut in cuts)
    assert all(cut.padding for cut in cuts if cut.rows > cut.micro_batches)


@pytest.mark.parametrize("profile", ["quick", "full", "gpu"])
def test_long_documents_are_trained_on_every_backend(profile: str) -> None:
    long = [phase for cell in cells_of(profile) if cell.scenario.name == "sft-long" for phase in cell.phases]
    assert {phase.backend.name for phase in long} == set(BACKENDS)
    assert any(phase.layout.sp > 1 for phase in long)


@pytest.mark.exhaustive
def test_full_profile_has_uneven_frozen_and_ended_cells() -> None:
    def pairs(of: Any) -> set[tuple[str, Any]]:
        cells = cells_of("full")
        return {
            (cell.backend, what) for cell in cells for phase in cell.phases for what in of(cell.scenario, phase.layout)
        }

    thirds = pairs(lambda _, layout: [axis for axis in ("dp", "sp", "pp") if getattr(layout, axis) == 3])
    assert thirds >= {("fsdp2", "dp"), ("fsdp2", "sp"), ("deepspeed", "dp"), ("deepspeed", "sp"), ("megatron", "pp")}
    assert {backend for backend, _ in pairs(lambda scenario, _: scenario.optimizer.frozen)} == set(BACKENDS)
    ends = pairs(lambda s, _: [s.schedule.name] if s.steps > s.schedule.total_steps else [])
    assert ends == {(backend, name) for backend in BACKENDS for name in ("linear", "cosine")}


def test_a_vocabulary_that_documents_leave_alone_shows(tmp_path: Path) -> None:
    """What the fixtures once were: the second shard of two, padded, had neither an input nor a target."""
    data = tmp_path / "poor.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}", "answer": "1"}) + "\n" for i in range(10, 40)))
    cell = next(c for c in cells_of("quick") if c.phases[0].layout.tp == 2 and c.scenario.objective.reads == "samples")
    poor = dataclasses.replace(cell.scenario, data=dataclasses.replace(cell.scenario.data, path=str(data)))
    found = measure_coverage([dataclasses.replace(cell, scenario=poor)])
    (reach,) = found.documents
    assert reach.targets < 2
    assert reach.longest < 16
    assert (reach.beyond_256, reach.cut, reach.pad_inputs) == (0, 0, 0)
    assert min(shard.targets for shard in found.shards) == 0


def test_the_command_prints_tables_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = tmp_path / "one.toml"
    profile.write_text("""
        description = "one"
        [[cells]]
        scenarios = ["sft-long"]
        models = ["gemma3"]
        layouts = ["tp2", "tp8"]
        precisions = ["exact"]
    """)
    asked = ["list", "--profile", str(profile), "--backend", "fsdp2", "--coverage"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "beyond_1024" in text
    assert "ranks_masked" in text
    assert main([*asked, "--json"]) == 0
    coverage = json.loads(capsys.readouterr().out)["coverage"]
    assert coverage["documents"][0]["window"] == 12
    assert {shard["tp"] for shard in coverage["shards"]} == {2}, "a layout that the backend refuses covers nothing"
