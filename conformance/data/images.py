"""Reads the images of a tokenized sample: what a processor of transformers gave for it.

``mm_token_type_ids`` (or ``token_type_ids``) is 1 at image tokens, ``pixel_values`` is a nested list, and for models of
Qwen ``image_grid_thw`` counts the patches of each image by time, height and width. All numbers of ``pixel_values`` are
shared out equally over the image tokens, in their order.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.data.samples import Place
from conformance.spec.batch import GRID, IMAGE, PIXEL, Column, Columns

MARKS = ("mm_token_type_ids", "token_type_ids")
LARGEST = 1e6  # of a pixel, which processors normalise
KEYS = (*MARKS, "pixel_values", "image_grid_thw")


def image_columns(record: Mapping[str, Any], place: Place, tokens: int) -> dict[str, Column]:
    """Returns the columns of a document of ``tokens`` tokens; empty without images. Raises UsageError."""
    if record.get("pixel_values") is None:
        return {}
    key = next((key for key in MARKS if record.get(key) is not None), MARKS[0])
    marks = record.get(key)
    if not isinstance(marks, list) or len(marks) != tokens or not all(map(_is_mark, marks)) or 1 not in marks:
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
    for token, grid in _grids(record, place, images, share).items():
        for name, count in zip(GRID, grid, strict=True):
            columns[name][token] = float(count)
    return {IMAGE: tuple(map(float, marks)), **{name: tuple(column) for name, column in columns.items()}}


def pixels_of_token(columns: Columns) -> int:
    """Counts the numbers of ``pixel_values`` that belong to each image token; 0 without images."""
    return sum(name.startswith(PIXEL) for name in columns)


def check_images(tokens: Sequence[int], columns: Columns, config: Any, place: Place) -> None:
    """Raises UsageError if a model with this ``image_config`` (Decoder) does not take the images of a document."""
    if config is None:
        raise UsageError(
            f"{place}: the data has images, which this model does not take; use a model with an image tower"
        )
    tower, share = config.vision_config, pixels_of_token(columns)
    merge = getattr(tower, "spatial_merge_size", None)
    sizes = ("in_channels", "temporal_patch_size", "patch_size") if merge else ("num_channels", "image_size")
    if missing := [name for name in sizes if not hasattr(tower, name)]:
        raise UsageError(
            f"{place}: the data has images, but this model's image tower has no {missing[0]!r} in config.json; "
            "images are judged for Qwen2.5-VL, Qwen3-VL and Gemma 3, or without images in the data"
        )
    heights, widths, marks = (columns[name] for name in (*GRID[1:], IMAGE))
    assert isinstance(heights, tuple)
    assert isinstance(widths, tuple)
    assert isinstance(marks, tuple)
    own = getattr(config, "image_token_id", None)
    wrong = [token for token, mark in zip(tokens, marks, strict=True) if (token == own) != (mark == 1)]
    if wrong and own is not None:
        raise UsageError(
            f"{place}: token {wrong[0]} is marked wrongly: the image tokens of this model are {own}, and all of them "
            f"are marked by 1, no others; give all as this model's processor gave them"
        )
    count = int(sum(marks))
    if merge:
        right = merge**2 * tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        patches = sum(height * width for height, width in zip(heights, widths, strict=True))
        if patches != merge**2 * count or any(size % merge for size in (*heights, *widths)):
            raise UsageError(
                f"{place}: this model joins {merge} x {merge} patches, so 'image_grid_thw' must hold heights and "
                f"widths that are multiples of {merge}, and {merge**2 * count} patches for {count} image tokens, got "
                f"{patches:g}; give it as this model's processor gave it"
            )
    else:
        of_image = tower.num_channels * tower.image_size**2
        of_one = getattr(config, "mm_tokens_per_image", None) or max(1, of_image // share)
        right = of_image // of_one
        if count % of_one:
            raise UsageError(
                f"{place}: an image of this model has {of_one} tokens, which {count} image tokens are no multiple of; "
                f"give all as this model's processor gave them"
            )
    if share != right:
        raise UsageError(
            f"{place}: 'pixel_values' has {share} numbers per image token, but this model takes {right}; give them as "
            f"this model's processor gave them"
        )


def _grids(record: Mapping[str, Any], place: Place, images: list[int], share: int) -> dict[int, list[int]]:
    """Returns the grid of each image by its first token; none for a model whose images have one size."""
    if (grids := record.get("image_grid_thw")) is None:
        return {}
    if not (isinstance(grids, list) and grids and all(map(_is_grid, grids))):
        raise UsageError(
            f"{place}: 'image_grid_thw' must be a list of [1, height, width] with positive integers, got "
            f"{shown(grids)}; give it as the processor gave it"
        )
    patches = [height * width for _, height, width in grids]
    merged, rest = divmod(sum(patches), len(images))
    if rest or not merged or share % merged or any(count % merged for count in patches):
        raise UsageError(
            f"{place}: 'image_grid_thw' counts {sum(patches)} patches, which do not fit {len(images)} image tokens of "
            f"{share} pixel values; give all as the processor gave them"
        )
    starts = accumulate((count // merged for count in patches[:-1]), initial=0)
    return {images[start]: grid for start, grid in zip(starts, grids, strict=True)}


def _is_grid(grid: Any) -> bool:
    is_triple = isinstance(grid, list) and len(grid) == 3 and all(type(count) is int for count in grid)
    return is_triple and grid[0] == 1 and min(grid) > 0


def _is_mark(mark: Any) -> bool:
    return type(mark) is int and mark in (0, 1)


def _flat(value: Any, place: Place) -> chain[float] | list[float]:
    if isinstance(value, list):
        return chain.from_iterable(_flat(part, place) for part in value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise UsageError(
            f"{place}: 'pixel_values' must be nested lists of numbers between -1e6 and 1e6, got {shown(value)}; "
            f"correct or remove the sample"
        )
    return [float(value)]
