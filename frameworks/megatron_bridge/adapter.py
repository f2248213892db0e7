"""NVIDIA Megatron-Bridge's ``pretrain`` with its step for GPT models, on megatron-core's DDP: the loop runs whole.

AutoBridge makes the model's configuration and converts weights; the suite's rows take the place of a data set; the loop
pauses where a step begins. TransformerEngine needs a GPU, so layers are megatron-core's local ones, which the provider
offers (``local_layer_spec``), without fused kernels.
"""

import functools
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import parity
from impl.megatron.device_placement import on_device

# They must not see the stand-in for TransformerEngine below.
for _name in ("models.gpt.gpt_layer_specs", "models.gpt.gpt_model", "optimizer", "dist_checkpointing"):
    importlib.import_module(f"megatron.core.{_name}")
with parity.on_cpu(stand_ins=("transformer_engine", "modelopt", "nvidia_resiliency_ext")):
    importlib.import_module("megatron.bridge")  # its LoRA has annotations of TransformerEngine's layers
with parity.on_cpu(stand_ins=("modelopt", "nvidia_resiliency_ext")):
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.training import checkpointing, config, gpt_step, initialize, setup, train
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.enums import AttnBackend

BACKENDS = ("MegatronBridge",)
UNFUSED = (
    *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_loss_fusion"),
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm", "attention_softmax_in_fp32"),
)


class Rows(config.DatasetProvider):  # type: ignore[misc]
    """Stands in for a data set: gives Bridge a loader of the suite's rows."""

    def __init__(self, loader: parity.Loader) -> None:
        super().__init__(dataloader_type="external", num_workers=0, pin_memory=False)
        self.loader = loader

    def build_datasets(self, context: Any) -> Any:
        return iter(self.loader), None, None


class Paces(Callback):  # type: ignore[misc]
    """Pauses the loop where a step begins, and keeps what the step before computed."""

    def __init__(self, backend: "MegatronBridge") -> None:
        self.backend = backend

    def on_train_start(self, context: Any) -> None:
        self.backend.started(context)

    def on_train_step_start(self, context: Any) -> None:
        self.backend.loop.pause()

    def on_train_step_end(self, context: Any) -> None:
        loss = context.loss_dict["lm loss"].item()
        self.backend.values |= {"loss": loss, "grad_norm": float(context.grad_norm)}


class MegatronBridge(parity.FrameworkAdapter):
    preload = ("adapter",)
    conventions = (parity.TrainedPaddingToken(), parity.GeneratorsNotSaved())  # but for those of the first rank

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        packages = ("torch", "transformers", "megatron-core", "megatron-bridge")
        url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge"
        return parity.BackendInfo(name="megatron_bridge", packages=packages, default_zero=0, url=url)

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        if layout != parity.Layout(dp=layout.dp):
            return f"this adapter runs megatron-core's DDP; use dp{layout.world_size}"
        if scenario.data.packed:
            return "packed rows need TransformerEngine's attention; use packed = false"
        if scenario.precision not in ("exact", "fp32"):
            return "half precision without TransformerEngine is not its users'; use exact or fp32"
        if scenario.optimizer.frozen or scenario.lora or scenario.balances_routers:
            return "this adapter has no frozen parameters, LoRA and z-loss"
        return ""

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        o, s, data, k = scenario.optimizer, scenario.schedule, scenario.data, scenario.accumulation
        self.scenario, self.layout, self.values, self.rows = scenario, layout, {}, parity.Loader()
        self.stack.enter_context(on_device(device, exact=scenario.precision == "exact"))
        if device == "cpu":
            self.stack.enter_context(torch.compiler.set_stance("force_eager"))
        folder, dtype = weights["policy"], torch.get_default_dtype()
        code = parity.runs_code(folder, trusted=scenario.trust_remote_code)
        self.bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=code)
        model = self.bridge.to_megatron_provider()
        hf = json.loads((folder / "config.json").read_text())
        model.rotary_base = hf["rope_parameters"]["rope_theta"]  # Bridge reads the name of transformers 4
        model.transformer_layer_spec, model.attention_backend = local_layer_spec, AttnBackend.local
        model.params_dtype = model.pipeline_dtype = dtype
        model.bf16 = model.fp16 = False
        model.seq_length, model.use_cpu_initialization, model.calculate_per_token_loss = data.max_len, True, True
        for fusion in UNFUSED:
            setattr(model, fusion, False)
        adam = {"optimizer": "adam", "adam_beta1": o.betas[0], "adam_beta2": o.betas[1], "adam_eps": o.eps}
        sgd = {"optimizer": "sgd", "sgd_momentum": o.momentum}
        self.container = config.ConfigContainer(
            model=model, dataset=Rows(self.rows),
            train=config.TrainingConfig(
                micro_batch_size=data.rows // (layout.dp * k), global_batch_size=data.rows, train_iters=10**6,
                eval_interval=10**7, eval_iters=0,
            ),
            optimizer=config.OptimizerConfig(
                lr=o.lr, min_lr=o.lr * s.min_factor, weight_decay=o.weight_decay, clip_grad=o.max_grad_norm or 0.0,
                params_dtype=dtype, bf16=False, fp16=False, use_distributed_optimizer=False,
                **(adam if o.name == "adamw" else sgd),
            ),
            scheduler=config.SchedulerConfig(
                lr_decay_style=s.name, lr_decay_iters=s.total_steps, lr_warmup_iters=s.warmup_steps,
                start_weight_decay=o.weight_decay, end_weight_decay=o.weight_decay,
            ),
            ddp=config.DistributedDataParallelConfig(
                use_distributed_optimizer=False, grad_reduce_in_fp32=False, overlap_grad_reduce=False
            ),
            dist=config.DistributedInitConfig(distributed_backend="gloo" if device == "cpu" else "nccl"),
            logger=config.LoggerConfig(log_interval=10**7), checkpoint=config.CheckpointConfig(save=None),
            tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=hf["vocab_size"] - 1),
        )  # fmt: skip
        allowed = functools.partial(setup.initialize_megatron, allow_no_cuda=device == "cpu")
        self.patch(setup, "initialize_megatron", allowed)
        self.patch(initialize, "compile_helpers", lambda: None)  # of Megatron's own data sets
        # modelopt's, which do nothing to a model that is neither quantised nor distilled
        self.patch(train, "get_tensor_shapes_adjust_fn_for_distillation", lambda *_, **__: None)
        for name in ("save_sharded_modelopt_state", "restore_modelopt_state"):
            self.patch(checkpointing, name, lambda *_: None)
        # megatron-core leaves groups in variables, and one in the cache of a method.
        self.stack.enter_context(mock.patch.dict(vars(parallel_state)))
        self.stack.callback(RotaryEmbedding.forward.cache_clear)
        self.start()
        return {"model": repr(self.model), "optimizer": repr(self.optimizer), "config": repr(self.container.optimizer)}

    def start(self) -> None:
        """Runs ``pretrain`` up to its first step."""
        self.loop = parity.Paused(lambda pause: pretrain(self.container, self.forward_step, callbacks=[Paces(self)]))
        self.stack.callback(initialize.destroy_global_state)
        self.stack.callback(self.loop.close)
        self.loop.resume()

    def started(self, context: Any) -> None:
        """Keeps the objects of the loop, and shows gradients where megatron-core has reduced and divided them."""
        self.state, self.chunks, self.optimizer = context.state, context.model, context.optimizer
        self.scheduler, (self.model,) = context.scheduler, context.model
        settings = self.container.model
        finalize = settings.finalize_model_grads_func

        def finalized(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
            finalize(model, num_tokens, **kwargs)
            self.values = {"token_count": float(num_tokens), "lr": self.optimizer.param_groups[0]["lr"]}
            self.on_gradients("policy")

        settings.finalize_model_grads_func = finalized

    def forward_step(self, state: GlobalState, data_iterator: Any, model: Any) -> Any:
        """Runs Bridge's forward step, and keeps log-probs: its model returns the loss of each token."""
        losses, finish = gpt_step.forward_step(state, data_iterator, model)
        self.seen.append(-losses.detach())
        return losses, finish

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        self.on_gradients, self.seen = on_gradients, []
        parts = self.own(batch)
        self.rows.waiting = [self.collated(rows) for rows in parts]
        masks = [one["loss_mask"].bool() for one in self.rows.waiting]
        self.loop.resume()
        rows: dict[int, torch.Tensor] = {}
        for part, losses, mask in zip(parts, self.seen, masks, strict=True):
            rows |= parity.by_row(losses[mask], part)
        return parity.StepMetrics(values=self.values, rows={"logprob": rows})

    def collated(self, rows: tuple[parity.Row, ...]) -> dict[str, torch.Tensor]:
        """Returns a micro-batch as Bridge's data sets give it: padded at the end, labels shifted."""
        length = max(row.length for row in rows)
        tokens = torch.zeros(len(rows), length, dtype=torch.long)
        labels, mask = torch.zeros_like(tokens), torch.zeros(len(rows), length)
        for i, (d,) in enumerate(row.documents for row in rows):
            n = len(d.tokens)
            tokens[i, :n], labels[i, : n - 1] = torch.tensor(d.tokens), torch.tensor(d.tokens[1:])
            mask[i, : n - 1] = torch.tensor(d.targets[1:])
        positions = torch.arange(length).expand(len(rows), -1)
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}

    def tensors(self, kind: parity.TensorKind, model: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors by Bridge's own mapping of names, which converts the weights: gradients take their place."""
        weights = {p: p.data for p in self.model.parameters()}
        for p in weights if kind == "gradient" else ():
            p.data = p.main_grad
        exported = self.bridge.export_hf_weights(self.chunks, cpu=False, show_progress=False)
        found = [(name, tensor.detach()) for name, tensor in exported]  # some are the parameters themselves
        for p, data in weights.items():
            p.data = data
        yield from found

    def save(self, path: Path) -> None:
        self.container.checkpoint.save = str(path)
        checkpointing.save_checkpoint(self.state, self.chunks, self.optimizer, self.scheduler, 0, {})

    def load(self, path: Path) -> None:
        self.loop.close()
        initialize.destroy_global_state()
        self.container.checkpoint.load = str(path)
        self.start()
