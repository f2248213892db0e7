"""Saves and loads megatron-core's own checkpoints (``torch_dist``): model, optimizer, schedule and loss scale.

The library plans, writes and reads the files, for any layout. This module adds the state of torch's optimizers
(docs/findings/megatron-checkpoint-torch-optimizers.md), the time and the process group of writing, and a list of the
training's properties. A checkpoint whose list does not fit is rejected before anything changes. The manifest of the
whole checkpoint (impl/checkpoints) detects damaged files.
"""

import contextlib
import json
import queue
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from conformance.backends.on_cpu import replaced
from conformance.core.errors import UsageError
from conformance.core.io import read_json
from impl.checkpoints.safe_pickle import checked_float8
from impl.interface.distributed import Group, on_all_ranks, on_first
from impl.interface.trainable import Writing
from impl.megatron.model_config import ModelShape
from impl.megatron.releases import SAVE_OPTIONS, writer_of_common_state
from impl.megatron.tensors import REMAINDER, refuse_foreign

FORMAT, VERSION, FILE = "backend-parity megatron checkpoint", 1, "contents.json"
OPTIMIZERS = ("optimizer", "experts")  # keys of their states in a checkpoint
_SET_STATES = DistributedOptimizer._set_main_param_and_optimizer_states


@dataclass(frozen=True, kw_only=True)
class Training:
    """Holds the training that is saved and restored.

    chunks: this rank's GPTModels. optimizers: those in megatron-core's chain; under expert parallelism, a second one is
    for the experts, and Muon and its AdamW are two. trained: the names of the trained parameters of the whole model.
    """

    chunks: Sequence[Any]
    optimizers: Sequence[Any]
    scheduler: Any
    shape: ModelShape
    trained: Sequence[str]

    def properties(self) -> dict[str, Any]:
        """Returns the properties that a checkpoint must share with this training, as JSON values; any layout fits."""
        kinds = [f"{type(one.optimizer).__name__} in {type(one).__name__}" for one in self.optimizers]
        own = {
            **{f"the model's {name}": value for name, value in asdict(self.shape).items()},
            "the trained parameters": [*self.trained],
            "the optimizer": " and ".join(kinds),
            "the dtype": str(next(self.chunks[0].parameters()).dtype),
        }
        properties: dict[str, Any] = json.loads(json.dumps(own))
        return properties


def save(path: Path, training: Training, when: Writing) -> None:
    """Writes a checkpoint into the folder ``path``; collective."""
    _refuse_foreign(training)
    doing = f"writing {path}"
    on_first(doing, lambda: path.mkdir(parents=True, exist_ok=True))
    updated = _on_any_rank(any(one.optimizer.state for one in training.optimizers))
    strategy = _Planned("torch_dist", 1)
    with (
        _completed(training.optimizers, keep=updated),
        replaced(filesystem_async, {"_results_queue": queue.Queue()}),
        _raising_on_all_ranks(doing),
    ):
        state = _state(training, is_loading=False) | {"scheduler": training.scheduler.state_dict()}
        dist_checkpointing.save(state, str(path), strategy, async_sharded_save=True, **SAVE_OPTIONS)
        files = strategy.take_files(copies=when.copies)
    contents = {"format": FORMAT, "version": VERSION, "of": training.properties(), "updated": updated}

    def write_contents() -> None:
        save_config(CheckpointingConfig(strategy.backend, strategy.version), str(path))
        (path / FILE).write_text(json.dumps(contents, indent=1), encoding="utf-8")

    on_first(doing, write_contents)
    when.add(lambda: strategy.write(files, doing, when.group))


def _raising_on_all_ranks(doing: str) -> AbstractContextManager[Any]:
    """Raises on all ranks if the first cannot write common.pt: they would wait for it in the next collective."""
    if (writer := writer_of_common_state()) is None:
        return contextlib.nullcontext()
    owner, name = writer
    save_common = getattr(owner, name)
    return replaced(owner, {name: lambda *given: on_first(doing, lambda: save_common(*given))})


def load(path: Path, training: Training) -> None:
    """Loads a checkpoint that ``save`` wrote in any layout; collective.

    Raises UsageError, before anything is changed, for a checkpoint of another training.
    """
    _refuse_foreign(training)
    answer = [_read_contents(path, training.properties()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer)
    contents = answer[0]
    if isinstance(contents, str):
        raise UsageError(contents)
    assert contents is not None
    with _completed(training.optimizers, keep=contents["updated"]):
        found = dist_checkpointing.load(_state(training, is_loading=True), str(path))
        for number, chunk in enumerate(training.chunks):
            chunk.load_state_dict(_checked(found[f"model{number}"], path))
        for key, optimizer in zip(OPTIMIZERS, training.optimizers, strict=False):
            optimizer.load_state_dict(found[key])
        training.scheduler.load_state_dict(found["scheduler"])


def _checked(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the state of a model, after its states of float8 are checked, which TransformerEngine unpickles."""
    return {
        name: checked_float8(value, f"{path}, {name},")
        if name.endswith("_extra_state") and torch.is_tensor(value)
        else value
        for name, value in state.items()
    }


class _Planned(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Uses the library's strategy for planning only.

    The library's writing needs a GPU, communicates over the training's group, and starts three more processes, one of
    them with ``spawn``, which takes seconds.
    """

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, *options: Any) -> Any:
        self._writer, self._metadata, _ = save_state_dict_ret
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, *options)

    def take_files(self, *, copies: bool) -> list[Any]:
        """Takes this rank's files from the library's writer, with tensors on the host. ``copies``: always copy."""
        buckets, self._writer.write_buckets = self._writer.write_buckets, []
        return [
            (path, name, (values, [(item, tensor.to("cpu", copy=copies)) for item, tensor in tensors]))
            for path, name, (values, tensors) in buckets
        ]

    def write(self, files: list[Any], doing: str, group: Group) -> None:
        """Writes the files of all ranks, and the metadata; collective."""
        written = on_all_ranks(doing, lambda: self._write(files), group=group)
        on_first(doing, lambda: self._writer.finish(self._metadata, written), group=group)

    def _write(self, files: list[Any]) -> list[Any]:
        done: queue.Queue[Any] = queue.Queue()
        begun: queue.Queue[int] = queue.Queue()  # the library's function takes a number from it for each file
        written = []
        for number, file in enumerate(files):
            begun.put(number)
            FileSystemWriterAsync.write_preloaded_data([self._writer.transforms], number, file, done, begun, True)
            _, found = done.get()
            if isinstance(found, Exception):
                raise found
            written += found
        return written


def _state(training: Training, *, is_loading: bool) -> dict[str, Any]:
    """Returns megatron-core's sharded state dict: this rank's tensors and their places in whole model and optimizer."""
    options = {
        "distrib_optim_sharding_type": "fully_reshardable",  # other types fit one layout, or fail
        "singleton_local_shards": True,  # otherwise saving fails if only some layers are trained
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models = {
        f"model{number}": chunk.sharded_state_dict(metadata=options) for number, chunk in enumerate(training.chunks)
    }
    with contextlib.ExitStack() as stack:
        # Only the distributed optimizer has buffers.
        for buffer in (b for one in training.optimizers for b in getattr(one, "buffers", ())):
            stack.enter_context(replaced(buffer, {"param_index_map": _unpadded_index_map(buffer)}))
        states = [one.sharded_state_dict(models, is_loading, metadata=options) for one in training.optimizers]
        return {**models, **dict(zip(OPTIMIZERS, states, strict=False))}


def _unpadded_index_map(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Returns the buffer's ``param_index_map`` (parameter -> start, end, bucket) in indices without bucket padding.

    megatron-core concatenates the buckets' state without padding, but then looks parameters up by indices that count
    the padding (docs/findings/megatron-checkpoint-buckets.md).
    """
    shift, end = {}, 0
    for bucket in buffer.buckets:
        shift[bucket.bucket_id] = end - bucket.offset
        end += bucket.numel_unpadded
    return {p: (start + shift[b], stop + shift[b], b) for p, (start, stop, b) in buffer.param_index_map.items()}


@contextlib.contextmanager
def _completed(optimizers: Sequence[Any], *, keep: bool) -> Iterator[None]:
    """Gives optimizers that have made no update yet the initial state that megatron-core expects.

    On exit, each parameter gets its own ``step`` tensor. ``keep``: whether the state stays on exit; it must not if the
    checkpoint has no state.
    """
    inners = [one.optimizer for one in optimizers]
    for inner in (one for one in inners if not one.state):
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if getattr(inner, "store_param_remainders", False):
                inner.initialize_state(parameter, store_param_remainders=True)
            else:
                inner.state[parameter] = _first_state(inner, parameter)
    with contextlib.ExitStack() as stack:
        for one in optimizers:
            stack.enter_context(replaced(one, {"init_state_fn": lambda *_: None}))  # megatron-core has none for SGD
        stack.enter_context(replaced(DistributedOptimizer, {"_set_main_param_and_optimizer_states": _set_states}))
        yield
    for inner in inners:
        for state in inner.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
        if not keep:
            inner.state.clear()


def _refuse_foreign(training: Training) -> None:
    for one in training.optimizers:
        refuse_foreign(one.optimizer)


def _first_state(inner: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the state of a parameter in torch's AdamW or SGD, or in Muon, before the first update."""
    if not isinstance(inner, torch.optim.AdamW):
        return {"momentum_buffer": torch.zeros_like(parameter)} if inner.defaults["momentum"] else {}
    moments = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0), **moments}


def _set_states(self: Any, parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Calls the library's method with the ``step`` that it requires: checkpoints lack it, the optimizer has it.

    Checkpoints have remainders, which are integers, as float32 numbers
    (docs/findings/megatron-remainder-checkpoints.md).
    """
    group, position = self.model_param_group_index_map[parameter]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][position]]
    if REMAINDER in state:
        _SET_STATES(self, parameter, {**tensors, "param": tensors["param"].to(state[REMAINDER].dtype)})
    else:
        _SET_STATES(self, parameter, {**tensors, "step": state["step"]})


def _on_any_rank(condition: bool) -> bool:
    """Whether ``condition`` is true on any rank; collective."""
    conditions = [False] * dist.get_world_size()
    dist.all_gather_object(conditions, condition)
    return any(conditions)


def _read_contents(path: Path, own: dict[str, Any]) -> dict[str, Any] | str:
    """Returns the contents of a checkpoint's FILE, or a message that says why the checkpoint cannot be loaded."""
    file = path / FILE
    if not file.is_file():
        return f"{path} has no {FILE}; give the folder that save_ckpt got, or wait until it is completely written"
    try:
        contents: dict[str, Any] = read_json(file)
        known = (contents["format"], contents["version"]) == (FORMAT, VERSION) and {"of", "updated"} <= contents.keys()
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        return f"{file} is not the list of a checkpoint of this version; save the checkpoint again"
    if different := [name for name, value in own.items() if contents["of"].get(name) != value]:
        name = different[0]
        return (
            f"{path} is a checkpoint of another training: {name} is {contents['of'].get(name)!r} there and "
            f"{own[name]!r} here; give the checkpoint of this model and optimizer, or transfer a training state, which "
            f"works with and without the distributed optimizer"
        )
    return contents
