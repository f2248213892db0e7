"""Megatron strategy: megatron-core's layers, pipeline schedules, gradient buffers and optimizers.

Ranks, innermost first: tp, cp (the layout's ``sp``), dp, pp. megatron-core averages gradients over cp x dp and over
micro-batches; the loss is multiplied by that number, because the trainer has divided by the whole step's token count.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import Float16Module

from conformance.backend import Kind, NamedTensors, Shard
from conformance.batch import Batch, Row
from conformance.scenario import OptimizerConfig, ScheduleConfig
from conformance.inputs.model import NOT_COPIED, weight_files
from impl.collate import NO_TARGET, Inputs
from impl.megatron import checkpoint
from impl.megatron.attention import Documents
from impl.files import SliceReader
from impl.megatron.model import build_chunk, mask_padding, transformer_config
from impl.megatron.placement import placed
from impl.megatron.process import ModelParallel
from impl.megatron.settings import cuts_optimizer, optimizer_settings, reduction_settings, scheduler
from impl.megatron.shape import read_shape
from impl.megatron.stages import stages
from impl.megatron.tensors import ModelTensors, fill, parameter_names
from impl.micro_batches import Loss
from impl.ring.attention import Ring, RingAttention, RingConfig, kind_of
from impl.strategy import StrategyConfig

MicroBatch = tuple[int, Inputs, Documents]  # its number, this rank's part of it, how that lies on the ring


class MegatronStrategy:
    """See impl.strategy.Strategy for the contract of each method."""

    chunks: list[Any]  # DistributedDataParallel around each of this rank's parts of the model

    def __init__(self, config: StrategyConfig) -> None:
        self.config = config
        self.options = config.layout.options

    @property
    def sequence_multiple(self) -> int:
        return 1  # rows are padded where they are cut

    def _placed(self) -> Any:
        return placed(self.config.device, exact=self.config.precision == "exact")

    def setup_distributed(self) -> None:
        self.process = ModelParallel()
        with self._placed():
            self.process.enter(self.config.layout)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = self.config.layout.dp
        self.setup_ring_attn()

    def setup_ring_attn(self) -> None:
        layout = self.config.layout
        config = RingConfig(
            kind=kind_of(layout),
            packed=self.config.packed or layout.sp == 1,  # a ring of one: rows end to end, without padding
            shipped="shipped" in self.options,
            head_stride=layout.stride,
            multiple=layout.tp if "seqpar" in self.options else 1,
        )
        self.ring = RingAttention(parallel_state.get_context_parallel_group(), config)

    def load_model(self, path: Path) -> torch.nn.ModuleList:
        """This rank's parts of the model, filled with what they hold of the file and nothing else."""
        layout = self.config.layout
        self.source = path
        self.shape = read_shape(path)
        self.stages = stages(layers=self.shape.layers, pp=layout.pp, vpp=layout.vpp)
        self.model_config = transformer_config(self.shape, layout, self.config.precision, self.stages)
        with self._placed(), SliceReader(weight_files(path)) as read, torch.no_grad():
            chunks = [build_chunk(self.model_config, self.shape, self.stages, i) for i in range(layout.vpp)]
            for chunk in chunks:
                names = parameter_names(chunk)
                for name, parameter in chunk.named_parameters():
                    fill(parameter, names[name], self.shape, read)
        return torch.nn.ModuleList(chunks).train()

    def prepare(self, model: torch.nn.ModuleList, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> None:
        half = self.config.precision in ("bf16", "fp16")
        with self._placed():
            parameters = sum(parameter.numel() for parameter in model.parameters())
            reduction = reduction_settings(self.config, parameters=parameters)
            modules = [Float16Module(self.model_config, chunk) if half else chunk for chunk in model]
            self.chunks = [
                DistributedDataParallel(self.model_config, reduction, module, disable_bucketing=number > 0)
                for number, module in enumerate(modules)
            ]
            self.optimizer = self.create_optimizer(model, optimizer)
            self.scheduler = scheduler(self.optimizer, optimizer, schedule)
        (only,) = self.optimizer.chained_optimizers  # the others would be for experts
        self.tensors = ModelTensors(list(model), only, self.shape, self.stages)
        if half and "shipped" not in self.options:
            # megatron-core copies the masters from the rounded model (docs/findings/megatron-rounded-masters.md).
            with SliceReader(weight_files(self.source)) as read, torch.no_grad():
                self.tensors.write_masters(read)
        self._configure_schedule()

    def create_optimizer(self, model: torch.nn.ModuleList, config: OptimizerConfig) -> Any:
        return get_megatron_optimizer(optimizer_settings(self.config, config), self.chunks)

    def _configure_schedule(self) -> None:
        """What megatron-core's schedules call."""
        config = self.model_config
        config.finalize_model_grads_func = finalize_model_grads
        if self.config.precision == "fp16":
            config.grad_scale_func = self.optimizer.scale_loss
        if "overlap" in self.options:
            one = len(self.chunks) == 1
            config.no_sync_func = self.chunks[0].no_sync if one else [chunk.no_sync for chunk in self.chunks]
        if self.config.layout.vpp > 1:
            config.microbatch_group_size_per_vp_stage = self._micro_batch_group()

    def _micro_batch_group(self) -> int:
        """Micro-batches that run through a chunk before the next: at least pp, and so are those that are left over."""
        count, pp = self.config.accumulation, self.config.layout.pp
        return next(size for size in range(pp, count + 1) if not 0 < count % size < pp)

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        return batch.micro_batches(
            dp_rank=self.data_rank, dp_size=self.data_size, accumulation=self.config.accumulation
        )

    def forward_backward(self, inputs: Sequence[Inputs], loss: Loss) -> list[torch.Tensor]:
        micro_batches = self._shard(inputs)
        found: dict[int, torch.Tensor] = {}

        def run(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            index, own, documents = next(iterator)
            output = chunk(own.tokens, own.positions, None, packed_seq_params=documents)
            return output, partial(self._loss, index, inputs[index], own, documents.ring, loss, found)

        self.start_step()
        rows, length = micro_batches[0][1].tokens.shape
        one = len(self.chunks) == 1
        with self._placed():
            get_forward_backward_func()(
                forward_step_func=run,
                data_iterator=iter(micro_batches) if one else [iter(micro_batches) for _ in self.chunks],
                model=self.chunks[0] if one else self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=length * self.config.layout.sp,
                micro_batch_size=rows,
                forward_only=False,
            )
        return [self._from_last_stage(found.get(i), micro_batch) for i, micro_batch in enumerate(inputs)]

    def start_step(self) -> None:
        """Clear the gradients of the step before."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _shard(self, inputs: Sequence[Inputs]) -> list[MicroBatch]:
        """This rank's part of each micro-batch; all of one length, because stages receive into buffers of one size."""
        sharded = [self.ring.shard(micro_batch) for micro_batch in inputs]
        if self.config.layout.pp > 1:
            longest = max(own.tokens.shape[1] for own, _ in sharded)
            sharded = [self.ring.shard(micro_batch, multiple=longest) for micro_batch in inputs]
        return [
            (index, own, Documents(positions=own.positions, ring=ring)) for index, (own, ring) in enumerate(sharded)
        ]

    def _loss(
        self,
        index: int,
        inputs: Inputs,
        own: Inputs,
        ring: Ring | None,
        loss: Loss,
        found: dict[int, torch.Tensor],
        logits: torch.Tensor,  # (rows, length, part of the vocabulary)
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """On the last stage: the number that gradients are taken of, by how many tokens to divide it, and no more."""
        assert ring is not None
        # Padding would take part in the softmax otherwise (docs/findings/megatron-padded-vocabulary.md).
        shipped = "shipped" in self.options
        scores = logits if shipped else mask_padding(logits, vocab=self.shape.vocab)
        target = own.labels != NO_TARGET
        negative = vocab_parallel_cross_entropy(scores, own.labels.where(target, 0))  # (rows, length)
        rows, length = inputs.labels.shape
        logp = self.ring.restore(-negative.where(target, 0), ring, rows=rows, length=length)
        found[index] = logp.detach()
        return self.backward(loss(index, logp)), torch.ones([], dtype=torch.int), {}

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """What the schedule is to take the gradient of."""
        return loss * self.gradient_scale() * self.config.accumulation

    def gradient_scale(self) -> float:
        """How many ranks megatron-core averages gradients over: the ring's too, though they hold parts of rows."""
        return self.config.layout.dp * self.config.layout.sp

    def _from_last_stage(self, logp: torch.Tensor | None, inputs: Inputs) -> torch.Tensor:
        if self.config.layout.pp == 1:
            assert logp is not None
            return logp
        if logp is None:
            dtype = torch.get_default_dtype()
            logp = torch.empty(inputs.labels.shape, dtype=dtype, device=inputs.labels.device)
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(logp, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return logp

    def finish_gradients(self) -> None:
        """Nothing: schedules end with ``finalize_model_grads``, and what is observed is free of the loss scale."""

    def optimizer_step(self) -> float:
        with self._placed():
            _, norm, _ = self.optimizer.step()
            self.advance_schedule()
        return float("nan") if norm is None else float(norm)  # None: overflow in fp16, no update

    def advance_schedule(self) -> None:
        self.scheduler.step(1)

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def all_reduce(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.config.device)
        dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())  # the other ranks hold the same number
        return tensor.item()

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def named_tensors(self, kind: Kind) -> NamedTensors:
        self._complete_weights()
        return self.tensors.named(kind)

    def named_optimizer_state(self, key: str) -> NamedTensors:
        """Full optimizer state under Hugging Face names; ``key`` as torch calls it, such as ``exp_avg``."""
        return self.tensors.optimizer_state(key)

    def local_shards(self, kind: Kind) -> Iterator[Shard]:
        self._complete_weights()
        return self.tensors.local(kind)

    def _complete_weights(self) -> None:
        """With overlap a rank gathers what others have updated when the next forward pass needs it; here, at once."""
        if "overlap" in self.options and cuts_optimizer(self.config):
            with self._placed():
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)

    def resolved(self) -> dict[str, Any]:
        config = self.model_config
        (only,) = self.optimizer.chained_optimizers
        group = only.param_groups[0]
        return {
            "model_class": "GPTModel",
            "mesh": {
                "pp": parallel_state.get_pipeline_model_parallel_world_size(),
                "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
                "dp": parallel_state.get_data_parallel_world_size(),
                "sp": parallel_state.get_context_parallel_world_size(),
                "tp": parallel_state.get_tensor_model_parallel_world_size(),
            },
            "layers": [[*chunk] for chunk in self.stages.chunks],
            "padded_vocabulary": self.shape.padded_vocab(self.config.layout.tp),
            "ring": self.ring.resolved(self.config.device, config.params_dtype),
            "compute_dtype": str(config.params_dtype),
            "optimizer": type(only.optimizer).__name__,
            "optimizer_wrapper": type(only).__name__,
            "optimizer_defaults": {k: v for k, v in group.items() if isinstance(v, (int, float, str, bool, tuple))},
            "schedule": get_forward_backward_func().__name__,
            "buckets": len(self.chunks[0].bucket_groups),
            "overlaps_reduction": self.chunks[0].ddp_config.overlap_grad_reduce,
            "overlaps_gathering": self.chunks[0].ddp_config.overlap_param_gather,
            "max_grad_norm": self.config.max_grad_norm,
            "sequence_parallel": self.chunks[0].config.sequence_parallel,
            "recompute": config.recompute_granularity,
        }

    def save_ckpt(self, path: Path) -> None:
        self._complete_weights()
        checkpoint.save(path, self.tensors, self.optimizer, self.scheduler)

    def load_ckpt(self, path: Path) -> None:
        with self._placed():
            checkpoint.load(path, self.tensors, self.optimizer, self.scheduler)

    def save_model(self, path: Path) -> None:
        first = dist.get_rank() == 0
        if first:
            shutil.copytree(self.source, path, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
        checkpoint.write(path, self.named_tensors("weight"))

    def teardown(self) -> None:
        for name in ("chunks", "optimizer", "scheduler", "tensors", "model_config", "ring"):
            self.__dict__.pop(name, None)
        self.process.leave()
