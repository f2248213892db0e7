"""NeMo Automodel's SFT recipe with its own Llama and Qwen3 models on FSDP2: ``run_train_validation_loop`` runs whole.

The recipe builds model, optimizer, schedule and checkpointer, packs, accumulates, clips, logs. The suite's rows take
the place of its data set, and the loop pauses where it has logged a step.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import parity

with parity.on_cpu():
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.components.datasets import utils as collators
    from nemo_automodel.components.datasets.llm.neat_packing import _build_packed_sample
    from nemo_automodel.recipes.llm import train_ft

BACKENDS = ("Automodel",)
# Its default norm is an operator of its own in float32, inside of which the exact tier cannot widen to float64.
BACKEND = "nemo_automodel.components.models.common.utils.BackendConfig"


class Rows:
    """Stands in for the recipe's loader: its micro-batches are those of the steps, without an end."""

    dataset_builds_on_all_ranks, seed = True, 0

    def build(self, *, packing_contract: Any, **_: Any) -> "Rows":
        self.packing, self.waiting = packing_contract, []
        return self

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.waiting.pop(0)


class Automodel:
    fresh_ranks = True
    preload = ("adapter",)
    conventions = (parity.DecaysAll(),)

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(
            name="nemo_automodel", packages=("torch", "transformers", "nemo_automodel"), default_zero=3,
            url="https://github.com/NVIDIA-NeMo/Automodel",
        )  # fmt: skip

    @classmethod
    def supports(cls, scenario: parity.Scenario, layout: parity.Layout) -> parity.Support:
        if layout != parity.Layout(dp=layout.dp, rep=layout.rep):
            return parity.Unsupported(f"this adapter runs FSDP2 and hybrid sharding; use dp{layout.world_size}")
        if scenario.optimizer.frozen or scenario.lora or scenario.balances_routers or scenario.precision == "fp16":
            return parity.Unsupported("this adapter has no frozen parameters, LoRA, z-loss or fp16; use exact or bf16")
        return parity.Supported()

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        o, s, data, k = scenario.optimizer, scenario.schedule, scenario.data, scenario.accumulation
        self.scenario, self.deal = scenario, {"dp_rank": dist.get_rank(), "dp_size": layout.dp, "accumulation": k}
        self.stack, dtype = contextlib.ExitStack(), str(torch.get_default_dtype())
        self.stack.enter_context(parity.on_cpu())
        if device == "cpu":
            self.stack.enter_context(torch.compiler.set_stance("force_eager"))
        own = self.stack.enter_context(tempfile.TemporaryDirectory())  # it logs there
        compute = "torch.bfloat16" if scenario.precision == "bf16" else dtype
        norm = "torch" if scenario.precision == "exact" else "torch_fp32"
        adamw = {"_target_": "torch.optim.AdamW", "betas": list(o.betas), "eps": o.eps}
        sgd = {"_target_": "torch.optim.SGD", "momentum": o.momentum}
        recipe = train_ft.TrainFinetuneRecipeForNextTokenPrediction(ConfigNode({
            "dist_env": {"backend": "gloo" if device == "cpu" else "nccl"},
            "model": {
                "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained", "torch_dtype": dtype,
                "pretrained_model_name_or_path": str(weights["policy"]), "attn_implementation": "sdpa",
                "backend": {"_target_": BACKEND, "rms_norm": norm},
                "trust_remote_code": parity.runs_code(weights["policy"], trusted=scenario.trust_remote_code),
            },
            "distributed": {
                "strategy": "fsdp2", "dp_size": layout.dp, "dp_replicate_size": layout.rep,
                "mp_policy": {"param_dtype": compute, "reduce_dtype": dtype},
            },
            "loss_fn": {
                "_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
                "fp32_upcast": scenario.precision != "exact",
            },
            "optimizer": {"lr": o.lr, "weight_decay": o.weight_decay} | (adamw if o.name == "adamw" else sgd),
            "lr_scheduler": {
                "lr_decay_style": s.name, "lr_warmup_steps": s.warmup_steps, "lr_decay_steps": s.total_steps,
                "init_lr": 0.0, "min_lr": o.lr * s.min_factor,
            },
            "step_scheduler": {
                "global_batch_size": data.rows, "local_batch_size": data.rows // (layout.dp * k), "max_steps": 10**9,
                "ckpt_every_steps": 10**9, "preemption_signal": None,
            },
            "packed_sequence": {"packed_sequence_size": data.max_len * data.packed, "packing_strategy": "neat"},
            "clip_grad_norm": {"max_norm": o.max_grad_norm or 1e30},  # without a number it clips at 1
            "checkpoint": {"enabled": True, "checkpoint_dir": own, "save_consolidated": False},
            "dataset": {"tokenizer": None},
        }))  # fmt: skip
        self.rows = recipe.cfg.__dict__["dataloader"] = Rows()
        clip, log = train_ft.scale_grads_and_clip_grad_norm, recipe.log_train_metrics

        def shown(*args: Any, **kwargs: Any) -> Any:
            self.on_gradients("policy")
            self.rate = recipe.optimizer[0].param_groups[0]["lr"]  # what it logs is that of the next step
            return clip(*args, **kwargs)

        def logged(sample: Any) -> None:
            log(sample)
            self.loop.pause(sample.metrics)

        self.stack.enter_context(mock.patch.object(train_ft, "scale_grads_and_clip_grad_norm", shown))
        recipe.setup()
        recipe.log_train_metrics = logged
        recipe.loss_fn.register_forward_pre_hook(self.keep_logprobs, with_kwargs=True)
        self.recipe, (self.model,) = recipe, recipe.model_parts
        self.loop = parity.Paused(lambda pause: recipe.run_train_validation_loop())
        self.stack.callback(self.loop.close)
        return {"optimizer": repr(recipe.optimizer), "model": repr(self.model), "loss": repr(recipe.loss_fn)}

    def keep_logprobs(self, _: Any, args: Any, kwargs: Any) -> None:
        """Keeps log-probs of the logits that come to Automodel's loss."""
        flat = torch.log_softmax(kwargs["logits"].detach().to(torch.get_default_dtype()), -1)
        labels = kwargs["labels"]
        self.seen.append(flat.gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != -100])

    def collated(self, rows: tuple[parity.Row, ...]) -> dict[str, torch.Tensor]:
        """Returns Automodel's batch of rows, whose labels are shifted by the data set."""
        samples = [
            [
                {
                    "input_ids": list(d.tokens),
                    "labels": [t if p else -100 for t, p in zip(d.tokens[1:], d.targets[1:], strict=True)] + [-100],
                }
                for d in row.documents
            ]
            for row in rows
        ]
        if not self.scenario.data.packed:
            whole = [sample | {"attention_mask": [1] * len(sample["input_ids"])} for (sample,) in samples]
            return collators.default_collater(whole)
        length = self.scenario.data.max_len
        return collators.neat_packed_collater(
            [_build_packed_sample(documents, length, 0) for documents in samples], packing=self.rows.packing
        )

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        self.on_gradients, self.seen = on_gradients, []
        parts = batch.micro_batches(**self.deal)
        self.rows.waiting = [self.collated(rows) for rows in parts]
        logged = self.loop.resume()
        values = {"loss": logged["loss"], "grad_norm": float(logged["grad_norm"]), "lr": self.rate}
        rows: dict[int, torch.Tensor] = {}
        for part, numbers in zip(parts, self.seen, strict=True):
            rows |= parity.by_row(numbers, part)
        return parity.StepMetrics(values=values | {"token_count": logged["num_label_tokens"]}, rows={"logprob": rows})

    def tensors(self, kind: parity.TensorKind) -> parity.NamedTensors:
        for name, parameter in self.model.named_parameters():
            yield name, (parameter if kind == "weight" else parameter.grad).detach()

    def named_tensors(self, kind: parity.TensorKind, model: str) -> parity.NamedTensors:
        return parity.whole_tensors(self.tensors(kind))

    def local_shards(self, kind: parity.TensorKind, model: str) -> Iterator[parity.Shard]:
        return parity.shards(self.tensors(kind))

    def save(self, path: Path) -> None:
        self.recipe.checkpointer.config.checkpoint_dir = str(path)
        self.recipe.save_checkpoint(0, self.recipe.step_scheduler.step, 0.0)

    def load(self, path: Path) -> None:
        (checkpoint,) = path.glob("epoch_*")
        self.recipe.load_checkpoint(str(checkpoint))

    def teardown(self) -> None:
        self.stack.close()
        self.__dict__.clear()
