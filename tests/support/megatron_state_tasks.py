"""Saves and loads training states and checkpoints of a policy and a critic, as tasks for test_megatron_models.py."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import megatron_reference as plain
import torch
import torch.distributed as dist
from megatron_tasks import WANTED, micro_batches, new, opened, relative, train, weights_of
from torch import Tensor

from conformance.backends.protocol import TensorKind
from conformance.core.errors import UsageError
from conformance.runtime import RankContext
from conformance.spec.observables import STATE_KINDS
from conformance.spec.precision import PrecisionName
from impl.checkpoints.training_state import export_state, import_state
from impl.megatron.checkpoint import FILE
from impl.megatron.context import MegatronContext
from impl.megatron.model import MegatronModel

Handed = Literal["checkpoint", "state"]
Models = dict[str, MegatronModel]


def models_of(context: MegatronContext, folders: dict[str, str], optimizer: str) -> Models:
    return {name: new(context, folders[name], head=plain.HEADS[name], optimizer=optimizer) for name in plain.TRAINED}


def update(context: MegatronContext, models: Models, step: int) -> None:
    """A step of both; the policy's by supervised fine-tuning."""
    batch, inputs = plain.make_batch(step, packed=context.config.packed), micro_batches(context, step)
    train(context, models["policy"], step)
    models["critic"].forward_backward(
        inputs, want=WANTED["critic"], loss=lambda i, outputs: plain.critic_loss(outputs, inputs[i], batch)
    )
    models["critic"].optimizer_step()


def state_of(model: MegatronModel) -> dict[str, Tensor]:
    """Masters and training state, by kind and name."""
    kinds: tuple[TensorKind, ...] = ("weight", *STATE_KINDS)
    return {f"{kind}/{name}": t.detach().cpu().clone() for kind in kinds for name, t in model.named_tensors(kind)}


def other_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """What is in one of the two only, or not the same to the bit."""
    same = {name for name in one.keys() & other.keys() if torch.equal(bits(one[name]), bits(other[name]))}
    return sorted((one.keys() | other.keys()) - same)


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def hand_over(model: MegatronModel, how: Handed, folder: Path) -> None:
    if how == "checkpoint":
        model.save_ckpt(folder)
    else:
        export_state(folder, model)


def take_over(model: MegatronModel, how: Handed, folder: Path) -> None:
    if how == "checkpoint":
        model.load_ckpt(folder)
    else:
        import_state(folder, model)


def handed_over(
    rank: RankContext,
    *,
    layout: str,
    other: str,
    how: Handed,
    precision: PrecisionName,
    optimizer: str,
    updates: int,
    folders: dict[str, str],
    out: str,
) -> dict[str, Any]:
    """``updates`` steps, a handover, two steps more: in the first layout, and in another from what was handed over.

    In float16 the gradients of the policy overflow before the last update. ``changed``: what was not loaded to the bit;
    ``kinds``, ``progress``: what there is of the policy's; ``shared``: whether parameters have one step together;
    ``off``: how far weights differ at the end, relative to their size.
    """
    with opened(rank, layout, precision) as context:
        models = models_of(context, folders, optimizer)
        for step in range(updates):
            if precision == "fp16" and step == updates - 1:
                train(context, models["policy"], step, scale=1e30)
            update(context, models, step)
        for name, model in models.items():
            hand_over(model, how, Path(out) / name)
        saved = {name: state_of(model) for name, model in models.items()}
        for step in (2, 3):
            update(context, models, step)
        stayed = {name: weights_of(model) for name, model in models.items()}
        for model in models.values():
            model.teardown()
    with opened(rank, other, precision) as context:
        models = models_of(context, folders, optimizer)
        for name, model in models.items():
            take_over(model, how, Path(out) / name)
        changed = [f"{name}: {n}" for name, model in models.items() for n in other_bits(saved[name], state_of(model))]
        shared = any(has_shared_steps(model) for model in models.values())
        for step in (2, 3):
            update(context, models, step)
        moved = {name: weights_of(model) for name, model in models.items()}
        for model in models.values():
            model.teardown()
    return {
        "changed": changed,
        "kinds": sorted({key.partition("/")[0] for key in saved["policy"]}),
        "progress": {n.partition("/")[2]: float(t) for n, t in saved["policy"].items() if n.startswith("progress/")},
        "shared": shared,
        "off": max(relative(moved[name][n], weight) for name in stayed for n, weight in stayed[name].items()),
    }


def has_shared_steps(model: MegatronModel) -> bool:
    (only,) = model.optimizer.chained_optimizers
    steps = [state["step"].data_ptr() for state in only.optimizer.state.values() if "step" in state]
    return len(steps) != len(set(steps))


def refused(rank: RankContext, *, layout: str, other: str, folders: dict[str, str], out: str) -> dict[str, str]:
    """What is said of checkpoints that are damaged or do not fit; models that were to read them have not changed.

    ``other``: a layout with another of megatron-core's optimizers.
    """
    whole = Path(out) / "whole"
    with opened(rank, layout, "fp32") as context:
        model = new(context, folders["policy"])
        train(context, model, 0)
        model.save_ckpt(whole)
        said = {"critic": said_of(new(context, folders["critic"], head="value"), whole)}
        for name, damage in DAMAGES.items():
            damaged = Path(out) / name
            if rank.rank == 0:
                shutil.copytree(whole, damaged)
                damage(damaged)
            dist.barrier()
            said[name] = said_of(model, damaged)
        train(context, model, 1)
        model.teardown()
    with opened(rank, other, "fp32") as context:
        said["optimizer"] = said_of(new(context, folders["policy"]), whole)
    return said


def said_of(model: MegatronModel, folder: Path) -> str:
    before, said = state_of(model), ""
    try:
        model.load_ckpt(folder)
    except UsageError as error:
        said = str(error)
    assert not other_bits(before, state_of(model))
    return said


def cut_the_list(folder: Path) -> None:
    (folder / FILE).write_text((folder / FILE).read_text()[:100])


def remove_the_list(folder: Path) -> None:
    (folder / FILE).unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": cut_the_list,
    "list": remove_the_list,
}
