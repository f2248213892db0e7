"""Coverage: the built-in profiles reach every shard of the vocabulary, long positions, cuts and masks.

A change of the fixtures that loses some of this would leave every cell green, and blind.
"""

import json
from functools import cache
from pathlib import Path

import pytest

from conformance.backend import find_backend
from conformance.batch import Batch, Document, Row
from conformance.cli import main
from conformance.plan.cell import Cell
from conformance.plan.coverage import Coverage, measure_coverage
from conformance.plan.profile import Overrides, expand, load_profile, profile_names

BACKENDS = ("fsdp2", "deepspeed", "megatron")
LONG = ("quick", "full", "gpu")  # the side-by-side table is of one scenario


@cache
def coverage_of(profile: str) -> Coverage:
    cells = expand(load_profile(profile), [find_backend(name) for name in BACKENDS], Overrides())
    return measure_coverage(cells)


@pytest.mark.parametrize("profile", profile_names())
def test_every_shard_of_the_vocabulary_has_inputs_and_targets_with_and_without_padding(profile: str) -> None:
    shards = coverage_of(profile).shards
    assert {shard.padded for shard in shards} == {True, False}
    for shard in shards:
        assert shard.rows >= 16, shard
        assert shard.inputs >= 4, shard
        assert shard.targets >= 2, shard
        assert (shard.padding > 0) == (shard.padded and shard.shard == shard.tp - 1), shard


@pytest.mark.parametrize("profile", profile_names())
def test_ordinary_documents_use_half_of_the_vocabulary_and_the_padding_token(profile: str) -> None:
    for reach in coverage_of(profile).documents:
        if reach.scenario == "sft-packed":
            assert reach.inputs >= 50, reach
            assert reach.targets >= 40, reach
            assert min(reach.pad_inputs, reach.pad_targets) > 0, reach
