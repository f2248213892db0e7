"""DeepSpeed's own checkpoints, and the universal ones that DeepSpeed makes of them.

At ZeRO-0 a file holds whole tensors, without names for those of the optimizer. At ZeRO-1 to 3 each rank has pieces,
which DeepSpeed's universal conversion puts together; it runs here in one process, and what it leaves out is added
(impl/deepspeed/checkpoint_layout.py). It unpickles whatever it finds, so every file is checked before.
"""

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from conformance.core.errors import UsageError, one_line
from impl.checkpoints.safe_pickle import check_pickle, read_torch_file
from impl.checkpoints.training_state import WRITTEN
from impl.convert.contents import Checkpoint, Held
from impl.deepspeed.checkpoint_layout import HOW_CUT, frozen_dtype, frozen_parts, frozen_shapes

LATEST = "latest"
MODEL_FILES, OPTIMIZER_FILES = "*_model_states.pt", "*_optim_states.pt"
MOMENTS = tuple(kind for kind in WRITTEN if kind not in ("weight", "step"))


def tag_folder(folder: Path) -> Path | None:
    """The folder of the files: this one, or that which ``latest`` names; None where there are none."""
    if any(folder.glob(MODEL_FILES)):
        return folder
    if not (folder / LATEST).is_file():
        return None
    tag = (folder / LATEST).read_text(encoding="utf-8").strip()
    inside = Path(tag).name == tag and any((folder / tag).glob(MODEL_FILES))
    return folder / tag if inside else None


def open_native(folder: Path) -> Checkpoint:
    """What an engine's save_checkpoint wrote. At ZeRO-1 to 3 its tensors are read by ``universal`` only."""
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
    """What the first rank wrote of the model. Raises UsageError where it is not what DeepSpeed writes."""
    file = min(folder.glob(MODEL_FILES))
    found = read_torch_file(file)
    if not isinstance(found, dict) or not {"module", "ds_config", "global_steps"} <= found.keys():
        raise UsageError(f"{file} is not what DeepSpeed's save_checkpoint writes; give the folder of a checkpoint")
    return found


def _facts(model: Mapping[str, Any]) -> dict[str, Any]:
    sizes = model.get("checkpoint_parallel_dimensions") or {}
    return {
        "step": model["global_steps"],
        "dp": model.get("dp_world_size"),
        "tp": model.get("mp_world_size"),
        **({"pp": sizes["pp_degree"]} if "pp_degree" in sizes else {}),
        "version": model.get("ds_version"),
    }


def _scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the loss scaler of an optimizer keeps; that of bf16 at ZeRO-1 has none."""
    return vars(state["loss_scaler"]) if "loss_scaler" in state else {}


def _progress(model: Mapping[str, Any], scaler: Mapping[str, Any]) -> dict[str, float]:
    """As impl.interface.protocol.Trainable.named_tensors says; the loss scale is there in fp16 only."""
    schedule = model.get("lr_scheduler") or {}
    found = {"schedule": float(schedule["last_epoch"])} if "last_epoch" in schedule else {}
    if model["ds_config"].get("fp16", {}).get("enabled") and "cur_iter" in scaler:
        good = (scaler["cur_iter"] - scaler["last_overflow_iter"] - 1) % scaler["scale_window"]
        found |= {"loss_scale": float(scaler["cur_scale"]), "good_steps": float(good)}
    return found


def _read_value(held: Held) -> torch.Tensor:
    tensor: torch.Tensor = held.place.detach()
    return tensor


def _value(kind: str, name: str, tensor: torch.Tensor) -> Held:
    return Held(kind=kind, name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, place=tensor)


def _whole(model: Mapping[str, Any]) -> tuple[Held, ...]:
    """Of ZeRO-0: weights or, in half precision, masters; and the optimizer's state, by the order of its groups."""
    weights = {name: t for name, t in model["module"].items() if name not in (model.get("buffer_names") or ())}
    weights = _without_second_names(weights)
    optimizer = model.get("optimizer") or {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    names = _order(weights, inner)
    masters = [tensor for group in optimizer.get("fp32_groups", ()) for tensor in group]
    weights |= dict(zip(names, masters, strict=True)) if masters else {}
    held = [_value("weight", name, tensor) for name, tensor in weights.items()]
    for kind in (*MOMENTS, "step"):
        for number, name in enumerate(names):
            value = inner["state"].get(number, {}).get(kind)
            if value is not None:
                held.append(_value(kind, name, torch.as_tensor(value)))
    return tuple(held)


def _without_second_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tied parameter once, under its first name: its two entries are one piece of the file."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(list(weights.items())) if tensor.numel()}
    return {name: t for name, t in weights.items() if not t.numel() or first[t.data_ptr()] == name}


def _order(weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> list[str]:
    """Names in the order in which torch's optimizer numbers parameters, which the file does not say.

    Parameters stand in a group as in the model. Two groups are those of two or more dimensions, which decay, and the
    others, as impl.engine.optimizers and most trainers make them. Raises UsageError where sizes say that it is not so.
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
            "model; save at ZeRO-1 instead, or convert its weights only, with --to hf"
        )
    return names


def _pieces(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> tuple[Held, ...]:
    """Of ZeRO-1 to 3: names and shapes; under tensor parallelism the shapes of the first rank's part."""
    inner = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    flat = optimizer.get("single_partition_of_fp32_groups") or optimizer["fp32_flat_groups"]
    state: Mapping[str, Any] = next(iter(inner["state"].values()), {})
    dtypes = {"weight": flat[0].dtype} | {kind: state[kind].dtype for kind in MOMENTS if kind in state}
    shapes = _shapes(model["param_shapes"])
    held = [Held(kind=k, name=n, shape=shape, dtype=d) for k, d in dtypes.items() for n, shape in shapes.items()]
    frozen = frozen_shapes(model).items()
    return (*held, *(Held(kind="weight", name=n, shape=s, dtype=frozen_dtype(model, n)) for n, s in frozen))


def _shapes(told: Any) -> dict[str, tuple[int, ...]]:
    groups = told if isinstance(told, list) else [told or {}]
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def open_universal(folder: Path) -> Checkpoint:
    """A universal checkpoint: of each parameter a folder with its master and moments, whole."""
    model = _model_states(folder)
    if (model.get("mp_world_size") or 1) > 1 and frozen_shapes(model):
        raise UsageError(
            f"{folder} has of its frozen parameters what DeepSpeed's conversion keeps of them, the part of the first "
            f"tensor-parallel rank; give the checkpoint that it was made of, which has all parts"
        )
    return _universal(folder, model)


def _universal(folder: Path, model: Mapping[str, Any]) -> Checkpoint:
    expected = _shapes(model["param_shapes"]) | frozen_shapes(model)
    common = read_torch_file(folder / "zero" / "optimizer_state.pt")
    steps = _steps_of_groups(model, common)
    held = []
    for name, shape in expected.items():
        own = folder / "zero" / name
        if not (own / "fp32.pt").is_file():
            raise UsageError(
                f"{folder} lacks {name}, which DeepSpeed's conversion leaves out where it is frozen; give the "
                f"checkpoint that it was made of"
            )
        for kind, file in (("weight", "fp32"), *((kind, kind) for kind in MOMENTS)):
            if (own / f"{file}.pt").is_file():
                found = read_torch_file(own / f"{file}.pt")
                # ZeRO-3's are flat.
                tensor = found["param"] if isinstance(found, dict) else found.view(shape)
                held.append(_value(kind, name, tensor))
        step = read_torch_file(own / "step.pt") if (own / "step.pt").is_file() else steps.get(name)
        if step is not None:
            held.append(_value("step", name, torch.as_tensor(step)))
    return Checkpoint(
        format="DeepSpeed universal",
        facts=_facts(model),
        tensors=tuple(held),
        progress=_progress(model, _scaler(common)),
        read=_read_value,
    )


def _steps_of_groups(model: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """At ZeRO-3 the conversion gives parameters no count of steps; groups of the optimizer have one."""
    states = common.get("optimizer_state_dict", {}).get("state", {})
    shapes = model["param_shapes"]
    if not isinstance(shapes, list):
        return {}
    return {name: states[n]["step"] for n, group in enumerate(shapes) if "step" in states.get(n, {}) for name in group}


def universal(folder: Path, out: Path) -> Checkpoint:
    """Have DeepSpeed put a checkpoint of ZeRO-1 to 3 together in the new folder ``out``, and open that.

    Raises UsageError for files that hold what no checkpoint needs, and where DeepSpeed cannot convert them.
    """
    tag = tag_folder(folder)
    assert tag is not None, f"{folder} is no checkpoint of DeepSpeed"
    for file in sorted(tag.glob("*.pt")):
        check_pickle(file)
    _check_optimizer(tag)
    model = _model_states(tag)
    if (tp := model.get("mp_world_size") or 1) > 1 and not model.get(HOW_CUT):  # it would put all of them end to end
        raise UsageError(
            f"{tag} is of {tp} tensor-parallel ranks and does not say how parameters are cut, which DeepSpeed writes "
            f"of AutoTP only; load it by the ranks that wrote it and save a Hugging Face folder"
        )
    frozen = list(frozen_parts(tag))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # It prints its steps and two bars; what it raises says enough.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from impl.deepspeed.universal_checkpoint import (
            add_parameter,
            make_universal,
        )  # only now: importing it takes seconds

        try:
            make_universal(tag, out, all_trained=not frozen)
            for name, parts in frozen:
                add_parameter(out, name, parts, model.get(HOW_CUT) or {})
        except Exception as error:  # assertions, KeyError and what else its parts raise
            raise UsageError(f"DeepSpeed cannot make a universal checkpoint of {tag}: {one_line(error)}") from None
    return _universal(out, model)


def _check_optimizer(tag: Path) -> None:
    """The conversion knows Adam's moments only."""
    for file in tag.glob(OPTIMIZER_FILES):
        state = read_torch_file(file)["optimizer_state_dict"]
        inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        if any(not {"exp_avg", "exp_avg_sq"} <= own.keys() for own in inner["state"].values()):
            raise UsageError(
                f"{tag} is of an optimizer without Adam's moments, which DeepSpeed's universal conversion does not "
                f"know; load it by ranks and export a training state"
            )
