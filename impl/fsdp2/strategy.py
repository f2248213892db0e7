"""FSDP2 strategy: fully sharded or hybrid data parallelism, ring attention and tensor parallelism on one mesh.

Mesh axes, outermost first: ``rep`` (replicas), ``dp``, ``sp`` (the ring), ``tp``. Parameters, gradients and optimizer
state are cut over dp x sp, called ``shard``. FSDP2 averages gradients over rep x dp x sp; ``backward`` multiplies the
loss by that number, because the trainer has divided by the whole step's token count already.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from conformance.backend import Kind, NamedTensors, Shard
from conformance.batch import Batch, Row
from conformance.scenario import OptimizerConfig, ScheduleConfig
from impl.collate import NO_TARGET, Inputs
from impl.fsdp2 import norm
from impl.fsdp2.gather import full_tensors
from impl.fsdp2.tensor_parallel import apply_explicit_plan, apply_model_plan
from impl.micro_batches import Loss, one_after_another
from impl.models import load_model
from impl.ring.attention import NAME, RingAttention, RingConfig, kind_of, register
from impl.strategy import StrategyConfig

GATHERED_AT_ONCE = 2**22  # elements
_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Fsdp2Strategy:
    """See impl.strategy.Strategy for the contract of each method."""

    model: transformers.PreTrainedModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    ring: RingAttention | None = None

    def __init__(self, config: StrategyConfig) -> None:
        self.config = config
        self.options = config.layout.options
        # Loss scaling for fp16 only: its gradients underflow, bf16's have the range of fp32. From GradScaler's usual
        # 65536 the first steps may overflow and be skipped until the scale has fallen; this one is low enough.
        self.scaler = torch.amp.GradScaler(
            torch.device(config.device).type, init_scale=2.0**12, enabled=config.precision == "fp16"
        )

    @property
    def sequence_multiple(self) -> int:
        # With a ring, rows are padded where they are cut.
        return 1 if self.config.layout.sp > 1 else self._shape_multiple

    @property
    def _shape_multiple(self) -> int:
        # DTensor plans each op once per shape; few shapes keep that cheap. seqpar cuts rows into tp equal slices.
        return math.lcm(32, self.config.layout.tp)

    def setup_distributed(self) -> None:
        layout = self.config.layout
        sizes = (layout.rep, layout.dp // layout.rep, layout.sp, layout.tp)
        kind = torch.device(self.config.device).type
        self.mesh = init_device_mesh(kind, sizes, mesh_dim_names=("rep", "dp", "sp", "tp"))
        self.mesh["dp", "sp"]._flatten("shard")
        self.data_rank, self.data_size = dist.get_rank() // (layout.sp * layout.tp), layout.dp
        if layout.sp > 1:
            self.setup_ring_attn()

    def setup_ring_attn(self) -> None:
        register()
        layout = self.config.layout
        config = RingConfig(
            kind=kind_of(layout),
            packed=self.config.packed,
            shipped="shipped" in self.options,
            head_stride=layout.stride,
            multiple=self._shape_multiple if layout.tp > 1 else 1,
        )
        self.ring = RingAttention(self.mesh.get_group("sp"), config)

    def load_model(self, path: Path) -> transformers.PreTrainedModel:
        exact = self.config.precision == "exact"
        attention = NAME if self.ring else "eager" if exact else "sdpa"
        return load_model(path, dtype=torch.float64 if exact else torch.float32, attention=attention)

    def prepare(
        self, model: transformers.PreTrainedModel, optimizer: OptimizerConfig, schedule: ScheduleConfig
    ) -> None:
        model.to(self.config.device)
        if "ckpt" in self.options:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.config.layout.tp > 1:
            if {"plan", "seqpar", "losspar"} & set(self.options):
                apply_explicit_plan(
                    model, self.mesh["tp"], sequence="seqpar" in self.options, loss="losspar" in self.options
                )
            else:
                apply_model_plan(model, self.mesh["tp"], shipped="shipped" in self.options)
        self._shard(model)
        self.model = model
        self.optimizer = self.create_optimizer(model, optimizer)
        # transformers' "constant" has no warm-up, whatever it is given.
        name = "constant_with_warmup" if schedule.name == "constant" else schedule.name
        self.scheduler = transformers.get_scheduler(
            name,
            self.optimizer,
            num_warmup_steps=schedule.warmup_steps,
            num_training_steps=schedule.total_steps,
        )

    def _shard(self, model: transformers.PreTrainedModel) -> None:
        mesh = self.reduction_mesh()
        compute = _COMPUTE.get(self.config.precision)
        # Parameters stay float32 (the masters); forward and backward run in ``compute``, reductions in float32.
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
        offload = (
            CPUOffloadPolicy(pin_memory=self.config.device != "cpu") if "offload" in self.options else OffloadPolicy()
        )
        blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)

    def reduction_mesh(self) -> DeviceMesh:
        """Ranks that see different tokens of a step: their gradients belong together, and so do their shards."""
        return self.mesh["rep", "shard"] if self.config.layout.rep > 1 else self.mesh["shard"]

    def gradient_scale(self) -> int:
        """Number of ranks that FSDP2 averages gradients over."""
        return self.config.layout.dp * self.config.layout.sp

    def create_optimizer(self, model: transformers.PreTrainedModel, config: OptimizerConfig) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if config.name == "sgd":
            return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum)
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        return batch.micro_batches(
            dp_rank=self.data_rank, dp_size=self.data_size, accumulation=self.config.accumulation
        )

    def forward_backward(self, inputs: Sequence[Inputs], loss: Loss) -> list[torch.Tensor]:
        return one_after_another(self, inputs, loss)

    def start_micro_batch(self, index: int, count: int) -> None:
        if index == 0:
            self.optimizer.zero_grad()
        if "lastsync" in self.options:
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_gradient_sync(index == count - 1)

    def forward(self, inputs: Inputs) -> torch.Tensor:
        if self.ring is None:
            return self._logprobs(inputs)
        own, ring = self.ring.shard(inputs)
        rows, length = inputs.labels.shape
        return self.ring.restore(self._logprobs(own, ring=ring), ring, rows=rows, length=length)

    def _logprobs(self, inputs: Inputs, **options: Any) -> torch.Tensor:
        """Of the tokens that this rank holds, in the shape of ``inputs``."""
        logits = self.model(input_ids=inputs.tokens, position_ids=inputs.positions, use_cache=False, **options).logits
        with self._loss_parallel():
            logp = -torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), inputs.labels.flatten(), ignore_index=NO_TARGET, reduction="none"
            )
        full = logp.full_tensor() if isinstance(logp, DTensor) else logp
        return full.view(inputs.labels.shape)

    def backward(self, loss: torch.Tensor) -> None:
        with self._loss_parallel():
            self.scaler.scale(loss * self.gradient_scale()).backward()

    def _loss_parallel(self) -> contextlib.AbstractContextManager[None]:
        return loss_parallel() if "losspar" in self.options else contextlib.nullcontext()

    def finish_gradients(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def optimizer_step(self) -> float:
        gradients = [p.grad for p in self.model.parameters()]
        total = norm.gradient_norm(gradients)
        if self.config.max_grad_norm is not None:
            coefficient = norm.clip_coefficient(total, self.config.max_grad_norm)
            torch._foreach_mul_([g.to_local() for g in gradients], coefficient)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.advance_schedule()
        return total

    def advance_schedule(self) -> None:
        self.scheduler.step()

    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def all_reduce(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.config.device)
        for axis in ("rep", "dp"):  # the ranks of a ring hold the same number already
            dist.all_reduce(tensor, group=self.mesh.get_group(axis))
        return tensor.item()

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def named_tensors(self, kind: Kind) -> NamedTensors:
        batch: dict[str, DTensor] = {}
        for name, tensor in self._named(kind):
            # Offloaded pieces lie where NCCL cannot reach.
            batch[name] = cast(DTensor, tensor.to(self.config.device))
            if sum(t.numel() for t in batch.values()) >= GATHERED_AT_ONCE:
                yield from zip(batch, full_tensors(list(batch.values())), strict=True)
                batch = {}
        yield from zip(batch, full_tensors(list(batch.values())), strict=True)

    def local_shards(self, kind: Kind) -> Iterator[Shard]:
        for name, tensor in self._named(kind):
            mesh = tensor.device_mesh
            place = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), tensor.placements, strict=True)
            cut = [f"{axis}{at}" for axis, at, placement in place if not placement.is_replicate()]
            yield Shard(name, ".".join(cut) or "full", tensor.to_local())

    def _named(self, kind: Kind) -> Iterator[tuple[str, DTensor]]:
        for name, parameter in self.model.named_parameters():
            tensor = parameter if kind == "weight" else parameter.grad
            assert isinstance(tensor, DTensor), f"{name} has no {kind}"
            yield name, cast(DTensor, tensor.detach())

    def resolved(self) -> dict[str, Any]:
        group = self.optimizer.param_groups[0]
        return {
            "model_class": type(self.model).__name__,
            "attention": self.model.config._attn_implementation,
            "mesh": {axis: self.mesh.size(i) for i, axis in enumerate(("rep", "dp", "sp", "tp"))},
            "ring": self._resolved_ring(),
            "master_dtype": str(next(self.model.parameters()).dtype),
            "compute_dtype": str(_COMPUTE.get(self.config.precision, next(self.model.parameters()).dtype)),
            "optimizer": type(self.optimizer).__name__,
            "optimizer_defaults": {k: v for k, v in group.items() if isinstance(v, (int, float, str, bool, tuple))},
            "max_grad_norm": self.config.max_grad_norm,
            "accumulation": self.config.accumulation,
        }

    def _resolved_ring(self) -> dict[str, Any] | None:
        if self.ring is None:
            return None
        compute = _COMPUTE.get(self.config.precision, next(self.model.parameters()).dtype)
        return self.ring.resolved(self.config.device, compute)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def save_ckpt(self, path: Path) -> None:
        dcp.save(self._state(), checkpoint_id=path)

    def load_ckpt(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def save_model(self, path: Path) -> None:
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=full)
        if dist.get_rank() == 0:
            # A plain copy does the writing: save_pretrained cannot follow sharded storages, and knows about ties.
            plain = type(self.model)(self.model.config)
            plain.load_state_dict(state, strict=False)
            plain.tie_weights()
            plain.save_pretrained(path)
        dist.barrier()

    def teardown(self) -> None:
        for name in ("model", "optimizer", "scheduler"):
            self.__dict__.pop(name, None)
