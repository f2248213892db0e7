"""Reads the images of a tokenized sample: what a processor of transformers gave for it.

``mm_token_type_ids`` (or ``token_type_ids``) is 1 at image tokens, ``pixel_values`` is a nested list, and for models of
Qwen ``image_grid_thw`` counts the patches of each image by time, height and width. All numbers of ``pixel_values`` are
shared out equally over the image tokens, in their order.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.data.samples import Place
from conformance.spec.batch import GRID, IMAGE, PIXEL, Column

MARKS = ("mm_token_type_ids", "token_type_ids")
KEYS = (*MARKS, "pixel_values", "image_grid_thw")


def image_columns(record: Mapping[str, Any], place: Place, tokens: int) -> dict[str, Column]:
    """Returns the columns of a document of ``tokens`` tokens; empty without images. Raises UsageError."""
    if record.get("pixel_values") is None:
        return {}
    key = next((key for key in MARKS if record.get(key) is not None), MARKS[0])
    marks = record.get(key)
    if not isinstance(marks, list) or len(marks) != tokens or {*map(str, marks)} - {"0", "1"} or 1 not in marks:
        raise UsageError(
            f"{place}: {key!r} must hold {tokens} numbers, 1 at image tokens and else 0, got {shown(marks)}"
        )
    pixels, images = list(_flat(record["pixel_values"], place)), [i for i, mark in enumerate(marks) if mark]
    share, rest = divmod(len(pixels), len(images))
    if rest or not share:
        raise UsageError(
            f"{place}: 'pixel_values' has {len(pixels)} numbers, which cannot be shared out over {len(images)} image "
            f"tokens ({key!r}); give both as the processor gave them"
        )
    columns: dict[str, list[float]] = {name: [0.0] * tokens for name in (*(f"{PIXEL}{i}" for i in range(share)), *GRID)}
    for number, token in enumerate(images):
        for i in range(share):
            columns[f"{PIXEL}{i}"][token] = pixels[number * share + i]
    for name, numbers in zip(GRID, zip(*_grids(record, place), strict=True), strict=True):
        for token, count in zip(_starts(record, place, images), numbers, strict=True):
            columns[name][token] = float(count)
    return {IMAGE: tuple(map(float, marks)), **{name: tuple(column) for name, column in columns.items()}}


def _grids(record: Mapping[str, Any], place: Place) -> list[list[int]]:
    grids = record.get("image_grid_thw") or [[0, 0, 0]]
    right = isinstance(grids, list) and all(
        isinstance(grid, list) and len(grid) == 3 and all(type(count) is int for count in grid) for grid in grids
    )
    if not right or any(grid[0] > 1 for grid in grids):
        raise UsageError(f"{place}: 'image_grid_thw' must be a list of [1, height, width], got {shown(grids)}")
    return grids


def _starts(record: Mapping[str, Any], place: Place, images: list[int]) -> list[int]:
    """Returns the first token of each image. Raises UsageError unless the grids have as many patches as there are."""
    grids = _grids(record, place)
    patches = [height * width for _, height, width in grids]
    if not sum(patches):  # a model whose images have one size
        return images[:1]
    found, merged, before = [], sum(patches) // len(images), 0
    for count in patches:
        if count % merged or before >= len(images):
            raise UsageError(
                f"{place}: 'image_grid_thw' counts {sum(patches)} patches, which do not fit {len(images)} image tokens"
            )
        found.append(images[before])
        before += count // merged
    return found


def _flat(value: Any, place: Place) -> chain[float] | list[float]:
    if isinstance(value, list):
        return chain.from_iterable(_flat(part, place) for part in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{place}: 'pixel_values' must be nested lists of numbers, got {shown(value)}")
    return [float(value)]
