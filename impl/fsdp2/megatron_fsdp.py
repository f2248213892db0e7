"""Runs one Hugging Face model in Megatron-FSDP, by megatron-core's ``fully_shard_model`` and ``fully_shard_optimizer``.

Both are the two halves of its ``fully_shard``, which would put all parameters into one group of the optimizer
(docs/findings/megatron-fsdp-one-group.md). The library lays the parameters of a layer, or those outside of layers, end
to end in a flat buffer, and each rank owns a stretch of it. Modules compute with the *raw* parameters; the optimizer
updates DTensors, this rank's stretches.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from megatron.core.distributed.fsdp.src import megatron_fsdp
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from conformance.backends.on_cpu import cuda_is_cpu, replaced
from conformance.backends.protocol import NamedTensors, Shard, TensorKind
from conformance.spec.scenario import OptimizerConfig
from impl.engine.hugging_face import layers_of
from impl.engine.optimizers import keeps, sums_of_squares, update_count
from impl.fsdp2.dtensors import clip_coefficient
from impl.fsdp2.wrapped import Fsdp1Model
from impl.interface.micro_batches import Outputs
from impl.interface.sharded_safetensors import SliceReader, fill, fill_flat
from impl.interface.trainable import WrittenKind
from impl.models.lazy_weights import UnreadWeights, published_buffers
from impl.models.lora import named_parameters

_IS_0_16 = "grad_reduce_in_fp32" in inspect.signature(megatron_fsdp.fully_shard_model).parameters


class _Widened:
    """Stands for the module torch in Megatron-FSDP's buffers, which name float32: float64 in the exact tier."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Lets the optimizer's methods drive Megatron-FSDP, and leaves state and weights as they are.

    From 0.17 on the library makes an update by zero gradients, which AdamW counts, and which decays weights
    (docs/findings/megatron-fsdp-counted-update.md).
    """
    before = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    megatron_fsdp.fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False)
    optimizer.state.clear()
    for group, (rate, decay) in zip(optimizer.param_groups, before, strict=True):
        group["lr"], group["weight_decay"] = rate, decay


class MegatronFsdpModel(Fsdp1Model):
    """Runs a model in Megatron-FSDP. A model that is not trained has no gradients, so it is not wrapped.

    raw: the parameters that modules compute with, by name; ``parameters``: the optimizer's.
    """

    scaler_class = torch.amp.GradScaler
    buffers: Any
    raw: dict[str, Parameter]
    parameters: dict[str, Parameter]

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Redirects the library's requests for CUDA to the device, and for float32 to float64 in the exact tier."""
        with contextlib.ExitStack() as stack:
            if self.context.config.device == "cpu":
                stack.enter_context(cuda_is_cpu())
            if self.context.config.tier.is_exact:
                stack.enter_context(replaced(param_and_grad_buffer, {"torch": _Widened()}))
            yield

    def wrap(self, model: transformers.PreTrainedModel) -> Any:
        config = self.context.config
        self.shapes = {name: parameter.shape for name, parameter in named_parameters(model)}
        if not self.trained:
            self.starts = dict.fromkeys(model.parameters(), 0)
            return model
        if half := config.tier.half_dtype:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(half)
        stage = self.stage()
        with self.placed():
            wrapper: Any = megatron_fsdp.fully_shard_model(
                model,
                device_mesh=self.context.mesh["dp", "tp"],
                dp_shard_dim="dp",
                tp_dim="tp",
                fsdp_unit_modules=list({type(layer) for layer in layers_of(model)}),
                zero_dp_strategy=stage,
                device=torch.device(config.device),
                # With ZeRO-1, 0.16 adds reduced gradients to the rank's own if it overlaps; later releases reduce twice
                # if they do not.
                overlap_grad_reduce=stage > 1 or not _IS_0_16,
                **self._dtypes(),
            )
        group = self.context.mesh.get_group("dp")
        if group._get_backend(torch.device(config.device)).name() == "gloo":
            wrapper.ddp_config.gradient_reduce_div_fusion = False  # gloo cannot scale while it sums
        self.buffers = wrapper.param_and_grad_buffer
        self.raw = dict(wrapper.raw_param)
        self.parameters = dict(self.buffers.optimizer_named_parameters)
        self.starts = {self.parameters[name]: self._group(name)[2][0] for name in self.raw}
        return wrapper

    def stage(self) -> int:
        zero = self.context.config.layout.zero
        return 3 if zero is None else zero

    def _dtypes(self) -> dict[str, Any]:
        """Returns the settings of the dtypes of masters and sums, which releases name in different ways."""
        half = self.context.config.tier.is_half
        if _IS_0_16:
            return {"preserve_fp32_weights": half, "grad_reduce_in_fp32": half, "check_for_nan_in_grad": False}
        dtype = torch.float32 if half else None
        policy = megatron_fsdp.MixedPrecisionPolicy(main_params_dtype=dtype, main_grads_dtype=dtype)
        return {"mixed_precision_policy": policy}

    def _group(self, name: str) -> tuple[Any, int, tuple[int, int]]:
        """Returns the buffers that hold a parameter, its number in them, and the first and last index of this rank's
        part."""
        group = self.buffers.parameter_groups[self.buffers.param_to_param_group[self.raw[name]]]
        number = group.model_weight_buffer.param_idx[self.raw[name]]
        return group, number, group.model_weight_buffer._get_item_slice_in_shard(number)

    def _read_weights(self, model: transformers.PreTrainedModel) -> None:
        if not self.trained:
            super()._read_weights(model)
            return
        unread: UnreadWeights = model.unread
        with unread.opened(self.context.config.device) as read:
            self._write_weights(read)
        del model.unread

    @torch.no_grad()
    def _write_weights(self, read: Any) -> None:
        """Sets this rank's stretches of the masters and of the weights that modules compute with."""
        for name, shape in self.shapes.items():
            whole = torch.empty(shape, dtype=self.parameters[name].dtype, device=self.context.config.device)
            fill(whole, name, [0] * len(shape), read.region)
            group, number, _ = self._group(name)
            for buffer in (group.model_weight_buffer, group.main_weight_buffer):
                if buffer is not None:
                    buffer.set_item(number, whole)
        with self.placed():
            self._gather_whole()

    def create_optimizer(self, model: transformers.PreTrainedModel, config: OptimizerConfig) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model, config)
        with self.placed():
            shard_optimizer(optimizer)
        return optimizer

    def start_micro_batch(self, index: int, count: int) -> None:
        self.wrapper.set_model_auto_sync(index == count - 1)

    def forward_backward(self, *args: Any, **options: Any) -> list[Outputs]:
        with self.placed():
            return super().forward_backward(*args, **options)

    def forward(self, *args: Any, **options: Any) -> Outputs:
        with self.placed():
            return super().forward(*args, **options)

    def reshard(self) -> None:
        if self.trained and self.stage() == 3:
            self.wrapper.synchronize_param_gather()

    def clip_gradients(self) -> Tensor:
        """Clips this rank's stretches by the norm of all of them; the library has no function for it."""
        own = [gradient for _, _, gradient in self._own("gradient") if gradient is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self.context.config.device)
        squares += sum(sums_of_squares(own), squares)
        dist.all_reduce(squares, group=self.context.mesh.get_group("dp"))
        norm = squares.sqrt().to(torch.get_default_dtype())
        if self.max_grad_norm is not None:
            torch._foreach_mul_(own, clip_coefficient(norm, self.max_grad_norm))
        return norm

    def optimizer_step(self) -> float:
        with self.placed():
            norm = super().optimizer_step()
            self._gather_whole()
            return norm

    def _gather_whole(self) -> None:
        """Gathers weights that all ranks keep whole, which are read between steps. The library would wait for the next
        forward pass, and gather those of layers twice in the first one."""
        if self.stage() < 3:
            self.wrapper.start_param_sync(force_sync=True)

    def _own(self, kind: TensorKind) -> Iterator[tuple[str, Parameter, Tensor | None]]:
        for name, parameter in self.parameters.items():
            state = self.optimizer.state.get(parameter, {}) if kind not in ("weight", "gradient") else {}
            found = {"weight": parameter, "gradient": parameter.grad}.get(kind, state.get(kind))
            yield name, parameter, None if found is None else _stretch(found)

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        return super().named_tensors(kind) if self.trained else self._whole_weights()

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        if kind != "weight" or (self.trained and self.stage() == 3):
            yield from super().local_shards(kind)
            return
        for name, tensor in self._whole_weights():
            yield Shard(name, "full", tensor)

    def _whole_weights(self) -> NamedTensors:
        """Yields weights that every rank holds, and the model's buffers."""
        for name, parameter in named_parameters(self.model) if not self.trained else ():
            yield name, parameter.detach()
        for name, shape in self.shapes.items() if self.trained else ():
            group, number, _ = self._group(name)
            yield name, group.model_weight_buffer.get_item(number).view(shape)
        yield from published_buffers(self.model).items()

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None:
        if not self.trained:
            super().write_state(kind, read)
            return
        if kind == "weight":
            for name, buffer in published_buffers(self.model).items():
                buffer.copy_(read.whole(name))
            self._write_weights(read)
            return
        for name, parameter in self.parameters.items():
            if not _stretch(parameter).numel() or not keeps(self.optimizer, parameter, kind):
                continue
            state = self.optimizer.state[parameter]
            if kind == "step":
                state[kind] = update_count(read.whole(name), self.optimizer, parameter)
                continue
            state[kind] = torch.empty_like(parameter)
            shape = self.shapes[name]
            first = self.starts[parameter]
            fill_flat(_stretch(state[kind]), name, first, origin=[0] * len(shape), shape=shape, region=read.region)

    def resolved(self) -> dict[str, Any]:
        return {**super().resolved(), "strategy": self.stage(), "units": len(layers_of(self.model))}

    def teardown(self) -> None:
        if self.trained:
            for (
                hook
            ) in self.wrapper.grad_acc_hooks.values():  # Python does not see the cycle through the autograd graph
                hook.remove()
        super().teardown()
        for name in ("buffers", "raw", "parameters", "starts"):
            self.__dict__.pop(name, None)


def _stretch(tensor: Any) -> Tensor:
    """Returns this rank's part of a DTensor, flat."""
    own: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return own.detach().view(-1)
