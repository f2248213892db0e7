"""A folder of openPangu with Python files in the shape of the published ones is loaded unchanged, and trained right."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from any_models import cell_with
from cells import assert_honest, exhaustive, slow
from published_pangu import published_folder
from test_oracle import BATCH, FLOAT64, oracle, relative
from transformers import masking_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from conformance.backends.protocol import Supported, Unsupported
from conformance.core.errors import UsageError
from conformance.numerics.float64_tier import LeakWatch, exact_tier
from conformance.oracle.loss_terms import target_logprobs
from conformance.oracle.primitives import HONEST as RIGHT
from conformance.oracle.role_model import read_decoder
from conformance.runner.session import Session
from impl.models.loading import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_folder(tmp_path_factory.mktemp("published") / "openpangu")


def names() -> tuple[Any, ...]:
    """What the stand-ins stand for, as transformers and torch have it."""
    absent = [name for name in ("torch_npu", "torch_npu.contrib") if name in sys.modules]
    has = hasattr(torch, "npu"), hasattr(transformers.utils, "LossKwargs"), "default" in ROPE_INIT_FUNCTIONS
    return absent, *has, masking_utils.create_causal_mask


def test_it_computes_what_the_oracle_computes(folder: Path) -> None:
    before, right = names(), oracle("pangu")
    with exact_tier(), LeakWatch() as watch:
        model = load_model(folder, dtype=torch.float64, attention="eager", trusted=True)
        count, loss = BATCH.target_count, torch.zeros(())
        for document in BATCH.documents[:3]:
            logits = model(input_ids=torch.tensor([document.tokens]), use_cache=False).logits[0]
            loss = loss - target_logprobs(logits, document, stable=torch.float64).sum() / count
        loss.backward()
    assert not [
        leak for leak in watch.leaks if "impl/interface/sharded_safetensors.py" not in leak.where
    ]  # files have fewer digits
    assert loss.detach().item() == pytest.approx(right.loss, rel=1e-14, abs=0)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == right.gradients.keys()
    assert max(relative(gradients[name], g) for name, g in right.gradients.items()) < 1e-13
    assert names() == before
    assert before[:4] == ([], False, False, False)


def test_documents_of_a_row_do_not_see_each_other(folder: Path) -> None:
    first, second = (torch.tensor(document.tokens) for document in BATCH.documents[:2])
    positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))])[None]
    with exact_tier():
        model = load_model(folder, dtype=torch.float64, attention="eager", trusted=True)
        row = torch.cat([first, second])[None]
        packed = model(input_ids=row, position_ids=positions, use_cache=False).logits[0].detach()
        decoder = read_decoder(folder)
        weights = decoder.load(folder, torch.float64, RIGHT, trained=False, devices=["cpu"])
        assert relative(packed[len(first) :], decoder.forward(second, weights, FLOAT64)) < 1e-14


def test_it_is_code_that_has_to_be_trusted(folder: Path) -> None:
    with pytest.raises(UsageError, match="add --trust-remote-code if you trust it"):
        load_model(folder, dtype=torch.float32, attention="eager")


NO_PLAN = "carries no tensor-parallel plan; use the layout option 'plan', or tp1"


@pytest.mark.parametrize(
    ("backend", "layout", "answer"),
    [
        ("fsdp2", "tp2", Unsupported(f"PanguEmbeddedForCausalLM {NO_PLAN}")),
        ("fsdp2", "tp2.plan", Supported()),
        ("deepspeed", "tp2", Supported()),
        ("fsdp2", "sp2", Supported()),
    ],
)
def test_layouts_are_those_of_a_model_without_a_plan(folder: Path, backend: str, layout: str, answer: Any) -> None:
    cell = cell_with(folder, backend=backend, scenario="sft-packed", layout=layout, precision="exact", trusted=True)
    assert cell.phases[0].backend.load().supports(cell.scenario, cell.phases[0].layout) == answer


@pytest.mark.parametrize(
    ("backend", "scenario", "layout"),
    [
        exhaustive("fsdp2", "sft-packed", "sp2"),
        exhaustive("fsdp2", "ppo", "dp2"),
        exhaustive("deepspeed", "sft-packed", "dp2.zero3"),
    ],
)
def test_cells_of_it_conform(session: Session, folder: Path, backend: str, scenario: str, layout: str) -> None:
    cell = cell_with(folder, backend=backend, scenario=scenario, layout=layout, precision="exact", trusted=True)
    assert not assert_honest(session, cell).second_class


REPLICATED = [("fsdp2", "dp2"), ("deepspeed", "dp2.zero3"), ("megatron", "dp2")]
SHARDED = [("fsdp2", "tp2.plan"), ("deepspeed", "tp2"), ("megatron", "tp2"), ("megatron", "pp2")]


@pytest.mark.parametrize(
    ("shape", "tied", "backend", "layout"),
    [
        ("1b", True, *REPLICATED[0]),
        slow("1b", True, *REPLICATED[1]),
        exhaustive("1b", True, *REPLICATED[2]),
        *(exhaustive("1b", True, backend, layout) for backend, layout in SHARDED),
        *(
            exhaustive(shape, tied, backend, layout)
            for shape, tied in (("1b", False), ("7b", True), ("7b", False))
            for backend, layout in REPLICATED + SHARDED
        ),
    ],
)
def test_tied_and_untied_shapes_conform(
    session: Session, tmp_path: Path, shape: str, tied: bool, backend: str, layout: str
) -> None:
    model = published_folder(tmp_path / f"openpangu-{shape}", shape=shape, tied=tied)
    cell = cell_with(model, backend=backend, scenario="sft-packed", layout=layout, precision="exact", trusted=True)
    assert not assert_honest(session, cell).second_class


def test_a_list_of_tied_weights_ties_them(tmp_path: Path) -> None:
    for tied in (True, False):
        model = published_folder(tmp_path / str(tied), shape="1b", tied=tied)
        loaded = load_model(model, dtype=torch.float64, attention="eager", trusted=True)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
