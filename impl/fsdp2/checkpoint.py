"""torch.distributed.checkpoint, whose files are read here without running what a pickle in them says.

The library reads its metadata, and every value that is no tensor, with all of pickle allowed.
"""

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from impl.checkpoints.pickles import METADATA, read_metadata


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state dict into a folder; collective."""
    dcp.save(state, checkpoint_id=path)


def load(state: dict[str, Any], path: Path) -> None:
    """Fill a state dict in place with what ``save`` wrote in any layout; collective.

    Raises UsageError for metadata that no honest checkpoint has.
    """
    dcp.load(state, storage_reader=_Reader(path), planner=_Planner())


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata: Metadata = read_metadata(Path(self.path) / METADATA)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))
