"""Runs one model at ZeRO 0 to 3, through DeepSpeed's engine as its users do.

DeepSpeed averages gradients over some of the ranks that see different tokens. ``backward`` multiplies the loss by the
number of these ranks, because the objective has divided by the whole step's totals already, and disables DeepSpeed's
division by the number of micro-batches. A frozen model has an engine without an optimizer, which shards it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules
from deepspeed.utils.groups import get_tensor_model_parallel_group
from torch.distributed.device_mesh import init_device_mesh

from conformance.backends.protocol import NamedTensors, Shard, TensorKind
from conformance.spec.observables import Head
from conformance.spec.scenario import OptimizerConfig, ScheduleConfig
from impl.context_parallel.ring_attention import MeshContext, RingAttention, RingConfig, register, ring_kind
from impl.deepspeed import checkpoint, global_state
from impl.deepspeed.checkpoint_layout import Cut, engine_cut, largest_group_last
from impl.deepspeed.config import (
    ClippingBeforeMuon,
    clip_by_a_number_of_the_host,
    clips_before_muon,
    compare_in_host_memory,
    forget_overflow,
    frozen_settings,
    good_steps,
    growth_afterwards,
    plans_the_head_alone,
    training_settings,
    zero_stage,
)
from impl.deepspeed.global_state import exchange_heads
from impl.deepspeed.tensors import EngineTensors, FrozenTensors, RankPlace, cut_count
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
    freeze_others,
    learning_rates,
    parameter_groups,
    set_schedule,
    trained_parameters,
)
from impl.interface.micro_batches import Loss, MicroBatch, Outputs, RouterTerms, Wanted, set_mode
from impl.interface.sharded_safetensors import SliceReader
from impl.interface.trainable import AT_ONCE, Writing, WrittenKind, code_that_ran
from impl.models.lazy_weights import UnreadWeights, give_memory, published_buffers, untouched_zeros
from impl.models.outputs import outputs_of
from impl.models.router import routers_of


class DeepspeedModel(HuggingFaceModel):
    """Implements impl.interface.trainable.Trainable, which has the contract of each method."""

    engine: deepspeed.DeepSpeedEngine
    optimizer: torch.optim.Optimizer
    tensors: EngineTensors | FrozenTensors
    clipping: ClippingBeforeMuon | None = None

    def __init__(self, context: MeshContext, head: Head) -> None:
        super().__init__(context, head)
        self.stage = zero_stage(context.config.layout)

    def prepare(
        self, model: transformers.PreTrainedModel, optimizer: OptimizerConfig | None, schedule: ScheduleConfig
    ) -> None:
        self.routers = routers_of(model)
        # DeepSpeed casts the parameters to half precision, and leaves buffers in float32.
        compute = self.context.config.tier.half_dtype
        give_memory(model, lambda empty: untouched_zeros(empty.shape, compute or empty.dtype))
        if "compile" in self.options:
            compile_layers(model, deterministic=self.context.config.layout.tp > 1, shipped="shipped" in self.options)
        if optimizer is None:
            self._prepare_frozen(model)
            return
        recompute_activations(model, self.options)
        own = "ownopt" in self.options  # DeepSpeed builds the optimizer itself
        explicit = self.adapter is not None or plans_the_head_alone(model)
        self.settings = training_settings(self.context.config, optimizer, model, explicit=explicit)
        self._initialize(
            model,
            optimizer=None if own else self.create_optimizer(model, optimizer),
            model_parameters=self.parameter_groups(model, optimizer) if own else None,
            lr_scheduler=lambda made: learning_rates(made, schedule),
        )
        freeze_others(model, optimizer)  # after AutoTP, which registers gradient hooks
        if self.context.config.tier.stored:
            clip_by_a_number_of_the_host(self.engine.optimizer)
        if clips_before_muon(self.context.config, optimizer):
            self.clipping = ClippingBeforeMuon(self.engine.optimizer, optimizer.max_grad_norm)
        self.tensors = EngineTensors(self.engine, self._place())
        self._read_weights(model, self.tensors)
        if self.stage == 0 and self.context.config.tier.is_half:
            self.forget_steps()

    def _prepare_frozen(self, model: transformers.PreTrainedModel) -> None:
        self.settings = frozen_settings(self.context.config, model, explicit=plans_the_head_alone(model))
        self._initialize(model.eval())
        model.requires_grad_(False)  # after AutoTP, which registers gradient hooks
        self.tensors = FrozenTensors(model, self._place())
        self._read_weights(model, self.tensors)

    def _initialize(self, model: transformers.PreTrainedModel, **options: Any) -> None:
        layout, mpu = self.context.config.layout, None
        if layout.ulysses > 1:
            group = self.context.mesh.get_group("ulysses")
            mpu = exchange_heads(model, size=layout.ulysses, tp=layout.tp, group=group)
        if leaves := self._leaves(model):
            set_z3_leaf_modules(model, leaves)
            model.enable_input_require_grads()  # docs/findings/deepspeed-leaf-inputs.md
        with contextlib.ExitStack() as stack:
            stack.enter_context(global_state.equal_on_all_ranks())
            if self.context.config.tier.is_exact:
                stack.enter_context(global_state.any_dtype())
            if self.adapter and layout.tp > 1:
                stack.enter_context(global_state.adapted_layers_opened())
            self.model = model
            self.engine, self.optimizer, *_ = deepspeed.initialize(
                model=model, config=self.settings, mpu=mpu, dist_init_required=False, **options
            )
        if layout.tp > 1:
            if self.context.ring:  # AutoTP pickles the first inputs, but a process group among them cannot be pickled
                self.engine.first_dataloader_check.remove()
            else:
                compare_in_host_memory(self.engine)

    def _leaves(self, model: transformers.PreTrainedModel) -> list[type]:
        """Returns the classes of modules whose weights ZeRO-3 gathers together.

        Experts are among them: a rank runs what is inside of an expert only if its tokens chose the expert, but ZeRO-3
        demands the same order of modules from all ranks.
        """
        if self.stage < 3:
            return []
        if "leaf" in self.options:
            return list({type(layer) for layer in layers_of(model)})
        return list({type(module) for name, module in model.named_modules() if name.endswith(".mlp.experts")})

    def _place(self) -> RankPlace:
        tp = self.context.config.layout.tp
        return RankPlace(
            zero_rank=dist.get_rank() // tp,
            zero_size=dist.get_world_size() // tp,
            tensor_group=get_tensor_model_parallel_group() if tp > 1 else None,
        )

    def _read_weights(self, model: transformers.PreTrainedModel, tensors: EngineTensors | FrozenTensors) -> None:
        """Reads this rank's pieces of masters and parameters.

        DeepSpeed would copy the masters from parameters in half precision. With ``shipped`` they are rounded in the
        same way.
        """
        compute = self.context.config.tier.half_dtype
        unread: UnreadWeights = model.unread
        device = "cpu" if "offload" in self.options else self.context.config.device
        with unread.opened(device) as read, torch.no_grad():
            if compute and "shipped" in self.options:
                tensors.write("weight", lambda *region: read.region(*region).to(compute))
            else:
                tensors.write("weight", read.region)
        del model.unread

    def forget_steps(self) -> None:
        """Clears AdamW's state: at ZeRO-0 in half precision, DeepSpeed has made a step to allocate it."""
        self.engine.basic_optimizer.state.clear()

    def parameter_groups(self, model: transformers.PreTrainedModel, config: OptimizerConfig) -> list[dict[str, Any]]:
        def dims(parameter: torch.nn.Parameter) -> int:
            return len(getattr(parameter, "ds_shape", parameter.shape))  # a sharded parameter has lost its shape

        groups = parameter_groups(trained_parameters(model, config), config, dims=dims)
        # ZeRO-1 and 2 wait for the device before they update a group, and loop over the parameters of all groups after
        # the last update. The large group comes last, so that its update runs during this loop.
        return groups[::-1] if largest_group_last(self.stage) else groups

    def forward_backward(
        self,
        inputs: Sequence[MicroBatch],
        *,
        want: Wanted,
        temperature: float = 1.0,
        loss: Loss | None,
        terms: RouterTerms | None = None,
    ) -> list[Outputs]:
        set_mode(self.engine.module, training=loss is not None)  # the engine keeps no mode of its own
        return self.run(inputs, want=want, temperature=temperature, loss=loss, terms=terms)

    def start_micro_batch(self, index: int, count: int) -> None:
        if "manual" in self.options:
            self.engine.set_gradient_accumulation_boundary(is_boundary=index == count - 1)
        elif index:
            self.engine.step()  # counts the micro-batch before this one; the engine cleared the gradients itself

    def own_outputs(self, inputs: MicroBatch, *, want: Wanted, temperature: float, **options: Any) -> Outputs:
        if self.routers:
            self.routers.begin(inputs)
        given = {**model_inputs(self.model.config, inputs), **options}
        logits = self.engine(input_ids=inputs.tokens, use_cache=False, **given).logits
        outputs = outputs_of(logits, inputs, head=self.head, want=want, temperature=temperature)
        return self.routers.added(outputs, inputs) if self.routers else outputs

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss * self.gradient_scale() * self.forgotten_scale(), scale_wrt_gas=False)

    def forgotten_scale(self) -> float:
        """Returns the loss scale at ZeRO-0 in fp16, where DeepSpeed divides by it but never multiplies; else 1."""
        forgets = self.stage == 0 and self.context.config.tier.is_loss_scaled
        return float(self.engine.optimizer.loss_scale) if forgets else 1.0

    def gradient_scale(self) -> int:
        """Returns the factor for the loss: the number of ranks that DeepSpeed averages gradients over."""
        layout = self.context.config.layout
        data = layout.dp * layout.sp
        if layout.tp > 1:  # Ulysses without an mpu: its ranks are data ranks like others
            return data * layout.ulysses
        # With an mpu, DeepSpeed sums over Ulysses ranks, except at ZeRO-3 (docs/findings/deepspeed-ulysses-scale.md)
        # where it reduces and scatters, which it does not beside Muon.
        corrected = self.stage == 3 and "shipped" not in self.options and not self.clipping
        return data * layout.ulysses if corrected else data

    def finish_gradients(self) -> None:
        assert self.engine.is_gradient_accumulation_boundary()

    def optimizer_step(self) -> float | None:
        # docs/findings/deepspeed-zero0-norm.md: at ZeRO-0 in half precision, the norm omits unmarked parts and contains
        # the loss scale; in full precision, DeepSpeed clips by a norm that it does not report.
        scale = 1.0
        if self.stage == 0:
            assert isinstance(self.tensors, EngineTensors)
            self.tensors.mark_cut_gradients()
            scale = float(getattr(self.engine.optimizer, "loss_scale", 1.0))
        norm = self.clipping.clip() if self.clipping else None
        with growth_afterwards(self._scaler()) if self.context.config.tier.is_loss_scaled else contextlib.nullcontext():
            self.engine.step()
        self.skipped = not self.engine.was_step_applied()
        if self.skipped and self.stage in (1, 2):
            forget_overflow(self.engine.optimizer)
        reported = self.engine.get_global_grad_norm() if norm is None else norm
        return None if reported is None else float(reported) / scale

    def learning_rate(self) -> float:
        return float(self.engine.get_lr()[0])

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        if kind == "progress":
            yield from ((name, torch.tensor(n, dtype=torch.float64)) for name, n in self._progress().items())
        else:
            yield from self.tensors.named(kind)
            yield from published_buffers(self.model).items() if kind == "weight" else ()

    def _progress(self) -> dict[str, float]:
        found = {"schedule": float(self.engine.lr_scheduler.last_epoch)}
        if self.context.config.tier.is_loss_scaled:
            scaler = self._scaler()
            good = good_steps(scaler) % scaler.scale_window
            found |= {"loss_scale": float(scaler.cur_scale), "good_steps": float(good)}
        return found

    def _scaler(self) -> Any:
        """Returns the object with the loss scale in fp16; its class depends on the stage, its attributes do not."""
        return self.engine.optimizer.loss_scale_config if self.stage == 0 else self.engine.optimizer.loss_scaler

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None:
        assert isinstance(self.tensors, EngineTensors), "a frozen model has no training state"
        self.tensors.write(kind, read.region)
        for name, buffer in published_buffers(self.model).items() if kind == "weight" else ():
            buffer.copy_(read.whole(name))

    def set_progress(self, progress: Mapping[str, float]) -> None:
        set_schedule(self.engine.lr_scheduler, int(progress["schedule"]))
        if self.context.config.tier.is_loss_scaled and "loss_scale" in progress:
            scaler = self._scaler()
            scaler.cur_scale = progress["loss_scale"]
            scaler.cur_iter, scaler.last_overflow_iter = int(progress.get("good_steps", 0)), -1

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        yield from self.tensors.local(kind)
        for name, buffer in published_buffers(self.model).items() if kind == "weight" else ():
            yield Shard(name, "full", buffer)

    def resolved(self) -> dict[str, Any]:
        model = self.model
        compute = next(model.parameters()).dtype
        return {
            **self.resolved_model(compute),
            "zero_stage": self.engine.zero_optimization_stage(),
            "offloads_parameters": self.engine.zero_offload_param() is not None,
            "checkpointing": bool(model.is_gradient_checkpointing),
            "leaf_modules": len(get_z3_leaf_modules(model)),
            "cut_by_tensor_parallelism": cut_count(model),
            "compute_dtype": str(compute),
            "deepspeed": self.settings,
            **(self._resolved_optimizer() if isinstance(self.tensors, EngineTensors) else {}),
        }

    def _resolved_optimizer(self) -> dict[str, Any]:
        basic = self.engine.basic_optimizer
        return {
            "offloads_optimizer": self.engine.zero_use_cpu_optimizer(),
            **resolved_optimizer(basic),
            "code": self._code(),
        }

    def _code(self) -> dict[str, str]:
        wrapper, accumulated = self.engine.optimizer, self.engine.get_data_types()[1]
        uses_compact = getattr(wrapper, "_use_compact_grad_partition_buffer", lambda group: False)(0)
        code = code_that_ran(optimizer=wrapper, update=self.engine.basic_optimizer, gradients=accumulated)
        return code | {"accumulation": "in compact buffers" if uses_compact else ""}

    def save_ckpt(self, path: Path, when: Writing = AT_ONCE) -> None:
        checkpoint.save(self.engine, path, self._cut(), when)

    def load_ckpt(self, path: Path) -> None:
        assert isinstance(self.tensors, EngineTensors), "a frozen model has no checkpoint"
        checkpoint.load(self.engine, path, self._cut(), write_frozen=self.tensors.write_frozen)

    def _cut(self) -> Cut:
        config, optimizer = self.context.config, type(self.engine.basic_optimizer).__name__
        return engine_cut(config.layout, config.precision, optimizer=optimizer)

    def teardown(self) -> None:
        self.engine.destroy()
        if "compile" in self.options:
            forget_compiled()
        global_state.forget_model(self.model)
        for name in ("model", "engine", "optimizer", "tensors", "clipping"):
            self.__dict__.pop(name, None)


class DeepspeedContext(ReferenceContext):
    """Builds the mesh, context parallelism and DeepSpeed's process state, for all models of a cell.

    Mesh axes, outermost first: ``dp``, ``sp`` (context parallel), ``ulysses``, ``tp``. ZeRO shards over all but ``tp``.
    """

    ring: RingAttention | None = None

    @property
    def sequence_multiple(self) -> int:
        return 1

    def setup_distributed(self) -> None:
        layout = self.config.layout
        global_state.enter(self.config.device, layout)
        sizes = (layout.dp, layout.sp, layout.ulysses, layout.tp)
        kind = torch.device(self.config.device).type
        self.mesh = init_device_mesh(kind, sizes, mesh_dim_names=("dp", "sp", "ulysses", "tp"))
        if layout.hpz > 1:
            global_state.group_second_copies(layout)
        self.data_rank, self.data_size = self.mesh.get_local_rank("dp"), layout.dp
        if layout.sp * layout.ulysses > 1:
            self.setup_ring_attn()

    def setup_ring_attn(self) -> None:
        register()
        layout = self.config.layout
        config = RingConfig(
            kind=ring_kind(layout),
            packed=self.config.packed or layout.ulysses > 1,  # Ulysses needs one row: documents are concatenated
            shipped="shipped" in layout.options,
            head_stride=layout.stride,
            multiple=layout.ulysses,
        )
        slices = self.mesh.get_group("ulysses") if layout.ulysses > 1 else None
        self.ring = RingAttention(self.mesh.get_group("sp"), config, slices=slices)

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        return [self.mesh.get_group("dp")]  # ranks that share rows have the same number

    def new_trainable(self, head: Head) -> DeepspeedModel:
        return DeepspeedModel(self, head)

    def library_generators(self) -> dict[str, torch.Tensor]:
        return dict(get_cuda_rng_tracker().get_states())

    def set_library_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        get_cuda_rng_tracker().set_states(dict(states))

    def teardown(self) -> None:
        self.ring = None
        global_state.leave()
