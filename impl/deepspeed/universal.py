"""DeepSpeed's conversion to universal checkpoints as a function: pieces of ZeRO 1 to 3 become files of tensors."""

import argparse
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal


def make_universal(checkpoint: Path, out: Path, *, all_trained: bool) -> None:
    """Convert the folder of a tag into the new folder ``out``, in this process. Raises whatever DeepSpeed raises.

    all_trained: whether the model has no frozen parameters. The checkpoint says of every parameter how AutoTP cut it,
    and of a frozen one there is no state that this could be used for, which DeepSpeed's strict conversion refuses.
    """
    arguments = argparse.Namespace(
        input_folder=str(checkpoint),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=all_trained,
        inject_missing_state=True,  # for entries that ZeRO-1 and 2 do not write
    )
    ds_to_universal.main(arguments)
