"""Reads DeepSpeed's own checkpoints, and the universal checkpoints that DeepSpeed converts them to.

At ZeRO-0 a file holds whole tensors; the optimizer's tensors have no names. At ZeRO-1 to 3 each rank has pieces.
DeepSpeed's universal conversion assembles them; it runs here in one process, and this module adds the parameters that
it omits (impl/deepspeed/checkpoint_layout.py). The conversion unpickles every file, so all files are checked before.
"""

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from conformance.core.errors import UsageError, one_line
from conformance.core.io import MIB, read_text
from impl.checkpoints.safe_pickle import check_pickle, read_torch_file
from impl.checkpoints.training_state import WRITTEN, Checkpoint, StoredTensor
from impl.deepspeed.checkpoint_layout import HOW_CUT, frozen_dtype, frozen_parts, frozen_shapes

LATEST = "latest"
MODEL_FILES, OPTIMIZER_FILES = "*_model_states.pt", "*_optim_states.pt"
_COUNTS = ("global_steps", "dp_world_size", "mp_world_size")
MOMENTS = tuple(kind for kind in WRITTEN if kind not in ("weight", "step"))


def tag_folder(folder: Path) -> Path | None:
    """Returns the folder of the files: this one, or the one that ``latest`` names; None without files."""
    if any(folder.glob(MODEL_FILES)):
        return folder
    if not (folder / LATEST).is_file():
        return None
    tag = read_text(folder / LATEST, limit=MIB).strip()
    inside = len(tag.encode()) < 256 and Path(tag).name == tag and any((folder / tag).glob(MODEL_FILES))
    return folder / tag if inside else None


def open_native(folder: Path) -> Checkpoint:
    """Opens a checkpoint of an engine's save_checkpoint. At ZeRO-1 to 3 only ``universal`` can read its tensors."""
    tag = tag_folder(folder)
    assert tag is not None, f"{folder} is no checkpoint of DeepSpeed"
    model = _model_states(tag)
    stage = int(model["ds_config"].get("zero_optimization", {}).get("stage", 0))
    optimizer_files = sorted(tag.glob(OPTIMIZER_FILES))
    if stage == 0 or not optimizer_files:
        tensors, read = _whole(model), _read_value
        scaler = model.get("optimizer") or {}
    else:
        state = read_torch_file(optimizer_files[0])["optimizer_state_dict"]
        tensors, read = _pieces(model, state), None
        scaler = _scaler(state)
    cut = read is None and (model.get("mp_world_size") or 1) > 1
    return Checkpoint(
        format=f"DeepSpeed, ZeRO-{stage}",
        facts=_facts(model) | ({"shapes": "of the first tensor-parallel rank's parts"} if cut else {}),
        tensors=tensors,
        progress=_progress(model, scaler),
        read=read,
    )


def _model_states(folder: Path) -> dict[str, Any]:
    """Reads the first rank's file of the model. Raises UsageError if DeepSpeed did not write it."""
    file = min(folder.glob(MODEL_FILES))
    found = read_torch_file(file)
    if not isinstance(found, dict) or not {"module", "ds_config", "global_steps"} <= found.keys():
        raise UsageError(f"{file} was not written by DeepSpeed's save_checkpoint; give the folder of a checkpoint")
    sizes = found.get("checkpoint_parallel_dimensions") or {}
    for name, value in (*((name, found.get(name)) for name in _COUNTS), ("pp_degree", sizes.get("pp_degree"))):
        if not isinstance(value, int | None):  # its repr may have any length
            raise UsageError(f"{file}: {name} must be a number, got a {type(value).__name__}; give another checkpoint")
    return found


def _facts(model: Mapping[str, Any]) -> dict[str, Any]:
    sizes = model.get("checkpoint_parallel_dimensions") or {}
    return {
        "step": model["global_steps"],
        "dp": model.get("dp_world_size"),
        "tp": model.get("mp_world_size"),
        **({"pp": sizes["pp_degree"]} if "pp_degree" in sizes else {}),
        "version": version if isinstance(version := model.get("ds_version"), str) else None,
    }


def _scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of an optimizer's loss scaler; bf16 at ZeRO-1 has none."""
    return vars(state["loss_scaler"]) if "loss_scaler" in state else {}


def _progress(model: Mapping[str, Any], scaler: Mapping[str, Any]) -> dict[str, float]:
    """Returns the progress as Trainable.named_tensors defines it; the loss scale in fp16 only."""
    schedule = model.get("lr_scheduler") or {}
    found = {"schedule": float(schedule["last_epoch"])} if "last_epoch" in schedule else {}
    if model["ds_config"].get("fp16", {}).get("enabled") and "cur_iter" in scaler:
        good = (scaler["cur_iter"] - scaler["last_overflow_iter"] - 1) % scaler["scale_window"]
        found |= {"loss_scale": float(scaler["cur_scale"]), "good_steps": float(good)}
    return found


def _read_value(stored: StoredTensor) -> torch.Tensor:
    tensor: torch.Tensor = stored.place.detach()
    return tensor


def _value(kind: str, name: str, tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor(kind=kind, name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, place=tensor)


def _whole(model: Mapping[str, Any]) -> tuple[StoredTensor, ...]:
    """Lists tensors of ZeRO-0: weights (in half precision: masters), and the optimizer's state in the groups' order."""
    weights = {name: t for name, t in model["module"].items() if name not in (model.get("buffer_names") or ())}
    weights = _without_second_names(weights)
    optimizer = model.get("optimizer") or {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    names = _order(weights, inner)
    masters = [tensor for group in optimizer.get("fp32_groups", ()) for tensor in group]
    weights |= dict(zip(names, masters, strict=True)) if masters else {}
    stored = [_value("weight", name, tensor) for name, tensor in weights.items()]
    for kind in (*MOMENTS, "step"):
        for number, name in enumerate(names):
            value = inner.get("state", {}).get(number, {}).get(kind)
            if value is not None:
                stored.append(_value(kind, name, torch.as_tensor(value)))
    return tuple(stored)


def _without_second_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keeps a tied parameter once, under its first name: both entries share one piece of the file."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(list(weights.items())) if tensor.numel()}
    return {name: t for name, t in weights.items() if not t.numel() or first[t.data_ptr()] == name}


def _order(weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> list[str]:
    """Returns names in the order in which torch's optimizer numbers parameters; the file does not contain it.

    Parameters in a group have the order of the model. Two groups are assumed to be those with two or more dimensions,
    which decay, and the others, as in impl.engine.optimizers and most trainers. Raises UsageError if sizes disagree.
    """
    groups = [len(group["params"]) for group in optimizer.get("param_groups", ())]
    names = sorted(weights, key=lambda name: weights[name].dim() < 2) if len(groups) == 2 else list(weights)
    state = optimizer.get("state", {})
    moments = ((number, state[number].get(kind)) for number in state for kind in MOMENTS)
    fits = sum(groups) == len(names) and all(
        moment is None or moment.shape == weights[names[number]].shape for number, moment in moments
    )
    if groups and not fits:
        raise UsageError(
            "this checkpoint of ZeRO-0 numbers the optimizer's parameters without names, and not in the order of the "
            "model; save at ZeRO-1 instead, or convert only the weights, with --to hf"
        )
    return names


def _pieces(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> tuple[StoredTensor, ...]:
    """Lists names and shapes of ZeRO-1 to 3; under tensor parallelism, the shapes of the first rank's part."""
    inner = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    flat = optimizer.get("single_partition_of_fp32_groups") or optimizer["fp32_flat_groups"]
    state: Mapping[str, Any] = next(iter(inner["state"].values()), {})
    dtypes = {"weight": flat[0].dtype} | {kind: state[kind].dtype for kind in MOMENTS if kind in state}
    shapes = _shapes(model["param_shapes"])
    stored = [
        StoredTensor(kind=k, name=n, shape=shape, dtype=d) for k, d in dtypes.items() for n, shape in shapes.items()
    ]
    frozen = frozen_shapes(model).items()
    return (*stored, *(StoredTensor(kind="weight", name=n, shape=s, dtype=frozen_dtype(model, n)) for n, s in frozen))


def _shapes(param_shapes: Any) -> dict[str, tuple[int, ...]]:
    groups = param_shapes if isinstance(param_shapes, list) else [param_shapes or {}]
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def open_universal(folder: Path) -> Checkpoint:
    """Opens a universal checkpoint: for each parameter, a folder with its whole master and moments."""
    model = _model_states(folder)
    if (model.get("mp_world_size") or 1) > 1 and frozen_shapes(model):
        raise UsageError(
            f"{folder} has only the first tensor-parallel rank's part of its frozen parameters, because DeepSpeed's "
            f"conversion omits the others; give the original checkpoint, which has all parts"
        )
    return _universal(folder, model)


def _universal(folder: Path, model: Mapping[str, Any]) -> Checkpoint:
    expected = _shapes(model["param_shapes"]) | frozen_shapes(model)
    common = read_torch_file(folder / "zero" / "optimizer_state.pt")
    steps = _steps_of_groups(model, common)
    stored = []
    for name, shape in expected.items():
        own = folder / "zero" / name
        if not (own / "fp32.pt").is_file():
            raise UsageError(
                f"{folder} lacks {name}, because DeepSpeed's conversion omits frozen parameters; give the original "
                f"checkpoint"
            )
        for kind, file in (("weight", "fp32"), *((kind, kind) for kind in MOMENTS)):
            if (own / f"{file}.pt").is_file():
                found = read_torch_file(own / f"{file}.pt")
                # ZeRO-3's are flat.
                tensor = found["param"] if isinstance(found, dict) else found.view(shape)
                stored.append(_value(kind, name, tensor))
        step = read_torch_file(own / "step.pt") if (own / "step.pt").is_file() else steps.get(name)
        if step is not None:
            stored.append(_value("step", name, torch.as_tensor(step)))
    return Checkpoint(
        format="DeepSpeed universal",
        facts=_facts(model),
        tensors=tuple(stored),
        progress=_progress(model, _scaler(common)),
        read=_read_value,
    )


def _steps_of_groups(model: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Maps parameters to the step counts of their optimizer groups: at ZeRO-3 the conversion drops their own counts."""
    states = common.get("optimizer_state_dict", {}).get("state", {})
    shapes = model["param_shapes"]
    if not isinstance(shapes, list):
        return {}
    return {name: states[n]["step"] for n, group in enumerate(shapes) if "step" in states.get(n, {}) for name in group}


def universal(folder: Path, out: Path) -> Checkpoint:
    """Lets DeepSpeed assemble a checkpoint of ZeRO-1 to 3 in the new folder ``out``, and opens the result.

    Raises UsageError for pickles that name something suspicious, and if DeepSpeed cannot convert the files.
    """
    tag = tag_folder(folder)
    assert tag is not None, f"{folder} is no checkpoint of DeepSpeed"
    for file in sorted(tag.glob("*.pt")):
        check_pickle(file)
    _check_optimizer(tag)
    model = _model_states(tag)
    if (tp := model.get("mp_world_size") or 1) > 1 and not model.get(HOW_CUT):  # DeepSpeed would concatenate all parts
        raise UsageError(
            f"{tag} has {tp} tensor-parallel ranks and does not say how parameters are sharded, which DeepSpeed writes "
            f"for AutoTP only; load it with the ranks that wrote it and save a Hugging Face folder"
        )
    frozen = list(frozen_parts(tag))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # The conversion prints its steps and two progress bars; its errors are informative enough.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from impl.deepspeed.checkpoint import add_parameter, make_universal  # only now: importing it takes seconds

        try:
            make_universal(tag, out, all_trained=not frozen)
            for name, parts in frozen:
                add_parameter(out, name, parts, model.get(HOW_CUT) or {})
        except Exception as error:  # assertions, KeyError and other errors of the conversion
            raise UsageError(f"DeepSpeed cannot make a universal checkpoint of {tag}: {one_line(error)}") from None
    return _universal(out, model)


def _check_optimizer(tag: Path) -> None:
    """Raises UsageError for optimizers other than Adam, because the conversion supports only Adam's moments."""
    for file in tag.glob(OPTIMIZER_FILES):
        state = read_torch_file(file)["optimizer_state_dict"]
        inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        if any(not {"exp_avg", "exp_avg_sq"} <= own.keys() for own in inner["state"].values()):
            raise UsageError(
                f"{tag} has an optimizer without Adam's moments, which DeepSpeed's universal conversion does not "
                f"support; load it with ranks and export a training state"
            )
