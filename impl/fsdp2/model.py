"""Runs one Hugging Face model with FSDP2 on the mesh of a context, fully sharded, or sharded within each replica.

FSDP2 averages gradients over the ranks that see different tokens; ``backward`` multiplies the loss by the number of
these ranks, because the objective has divided by the whole step's totals already.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardAlong

from conformance.backends.protocol import NamedTensors, Shard, TensorKind
from conformance.spec.observables import Head
from conformance.spec.scenario import OptimizerConfig, ScheduleConfig
from impl.context_parallel.ring_attention import RingAttention, RingConfig, register, ring_kind
from impl.engine.adapter import ReferenceContext
from impl.engine.hugging_face import (
    HuggingFaceModel,
    compile_layers,
    forget_compiled,
    layers_of,
    model_inputs,
    recompute_activations,
    resolved_optimizer,
)
from impl.engine.optimizers import (
    Replicas,
    freeze_others,
    keeps,
    learning_rates,
    read_progress,
    set_loss_scale,
    set_schedule,
    update_count,
)
from impl.fsdp2 import dtensors
from impl.fsdp2.dtensors import write_region
from impl.fsdp2.float8 import SHAPE_MULTIPLE, agree_on_scales, begin_histories, cast_layers, update_scales
from impl.fsdp2.model_parallel import (
    apply_explicit_plan,
    apply_model_plan,
    cut_experts,
    experts_of,
    is_of_experts,
    vocabulary_shard,
)
from impl.fsdp2.pipeline import Pipeline
from impl.interface.distributed import Reading
from impl.interface.micro_batches import Loss, MicroBatch, Outputs, RouterTerms, Wanted, set_mode
from impl.interface.sharded_safetensors import SliceReader
from impl.interface.trainable import AT_ONCE, Writing, WrittenKind, code_that_ran
from impl.models.lazy_weights import UnreadWeights, published_buffers
from impl.models.lora import named_parameters
from impl.models.outputs import from_last_stage, outputs_of
from impl.models.router import routers_of


def _second(parameter: torch.nn.Parameter) -> ShardAlong:
    """Shards along the second dimension: stacked experts are sharded over ``ep`` along the first."""
    return ShardAlong(1)


class Fsdp2Model(HuggingFaceModel):
    """Implements impl.interface.trainable.Trainable, which has the contract of each method."""

    context: "Fsdp2Context"
    trained: bool
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    max_grad_norm: float | None
    scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler

    def __init__(self, context: "Fsdp2Context", head: Head) -> None:
        super().__init__(context, head)
        # Loss scaling is for fp16 only: its gradients underflow, those of bf16 have the range of fp32.
        self.scaler = self.scaler_class(
            torch.device(context.config.device).type,
            init_scale=2.0**context.config.loss_scale.initial_power,
            growth_interval=context.config.loss_scale.growth_interval,
            enabled=context.config.tier.is_loss_scaled,
        )

    @property
    def called(self) -> Any:
        """Returns the module that is called for a forward pass, and that checkpoints are made of."""
        return self.model

    def prepare(
        self, model: transformers.PreTrainedModel, optimizer: OptimizerConfig | None, schedule: ScheduleConfig
    ) -> None:
        self.model, self.trained = model, optimizer is not None
        self.routers = routers_of(model)
        if self.context.pipeline:
            self.context.pipeline.keep_stage(model)
        config = self.context.config
        compute = config.tier.half_dtype or config.tier.master.dtype
        cast_layers(model, config.layout, compute=compute, device=config.device)
        recompute_activations(model, self.options)
        if self.context.config.layout.ep > 1:
            cut_experts(model, self.context.mesh["ep"])
        if self.context.config.layout.tp > 1:
            mesh = self.context.mesh["tp"]
            if {"plan", "seqpar", "losspar"} & set(self.options):
                apply_explicit_plan(model, mesh, sequence="seqpar" in self.options, loss="losspar" in self.options)
            else:
                without = is_of_experts if self.context.config.layout.ep > 1 else lambda key: False
                apply_model_plan(model, mesh, shipped="shipped" in self.options, without=without)
        if optimizer is None:  # after the plans, which make new parameters that require gradients
            model.eval().requires_grad_(False)
        else:
            freeze_others(model, optimizer)
        self._shard(model)
        self._read_weights(model)
        if "fp8delayed" in self.options:
            begin_histories(model)
        if optimizer is not None:
            self.max_grad_norm = optimizer.max_grad_norm
            self.optimizer = self.create_optimizer(model, optimizer)
            self.scheduler = learning_rates(self.optimizer, schedule)

    def _shard(self, model: transformers.PreTrainedModel) -> None:
        mesh = self.reduction_mesh()
        compute = self.context.config.tier.half_dtype
        # Parameters stay float32 (the masters), unless there are none; forward and backward run in ``compute``.
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=self.summing_dtype() if compute else None)
        pinned = self.context.config.device != "cpu"
        offload = CPUOffloadPolicy(pin_memory=pinned) if "offload" in self.options else OffloadPolicy()
        if self.context.config.layout.ep > 1:
            options: dict[str, Any] = {"mp_policy": precision, "offload_policy": offload}
            for experts in experts_of(model):
                fully_shard(experts, mesh=self.expert_mesh(), shard_placement_fn=_second, **options)
        if "compile" in self.options:
            compile_layers(model, deterministic=self.context.config.layout.tp > 1, shipped="shipped" in self.options)
        for block in layers_of(model):
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)

    def _read_weights(self, model: transformers.PreTrainedModel) -> None:
        """Reads this rank's parts of the parameters, which have no memory yet."""
        device = self.context.config.device
        part_device = "cpu" if "offload" in self.options else device

        def placed(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return torch.empty_like(tensor, device=part_device)
            # A tied parameter comes twice; the second time it has memory already.
            return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.to(device)

        unread: UnreadWeights = model.unread
        model._apply(placed)
        with unread.opened(part_device) as read, torch.no_grad():
            for name, parameter in named_parameters(model):
                write_region(cast(DTensor, parameter), name, read)
        del model.unread

    def replicas(self) -> Replicas | None:
        layout = self.context.config.layout
        if layout.rep == layout.tp == 1:
            return None
        seed = [torch.initial_seed()]
        dist.broadcast_object_list(seed, src=0)
        return Replicas(region=lambda parameter: dtensors.region_of(cast(DTensor, parameter)), seed=seed[0])

    def expert_mesh(self) -> DeviceMesh:
        """Returns the mesh of the ranks that hold the same experts."""
        mesh = self.context.mesh
        return mesh["rep", "expert_shard"] if self.context.config.layout.rep > 1 else mesh["expert_shard"]

    def summing_dtype(self) -> torch.dtype:
        """Returns the dtype in which half-precision gradients are reduced; they accumulate in float32."""
        return self.context.config.tier.summing.dtype

    def reduction_mesh(self) -> DeviceMesh:
        """Returns the mesh of the ranks that see different tokens: it reduces gradients and shards parameters."""
        mesh = self.context.mesh
        return mesh["rep", "shard"] if self.context.config.layout.rep > 1 else mesh["shard"]

    def gradient_scale(self) -> float:
        """Returns the factor for the loss: the number of ranks that FSDP2 averages gradients over."""
        layout = self.context.config.layout
        return layout.data * layout.sp

    def forward_backward(
        self,
        inputs: Sequence[MicroBatch],
        *,
        want: Wanted,
        temperature: float = 1.0,
        loss: Loss | None,
        terms: RouterTerms | None = None,
    ) -> list[Outputs]:
        set_mode(self.model, training=loss is not None)
        run = self._run_stages if self.context.pipeline else self.run
        outputs = run(inputs, want=want, temperature=temperature, loss=loss, terms=terms)
        if loss is None:
            self.reshard()
        return outputs

    def reshard(self) -> None:
        """Frees parameters outside of blocks: FSDP2 leaves them unsharded for a backward pass, but none follows."""
        cast(FSDPModule, self.model).reshard()

    def _run_stages(
        self,
        inputs: Sequence[MicroBatch],
        *,
        want: Wanted,
        temperature: float,
        loss: Loss | None,
        terms: RouterTerms | None,
    ) -> list[Outputs]:
        """Runs all micro-batches through the pipeline; see Trainable.forward_backward."""
        pipeline, found = self.context.pipeline, dict[int, Outputs]()
        assert pipeline, "without stages the model runs as a whole"
        assert terms is None, "mixtures of experts are unsupported with stages"

        def finish(index: int, result: Tensor) -> Tensor:
            outputs = outputs_of(result, inputs[index], head=self.head, want=want, temperature=temperature)
            found[index] = outputs.detach()
            return self.scaled(loss(index, outputs)) if loss else result.new_zeros([])

        config = self.context.config
        compute = config.tier.half_dtype or config.tier.master.dtype
        with torch.set_grad_enabled(loss is not None):
            pipeline.run(self.model, inputs, finish, compute=compute, trains=loss is not None)
        return [from_last_stage(found.get(i), one, want, pipeline.group) for i, one in enumerate(inputs)]

    def start_micro_batch(self, index: int, count: int) -> None:
        if "lastsync" in self.options:
            cast(FSDPModule, self.model).set_requires_gradient_sync(index == count - 1)
        if "manual" in self.options:
            cast(FSDPModule, self.model).set_requires_all_reduce(index == count - 1)

    def own_outputs(self, inputs: MicroBatch, *, want: Wanted, temperature: float, **options: Any) -> Outputs:
        if self.routers:
            self.routers.begin(inputs)
        given = {**model_inputs(self.model.config, inputs), **options}
        logits: Tensor = self.called(input_ids=inputs.tokens, use_cache=False, **given).logits
        shard = vocabulary_shard(logits)
        outputs = outputs_of(
            shard.logits,
            inputs,
            head=self.head,
            want=want,
            temperature=temperature,
            group=shard.group,
            vocab_start=shard.start,
        )
        return self.routers.added(outputs, inputs) if self.routers else outputs

    def backward(self, loss: Tensor) -> None:
        self.scaled(loss).backward()
        if "fp8delayed" in self.options:
            update_scales(self.model)

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss times what FSDP2 divides gradients by, and times the loss scale."""
        return self.scaler.scale(loss * self.gradient_scale())

    def finish_gradients(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def optimizer_step(self) -> float:
        total = self.clip_gradients()
        reading = Reading(total[None])  # the copy begins before the update, so it does not wait for it
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped = self.scaler.get_scale() < scale  # torch's only sign of a skipped update
        if not self.skipped:
            self.advance_schedule()
        if "fp8gather" in self.options:
            agree_on_scales(self.model)
        self.optimizer.zero_grad()
        return reading.numbers()[0]

    def clip_gradients(self) -> Tensor:
        """Clips all gradients and returns their norm before that, a scalar."""
        gradients = [p.grad for p in self.model.parameters() if p.requires_grad]
        total = dtensors.gradient_norm(gradients)
        if self.context.pipeline:
            total = self.context.pipeline.norm_of_all(total)
        if self.max_grad_norm is not None:
            coefficient = dtensors.clip_coefficient(total, self.max_grad_norm)
            dtensors.multiply(gradients, coefficient, in_float32=self.context.config.tier.stored is not None)
        return total

    def advance_schedule(self) -> None:
        self.scheduler.step()

    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        if kind == "progress":
            return read_progress(self.scheduler, self.scaler)
        own = self._of_stage(kind)
        return self.context.pipeline.of_all(own) if self.context.pipeline else own

    def _of_stage(self, kind: TensorKind) -> NamedTensors:
        if kind == "step":
            for name, parameter in named_parameters(self.model):
                if "step" in (state := self.optimizer.state.get(parameter, {})):
                    yield name, torch.tensor(float(state["step"]), dtype=torch.float64)
            return
        yield from dtensors.gathered(self._named(kind), self.context.config.device)
        yield from published_buffers(self.model).items() if kind == "weight" else ()

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        for name, tensor in self._named(kind):
            yield Shard(name, dtensors.region_of(tensor), tensor.to_local())
        for name, buffer in published_buffers(self.model).items() if kind == "weight" else ():
            yield Shard(name, "full", buffer)

    def _named(self, kind: TensorKind) -> Iterator[tuple[str, DTensor]]:
        for name, parameter in named_parameters(self.model):
            if kind == "weight":
                yield name, cast(DTensor, parameter.detach())
            elif kind == "gradient" and parameter.requires_grad:
                assert parameter.grad is not None, f"{name} has no gradient"
                yield name, cast(DTensor, parameter.grad.detach())
            elif kind in (state := self.optimizer.state.get(parameter, {})):
                yield name, cast(DTensor, state[kind])

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None:
        for name, buffer in published_buffers(self.model).items() if kind == "weight" else ():
            buffer.copy_(read.whole(name))
        for name, parameter in named_parameters(self.model):
            if kind == "weight":
                write_region(cast(DTensor, parameter), name, read)
            elif not (parameter.requires_grad and keeps(self.optimizer, parameter, kind)):
                continue
            elif kind == "step":
                self.optimizer.state[parameter][kind] = update_count(read.whole(name), self.optimizer, parameter)
            else:
                state = torch.empty_like(parameter)
                write_region(cast(DTensor, state), name, read)
                self.optimizer.state[parameter][kind] = state

    def set_progress(self, progress: Mapping[str, float]) -> None:
        set_schedule(self.scheduler, int(progress["schedule"]))
        set_loss_scale(self.scaler, progress)

    def resolved(self) -> dict[str, Any]:
        config = self.context.config
        master = next(self.model.parameters()).dtype
        compute = config.tier.half_dtype or master
        return {
            **self.resolved_model(compute),
            "master_dtype": str(master),
            "compute_dtype": str(compute),
            "accumulation": config.accumulation,
            **(resolved_optimizer(self.optimizer) if self.trained else {"optimizer": None}),
            **({"max_grad_norm": self.max_grad_norm, "code": self._code(master)} if self.trained else {}),
        }

    def _code(self, master: torch.dtype) -> dict[str, str]:
        scaler = self.scaler if self.scaler.is_enabled() else None
        return code_that_ran(optimizer=scaler, update=self.optimizer, gradients=master)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.called, self.optimizer, options=self._by_name())
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def _by_name(self) -> StateDictOptions:
        """Returns options for checkpoints. Stages, which have other parameters, write settings by parameter."""
        return StateDictOptions(flatten_optimizer_state_dict=self.context.pipeline is not None)

    def save_ckpt(self, path: Path, when: Writing = AT_ONCE) -> None:
        dtensors.save(self._state(), path, when)

    def load_ckpt(self, path: Path) -> None:
        state = self._state()
        with dtensors.raising_first_failure():
            dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.called,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._by_name(),
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])

    def teardown(self) -> None:
        if "compile" in self.options:
            forget_compiled()
        for name in ("model", "optimizer", "scheduler"):
            self.__dict__.pop(name, None)


WRAPPED_MODELS = {  # classes derived from Fsdp2Model, by layout option
    "ddp": "impl.fsdp2.wrapped:DdpModel",
    "fsdp1": "impl.fsdp2.wrapped:Fsdp1Model",
    "mfsdp": "impl.fsdp2.megatron_fsdp:MegatronFsdpModel",
}
MESH_DIM_NAMES = ("pp", "rep", "ep", "dp", "sp", "tp")


class Fsdp2Context(ReferenceContext):
    """Builds the device mesh and context parallelism of a layout, and selects the data of this rank.

    Mesh axes, outermost first: ``pp`` (stages), ``rep`` (replicas), ``ep`` (experts), ``dp``, ``sp`` (context
    parallel), ``tp``.
    Parameters, gradients and optimizer state are sharded over ep x dp x sp, which is flattened into the axis ``shard``;
    those of experts over dp x sp, ``expert_shard``.
    """

    ring: RingAttention | None = None
    pipeline: Pipeline | None = None

    @property
    def sequence_multiple(self) -> int:
        # With context parallelism, rows are padded when they are sharded.
        return 1 if self.config.layout.sp > 1 else self._shape_multiple

    @property
    def _shape_multiple(self) -> int:
        # DTensor plans each op once per shape; few shapes keep that cheap. seqpar shards rows into tp equal slices.
        return math.lcm(SHAPE_MULTIPLE, self.config.layout.tp)

    def setup_distributed(self) -> None:
        layout = self.config.layout
        sizes = (layout.pp, layout.rep, layout.ep, layout.dp // layout.rep, layout.sp, layout.tp)
        self.mesh = init_device_mesh(torch.device(self.config.device).type, sizes, mesh_dim_names=MESH_DIM_NAMES)
        self.mesh["ep", "dp", "sp"]._flatten("shard")
        if layout.ep > 1:
            self.mesh["dp", "sp"]._flatten("expert_shard")
        self.data_rank = dist.get_rank() // (layout.sp * layout.tp) % layout.data
        self.data_size = layout.data
        if layout.pp > 1:
            self.pipeline = Pipeline(self.mesh.get_group("pp"), self.config.device)
        if layout.sp > 1:
            self.setup_ring_attn()

    def setup_ring_attn(self) -> None:
        register()
        layout = self.config.layout
        config = RingConfig(
            kind=ring_kind(layout),
            packed=self.config.packed,
            shipped="shipped" in layout.options,
            head_stride=layout.stride,
            multiple=self._shape_multiple if layout.tp > 1 else 1,
        )
        self.ring = RingAttention(self.mesh.get_group("sp"), config)

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        return [self.mesh.get_group(axis) for axis in ("rep", "ep", "dp")]

    def new_trainable(self, head: Head) -> Fsdp2Model:
        if wrapper := self.config.layout.wrapper:
            module, _, name = WRAPPED_MODELS[wrapper].partition(":")
            wrapped: Fsdp2Model = getattr(import_module(module), name)(self, head)
            return wrapped
        return Fsdp2Model(self, head)

    def teardown(self) -> None:
        # The mesh's process groups stay open: DTensor's caches refer to them, and reuse them for an equal mesh later.
        for name in ("mesh", "ring", "pipeline"):
            self.__dict__.pop(name, None)
