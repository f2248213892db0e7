"""Models with image towers: transformers' own forward pass of one document is the reference of packed rows."""

import functools
import json
import math
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from any_models import WITH_IMAGES, cell_with, make_model
from cells import assert_honest, slow

from conformance.backends.protocol import BackendEntry
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.images import check_images
from conformance.data.inputs import build_batches, load_documents
from conformance.matrix.cell import Cell
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.primitives import HONEST
from conformance.oracle.role_model import read_decoder
from conformance.oracle.run import POLICIES
from conformance.runner.session import Session
from conformance.spec.batch import GRID, IMAGE, PIXEL, Row
from conformance.spec.scenario import DataConfig, load_scenario
from impl.engine.hugging_face import image_positions, model_inputs
from impl.interface.micro_batches import collate
from impl.models.loading import load_model

IMAGE_TOKEN = 7
PIXELS = ["a", math.nan, math.inf, -1e300, 10**400]
GRIDS: list[Any] = [[[time, 4, 4]] for time in (2, 0, -1)]
GRIDS += [[[0, 0, 0], [0, 0, 0]], [[1, -4, -4]], [[1, 0, 4]], [[1, 4, True]], [[1, 4]], []]
COUNTS = [[[1, 4, 4]] * 9, [[1, 1, 1]], [[1, 2, 5]], [[1, 1, 3], [1, 1, 61]], [[1, 16 * 10**400, 1]]]
FLOAT64 = POLICIES["float64"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    parent = tmp_path_factory.mktemp("models")
    return functools.cache(lambda kind: make_model(kind, parent / kind.lower()))


def record(draw: random.Random, kind: str) -> dict[str, Any]:
    """A sample as a processor gives it: text, an image, text, and for Qwen perhaps a second image of another shape."""
    tokens, marks, grids, patches = [], [], [], []
    for height, width in draw.choice([[(4, 4)], [(4, 8), (8, 4)]]) if kind != "Gemma3" else [(8, 8)]:
        text = draw.randint(2, 6)
        images = 4 if kind == "Gemma3" else height * width // 4
        tokens += [draw.randint(8, 399) for _ in range(text)] + [6] + [IMAGE_TOKEN] * images + [5]
        marks += [0] * (text + 1) + [1] * images + [0]
        grids.append([1, height, width])
        patches += [[draw.uniform(-1, 1) for _ in range(24)] for _ in range(height * width)]
    answer = draw.randint(4, 9)
    labels = [-100] * len(tokens)
    tokens, marks = tokens + [draw.randint(8, 399) for _ in range(answer)], marks + [0] * answer
    found = {"input_ids": tokens, "labels": labels + tokens[-answer:], "mm_token_type_ids": marks}
    if kind == "Gemma3":
        return {**found, "pixel_values": [[draw.uniform(-1, 1) for _ in range(192)]]}
    return {**found, "pixel_values": patches, "image_grid_thw": grids}


def data_of(kind: str, folder: Path, count: int = 8, **changes: Any) -> Path:
    draw, file = random.Random(0), folder / "images.jsonl"
    records = [{**record(draw, kind), **changes} for _ in range(count)]
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    return file


def config_of(file: Path) -> DataConfig:
    return DataConfig(path=str(file), packed=True, max_len=160)


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", slow("Qwen3VL"), slow("Gemma3")])
def test_packed_images_equal_one_document_at_a_time(models: Any, tmp_path: Path, kind: str) -> None:
    documents = tuple(load_documents(config_of(data_of(kind, tmp_path)), None)[:4])
    with exact_tier():
        packed = collate([Row(0, documents[:3]), Row(1, documents[3:])])
        decoder = read_decoder(models(kind))
        for document in documents:
            check_images(document.tokens, document.columns, decoder.image_config, "")
        weights = decoder.load(models(kind), torch.float64, HONEST, trained=False, devices=["cpu"])
        model = load_model(models(kind), dtype=torch.float64, attention=None)
        given = model_inputs(model.config, packed)
        found = model(input_ids=packed.tokens, use_cache=False, **given).logits[0].detach()
        right = torch.cat(
            [decoder.forward(torch.tensor(d.tokens), weights, FLOAT64, columns=d.columns) for d in documents[:3]]
        )
    assert float((found[: len(right)] - right).norm() / right.norm()) < 1e-13


def test_positions_of_images_are_counted_by_axis_in_each_document() -> None:
    """Two documents: text, an image of 1 x 2 tokens, text; an image of 2 x 2 tokens, text."""
    grids = torch.zeros(1, 10, 3, dtype=torch.int64)
    grids[0, 1], grids[0, 5] = torch.tensor([1, 2, 4]), torch.tensor([1, 4, 4])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
    assert image_positions(positions, grids, 2)[:, 0].tolist() == [
        [0, 1, 1, 3, 4, 0, 0, 0, 0, 2],
        [0, 1, 1, 3, 4, 0, 0, 1, 1, 2],
        [0, 1, 2, 3, 4, 0, 1, 0, 1, 2],
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_token_type_ids": None}, "line 1: 'mm_token_type_ids' must hold .* numbers, 1 at image tokens"),
        ({"pixel_values": [[0.5] * 25]}, "'pixel_values' has 25 numbers, which cannot be shared out over"),
        *(({"pixel_values": [pixel]}, "'pixel_values' must be nested lists of numbers") for pixel in PIXELS),
        *(({"image_grid_thw": grids}, r"must be a list of \[1, height, width\]") for grids in GRIDS),
        *(({"image_grid_thw": grids}, "patches, which do not fit .* image tokens") for grids in COUNTS),
    ],
    ids=str,
)
def test_wrong_images_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"line 1: .*{message.removeprefix('line 1: ')}"):
        load_documents(config_of(data_of("Qwen2_5_VL", tmp_path, **changes)), None)


def images_of(tokens: int, share: int, grids: tuple[tuple[int, int], ...] = ()) -> dict[str, Any]:
    columns: dict[str, Any] = dict.fromkeys((*(f"{PIXEL}{i}" for i in range(share)), *GRID), (0.0,) * tokens)
    for i, name in enumerate(GRID):
        columns[name] = tuple(float((1, *grid)[i]) for grid in grids) + (0.0,) * (tokens - len(grids))
    return {**columns, IMAGE: (1.0,) * tokens}


QWEN = SimpleNamespace(spatial_merge_size=2, in_channels=3, temporal_patch_size=2, patch_size=2)
GEMMA = SimpleNamespace(num_channels=3, image_size=8)


@pytest.mark.parametrize(
    ("tower", "columns", "message"),
    [
        (QWEN, images_of(4, 96, ((4, 4),)), ""),
        (QWEN, images_of(6, 96, ((4, 4), (2, 4))), ""),
        (QWEN, images_of(4, 95, ((4, 4),)), "has 95 numbers per image token, but this model takes 96"),
        (QWEN, images_of(4, 96), "16 patches for 4 image tokens, got 0"),
        (QWEN, images_of(4, 96, ((16, 1),)), "multiples of 2"),
        (QWEN, images_of(4, 96, ((2, 4),)), "16 patches for 4 image tokens, got 8"),
        (GEMMA, images_of(8, 48), ""),
        (GEMMA, images_of(8, 47), "has 47 numbers per image token, but this model takes 48"),
        (GEMMA, images_of(6, 48), "has 4 tokens, which 6 image tokens are no multiple of"),
        (GEMMA, images_of(8, 48) | {IMAGE: (1.0,) * 4 + (0.0,) * 4}, "token 7 is marked wrongly"),
        (SimpleNamespace(patch_size=14), images_of(4, 96), "model's image tower has no 'num_channels'"),
        (SimpleNamespace(spatial_merge_size=2), images_of(4, 96), "model's image tower has no 'in_channels'"),
        (None, images_of(4, 96), "which this model does not take; use a model with an image tower"),
    ],
    ids=range(13),
)
def test_images_fit_the_image_tower(tower: Any, columns: dict[str, Any], message: str) -> None:
    size = {"mm_tokens_per_image": 4} if tower is GEMMA else {}
    config = tower and SimpleNamespace(vision_config=tower, image_token_id=IMAGE_TOKEN, **size)
    with pytest.raises(UsageError, match=f"^line 3: .*{message}") if message else nullcontext():
        check_images([IMAGE_TOKEN] * len(columns[IMAGE]), columns, config, "line 3")


def test_models_without_a_tower_refuse_images_by_line(tmp_path: Path) -> None:
    data, file = {"path": str(data_of("Gemma3", tmp_path)), "rows": 6}, FIXTURES / "scenarios" / "sft-packed.toml"
    scenario = load_scenario(file, data_overrides=data, model="models/llama", precision="exact")
    with pytest.raises(UsageError, match=r"images.jsonl, line 1: the data has images, which this model"):
        build_batches(scenario, FIXTURES / "models" / "llama")


def test_samples_without_images_beside_others_are_refused(tmp_path: Path) -> None:
    file = data_of("Qwen2_5_VL", tmp_path, count=1)
    file.write_text(file.read_text() + json.dumps({"input_ids": [8, 9], "labels": [-100, 9]}) + "\n")
    with pytest.raises(
        UsageError, match=r"images.jsonl, line 2: has 0 pixel values per image token, line 1 has 96; all"
    ):
        load_documents(config_of(file), None)


def image_cell(models: Any, kind: str, folder: Path, backend: str, layout: str, frozen: tuple[str, ...] = ()) -> Cell:
    cell = cell_with(models(kind), backend=backend, scenario="sft-packed", layout=layout, precision="exact")
    data = replace(cell.scenario.data, path=str(data_of(kind, folder, count=160)))
    optimizer = replace(cell.scenario.optimizer, frozen=frozen)
    return replace(cell, scenario=replace(cell.scenario, data=data, optimizer=optimizer))


@pytest.mark.exhaustive
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("backend", "layout"), [("fsdp2", "dp2"), ("deepspeed", "dp2.zero2"), ("deepspeed", "dp2.zero3")]
)
@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_images_conform(
    session: Session, models: Any, tmp_path: Path, kind: str, backend: str, layout: str, frozen: bool
) -> None:
    towers = ("model.vision_tower.*",) if kind == "Gemma3" else ("model.visual.*",)
    assert_honest(session, image_cell(models, kind, tmp_path, backend, layout, towers if frozen else ()))


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "stage"), [("TextOrder", "log-probs"), ("TrainedTower", "gradients")])
def test_defects_with_images_are_caught(session: Session, models: Any, tmp_path: Path, wrong: str, stage: str) -> None:
    frozen = ("model.visual.*",) if wrong == "TrainedTower" else ()
    cell = image_cell(models, "Qwen2_5_VL", tmp_path, "fsdp2", "dp2", frozen)
    backend = BackendEntry(name="wrong", target=f"any_models:{wrong}")
    verdict = session.run(Cell.single(scenario=cell.scenario, backend=backend, layout=cell.phases[0].layout)).verdict
    assert verdict.state == "differs"
    assert verdict.first_stage == stage, verdict.reason
