"""Runs one Hugging Face model in torch's DistributedDataParallel (DDP) or FullyShardedDataParallel (FSDP1).

Both are driven as people drive them. DDP: float32 parameters, autocast in half precision, torch's
``clip_grad_norm_``. FSDP1: original parameters, each layer wrapped by the auto-wrap policy, mixed precision of its own,
``clip_grad_norm_`` of the wrapper. In both, ``no_sync`` delays reductions to the last micro-batch (option lastsync).

A parameter in FSDP1 is, outside of its forward and backward pass, this rank's piece of the flattened parameter, which
may be empty. A rank has no gradient and no optimizer state for an empty piece.
"""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from conformance.backends.protocol import NamedTensors, Shard, TensorKind
from conformance.spec.scenario import OptimizerConfig
from impl.engine.hugging_face import compile_layers, layers_of
from impl.engine.optimizers import keeps, parameter_groups, read_progress, trained_parameters, update_count
from impl.fsdp2.dtensors import GATHERED_AT_ONCE
from impl.fsdp2.model import Fsdp2Model
from impl.interface.micro_batches import MicroBatch, Outputs, Wanted
from impl.interface.sharded_safetensors import SliceReader, fill, fill_flat
from impl.interface.trainable import WrittenKind
from impl.models.lazy_weights import UnreadWeights, give_memory, published_buffers
from impl.models.lora import named_parameters

BUCKETS = 8  # with the option ``buckets``, for all gradients


class WrappedModel(Fsdp2Model):
    """Implements what both wrappers have in common: one process group, and reductions that ``no_sync`` delays."""

    wrapper: Any  # torch declares methods of a Module as tensors
    _delaying: contextlib.ExitStack

    @property
    def called(self) -> Any:
        return self.wrapper

    def _shard(self, model: transformers.PreTrainedModel) -> None:
        device = self.context.config.device
        give_memory(model, lambda empty: torch.zeros_like(empty, device=device))
        model.to(device)
        if "compile" in self.options:
            compile_layers(model, deterministic=False, shipped="shipped" in self.options)
        self._delaying = contextlib.ExitStack()
        self.wrapper = self.wrap(model)

    def wrap(self, model: transformers.PreTrainedModel) -> Any:
        """Returns the model in the wrapper of the layout."""
        raise NotImplementedError

    def _read_weights(self, model: transformers.PreTrainedModel) -> None:
        unread: UnreadWeights = model.unread
        with unread.opened(self.context.config.device) as read, torch.no_grad():
            for name, parameter in named_parameters(model):
                self.write(name, parameter, parameter.detach(), read)
        del model.unread

    def write(self, name: str, parameter: Parameter, own: Tensor, read: Any) -> None:
        """Sets what this rank has of a tensor that is shaped as a parameter; ``read`` knows the whole tensor."""
        fill(own, name, [0] * own.dim(), read.region)

    def start_micro_batch(self, index: int, count: int) -> None:
        self._delaying.close()
        if self.delays_reduction(index, count):
            self._delaying.enter_context(self.wrapper.no_sync())

    def delays_reduction(self, index: int, count: int) -> bool:
        """Returns whether the gradients of a micro-batch are not reduced before those of a later one."""
        return "lastsync" in self.options and index < count - 1

    def reshard(self) -> None:
        pass

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None:
        for name, buffer in published_buffers(self.model).items() if kind == "weight" else ():
            buffer.copy_(read.whole(name))
        for name, parameter in named_parameters(self.model):
            if kind == "weight":
                self.write(name, parameter, parameter.detach(), read)
            elif parameter.requires_grad and parameter.numel() and keeps(self.optimizer, parameter, kind):
                state = self.optimizer.state[parameter]
                if kind == "step":
                    state[kind] = update_count(read.whole(name), self.optimizer, parameter)
                else:
                    state[kind] = torch.empty_like(parameter)
                    self.write(name, parameter, state[kind], read)

    def _own(self, kind: TensorKind) -> Iterator[tuple[str, Parameter, Tensor | None]]:
        """Yields each parameter that has a tensor of this kind, and this rank's part of it; None for an empty part."""
        for name, parameter in named_parameters(self.model):
            if kind == "weight":
                yield name, parameter, parameter.detach()
            elif parameter.requires_grad and kind == "gradient":
                assert parameter.grad is not None or not parameter.numel(), f"{name} has no gradient"
                yield name, parameter, parameter.grad
            elif parameter.requires_grad:
                yield name, parameter, self.optimizer.state.get(parameter, {}).get(kind)

    def resolved(self) -> dict[str, Any]:
        return {**super().resolved(), "wrapper": type(self.wrapper).__name__}

    def teardown(self) -> None:
        super().teardown()
        for name in ("wrapper", "_delaying"):
            self.__dict__.pop(name, None)


class DdpModel(WrappedModel):
    """Runs a model in DistributedDataParallel. A frozen model has no gradients to reduce, so it is not wrapped."""

    def wrap(self, model: transformers.PreTrainedModel) -> Any:
        if not self.trained:
            return model
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        megabytes = {"bucket_cap_mb": trained / BUCKETS / 2**20} if "buckets" in self.options else {}
        group = self.context.mesh.get_group("shard")
        return DistributedDataParallel(model, process_group=group, **megabytes)

    def own_outputs(self, inputs: MicroBatch, *, want: Wanted, temperature: float, **options: Any) -> Outputs:
        config = self.context.config
        half = torch.autocast(torch.device(config.device).type, config.tier.half_dtype, enabled=config.tier.is_half)
        with half:
            return super().own_outputs(inputs, want=want, temperature=temperature, **options)

    def clip_gradients(self) -> Tensor:
        bound = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return torch.nn.utils.clip_grad_norm_(self.wrapper.parameters(), bound)

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        if kind == "progress":
            yield from read_progress(self.scheduler, self.scaler)
            return
        for name, _, tensor in self._own(kind):
            if tensor is not None:
                yield name, torch.tensor(float(tensor), dtype=torch.float64) if kind == "step" else tensor.detach()
        yield from published_buffers(self.model).items() if kind == "weight" else ()

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        for name, tensor in self.named_tensors(kind):
            yield Shard(name, "full", tensor)


class Fsdp1Model(WrappedModel):
    """Runs a model in FullyShardedDataParallel.

    shapes: of whole parameters, by name. starts: the index in the flattened parameter at which this rank's piece of it
    begins, by parameter.
    """

    # Ranks must agree on an overflow, which one of them alone may see.
    scaler_class: type[torch.amp.GradScaler] = ShardedGradScaler
    shapes: dict[str, torch.Size]
    starts: dict[Parameter, int]

    def wrap(self, model: transformers.PreTrainedModel) -> Any:
        self.shapes = {name: parameter.shape for name, parameter in named_parameters(model)}
        config = self.context.config
        compute = config.tier.half_dtype
        precision = MixedPrecision(param_dtype=compute, reduce_dtype=self.summing_dtype()) if compute else None
        layers = {type(layer) for layer in layers_of(model)}
        wrapper = FullyShardedDataParallel(
            model,
            device_mesh=self.reduction_mesh(),
            sharding_strategy=self.strategy(),
            auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=layers),
            mixed_precision=precision,
            device_id=torch.device(config.device),
            use_orig_params=True,
        )
        self.starts = {}
        for unit in FullyShardedDataParallel.fsdp_modules(wrapper):
            flat: Any = unit._flat_param
            for parameter, piece in zip(flat._params, flat._shard_param_infos, strict=True):
                self.starts[parameter] = piece.intra_param_start_idx or 0
        return wrapper

    def reshard(self) -> None:
        # FSDP1 leaves parameters outside of layers whole for a backward pass, but none follows.
        _reshard(self.wrapper, self.wrapper._handle, True)

    def strategy(self) -> ShardingStrategy:
        """Returns FSDP1's name for what the layout shards."""
        layout = self.context.config.layout
        until_backward = layout.zero == 2
        if layout.rep > 1:
            return ShardingStrategy._HYBRID_SHARD_ZERO2 if until_backward else ShardingStrategy.HYBRID_SHARD
        return ShardingStrategy.SHARD_GRAD_OP if until_backward else ShardingStrategy.FULL_SHARD

    def parameter_groups(self, model: transformers.PreTrainedModel, config: OptimizerConfig) -> list[dict[str, Any]]:
        dims = {parameter: len(self.shapes[name]) for name, parameter in named_parameters(model)}
        return parameter_groups(trained_parameters(model, config), config, dims=dims.__getitem__)

    def write(self, name: str, parameter: Parameter, own: Tensor, read: Any) -> None:
        shape = self.shapes[name]
        start = self.starts[parameter]
        fill_flat(own.view(-1), name, start, origin=[0] * len(shape), shape=shape, region=read.region)

    def clip_gradients(self) -> Tensor:
        bound = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm: Tensor = self.wrapper.clip_grad_norm_(bound)
        return norm

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        if kind == "progress":
            yield from read_progress(self.scheduler, self.scaler)
        elif kind == "step":
            yield from self._steps()
        else:
            batch: list[tuple[str, Parameter, Tensor | None]] = []
            numbers = 0
            for one in self._own(kind):
                numbers += self.shapes[one[0]].numel()
                if batch and numbers > GATHERED_AT_ONCE:
                    yield from self._whole(batch)
                    batch, numbers = [], self.shapes[one[0]].numel()
                batch.append(one)
            yield from self._whole(batch)
            yield from published_buffers(self.model).items() if kind == "weight" else ()

    def _whole(self, pieces: list[tuple[str, Parameter, Tensor | None]]) -> NamedTensors:
        """Yields whole tensors, from the pieces of all ranks; collective.

        Every byte is a sum of which one summand is not 0. Tensors that no rank holds a piece of are left out.
        """
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        sizes = [self.shapes[name].numel() for name, *_ in pieces]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self.context.config.device)
        owners = torch.zeros(len(pieces), device=self.context.config.device)
        wholes = flat.split(sizes)
        for index, (whole, (_, parameter, own)) in enumerate(zip(wholes, pieces, strict=True)):
            if own is not None and own.numel():
                start = self.starts[parameter]
                whole[start : start + own.numel()] = own.detach().view(-1)
                owners[index] = 1
        group = self.context.mesh.get_group("shard")
        dist.all_reduce(flat.view(torch.uint8), group=group)
        dist.all_reduce(owners, group=group)
        for (name, *_), whole, owned in zip(pieces, wholes, owners.tolist(), strict=True):
            if owned:
                yield name, whole.view(self.shapes[name])

    def _steps(self) -> NamedTensors:
        """Yields numbers of updates. A rank without a piece of a parameter does not count its updates; collective."""
        names = [(name, parameter) for name, parameter in named_parameters(self.model) if parameter.requires_grad]
        own = [float(self.optimizer.state.get(parameter, {}).get("step", -1)) for _, parameter in names]
        steps = torch.tensor(own, dtype=torch.float64, device=self.context.config.device)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=self.context.mesh.get_group("shard"))
        for (name, _), step in zip(names, steps.cpu(), strict=True):
            if step >= 0:
                yield name, step

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        for name, parameter, own in self._own(kind):
            if own is not None and own.numel():
                start = self.starts[parameter]
                yield Shard(name, f"{start}:{start + own.numel()}", own.detach().view(-1))
        for name, buffer in published_buffers(self.model).items() if kind == "weight" else ():
            yield Shard(name, "full", buffer)

    def resolved(self) -> dict[str, Any]:
        return {**super().resolved(), "strategy": self.strategy().name}
