"""DeepSpeed's conversion to universal checkpoints as a function: pieces of ZeRO 1 to 3 become files of tensors."""

import argparse
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal


def make_universal(checkpoint: Path, out: Path) -> None:
    """Convert the folder of a tag into the new folder ``out``, in this process. Raises whatever DeepSpeed raises."""
    arguments = argparse.Namespace(
        input_folder=str(checkpoint),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # for entries that ZeRO-1 and 2 do not write
    )
    ds_to_universal.main(arguments)
