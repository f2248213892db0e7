"""Trains one model with megatron-core's layers, pipeline schedules, gradient buffers and optimizer.

megatron-core averages gradients over cp x dp ranks and over micro-batches. The objective has already divided by the
totals of the whole step, so the loss is multiplied by both numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from conformance.backends.protocol import NamedTensors, Shard, TensorKind, Traced
from conformance.core.errors import UsageError
from conformance.models.folders import weight_files
from conformance.spec.layout import OWN_BALANCE
from conformance.spec.observables import Head
from conformance.spec.scenario import WEIGHTS_FILE, OptimizerConfig, ScheduleConfig
from impl.context_parallel.ring_attention import RingAttention
from impl.interface.micro_batches import Loss, MicroBatch, Outputs, RouterTerms, Wanted, set_mode
from impl.interface.sharded_safetensors import SliceReader
from impl.interface.trainable import AT_ONCE, ContextConfig, Dtype, Writing, WrittenKind
from impl.megatron import checkpoint
from impl.megatron.attention import ShardedMicroBatch, sharded
from impl.megatron.config import (
    is_fully_sharded,
    optimizer_settings,
    read_progress,
    reduction_settings,
    resolved_optimizer,
    run_by_hand,
    scheduler,
    set_progress,
    shards_optimizer,
    share_scale,
    undecayed,
    update_in_one_kernel,
)
from impl.megatron.fsdp import ShardedTensors, chained, finish_gathers, unhook, wrap
from impl.megatron.gpt_model import (
    begin_with_gradient,
    build_chunk,
    leave_padding_token,
    traced_chunks,
    transformer_config,
)
from impl.megatron.hf_mapping import all_parameters, check_weights, is_trained
from impl.megatron.lora import add_adapters, with_adapters
from impl.megatron.model_config import read_shape, stages
from impl.megatron.router import StepLoss, correct_running_counts, gathered, release
from impl.megatron.tensors import ModelTensors, parameter_names, read_weights, release_trained, weight_tensors
from impl.models.export import write_merged, write_model
from impl.models.outputs import from_last_stage, outputs_of, token_statistics


class ModelContext(Protocol):
    """Lists the part of impl.megatron.context.MegatronContext that a model needs."""

    config: ContextConfig
    ring: RingAttention

    def all_reduce(self, value: float) -> float: ...

    def placed(self) -> AbstractContextManager[None]: ...


def count_tokens(part: ShardedMicroBatch) -> Tensor:
    """Counts the targets of a micro-batch that this context-parallel rank holds, for megatron-core to sum up."""
    return part.own.targets.sum().int()


class MegatronModel:
    """Implements impl.interface.trainable.Trainable, which documents each method.

    chunks: this rank's chunks of the model, wrapped in DistributedDataParallel if the model is trained. optimizer: None
    if the model is frozen.
    """

    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    skipped: bool = False
    muon: bool = False  # whether Muon trains the model
    adapter: Path | None = None  # the folder of the adapter, if the model has one

    def __init__(self, context: ModelContext, head: Head) -> None:
        self.context, self.head = context, head
        self.options = context.config.layout.options
        self.half = context.config.tier.is_half
        self.per_token = "pertoken" in self.options
        self.divided = 1 if self.per_token else context.config.accumulation  # schedules divide the loss by it

    def load_model(self, path: Path) -> torch.nn.ModuleList:
        """Builds this rank's chunks of the model with uninitialised weights; ``prepare`` reads the weights.

        Raises UsageError if the folder has another head, or weights that do not fit the model.
        """
        layout, self.source = self.context.config.layout, path
        self.shape = read_shape(path, multi_token=self.head == "multi-token")
        if self.shape.head != self.head:
            raise UsageError(
                f"{path} has a {self.shape.head} head, but a {self.head} head is required; give another folder"
            )
        check_weights(path, self.shape)
        self.stages = stages(layers=self.shape.layers, pp=layout.pp, vpp=layout.vpp)
        self.model_config = transformer_config(
            self.shape, layout, self.context.config.tier, self.stages, self.context.config.router_bias_rate
        )
        with self.context.placed():
            chunks = [build_chunk(self.model_config, self.shape, self.stages, i) for i in range(layout.vpp)]
            if "globalaux" in self.options and "shipped" not in self.options:
                correct_running_counts(chunks)
            if chunks[0].pre_process and self.shape.padding_token is not None and "shipped" not in self.options:
                leave_padding_token(chunks[0], self.shape.padding_token)
        return torch.nn.ModuleList(chunks).train()

    def add_adapter(self, model: torch.nn.ModuleList, folder: Path) -> None:
        self.adapter, self.shape = folder, with_adapters(self.shape, folder)
        with self.context.placed():
            for chunk in model:
                add_adapters(chunk, self.shape)

    def prepare(self, model: torch.nn.ModuleList, optimizer: OptimizerConfig | None, schedule: ScheduleConfig) -> None:
        self.optimizer, self.muon = None, optimizer is not None and optimizer.name == "muon"
        files = [*weight_files(self.source), *([self.adapter / WEIGHTS_FILE] if self.adapter else [])]
        trained = [] if optimizer is None else self._freeze(model, optimizer)
        with self.context.placed():
            self.chunks = [Float16Module(self.model_config, chunk) if self.half else chunk for chunk in model]
            read_first = optimizer is None or is_fully_sharded(self.context.config)
            if read_first:
                read_weights(model, self.shape, files, device=self.context.config.device)
            if optimizer is None:
                model.eval().requires_grad_(False)
            else:
                self.reduce_gradients()
            if not read_first:
                read_weights(model, self.shape, files, device=self.context.config.device)
            if optimizer is not None:
                self.optimizer = self.create_optimizer(model, optimizer)
                self.scheduler = scheduler(self.optimizer, optimizer, schedule)
        optimizers = [] if self.optimizer is None else self.optimizer.chained_optimizers
        kind: Callable[..., ModelTensors] = ModelTensors
        if optimizer and is_fully_sharded(self.context.config):
            kind = partial(ShardedTensors, wrapped=self.chunks)
        if self.muon:
            from impl.megatron.library_optimizers import MuonTensors

            kind = partial(MuonTensors, chain=self.optimizer)
        if "remainders" in self.options and optimizer:
            from impl.megatron.library_optimizers import RemainderTensors

            kind = RemainderTensors
        self.tensors = kind(list(model), optimizers, self.shape, self.stages, trained=trained)
        if optimizer and self.half and "shipped" not in self.options:
            # megatron-core copies the masters from the rounded model (docs/findings/megatron-rounded-masters.md).
            with SliceReader(files, device=self.context.config.device) as read, torch.no_grad():
                self.tensors.write_masters(read)
        self._configure_schedule()

    def _freeze(self, model: torch.nn.ModuleList, optimizer: OptimizerConfig) -> list[str]:
        """Freezes this rank's parameters as ``optimizer`` says; returns the trained parameters of the whole model."""
        for chunk in model:
            names = parameter_names(chunk)
            for name, parameter in weight_tensors(chunk).items():
                parameter.requires_grad_(is_trained(names[name], self.shape, optimizer))
            if chunk.pre_process and "ckpt" in self.options:
                begin_with_gradient(chunk)
        return [name for name in all_parameters(self.shape) if is_trained(name, self.shape, optimizer)]

    def reduce_gradients(self) -> None:
        """Wraps the chunks in megatron-core's gradient buffers, before the weights are read."""
        config = self.context.config
        parameters = sum(parameter.numel() for chunk in self.chunks for parameter in chunk.parameters())
        settings = reduction_settings(config, parameters=parameters)
        if is_fully_sharded(config):
            self.chunks = wrap(self.chunks, self.model_config, settings, config.device)
            return
        if self.muon:
            settings.use_distributed_optimizer = False  # the layer-wise optimizer needs whole gradients
        if settings.use_distributed_optimizer:
            release_trained(self.chunks)
        self.chunks = [
            DistributedDataParallel(self.model_config, settings, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]

    def create_optimizer(self, model: torch.nn.ModuleList, config: OptimizerConfig) -> Any:
        overrides = undecayed() if self.context.config.whole_experts else None
        settings = optimizer_settings(self.context.config, config)
        if self.muon:
            from impl.megatron.library_optimizers import muon_optimizer, set_muon

            set_muon(settings, config, self.shape, "shipped" in self.options)
            optimizer = muon_optimizer(settings, self.chunks, layer_wise=shards_optimizer(self.context.config))
        else:
            optimizer = chained(get_megatron_optimizer(settings, self.chunks, overrides))
        share_scale(optimizer)
        update_in_one_kernel(optimizer, self.context.config)
        return optimizer

    def _inner_optimizer(self) -> Any:
        """Returns the chain's optimizer of all parameters but expert-parallel ones; None if the model is frozen."""
        return None if self.optimizer is None else self.optimizer.chained_optimizers[0]

    def _configure_schedule(self) -> None:
        """Sets the functions that megatron-core's schedules look up in the model's configuration."""
        config = self.model_config
        if self.optimizer is not None:
            config.finalize_model_grads_func = finalize_model_grads
            if self.context.config.tier.is_loss_scaled:
                config.grad_scale_func = self.optimizer.scale_loss
            if "overlap" in self.options:
                single = len(self.chunks) == 1
                config.no_sync_func = self.chunks[0].no_sync if single else [chunk.no_sync for chunk in self.chunks]
            if "manual" in self.options:
                config.grad_sync_func = (
                    self.chunks[0].start_grad_sync if single else [chunk.start_grad_sync for chunk in self.chunks]
                )
        if self.context.config.layout.vpp > 1:
            config.microbatch_group_size_per_vp_stage = self._micro_batch_group()

    def _micro_batch_group(self) -> int:
        """Returns the micro-batch group size that megatron-core requires of interleaved schedules.

        It is the smallest g in [pp, accumulation] whose last group (accumulation % g) is empty or has at least pp
        micro-batches.
        """
        count, pp = self.context.config.accumulation, self.context.config.layout.pp
        return next(size for size in range(pp, count + 1) if not 0 < count % size < pp)

    def forward_backward(
        self,
        inputs: Sequence[MicroBatch],
        *,
        want: Wanted,
        temperature: float = 1.0,
        loss: Loss | None,
        terms: RouterTerms | None = None,
    ) -> list[Outputs]:
        micro_batches = self._shard(inputs, terms)
        for chunk in self.chunks:
            set_mode(chunk, training=loss is not None)
        found: dict[int, Outputs] = {}
        # By default megatron-core casts all half-precision logits to float32 at once.
        options = {"fp32_output": False} if self.half else {}

        def run(iterator: Iterator[ShardedMicroBatch], chunk: Any) -> tuple[Tensor, partial[Any]]:
            part = next(iterator)
            result = chunk(part.own.tokens, part.own.positions, None, packed_seq_params=part.documents, **options)
            return result, partial(finish, part)

        def finish(part: ShardedMicroBatch, result: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            """Returns (scaled loss, number of tokens for the library, nothing to report); runs on the last stage."""
            outputs = self._outputs(result, part, want=want, temperature=temperature)
            found[part.index] = outputs.detach()
            number = result.new_zeros([]) if loss is None else self.backward(loss(part.index, outputs))
            tokens = count_tokens(part) if self.per_token else torch.ones([], dtype=torch.int)
            return number, tokens, {}

        if loss is not None:
            self.start_step()
        rows, length = micro_batches[0].own.tokens.shape
        single = len(self.chunks) == 1
        with self.context.placed(), torch.set_grad_enabled(loss is not None):
            by_hand = loss is not None and "manual" in self.options and self.context.config.layout.pp == 1
            (run_by_hand if by_hand else get_forward_backward_func())(
                forward_step_func=run,
                data_iterator=iter(micro_batches) if single else [iter(micro_batches) for _ in self.chunks],
                model=self.chunks[0] if single else self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=length * self.context.config.layout.sp,
                micro_batch_size=rows,
                forward_only=loss is None,
            )
        outputs = [self._from_last_stage(found.get(part.index), part.whole, want) for part in micro_batches]
        return [self._with_routing(*pair) for pair in zip(outputs, micro_batches, strict=True)]

    def start_step(self) -> None:
        """Clears the gradients of the previous step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _shard(self, inputs: Sequence[MicroBatch], terms: RouterTerms | None = None) -> list[ShardedMicroBatch]:
        # Schedules divide the routers' loss by the micro-batch count and multiply it by the context-parallel size; with
        # a loss per token, they do neither.
        self.tokens = self.context.all_reduce(sum(int(one.targets.sum()) for one in inputs)) if self.per_token else 1
        scale = self.gradient_scale() * self.divided / (1 if self.per_token else self.context.config.layout.sp)
        loss = None if terms is None else StepLoss(terms=terms, scale=scale)
        modules = self.shape.mtp
        return sharded(
            inputs, self.context.ring, self.context.config, mixture=self.shape.mixture, loss=loss, modules=modules
        )

    @property
    def router_loss_factor(self) -> float:
        own = set(OWN_BALANCE) & set(self.options)
        return self.shape.mixture.loss_factor if self.shape.mixture and not own else 0.0

    def _outputs(self, result: Tensor, part: ShardedMicroBatch, *, want: Wanted, temperature: float) -> Outputs:
        """Computes the outputs that ``want`` names, as whole rows.

        ``result``: this rank's logits (rows, length, part of the vocabulary) or values (rows, length, 1).
        """
        width = result.shape[-1]
        start = parallel_state.get_tensor_model_parallel_rank() * width
        # Padding would take part in the softmax (docs/findings/megatron-padded-vocabulary.md).
        real = width if "shipped" in self.options else min(width, max(0, self.shape.vocab - start))
        group = parallel_state.get_tensor_model_parallel_group()
        shard: dict[str, Any] = {"group": group, "vocab_start": start, "vocab_size": real}
        further: list[Tensor] = []
        if self.shape.mtp:
            result, *further = self._by_depth(result)
        found = outputs_of(result, part.own, head=self.head, want=want, temperature=temperature, **shard)
        if "mtp_logprobs" in want:
            pairs = zip(further, part.further, strict=True)
            options = {**shard, "temperature": temperature, "entropy": False}
            found = replace(
                found, mtp_logprobs=torch.stack([token_statistics(z, m.labels, **options)[0] for z, m in pairs], dim=-1)
            )
        return found.each(lambda numbers: self._whole(numbers, part))

    def _by_depth(self, result: Tensor) -> list[Tensor]:
        """Splits logits (rows, all lengths, V) into those of the model and of each module, (rows, length, V).

        The modules' hidden states follow those of the model, with sequence parallelism in each rank's part.
        """
        parts = self.model_config.tensor_model_parallel_size if self.model_config.sequence_parallel else 1
        depths = result.unflatten(1, (parts, 1 + self.shape.mtp, -1)).transpose(1, 2).flatten(2, 3)
        return list(depths.unbind(1))

    def _whole(self, own: Tensor, part: ShardedMicroBatch) -> Tensor:
        """Gathers the numbers of all tokens of a micro-batch, (rows, length, ...), over context-parallel ranks."""
        rows, length = part.whole.tokens.shape
        assert part.documents.ring is not None
        return self.context.ring.restore(own, part.documents.ring, rows=rows, length=length)

    def _with_routing(self, outputs: Outputs, part: ShardedMicroBatch) -> Outputs:
        """Adds the choices of the routers of all stages to ``outputs``; collective."""
        mixture, routed = self.shape.mixture, part.documents.routed
        if mixture is None or routed is None:
            return outputs
        observed = gathered(routed, mixture, part.own, sequence_parallel=self.model_config.sequence_parallel)
        weights, probabilities, squares = (self._whole(own, part) for own in observed)
        return replace(outputs, routing=weights, probabilities=probabilities, squares=squares)

    def backward(self, loss: Tensor) -> Tensor:
        """Returns the scaled loss that megatron-core's schedule differentiates."""
        return loss * self.gradient_scale() * self.divided

    def gradient_scale(self) -> float:
        """Returns what megatron-core divides gradients by after their reduction: data x context-parallel ranks, or the
        number of tokens of the step."""
        if self.per_token:
            return self.tokens
        return self.context.config.layout.data * self.context.config.layout.sp

    def traced(self, numbers: Sequence[MicroBatch]) -> Traced:
        parts = [part.own for part in self._shard(numbers)]
        return traced_chunks(self.tensors.chunks, self.shape, self.stages, parts, gradient_scale=self.gradient_scale())

    def _from_last_stage(self, outputs: Outputs | None, inputs: MicroBatch, want: Wanted) -> Outputs:
        """Broadcasts the outputs of the last pipeline stage to all stages; collective."""
        if self.context.config.layout.pp == 1:
            assert outputs is not None
            return outputs
        return from_last_stage(outputs, inputs, want, parallel_state.get_pipeline_model_parallel_group())

    def finish_gradients(self) -> None:
        """Does nothing: schedules end with ``finalize_model_grads``, and readers of gradients remove the loss scale."""

    def optimizer_step(self) -> float | None:
        """Updates the parameters and returns the gradient norm.

        Returns NaN if fp16 gradients overflow: the library then makes no update and computes no norm.
        """
        with self.context.placed():
            updated, norm, _ = self.optimizer.step()
            if is_fully_sharded(self.context.config):
                finish_gathers(self.chunks)
            self.skipped = not updated
            if self.skipped:
                return float("nan")
            self.advance_schedule()
        return None if norm is None else float(norm)

    def advance_schedule(self) -> None:
        self.scheduler.step(1)

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        if kind == "weight":
            self._complete_weights()
        if kind == "progress":
            return read_progress(self.scheduler, self._scaler())
        return self.tensors.named(kind)

    def _scaler(self) -> Any:
        """Returns megatron-core's grad scaler, which holds the loss scale; None except in fp16."""
        return getattr(self._inner_optimizer(), "grad_scaler", None)

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None:
        if kind == "weight":
            self.tensors.write_masters(read)
        else:
            self.tensors.write_optimizer_state(kind, read)

    def set_progress(self, progress: Mapping[str, float]) -> None:
        with self.context.placed():
            set_progress(self.scheduler, self._scaler(), progress)

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        if kind == "weight":
            self._complete_weights()
        return self.tensors.local(kind)

    def _complete_weights(self) -> None:
        """Gathers the weights that other ranks have updated; with overlap, only the next forward pass would do that."""
        if is_fully_sharded(self.context.config):
            return  # it is the masters that are read
        if self.optimizer is not None and "overlap" in self.options and shards_optimizer(self.context.config):
            with self.context.placed():
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)
                    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                        # Otherwise the forward pass after the next update would not gather the updated weights.
                        group.param_gather_dispatched = False

    def resolved(self) -> dict[str, Any]:
        config = self.model_config
        found = {
            "model_class": "GPTModel",
            "head": self.head,
            "mesh": {
                "pp": parallel_state.get_pipeline_model_parallel_world_size(),
                "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
                "dp": parallel_state.get_data_parallel_world_size(),
                "ep": parallel_state.get_expert_model_parallel_world_size(),
                "sp": parallel_state.get_context_parallel_world_size(),
                "tp": parallel_state.get_tensor_model_parallel_world_size(),
            },
            "layers": [[*chunk] for chunk in self.stages.chunks],
            "padded_vocabulary": self.shape.padded_vocab(self.context.config.layout.tp),
            "ring": self.context.ring.resolved(self.context.config.device, config.params_dtype),
            "compute_dtype": str(config.params_dtype),
            "schedule": get_forward_backward_func().__name__,
            "sequence_parallel": config.sequence_parallel,
            "recompute": config.recompute_granularity,
            "replaced": ["load-balancing loss"] if self.router_loss_factor else [],
            "wrapper": type(self.chunks[0]).__name__,
        }
        return found if self.optimizer is None else found | resolved_optimizer(self._inner_optimizer(), self.chunks)

    def save_ckpt(self, path: Path, when: Writing = AT_ONCE) -> None:
        self._complete_weights()
        with self.context.placed():
            checkpoint.save(path, self._training(), when)

    def load_ckpt(self, path: Path) -> None:
        with self.context.placed():
            checkpoint.load(path, self._training())

    def _training(self) -> checkpoint.Training:
        return checkpoint.Training(
            chunks=self.tensors.chunks,
            optimizers=self.optimizer.chained_optimizers,
            scheduler=self.scheduler,
            shape=self.shape,
            trained=self.tensors.trained,
        )

    def save_model(self, path: Path, *, dtype: Dtype = "source") -> None:
        weights = self.named_tensors("weight")
        write_model(path, source=self.source, weights=weights, dtype=dtype, adapter=self.adapter)

    def save_merged(self, path: Path, *, dtype: Dtype = "source") -> None:
        write_merged(path, dtype=dtype, write=self.save_model, trusted=self.context.config.trust_remote_code)

    def teardown(self) -> None:
        for chunk in self.__dict__.get("chunks", ()):
            release(chunk)
            if isinstance(chunk, FullyShardedDataParallel):
                unhook(chunk)
        for name in ("chunks", "optimizer", "scheduler", "tensors", "model_config"):
            self.__dict__.pop(name, None)
