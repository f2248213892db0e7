"""Hugging Face Accelerate with its FSDP2 plugin: the loop of its guide on gradient accumulation with a token mean.

Accelerate's own are the wrapping, the accumulation, the clipping, the schedule that counts ranks, and ``save_state``.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator, state, utils
from packaging.version import Version
from transformers import AutoModelForCausalLM, get_scheduler

import parity
from conformance.spec.conventions import model_config

BACKENDS = ("Fsdp2",)


class Fsdp2(parity.FrameworkAdapter):
    expected = (
        parity.ExpectedDifference(
            reason="the bf16 policy rounds the loss that the model returns to bf16",
            link="docs/findings/accelerate-bf16-loss.md",
            unmodelled=lambda scenario, layout: parity.Unmodelled(stage="loss", tensors=("loss",)),
            precisions=("bf16",),
        ),
    )
    preload = ("torch", "transformers", "accelerate")

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(
            name="accelerate", packages=cls.preload, url="https://github.com/huggingface/accelerate", default_zero=3
        )

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        if layout != parity.Layout(dp=layout.dp, rep=layout.rep):
            return f"this adapter runs FSDP2 with dp and rep only; use dp{layout.world_size}"
        if scenario.optimizer.frozen or scenario.lora or scenario.balances_routers or scenario.precision == "fp16":
            return "this adapter has no frozen parameters, LoRA, z-loss or fp16; use exact or bf16"
        old = Version(accelerate.__version__) < Version("1.15") and Version(torch.__version__) >= Version("2.13")
        if old and model_config(scenario).get("tie_word_embeddings"):
            return "accelerate 1.14 puts tied embeddings into two groups of FSDP2, which torch 2.13 refuses; use 1.15"
        return ""

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        o, s, folder = scenario.optimizer, scenario.schedule, weights["policy"]
        self.scenario, self.layout = scenario, layout
        code = parity.runs_code(folder, trusted=scenario.trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.get_default_dtype(), trust_remote_code=code)
        model.train()
        model.config.use_cache = False  # with a cache, transformers lets packed documents see each other
        if device == "cpu":  # there, Accelerate ignores the plugin silently, and runs DDP
            state.PartialState(cpu=True).distributed_type = utils.DistributedType.MULTI_GPU
        self.accelerator = Accelerator(
            cpu=device == "cpu",
            mixed_precision="bf16" if scenario.precision == "bf16" else "no",
            gradient_accumulation_plugin=utils.GradientAccumulationPlugin(
                num_steps=scenario.accumulation, sync_with_dataloader=False
            ),
            fsdp_plugin=utils.FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT"
            ),
            parallelism_config=utils.ParallelismConfig(
                dp_replicate_size=layout.rep, dp_shard_size=layout.dp // layout.rep
            ),
        )
        matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": o.weight_decay}
        groups = [matrices, {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
        adamw = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
        optimizer = torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum) if o.name == "sgd" else adamw
        name, ranks = s.name.replace("constant", "constant_with_warmup"), layout.dp  # it takes a step for each rank
        name, minimum = ("cosine_with_min_lr", {"min_lr_rate": s.min_factor}) if s.min_factor else (name, {})
        schedule = get_scheduler(
            name, optimizer, s.warmup_steps * ranks, s.total_steps * ranks, scheduler_specific_kwargs=minimum
        )
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        policy = self.accelerator.state.fsdp_plugin.mixed_precision_policy
        return {"model": type(self.model).__name__, "optimizer": repr(optimizer), "mixed_precision": repr(policy)}

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        it = self.accelerator
        own, clip = self.own(batch), self.scenario.optimizer.max_grad_norm
        flats = [parity.flatten(rows) for rows in own]
        items = sum(flat.labels.ne(-100).sum() for flat in flats)
        count = it.gather(torch.as_tensor(items, device=it.device)).sum().item()
        lr, total, logprobs = self.schedule.get_last_lr()[0], torch.zeros((), device=it.device), {}
        for rows, flat in zip(own, flats, strict=True):
            with it.accumulate(self.model):
                inputs = {key: tensor.to(it.device) for key, tensor in flat.as_inputs.items()}
                output = self.model(**inputs, num_items_in_batch=count)  # the model's loss: a sum divided by the count
                total += output.loss.detach()
                logprobs |= parity.by_row(parity.target_logprobs(output.logits, flat), rows)
                # As in the guide: Accelerate divides by the micro-batches, and FSDP2 by the ranks.
                it.backward(output.loss * it.gradient_accumulation_steps * it.num_processes)
                if it.sync_gradients:
                    on_gradients("policy")
                    norm = it.clip_grad_norm_(self.model.parameters(), clip or float("inf"))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        values = {"loss": it.reduce(total, "sum").item(), "grad_norm": float(parity.whole(norm)), "lr": lr}
        return parity.StepMetrics(values=values | {"token_count": count}, rows={"logprob": logprobs})

    def tensors(self, kind: parity.TensorKind, model: str) -> parity.NamedTensors:
        for name, parameter in self.accelerator.unwrap_model(self.model).named_parameters():
            yield name, parameter if kind == "weight" else parameter.grad

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))

    def export(self, path: Path, model: str) -> None:
        whole = self.accelerator.get_state_dict(self.model)
        self.accelerator.unwrap_model(self.model).save_pretrained(
            path, state_dict=whole, is_main_process=self.accelerator.is_main_process
        )

    def teardown(self) -> None:
        super().teardown()
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG"))]:
            del os.environ[name]
