"""Training state under Hugging Face names: masters and optimizer state in full, so that any layout can go on from it.

megatron-core's own distributed checkpoints are for one framework and one optimizer; here the same conversion that loads
weights loads the rest, by the slices that a rank holds.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.validation import UsageError
from impl.files import SliceReader, write_tensors
from impl.megatron.tensors import ModelTensors

_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # of AdamW and SGD in torch


def save(path: Path, tensors: ModelTensors, optimizer: Any, scheduler: Any) -> None:
    """Write the state of one of megatron-core's optimizers into a folder; collective. UsageError: see ``_check``."""
    _check(optimizer)
    mine: dict[str, Any] = next(iter(optimizer.optimizer.state.values()), {})
    known: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        known, {"states": [key for key in _STATES if key in mine], "step": _number(mine.get("step"))}
    )
    some = max(known, key=lambda rank: len(rank["states"]))  # a rank may own no optimizer state
    write_tensors(path / "weights", tensors.named("weight"))
    for key in some["states"]:
        write_tensors(path / key, tensors.optimizer_state(key))
    if dist.get_rank() == 0:
        scaler = getattr(optimizer, "grad_scaler", None)
        state = {**some, "schedule": scheduler.state_dict(), "scaler": _json(scaler.state_dict()) if scaler else None}
        (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    dist.barrier()


def load(path: Path, tensors: ModelTensors, optimizer: Any, scheduler: Any) -> None:
    """Read what ``save`` wrote, in any layout. UsageError for another folder, and see ``_check``."""
    _check(optimizer)
    if not (path / "state.json").is_file():
        raise UsageError(f"{path} has no training state; give the folder that save_ckpt got")
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    with _reader(path / "weights") as read, torch.no_grad():
        tensors.write_masters(read)
    for key in state["states"]:
        with _reader(path / key) as read, torch.no_grad():
            tensors.write_optimizer_state(key, read)
    if state["step"] is not None:
        tensors.set_steps(state["step"])
    scheduler.load_state_dict(state["schedule"])
    if state["scaler"]:
        optimizer.grad_scaler.load_state_dict(
            {key: torch.tensor(value) if key == "scale" else value for key, value in state["scaler"].items()}
        )


def _check(optimizer: Any) -> None:
    """Raises UsageError for optimizers of TransformerEngine and Apex, whose state is laid out in another way."""
    kind = type(optimizer.optimizer)
    if not issubclass(kind, (torch.optim.AdamW, torch.optim.SGD)):
        raise UsageError(
            f"megatron-core has taken {kind.__module__}.{kind.__name__}, whose state cannot be written or read here, "
            f"only that of torch's AdamW and SGD; uninstall transformer-engine and apex"
        )


def _reader(folder: Path) -> SliceReader:
    return SliceReader(sorted(folder.glob("*.safetensors")))


def _number(step: torch.Tensor | None) -> float | None:
    return None if step is None else float(step)


def _json(state: dict[str, Any]) -> dict[str, Any]:
    return {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
