"""Which format a folder's checkpoint has, by the files that lie there; nothing is loaded to tell."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conformance.inputs.folder import CONFIG
from conformance.validation import UsageError, one_line
from impl import training_state
from impl.checkpoints.pickles import METADATA
from impl.formats import deepspeed, megatron, safetensors_folders, torch_distributed
from impl.formats.contents import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Format:
    is_in: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]


TRAINING_STATE = Format(
    is_in=lambda folder: (folder / training_state.FILE).is_file(), open=safetensors_folders.open_state
)
UNIVERSAL = Format(
    is_in=lambda folder: (folder / "zero").is_dir() and any(folder.glob(deepspeed.MODEL_FILES)),
    open=deepspeed.open_universal,
)
DEEPSPEED = Format(is_in=lambda folder: deepspeed.tag_folder(folder) is not None, open=deepspeed.open_native)
MEGATRON = Format(
    is_in=lambda folder: all((folder / name).is_file() for name in (METADATA, megatron.FILE, megatron.COMMON)),
    open=megatron.open_megatron,
)
FSDP2 = Format(is_in=lambda folder: (folder / METADATA).is_file(), open=torch_distributed.open_fsdp2)
MODEL = Format(is_in=lambda folder: (folder / CONFIG).is_file(), open=safetensors_folders.open_model)
FORMATS = (TRAINING_STATE, UNIVERSAL, DEEPSPEED, MEGATRON, FSDP2, MODEL)  # the first that is there is taken


def find_format(folder: Path) -> Format:
    """The format of a checkpoint. Raises UsageError for what is none of those that are known."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give the folder of a checkpoint")
    for known in FORMATS:
        if known.is_in(folder):
            return known
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and any(f.is_in(path) for f in FORMATS)]
    if below:
        raise UsageError(f"{folder} is no checkpoint of one model; give one of {', '.join(map(str, below))}")
    raise UsageError(
        f"{folder} is no checkpoint that is known here: no training state, Hugging Face folder, checkpoint of "
        f"DeepSpeed, torch.distributed.checkpoint or megatron-core"
    )


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint of any known format without loading its tensors; runs no code of it. Raises UsageError."""
    return open_as(find_format(folder), folder)


def open_as(known: Format, folder: Path) -> Checkpoint:
    """Open a checkpoint of a format. Raises UsageError, also where files have the right names and other content."""
    try:
        return known.open(folder)
    except UsageError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"{folder} cannot be read; it is damaged or of another version: {type(error).__name__}: {one_line(error)}"
        ) from None
