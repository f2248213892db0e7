"""Runs verl's TrainingWorker on its FSDP2 engine for SFT: ``train_batch`` with ``sft_loss``.

verl builds, shards, accumulates, reduces, clips, steps, schedules and writes checkpoints. This module fills in verl's
configuration, turns rows into verl's batches, and reads what verl computed.
"""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import parity

os.environ.setdefault("VERL_DISABLE_FLASH_ATTN_CE", "1")  # log-probs by torch: flash-attention needs a GPU
with parity.on_cpu(stand_ins=("vllm",)):
    import verl.utils.model
    from transformers import AutoModelForTokenClassification
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import sft_loss


def value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    """Loads a critic as verl does, but with the configured attention and without a bias in the value head.

    verl asks for flash-attention whatever the configuration says. Its head is transformers' classifier, whose bias the
    value models of the suite do not have.
    """
    model = AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )
    model.score.bias = None
    return model


class VerlSft(parity.FrameworkAdapter):
    objectives: tuple[str, ...] = ("sft",)
    gpu_backend = "cpu:gloo,cuda:nccl"  # as verl's workers

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        packages = ("torch", "transformers", "tensordict", "verl")
        return parity.BackendInfo(
            name="verl", packages=packages, url="https://github.com/volcengine/verl", default_zero=3
        )

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        if layout != parity.Layout(dp=layout.dp, rep=layout.rep) or 1 < layout.dp == layout.rep:
            return f"the FSDP2 engine shards over data ranks; use dp{layout.world_size}"
        if scenario.schedule.name == "linear":
            return "verl's FSDP engine has constant and cosine schedules; use one of these"
        if scenario.precision == "fp16":
            return "verl's ShardedGradScaler begins at 65536 and is not set here; use bf16"
        if scenario.precision == "bf16" and not torch.cuda.is_available():
            return (
                "verl leaves log-softmax and sums to autocast, which computes them in float32 on a GPU and in bf16 "
                "on a CPU; run bf16 on GPUs"
            )
        if scenario.precision not in ("exact", "fp32", "bf16"):
            return f"the engine has no {scenario.precision}; use exact, fp32 or bf16"
        if scenario.optimizer.frozen or scenario.lora or scenario.balances_routers:
            return "frozen parameters, LoRA and z-losses are not part of this adapter"
        return ""

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        self.scenario, self.layout = scenario, layout
        self.stack.enter_context(parity.on_cpu())
        self.stack.enter_context(parity.float64_for(PrecisionType, "to_dtype"))
        verl.utils.model.load_valuehead_model = value_model
        self.rows = scenario.data.rows // (layout.dp * scenario.accumulation)  # of a micro-batch on a rank
        self.seen: dict[str, list[Any]] = {}
        self.rates: dict[str, float] = {}
        self.workers = {role: self._worker(role, folder, layout) for role, folder in weights.items()}
        for role, loss in self.losses().items():
            self._observe(role, loss)
        engine = self.workers["policy"].engine
        return {"optimizer": repr(engine.optimizer), "module": type(engine.module).__name__}

    def _worker(self, role: str, folder: Path, layout: parity.Layout) -> TrainingWorker:
        s, o, exact = self.scenario, self.scenario.optimizer, self.scenario.precision == "exact"
        trained, adamw = role != "reference", o.name == "adamw"
        dtypes = {"param_dtype": "bf16" if s.precision == "bf16" else "fp32", "reduce_dtype": "fp32"}
        override = {"attn_implementation": "sdpa"} | ({"attention_dropout": 0.0} if s.objective.disable_dropout else {})
        optimizer = FSDPOptimizerConfig(
            **{"optimizer": "AdamW" if adamw else "SGD", "lr": o.lr, "weight_decay": o.weight_decay, "betas": o.betas},
            override_optimizer_config={"eps": o.eps} if adamw else {"momentum": o.momentum},
            clip_grad=o.max_grad_norm or 1e30,  # verl always clips
            **{"lr_scheduler_type": s.schedule.name, "min_lr_ratio": s.schedule.min_factor},
            **{"lr_warmup_steps": s.schedule.warmup_steps, "total_training_steps": s.schedule.total_steps},
        )
        engine = FSDPEngineConfig(
            **{"strategy": "fsdp2", "fsdp_size": layout.dp // layout.rep, "forward_only": not trained},
            **{"mixed_precision": dtypes | {"buffer_dtype": "fp32"}, "use_torch_compile": False},
            **{
                "use_dynamic_bsz": False,
                "micro_batch_size_per_gpu": self.rows,
                "infer_micro_batch_size_per_gpu": self.rows,
            },
        )
        model = HFModelConfig(
            **{"path": str(folder), "load_tokenizer": False, "override_config": override},
            trust_remote_code=parity.runs_code(folder, trusted=s.trust_remote_code),
            enable_gradient_checkpointing=False,  # verl's default recomputes; the layout asks for no recomputation
        )
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="value_model" if role == "critic" else "language_model",
                **{"model_config": model, "engine_config": engine, "checkpoint_config": CheckpointConfig()},
                optimizer_config=optimizer if trained else None,
            )
        )
        worker.reset()
        if exact:
            worker.engine._autocast_dtype = torch.float32  # verl's word for: no autocast
        return worker

    def losses(self) -> dict[str, Callable[..., Any]]:
        """Returns verl's loss of each trained role."""
        return {"policy": functools.partial(sft_loss, config=None)}

    def _observe(self, role: str, loss: Callable[..., Any]) -> None:
        """Keeps the outputs of each micro-batch, and shows the gradients and the rate of each optimizer step."""
        engine = self.workers[role].engine
        step = engine.optimizer_step

        def observed_loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            outputs = {key: tensor.detach() for key, tensor in model_output.items()}
            self.seen[role].append((outputs, data))
            return loss(model_output=model_output, data=data, dp_group=dp_group)

        def observed_step() -> Any:
            self.rates[role] = engine.optimizer.param_groups[0]["lr"]
            self.on_gradients(role)
            return step()

        self.workers[role].set_loss_fn(observed_loss)
        engine.optimizer_step = observed_step

    def own_rows(self, batch: parity.Batch) -> list[parity.Row]:
        """Returns the rows of this rank, micro-batch by micro-batch."""
        return [row for part in self.own(batch) for row in part]

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        self.on_gradients, self.seen = on_gradients, {"policy": []}
        rows = self.own_rows(batch)
        flat = [parity.flatten([row]) for row in rows]  # a row is one sample for verl, whether packed or not
        ragged = lambda parts: torch.nested.as_nested_tensor([part[0] for part in parts], layout=torch.jagged)  # noqa: E731
        tensors = {
            "input_ids": ragged([f.tokens for f in flat]),
            "position_ids": ragged([f.positions for f in flat]),
            "loss_mask": ragged([(f.labels >= 0).long() for f in flat]),
        }
        data = tu.get_tensordict(
            tensors, {"temperature": 1.0, "global_batch_size": len(batch.rows), "update_lr_scheduler": True}
        )
        metrics = tu.get(self.workers["policy"].train_batch(data), "metrics")
        samples = [sample for outputs, _ in self.seen["policy"] for sample in outputs["log_probs"].unbind()]
        logprobs = {
            row.index: sample[:-1][f.labels[0, 1:].to(sample.device) >= 0]
            for row, sample, f in zip(rows, samples, flat, strict=True)
        }
        return parity.StepMetrics(values=self.common("policy", metrics), rows={"logprob": logprobs})

    def common(self, role: str, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Returns verl's loss and norm, the rate, and the tokens that verl divided by."""
        prefix = "" if role == "policy" else f"{role}."
        values = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "lr": self.rates[role]}
        if role == "policy":
            values["token_count"] = self.seen[role][0][1]["batch_num_tokens"]
        return {f"{prefix}{key}": float(value) for key, value in values.items()}

    def tensors(self, kind: parity.TensorKind, model: str) -> parity.NamedTensors:
        for name, parameter in self.workers[model].engine.module.named_parameters():
            yield name, parameter if kind == "weight" else parameter.grad

    def save(self, path: Path) -> None:
        for role in self.losses():
            self.workers[role].save_checkpoint(str(path / role))

    def load(self, path: Path) -> None:
        for role in self.losses():
            self.workers[role].load_checkpoint(str(path / role))
