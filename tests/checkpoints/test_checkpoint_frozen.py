"""Frozen parameters in users' checkpoints of DeepSpeed, which its own conversion leaves out or leaves cut."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cells import cell_of, exhaustive, needs
from converted import assert_converted, train

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.runtime import Pool
from conformance.spec.precision import PrecisionName
from impl.convert.convert import convert, open_checkpoint

pytestmark = needs("deepspeed")

LLAMA = FIXTURES / "models" / "llama"
Written = Callable[[str, PrecisionName], Path]


@pytest.fixture(scope="module")
def written(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Trains two steps with some parameters frozen, once in each layout, and gives the folder of what it wrote."""
    folders: dict[tuple[str, PrecisionName], Path] = {}

    def once(layout: str, precision: PrecisionName) -> Path:
        if (layout, precision) not in folders:
            folder = folders[layout, precision] = tmp_path_factory.mktemp(layout)
            train(pool, folder, "deepspeed", cell_of("deepspeed", "sft-frozen", "llama", layout, precision))
        return folders[layout, precision]

    return once


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("tp2.zero1", "fp32"),
        *(exhaustive(layout, "fp32") for layout in ("dp2.zero1", "dp2.zero2", "tp2.zero2", "dp2.zero3", "tp2.zero3")),
        exhaustive("dp2.tp2.zero2", "exact"),
        exhaustive("dp2.tp2.zero3", "exact"),
    ],
)
def test_frozen_parameters_are_converted_though_the_library_leaves_them_out(
    written: Written, tmp_path: Path, layout: str, precision: PrecisionName
) -> None:
    folder = written(layout, precision)
    frozen = {held.name for held in open_checkpoint(folder / "checkpoint").of_kind("weight")}
    frozen -= {held.name for held in open_checkpoint(folder / "checkpoint").of_kind("exp_avg")}
    # Cut along the rows and the columns, and on every rank.
    of_a_layer = {"self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"}
    assert {f"model.layers.0.{name}.weight" for name in of_a_layer} | {"model.embed_tokens.weight"} <= frozen
    assert_converted(folder, LLAMA, tmp_path)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp2.zero1", "only the first tensor-parallel rank's part of .*; give the original checkpoint"),
        exhaustive("dp2.zero3", "omits frozen parameters; give the original checkpoint"),
    ],
)
def test_universal_checkpoint_without_frozen_is_usage_error(
    written: Written, tmp_path: Path, layout: str, message: str
) -> None:
    universal = pytest.importorskip("impl.deepspeed.checkpoint")
    folder = written(layout, "fp32")
    universal.make_universal(folder / "checkpoint" / "state", tmp_path / "universal", all_trained=False)
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / "universal", tmp_path / "new", to="state", model=None, report=lambda *_: None)


def test_parts_of_parameters_that_nobody_says_how_to_put_together_are_refused(written: Written, tmp_path: Path) -> None:
    folder = written("tp2.zero1", "fp32")
    copy = shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    for file in (copy / "state").glob("*_model_states.pt"):
        model = torch.load(file, weights_only=False)
        del model["universal_checkpoint_info"]
        torch.save(model, file)
    with pytest.raises(UsageError, match="has 2 tensor-parallel ranks and does not say how parameters are sharded"):
        convert(copy, tmp_path / "new", to="state", model=None, report=lambda *_: None)
