"""Gives a multimodal Hugging Face model the images of a micro-batch, and positions for packed rows.

transformers' own positions of images (M-RoPE, arXiv 2409.12191 section 2.1) need one document per row, so they are
counted here: a text token has one number for time, height and width; the tokens of an image count each axis from the
number after the text before them, and the text behind goes on after the largest.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from conformance.spec.batch import GRID, IMAGE, PIXEL
from impl.interface.micro_batches import MicroBatch


def model_inputs(config: Any, inputs: MicroBatch) -> dict[str, Any]:
    """Returns what the forward pass of a model gets besides tokens."""
    columns = inputs.columns
    if IMAGE not in columns:
        return {"position_ids": inputs.positions}
    tower, marks = config.vision_config, columns[IMAGE] > 0
    pixels = columns[PIXEL][marks]
    merge = getattr(tower, "spatial_merge_size", None)
    if merge is None:
        pixels = pixels.view(-1, tower.num_channels, tower.image_size, tower.image_size)
        masks = image_masks(config.get_text_config(), inputs.positions, marks, pixels.dtype)
        return {"pixel_values": pixels, "attention_mask": masks, "position_ids": inputs.positions}
    grids = torch.stack([columns[name] for name in GRID], dim=-1).long()
    places = image_positions(inputs.positions, grids, merge)
    return {
        "pixel_values": pixels.reshape(len(pixels) * merge**2, -1),
        "image_grid_thw": grids[grids[..., 0] > 0],
        "position_ids": torch.cat([inputs.positions[None], places]),  # the first ones separate documents
    }


def image_masks(text: Any, positions: Tensor, marks: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes the masks of packed rows in which the tokens of an image see each other, by kind of layer.

    Gemma 3's own mask for sliding layers takes the images of the first document for those of all
    (docs/findings/gemma3-packed-images.md). An image is not longer than the window.
    """
    begins = marks & ~torch.nn.functional.pad(marks, (1, 0))[:, :-1]
    wanted = {
        "config": text,
        "inputs_embeds": torch.empty(*positions.shape, 1, dtype=dtype, device=positions.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
        "block_sequence_ids": torch.where(marks, begins.cumsum(1) - 1, -1),
    }
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    return {kind: make(**wanted) for kind, make in makers.items()}


def image_positions(positions: Tensor, grids: Tensor, merge: int) -> Tensor:
    """Counts the tokens of packed rows by time, height and width, (3, rows, length).

    positions: (rows, length), from 0 in each document. grids: (rows, length, 3), the patches of an image at its first
    token. merge: patches of a token along an axis.
    """
    found = positions.expand(3, -1, -1).clone()
    for row, first in (grids[..., 0] > 0).nonzero().tolist():
        time, height, width = (int(grids[row, first, 0]), *(grids[row, first, 1:] // merge).tolist())
        count, start = time * height * width, int(found[0, row, first])
        behind = first + count
        ends = (positions[row, behind:] == 0).nonzero()
        end = behind + int(ends[0]) if len(ends) else positions.shape[1]
        found[:, row, behind:end] += max(height, width) - count
        inside = torch.cartesian_prod(*(torch.arange(size, device=positions.device) for size in (time, height, width)))
        found[:, row, first:behind] = start + inside.view(-1, 3).T
    return found
