"""TRL's SFTTrainer and GRPOTrainer on DDP, as a user writes them: their own ``train()`` runs whole, and pauses where
the loader asks for the rows of the next step. Frozen rows stand in for the data set, frozen responses for generation.

What else is TRL's own: the collator, padding-free packing, the token count, the LM head in chunks, accumulation, the
losses, advantages and old log-probs, clipping, optimizer, schedule, checkpoints and the log that the metrics are from.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trl.trainer.grpo_trainer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import parity

BACKENDS = ("TrlSft", "TrlGrpo")
PACKAGES = ("torch", "transformers", "accelerate", "trl")
URL = "https://github.com/huggingface/trl"  # no default_zero: TRL gathers metrics where ZeRO gathers weights
HEAD: Any = sys.modules.get("trl.kernels.chunked_logprob")  # with its twin in torch, since 1.16
LOSSES = {  # loss_type by loss_mode and loss_agg_mode
    ("vanilla", "token-mean"): "dapo",
    ("vanilla", "seq-mean-token-mean"): "grpo",
    ("vanilla", "seq-mean-token-sum-norm"): "dr_grpo",
    ("gspo", "token-mean"): "dapo",
    ("gspo", "seq-mean-token-mean"): "grpo",
    ("cispo", "token-mean"): "cispo",
}


class Paused:
    """Is mixed into a trainer. ``observe`` is called after each backward pass, before clipping."""

    def get_train_dataloader(self: Any) -> Any:
        return self.batches()  # without a length; the step count is max_steps

    def batches(self: Any) -> Iterator[Any]:
        while True:
            for examples in self.loop.pause():
                yield self.data_collator(examples)

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if self.accelerator.sync_gradients:  # the last micro-batch: DDP has reduced, the Trainer clips next
            self.on_gradients("policy")
        self.token_count = num_items_in_batch
        return loss


class Trl:
    """Holds what both trainers share."""

    fresh_ranks = True  # Accelerate keeps its state in the process
    preload = ("torch", "transformers", "trl.trainer.sft_trainer", "trl.trainer.grpo_trainer", "datasets")
    trainer: Any

    @classmethod
    def supports(cls, scenario: parity.Scenario, layout: parity.Layout) -> parity.Support:
        if layout != parity.Layout(dp=layout.dp):
            return parity.Unsupported(f"this adapter runs TRL on plain DDP; use dp{layout.world_size}")
        if scenario.steps > scenario.schedule.total_steps:
            return parity.Unsupported(
                "train() ends with its schedule; use at least as many schedule.total_steps as steps"
            )
        if scenario.optimizer.frozen or scenario.lora or scenario.router_z_loss or scenario.precision == "fp16":
            return parity.Unsupported("this adapter has no frozen parameters, LoRA, z-loss or fp16; use exact or bf16")
        if not hasattr(HEAD, "_TRITON_AVAILABLE") and (scenario.precision == "exact" or not torch.cuda.is_available()):
            return parity.Unsupported(
                "TRL 1.15 has the loss as a Triton kernel alone, in float32 and on GPUs; use 1.16, or bf16 on a GPU"
            )
        return parity.Supported()

    def config(self, scenario: parity.Scenario, layout: parity.Layout, device: str) -> dict[str, Any]:
        """Returns the options that both trainers share, as a user of TRL writes them."""
        o, s, k = scenario.optimizer, scenario.schedule, scenario.accumulation
        adamw = {"adam_beta1": o.betas[0], "adam_beta2": o.betas[1], "adam_epsilon": o.eps}
        name = s.name.replace("constant", "constant_with_warmup")
        minimum = {"lr_scheduler_kwargs": {"min_lr_rate": s.min_factor}} if s.min_factor else {}
        return {
            **({"optim": "sgd", "optim_args": f"momentum={o.momentum}"} if o.name == "sgd" else adamw),
            **{"learning_rate": o.lr, "weight_decay": o.weight_decay, "max_grad_norm": o.max_grad_norm or 0.0},
            **{
                "lr_scheduler_type": "cosine_with_min_lr" if minimum else name,
                "warmup_steps": s.warmup_steps,
                **minimum,
            },
            **{"max_steps": s.total_steps, "ignore_data_skip": True},  # the suite gives the rows after a resume
            **{"gradient_accumulation_steps": k, "bf16": scenario.precision == "bf16", "use_cpu": device == "cpu"},
            **{"per_device_train_batch_size": scenario.data.rows // (layout.dp * k)},
            **{"logging_steps": 1, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"},
            **{"output_dir": ".", "gradient_checkpointing": False},  # on by default
        }

    def load_model(self, folder: Path, scenario: parity.Scenario) -> Any:
        """Loads master weights: in float64 in the exact tier, else in float32."""
        if scenario.precision == "exact":  # the Triton kernel, for GPUs, computes in float32; its twin in torch not
            HEAD._TRITON_AVAILABLE = False
        code = parity.runs_code(folder, trusted=scenario.trust_remote_code)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.get_default_dtype(), trust_remote_code=code)

    def start(self, trainer: Any, resume: str | None = None) -> dict[str, Any]:
        """Runs ``train()`` until it asks for rows."""
        self.trainer = trainer
        # The last step of all ends train(), where the others ask for more rows.
        trainer.loop = parity.Paused(lambda pause: pause(trainer.train(resume_from_checkpoint=resume)))
        trainer.loop.resume()
        return {"optimizer": repr(trainer.optimizer), "attention": trainer.model.config._attn_implementation}

    def step(self, micro_batches: list[Any], on_gradients: Callable[[str], None]) -> dict[str, float]:
        """Runs ``train()`` until it asks for the rows of the step after this one; returns what it has logged."""
        self.trainer.on_gradients, self.trainer.seen = on_gradients, []
        self.trainer.loop.resume(micro_batches)
        log = next(line for line in reversed(self.trainer.state.log_history) if "loss" in line)
        return {"loss": log["loss"], "grad_norm": log["grad_norm"], "lr": log["learning_rate"]}

    def named_tensors(self, kind: parity.TensorKind, model: str) -> Iterator[tuple[str, torch.Tensor]]:
        role = self.trainer.ref_model if model == "reference" else self.trainer.model
        for name, parameter in role.named_parameters():
            yield name.removeprefix("module."), (parameter if kind == "weight" else parameter.grad).detach()

    def local_shards(self, kind: parity.TensorKind, model: str) -> Iterator[parity.Shard]:
        return parity.shards(self.named_tensors(kind, model))

    def save(self, path: Path) -> None:
        self.trainer.args.output_dir = str(path)
        self.trainer._save_checkpoint(self.trainer.model, None)

    def load(self, path: Path) -> None:
        self.trainer.loop.close()
        self.start(self.trainer, str(next(path.glob("checkpoint-*"))))

    def export(self, path: Path, model: str) -> None:
        self.trainer.save_model(str(path))

    def teardown(self) -> None:
        self.trainer.loop.close()
        del self.trainer


class ObservedSft(Paused, SFTTrainer):  # type: ignore[misc]
    pass


class TrlSft(Trl):
    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name="trl-sft", packages=PACKAGES, url=URL)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        args = SFTConfig(
            **self.config(scenario, layout, device),
            packing=scenario.data.packed,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},  # the suite's rows have tokens and labels
        )
        self.packed, self.dp, self.accumulation = scenario.data.packed, layout.dp, scenario.accumulation
        trainer = ObservedSft(
            self.load_model(folder := weights["policy"], scenario),
            args,
            train_dataset=Dataset.from_list([{"input_ids": [1, 2], "labels": [-100, 2]}]),  # only looked at
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        trainer.model.register_forward_hook(lambda module, inputs, output: trainer.seen.append(output))
        return self.start(trainer)

    def example(self, row: parity.Row) -> dict[str, list[int]]:
        """Returns a row as TRL's packing leaves it."""
        flat = parity.flatten([row])
        lengths = {"seq_lengths": [len(document.tokens) for document in row.documents]} if self.packed else {}
        return {"input_ids": flat.tokens[0].tolist(), "labels": flat.labels[0].tolist(), **lengths}

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        own = batch.micro_batches(dp_rank=dist.get_rank(), dp_size=self.dp, accumulation=self.accumulation)
        values = self.step([[self.example(row) for row in rows] for rows in own], on_gradients)
        logprobs: dict[int, torch.Tensor] = {}
        for rows, output in zip(own, self.trainer.seen, strict=True):
            logprobs |= parity.by_row(output.log_probs.detach()[output.label_mask], rows)
        values["token_count"] = int(self.trainer.token_count)
        return parity.StepMetrics(values=values, rows={"logprob": logprobs})


class ObservedGrpo(Paused, GRPOTrainer):  # type: ignore[misc]
    """Keeps the inputs of each loss, with the log-probs and entropies that TRL has computed for it."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self.computed = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.computed

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        logprobs, entropies, *_ = self.computed
        self.seen.append((inputs, logprobs.detach(), entropies.detach()))
        return loss


class TrlGrpo(Trl):
    objectives = ("grpo",)
    conventions = (
        parity.AdvantageEpsilon(value=1e-4),
        parity.GenerationDenominator(),
        parity.EntropyByMicroBatch(),
    )

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name="trl-grpo", packages=PACKAGES, url=URL)

    @classmethod
    def supports(cls, scenario: parity.Scenario, layout: parity.Layout) -> parity.Support:
        o: Any = scenario.objective
        reasons = {
            "GRPOTrainer has rows of one response; use data.packed = false": scenario.data.packed,
            "GRPOTrainer has the advantages of GRPO; TRL's RLOO is another trainer, with other ratios": (
                o.adv_estimator != "grpo"
            ),
            "GRPOTrainer has k3 in the loss, and no KL in rewards": o.kl_coef or o.kl_loss_type != "low_var_kl",
            "GRPOTrainer takes log-probs of the sampler with vLLM only": (
                not o.recompute_old_logprobs or o.rollout_is_threshold
            ),
            f"GRPOTrainer has no {o.loss_agg_mode} with {o.loss_mode}": (o.loss_mode, o.loss_agg_mode) not in LOSSES,
            "GRPOTrainer bounds ratios of CISPO from above only; use clip_ratio_low = 1.0": (
                o.loss_mode == "cispo" and o.clip_ratio_low < 1
            ),
        }
        return next(
            (parity.Unsupported(why) for why, is_so in reasons.items() if is_so), super().supports(scenario, layout)
        )

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        o: Any = scenario.objective
        self.dp, self.accumulation, folder = layout.dp, scenario.accumulation, weights["policy"]
        args = GRPOConfig(
            **self.config(scenario, layout, device),
            **({"max_completion_length": int(o.loss_scale_factor)} if o.loss_scale_factor else {}),  # dr_grpo's divisor
            steps_per_generation=o.mini_batches * scenario.accumulation,
            num_iterations=o.ppo_epochs,
            num_generations=4,
            temperature=o.temperature,
            loss_type=LOSSES[o.loss_mode, o.loss_agg_mode],
            importance_sampling_level="sequence" if o.loss_mode == "gspo" else "token",
            epsilon=o.clip_ratio_low,
            epsilon_high=o.clip_ratio_high + (o.loss_mode == "cispo"),  # there, the bound of the ratio itself
            delta=None if o.loss_mode == "cispo" else o.clip_ratio_c,
            beta=o.kl_loss_coef,
            use_bias_correction_kl=False,  # on by default
            scale_rewards="group" if o.norm_adv_by_std_in_grpo else "none",
            entropy_coef=o.entropy_coeff,
            disable_dropout=True,
        )
        model = self.load_model(folder, scenario)
        model.config._name_or_path = str(weights.get("reference", folder))  # from where TRL loads the reference
        trainer = ObservedGrpo(
            model,
            lambda completions, reward, **_: reward,
            args,
            train_dataset=Dataset.from_list([{"prompt": ""}]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_func=self.generate,
        )
        trl.trainer.grpo_trainer.shuffle_sequence_dict = lambda samples: samples  # else by chance
        return self.start(trainer)

    def generate(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Gives the frozen responses of this rank, with their rewards."""
        documents = [row.documents[0] for rows in self.rollout for row in rows]
        starts = [document.targets.index(True) for document in documents]
        both = list(zip(documents, starts, strict=True))
        return {
            "prompt_ids": [list(document.tokens[:start]) for document, start in both],
            "completion_ids": [list(document.tokens[start:]) for document, start in both],
            "logprobs": [list(document.columns["rollout_logprob"][start:]) for document, start in both],  # type: ignore[index]
            "reward": [document.columns["reward"] for document in documents],
        }

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        deal = {"dp_rank": dist.get_rank(), "dp_size": self.dp, "accumulation": self.accumulation}
        own = batch.micro_batches(**deal)
        if batch.rollout:
            self.rollout = [rows for one in batch.rollout for rows in one.micro_batches(**deal)]
        prompts = [{"prompt": ""} for rows in self.rollout for _ in rows]
        values = self.step([prompts for _ in own], on_gradients)
        found: dict[str, dict[int, torch.Tensor]] = {}
        for rows, (inputs, logprobs, entropies) in zip(own, self.trainer.seen, strict=True):
            mask = inputs["completion_mask"].bool()
            columns = {
                "logprob": logprobs,
                "entropy": entropies,
                "old_logprob": inputs.get("old_per_token_logps", logprobs),
                "advantage": inputs["advantages"][:, None].expand(mask.shape),
                "reference.logprob": inputs.get("ref_per_token_logps"),
            }
            for key, numbers in columns.items():
                if numbers is not None:
                    found.setdefault(key, {}).update(parity.by_row(numbers[mask], rows))
        count = sum(inputs["completion_mask"].sum() for inputs, *_ in self.trainer.seen)
        values["token_count"] = int(self.trainer.accelerator.reduce(count))
        return parity.StepMetrics(values=values, rows=found)
