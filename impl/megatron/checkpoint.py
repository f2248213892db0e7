"""megatron-core's own checkpoints (``torch_dist``): model, optimizer, schedule and loss scale, in any layout.

The library plans, writes and reads them. Ours is what it leaves out for torch's optimizers
(docs/findings/megatron-checkpoint-torch-optimizers.md), when and over which group it writes, and a list of what the
checkpoint is of, so that one that does not fit is refused before anything has changed. What is damaged shows in the
manifest of the whole checkpoint (impl/checkpoints).
"""

import contextlib
import json
import queue
from collections.abc import Iterator, Sequence
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

from conformance.core.errors import UsageError
from impl.interface.distributed import Group, on_first, together
from impl.interface.protocol import Writing
from impl.megatron.device_placement import replaced
from impl.megatron.model_config import ModelShape
from impl.megatron.tensors import refuse_foreign

FORMAT, VERSION, FILE = "backend-parity megatron checkpoint", 1, "contents.json"
OPTIMIZERS = ("optimizer", "experts")  # where in a checkpoint the state of each lies
_SET_STATES = DistributedOptimizer._set_main_param_and_optimizer_states


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training that is saved and restored.

    chunks: this rank's GPTModels. optimizers: those in megatron-core's chain, of which a second one has the experts of
    expert parallelism. trained: the names of the trained parameters of the whole model.
    """

    chunks: Sequence[Any]
    optimizers: Sequence[Any]
    scheduler: Any
    shape: ModelShape
    trained: Sequence[str]

    def told(self) -> dict[str, Any]:
        """The properties that a checkpoint and this training must share, as JSON values; the layout is none of them."""
        kinds = [f"{type(one.optimizer).__name__} in {type(one).__name__}" for one in self.optimizers]
        own = {
            **{f"the model's {name}": value for name, value in asdict(self.shape).items()},
            "the trained parameters": [*self.trained],
            "the optimizer": " and ".join(kinds),
            "the dtype": str(next(self.chunks[0].parameters()).dtype),
        }
        told: dict[str, Any] = json.loads(json.dumps(own))
        return told


def save(path: Path, training: Training, when: Writing) -> None:
    """Write a checkpoint into the folder ``path``; collective."""
    _refuse_foreign(training)
    doing = f"writing {path}"
    on_first(doing, lambda: path.mkdir(parents=True, exist_ok=True))
    updated = _anywhere(any(one.optimizer.state for one in training.optimizers))
    strategy = _Planned("torch_dist", 1)
    with _completed(training.optimizers, keep=updated), replaced(filesystem_async, {"_results_queue": queue.Queue()}):
        state = _state(training, is_loading=False) | {"scheduler": training.scheduler.state_dict()}
        dist_checkpointing.save(state, str(path), strategy, async_sharded_save=True)
        files = strategy.taken(copies=when.copies)
    told = {"format": FORMAT, "version": VERSION, "of": training.told(), "updated": updated}

    def tell() -> None:
        save_config(CheckpointingConfig(strategy.backend, strategy.version), str(path))
        (path / FILE).write_text(json.dumps(told, indent=1), encoding="utf-8")

    on_first(doing, tell)
    when.add(lambda: strategy.write(files, doing, when.group))


def load(path: Path, training: Training) -> None:
    """Load a checkpoint that ``save`` wrote in any layout; collective.

    Raises UsageError, before anything is changed, for a checkpoint of another training.
    """
    _refuse_foreign(training)
    answer = [_read_told(path, training.told()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer)
    told = answer[0]
    if isinstance(told, str):
        raise UsageError(told)
    assert told is not None
    with _completed(training.optimizers, keep=told["updated"]):
        found = dist_checkpointing.load(_state(training, is_loading=True), str(path))
        for number, chunk in enumerate(training.chunks):
            chunk.load_state_dict(found[f"model{number}"])
        for key, optimizer in zip(OPTIMIZERS, training.optimizers, strict=False):
            optimizer.load_state_dict(found[key])
        training.scheduler.load_state_dict(found["scheduler"])


class _Planned(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """The library's strategy, of which the plan is used and not the end: that is for a rank with a GPU, talks over the
    training's group, and starts three more processes, one of them anew, which takes seconds."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        self._writer, self._metadata, _ = save_state_dict_ret
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)

    def taken(self, *, copies: bool) -> list[Any]:
        """The files of this rank, as the library's writer has them, with tensors on the host. ``copies``: all of them
        are copies."""
        buckets, self._writer.write_buckets = self._writer.write_buckets, []
        return [
            (path, name, (values, [(item, tensor.to("cpu", copy=copies)) for item, tensor in tensors]))
            for path, name, (values, tensors) in buckets
        ]

    def write(self, files: list[Any], doing: str, group: Group) -> None:
        """Write the files of all ranks, and the list of what is where; collective."""
        written = together(doing, lambda: self._write(files), group=group)
        on_first(doing, lambda: self._writer.finish(self._metadata, written), group=group)

    def _write(self, files: list[Any]) -> list[Any]:
        done: queue.Queue[Any] = queue.Queue()
        begun: queue.Queue[int] = queue.Queue()  # these are of its workers
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
    """This rank's tensors and their places in the whole model and optimizer: megatron-core's sharded state dict."""
    options = {
        "distrib_optim_sharding_type": "fully_reshardable",  # others are for one layout, or fail
        "singleton_local_shards": True,  # layers together are refused where only some of them are trained
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    models = {
        f"model{number}": chunk.sharded_state_dict(metadata=options) for number, chunk in enumerate(training.chunks)
    }
    with contextlib.ExitStack() as stack:
        for buffer in (b for one in training.optimizers for b in getattr(one, "buffers", ())):  # of the distributed one
            stack.enter_context(replaced(buffer, {"param_index_map": _places_without_padding(buffer)}))
        states = [one.sharded_state_dict(models, is_loading, metadata=options) for one in training.optimizers]
        return {**models, **dict(zip(OPTIMIZERS, states, strict=False))}


def _places_without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """The buffer's ``param_index_map`` (parameter -> start, end, bucket) in indices that leave out bucket padding.

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
    """Give optimizers that have made no update yet the initial state that megatron-core expects.

    On exit, each parameter gets its own ``step`` tensor. ``keep``: whether the state stays on exit; it must not if the
    checkpoint has no state.
    """
    inners = [one.optimizer for one in optimizers]
    for inner in (one for one in inners if not one.state):
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
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
    """The state of a parameter in torch's AdamW or SGD before the first update."""
    if isinstance(inner, torch.optim.SGD):
        return {"momentum_buffer": torch.zeros_like(parameter)} if inner.defaults["momentum"] else {}
    moments = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0), **moments}


def _set_states(self: Any, parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Call the library's method with the ``step`` that it requires; it has set it before, and checkpoints lack it."""
    group, position = self.model_param_group_index_map[parameter]
    main = self.optimizer.param_groups[group]["params"][position]
    _SET_STATES(self, parameter, {**tensors, "step": self.optimizer.state[main]["step"]})


def _anywhere(here: bool) -> bool:
    """Whether ``here`` is true on any rank; collective."""
    of_all = [False] * dist.get_world_size()
    dist.all_gather_object(of_all, here)
    return any(of_all)


def _read_told(path: Path, own: dict[str, Any]) -> dict[str, Any] | str:
    """The contents of a checkpoint's FILE, or a message that says why the checkpoint is refused."""
    file = path / FILE
    if not file.is_file():
        return f"{path} holds no {FILE}; give the folder that save_ckpt got, or wait until it has been written whole"
    try:
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        known = (told["format"], told["version"]) == (FORMAT, VERSION) and {"of", "updated"} <= told.keys()
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        return f"{file} is not the list of a checkpoint of this version; save the checkpoint again"
    if other := [name for name, value in own.items() if told["of"].get(name) != value]:
        return (
            f"{path} is a checkpoint of another training: {other[0]} is {told['of'].get(other[0])!r} there and "
            f"{own[other[0]]!r} here; give the checkpoint of this model and optimizer, or hand over a state, which "
            f"goes with and without the distributed optimizer"
        )
    return told
