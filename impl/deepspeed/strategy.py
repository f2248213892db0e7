"""DeepSpeed strategy: ZeRO 0 to 3, driven through the engine as its users drive it.

Mesh axes, outermost first: ``dp``, ``sp`` (the ring), ``ulysses``, ``tp``. ZeRO cuts over all but ``tp``. DeepSpeed
averages gradients over some of these ranks; ``backward`` multiplies the loss by their number, because the trainer has
divided by the whole step's token count already, and asks for no division by the accumulation.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.utils.groups import get_tensor_model_parallel_group
from torch.distributed.device_mesh import init_device_mesh

from conformance.backend import Kind, NamedTensors, Shard
from conformance.batch import Batch, Row
from conformance.scenario import OptimizerConfig, ScheduleConfig
from impl.collate import NO_TARGET, Inputs
from impl.deepspeed import process
from impl.deepspeed.settings import engine_settings, optimizer_settings, zero_stage
from impl.deepspeed.tensors import EngineTensors, Place
from impl.deepspeed.ulysses import exchange_heads, withdraw
from impl.micro_batches import Loss, one_after_another
from impl.models import load_model
from impl.ring.attention import NAME, RingAttention, RingConfig, kind_of, register
from impl.strategy import StrategyConfig

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DeepspeedStrategy:
    """See impl.strategy.Strategy for the contract of each method."""

    engine: deepspeed.DeepSpeedEngine
    optimizer: torch.optim.Optimizer
    ring: RingAttention | None = None

    def __init__(self, config: StrategyConfig) -> None:
        self.config = config
        self.options = config.layout.options
        self.stage = zero_stage(config)
        self.settings = engine_settings(config)

    @property
    def sequence_multiple(self) -> int:
        return 1

    def setup_distributed(self) -> None:
        process.enter(self.config.device)
        layout = self.config.layout
        sizes = (layout.dp, layout.sp, layout.ulysses, layout.tp)
        kind = torch.device(self.config.device).type
        self.mesh = init_device_mesh(kind, sizes, mesh_dim_names=("dp", "sp", "ulysses", "tp"))
        self.data_rank, self.data_size = self.mesh.get_local_rank("dp"), layout.dp
        if layout.sp * layout.ulysses > 1:
            self.setup_ring_attn()

    def setup_ring_attn(self) -> None:
        register()
        layout = self.config.layout
        config = RingConfig(
            kind=kind_of(layout),
            packed=self.config.packed or layout.ulysses > 1,  # documents end to end: slices of one row are wanted
            shipped="shipped" in self.options,
            head_stride=layout.stride,
            multiple=layout.ulysses,
        )
        slices = self.mesh.get_group("ulysses") if layout.ulysses > 1 else None
        self.ring = RingAttention(self.mesh.get_group("sp"), config, slices=slices)

    def load_model(self, path: Path) -> transformers.PreTrainedModel:
        exact = self.config.precision == "exact"
        attention = NAME if self.ring else "eager" if exact else "sdpa"
        with process.cut_while_loading(self.settings) if "shardinit" in self.options else contextlib.nullcontext():
            model = load_model(path, dtype=torch.float64 if exact else torch.float32, attention=attention)
        assert all(hasattr(p, "ds_id") == ("shardinit" in self.options) for p in model.parameters())
        return model

    def prepare(
        self, model: transformers.PreTrainedModel, optimizer: OptimizerConfig, schedule: ScheduleConfig
    ) -> None:
        if "ckpt" in self.options:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # transformers' "constant" has no warm-up, whatever it is given.
        name = "constant_with_warmup" if schedule.name == "constant" else schedule.name
        own = "ownopt" in self.options
        if own:
            self.settings["optimizer"] = optimizer_settings(self.config, optimizer)
        layout = self.config.layout
        mpu = None
        if layout.ulysses > 1:
            group = self.mesh.get_group("ulysses")
            mpu = exchange_heads(model, size=layout.ulysses, tp=layout.tp, group=group)
        weights = self._starting_weights(model)
        with process.any_dtype() if self.config.precision == "exact" else contextlib.nullcontext():
            self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
                model=model,
                optimizer=None if own else self.create_optimizer(model, optimizer),
                model_parameters=self._parameter_groups(model, optimizer) if own else None,
                lr_scheduler=lambda made: transformers.get_scheduler(
                    name, made, num_warmup_steps=schedule.warmup_steps, num_training_steps=schedule.total_steps
                ),
                config=self.settings,
                mpu=mpu,
                dist_init_required=False,
            )
        if self.ring and layout.tp > 1:
            # AutoTP compares the first inputs of its ranks, pickled; a ring holds a process group, which has no pickle.
            self.engine.first_dataloader_check.remove()
        tensor_group = get_tensor_model_parallel_group() if layout.tp > 1 else None
        size = dist.get_world_size() // layout.tp
        place = Place(rank=dist.get_rank() // layout.tp, size=size, tensor_group=tensor_group)
        self.tensors = EngineTensors(self.engine, place)
        if weights:
            self.tensors.set_weights(weights)
            if self.stage == 0:
                self.forget_steps()

    def _starting_weights(self, model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
        """What has to be written over the masters that DeepSpeed makes; nothing where they are right.

        It casts the model to half precision first and copies the masters from that. As shipped they stay so, but at
        ZeRO-0 they have to be written then too: by a step with gradients of zero they have decayed.
        """
        if self.config.precision not in COMPUTE:
            return {}
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        if "shipped" not in self.options:
            return weights
        compute = COMPUTE[self.config.precision]
        return {name: w.to(compute).float() for name, w in weights.items()} if self.stage == 0 else {}

    def forget_steps(self) -> None:
        """At ZeRO-0 in half precision, the wrapper has made a step to allocate AdamW's state: undo its count."""
        self.engine.basic_optimizer.state.clear()

    def create_optimizer(self, model: transformers.PreTrainedModel, config: OptimizerConfig) -> torch.optim.Optimizer:
        groups = self._parameter_groups(model, config)
        if config.name == "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    def _parameter_groups(self, model: transformers.PreTrainedModel, config: OptimizerConfig) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        if config.name == "sgd":
            return [{"params": parameters}]
        decays = [len(getattr(p, "ds_shape", p.shape)) >= 2 for p in parameters]  # a cut one has lost its shape
        return [
            {"params": [p for p, d in zip(parameters, decays, strict=True) if d], "weight_decay": config.weight_decay},
            {"params": [p for p, d in zip(parameters, decays, strict=True) if not d], "weight_decay": 0.0},
        ]

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        return batch.micro_batches(
            dp_rank=self.data_rank, dp_size=self.data_size, accumulation=self.config.accumulation
        )

    def forward_backward(self, inputs: Sequence[Inputs], loss: Loss) -> list[torch.Tensor]:
        return one_after_another(self, inputs, loss)

    def start_micro_batch(self, index: int, count: int) -> None:
        if index:
            self.engine.step()  # counts the micro-batch before this one; the engine cleared the gradients itself

    def forward(self, inputs: Inputs) -> torch.Tensor:
        if self.ring is None:
            return self._logprobs(inputs)
        own, ring = self.ring.shard(inputs)
        rows, length = inputs.labels.shape
        return self.ring.restore(self._logprobs(own, ring=ring), ring, rows=rows, length=length)

    def _logprobs(self, inputs: Inputs, **options: Any) -> torch.Tensor:
        """Of the tokens that this rank holds, in the shape of ``inputs``."""
        logits = self.engine(input_ids=inputs.tokens, position_ids=inputs.positions, use_cache=False, **options).logits
        logp = -torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), inputs.labels.flatten(), ignore_index=NO_TARGET, reduction="none"
        )
        return logp.view(inputs.labels.shape)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss * self.gradient_scale() * self.forgotten_scale(), scale_wrt_gas=False)

    def forgotten_scale(self) -> float:
        """At ZeRO-0 in fp16, its step divides by the loss scale, but its backward forgets to multiply."""
        forgets = self.stage == 0 and self.config.precision == "fp16"
        return float(self.engine.optimizer.loss_scale) if forgets else 1.0

    def gradient_scale(self) -> int:
        """By how much the loss is to be multiplied: how many ranks DeepSpeed averages gradients over."""
        layout = self.config.layout
        data = layout.dp * layout.sp
        if layout.tp > 1:  # Ulysses without an mpu: its ranks are data ranks like others
            return data * layout.ulysses
        # The mpu has gradients summed over Ulysses, but for ZeRO-3 (docs/findings/deepspeed-ulysses-scale.md).
        corrected = self.stage == 3 and "shipped" not in self.options
        return data * layout.ulysses if corrected else data

    def finish_gradients(self) -> None:
        assert self.engine.is_gradient_accumulation_boundary()

    def optimizer_step(self) -> float:
        if self.stage > 0:
            self.engine.step()
            return float(self.engine.get_global_grad_norm())
        # docs/findings/deepspeed-zero0-norm.md: in half precision its norm has the loss scale in it, and misses what
        # is not marked; else it clips by a norm and forgets it.
        self.tensors.mark_cut_gradients()
        scale, own = getattr(self.engine.optimizer, "loss_scale", 1.0), self._own_norm()
        self.engine.step()
        reported = self.engine.get_global_grad_norm()
        return own if reported is None else float(reported) / scale

    def _own_norm(self) -> float:
        squares = [gradient.double().square().sum() for _, gradient in self.named_tensors("gradient")]
        return float(torch.stack(squares).sum().sqrt())

    def learning_rate(self) -> float:
        return float(self.engine.get_lr()[0])

    def all_reduce(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.config.device)
        dist.all_reduce(tensor, group=self.mesh.get_group("dp"))  # ranks that share rows hold the same number
        return tensor.item()

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def named_tensors(self, kind: Kind) -> NamedTensors:
        return self.tensors.named(kind)

    def named_optimizer_state(self, key: str) -> NamedTensors:
        """Full optimizer state under Hugging Face names; ``key`` as torch calls it, such as ``exp_avg``."""
        return self.tensors.optimizer_state(key)

    def local_shards(self, kind: Kind) -> Iterator[Shard]:
        return self.tensors.local(kind)

    def resolved(self) -> dict[str, Any]:
        basic = self.engine.basic_optimizer
        group = basic.param_groups[0]
        compute = next(self.engine.module.parameters()).dtype
        return {
            "model_class": type(self.engine.module).__name__,
            "attention": self.engine.module.config._attn_implementation,
            "mesh": dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)),
            "ring": self.ring.resolved(self.config.device, compute) if self.ring else None,
            "zero_stage": self.engine.zero_optimization_stage(),
            "offloads_optimizer": self.engine.zero_use_cpu_optimizer(),
            "offloads_parameters": self.stage == 3 and self.engine.zero_offload_param() is not None,
            "checkpointing": bool(self.engine.module.is_gradient_checkpointing),
            "cut_by_tensor_parallelism": self.tensors.cut_count(),
            "compute_dtype": str(compute),
            "accumulation_dtype": str(self.engine.get_data_types()[1]),
            "optimizer": type(basic).__name__,
            "optimizer_wrapper": type(self.engine.optimizer).__name__,
            "optimizer_defaults": {k: v for k, v in group.items() if isinstance(v, (int, float, str, bool, tuple))},
            "deepspeed": self.settings,
        }

    def save_ckpt(self, path: Path) -> None:
        self.engine.save_checkpoint(str(path), tag="state")

    def load_ckpt(self, path: Path) -> None:
        folder, _ = self.engine.load_checkpoint(str(path), tag="state")
        if folder is None:
            raise ValueError(f"DeepSpeed found no checkpoint in {path}; give the folder that save_ckpt got")

    def save_model(self, path: Path) -> None:
        state = {name: tensor.cpu() for name, tensor in self.named_tensors("weight")}
        if dist.get_rank() == 0:
            # A plain copy does the writing: save_pretrained knows about ties, and nothing about pieces.
            plain = type(self.engine.module)(self.engine.module.config)
            plain.load_state_dict(state, strict=False)
            plain.tie_weights()
            plain.save_pretrained(path)
        dist.barrier()

    def teardown(self) -> None:
        self.engine.destroy()
        for name in ("engine", "optimizer", "scheduler", "tensors"):
            self.__dict__.pop(name, None)
        withdraw()
        process.leave()
