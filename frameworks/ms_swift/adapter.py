"""ms-swift's Seq2SeqTrainer and GRPOTrainer on DDP: their own ``train()`` runs whole, and pauses where the loader asks
for the rows of the next step. Frozen tokens go through swift's template; frozen responses stand in for its engine.

What else is swift's own: encoding with masks, collator, padding-free packing, logits to keep, both losses of SFT (the
model's, and its own per token for rows with a loss scale: here the packed ones), accumulation, everything of GRPO but
the sampling, clipping, optimizer, schedule, checkpoints. On the command line its packing asks for flash-attention.
"""

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from swift.infer_engine.protocol import ChatCompletionResponse, ChatCompletionResponseChoice, ChatMessage, RolloutOutput
from swift.model import get_model_processor
from swift.model.model_meta import get_matched_model_types
from swift.rlhf_trainers import GRPOConfig, GRPOTrainer
from swift.template import TemplateMeta, get_template, register_template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers import AutoConfig

import parity

BACKENDS = ("SwiftSft", "SwiftGrpo")
PACKAGES = ("torch", "transformers", "accelerate", "trl", "ms-swift")
URL = "https://github.com/modelscope/ms-swift"
LOSSES = {  # loss_type by loss_mode and loss_agg_mode
    ("vanilla", "token-mean"): "dapo",
    ("vanilla", "seq-mean-token-mean"): "grpo",
    ("vanilla", "seq-mean-token-sum-norm"): "dr_grpo",
    ("gspo", "token-mean"): "dapo",
    ("gspo", "seq-mean-token-mean"): "grpo",
    ("cispo", "token-mean"): "cispo",
}
FINDING = "docs/findings/swift-divided-loss.md"
RELEASE = tuple(int(part) for part in importlib.metadata.version("ms-swift").split(".")[:2])
register_template(TemplateMeta("tokens", prefix=[], prompt=["{{QUERY}}"], chat_sep=None, suffix=[]))


class Paused:
    """Is mixed into a trainer. ``on_gradients`` is called after the last backward pass of a step, before clipping."""

    def get_train_dataloader(self: Any, skip_batches: int = 0) -> Any:
        return self.batches()  # without a length; the step count is max_steps

    def batches(self: Any) -> Iterator[Any]:
        while True:
            for examples in self.loop.pause():
                yield self.data_collator(examples)

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if self.accelerator.sync_gradients:  # the last micro-batch: DDP has reduced, the Trainer clips next
            self.on_gradients("policy")
        self.token_count, self.lr = num_items_in_batch, self.optimizer.param_groups[0]["lr"]
        return loss


class Swift:
    """Holds what both trainers share."""

    fresh_ranks = True  # Accelerate keeps its state in the process
    preload = ("torch", "transformers", "swift.trainers.seq2seq_trainer", "swift.rlhf_trainers.grpo_trainer")
    trainer: Any

    @classmethod
    def supports(cls, scenario: parity.Scenario, layout: parity.Layout) -> parity.Support:
        if layout != parity.Layout(dp=layout.dp):
            return parity.Unsupported(f"this adapter runs ms-swift on plain DDP; use dp{layout.world_size}")
        if scenario.steps > scenario.schedule.total_steps:
            return parity.Unsupported(
                "train() ends with its schedule; use at least as many schedule.total_steps as steps"
            )
        if scenario.optimizer.frozen or scenario.lora or scenario.router_z_loss or scenario.precision == "fp16":
            return parity.Unsupported("this adapter has no frozen parameters, LoRA, z-loss or fp16; use exact or bf16")
        return parity.Supported()

    def config(self, scenario: parity.Scenario, layout: parity.Layout, device: str) -> dict[str, Any]:
        """Returns the options that both trainers share."""
        o, s, k = scenario.optimizer, scenario.schedule, scenario.accumulation
        self.dp, self.accumulation = layout.dp, k
        sgd = {"optim": "sgd", "optim_args": f"momentum={o.momentum}"}
        adamw = {"adam_beta1": o.betas[0], "adam_beta2": o.betas[1], "adam_epsilon": o.eps}
        name = "cosine_with_min_lr" if s.min_factor else s.name.replace("constant", "constant_with_warmup")
        return {
            **(sgd if o.name == "sgd" else adamw),
            **{"learning_rate": o.lr, "weight_decay": o.weight_decay, "max_grad_norm": o.max_grad_norm or 0.0},
            **{"lr_scheduler_type": name, "warmup_steps": s.warmup_steps},
            **({"lr_scheduler_kwargs": {"min_lr_rate": s.min_factor}} if s.min_factor else {}),
            **{"max_steps": s.total_steps, "ignore_data_skip": True},  # the suite gives the rows after a resume
            **{"gradient_accumulation_steps": k, "bf16": scenario.precision == "bf16", "use_cpu": device == "cpu"},
            **{"per_device_train_batch_size": scenario.data.rows // (layout.dp * k), "dataloader_num_workers": 0},
            **{"logging_steps": 1, "disable_tqdm": True, "report_to": [], "save_strategy": "no"},
            **{"output_dir": ".", "check_model": False, "gradient_checkpointing": False},  # on by default
        }

    def load_model(self, folder: Path, scenario: parity.Scenario) -> tuple[Any, Any]:
        """Loads master weights, in float64 in the exact tier, else in float32, and a template that adds no tokens."""
        parity.runs_code(folder, trusted=scenario.trust_remote_code)  # swift itself always trusts
        kinds = get_matched_model_types(AutoConfig.from_pretrained(folder).architectures)
        model, processor = get_model_processor(
            str(folder), torch_dtype=torch.get_default_dtype(), model_type=kinds[0] if kinds else None
        )
        packed = scenario.data.packed
        template = get_template(processor, template_type="tokens", padding_free=packed, is_binary_loss_scale=not packed)
        template.packing = packed
        template.set_mode("train")
        return model, template

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
        return {"loss": log["loss"], "grad_norm": log["grad_norm"], "lr": self.trainer.lr}  # it logs the next rate

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
        if self.trainer.args.device.type == "cpu":  # "cpu:0", which torch.load refuses and newer transformers replace
            self.trainer.args._setup_devices = torch.device("cpu")
        self.start(self.trainer, str(next(path.glob("checkpoint-*"))))

    def export(self, path: Path, model: str) -> None:
        self.trainer.save_model(str(path))

    def teardown(self) -> None:
        self.trainer.loop.close()
        del self.trainer


class ObservedSft(Paused, Seq2SeqTrainer):  # type: ignore[misc]
    """Keeps the logits and the labels of each loss."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        self.seen.append((outputs.logits.detach(), labels))
        return loss


class SwiftSft(Swift):
    expected = (
        parity.ExpectedDifference(
            reason="a micro-batch without targets has the loss NaN, and the logged loss counts those before it again",
            link="docs/findings/swift-empty-micro-batch.md",
            unmodelled=lambda scenario, layout: parity.Unmodelled(stage="loss", tensors=("loss",)),
            **{"at_least": {"accumulation": 2}, "objectives": ("sft",), "packed": False},  # there are such, no scale
        ),
    )

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name="swift-sft", packages=PACKAGES, url=URL)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        args = Seq2SeqTrainingArguments(**self.config(scenario, layout, device), remove_unused_columns=False)
        model, self.template = self.load_model(weights["policy"], scenario)
        return self.start(ObservedSft(model, args, self.template, train_dataset=[{}]))

    def example(self, row: parity.Row) -> Any:
        """Returns a row as swift's template encodes it, and a packed one as its PackingDataset gives it."""
        encoded = []
        for document in row.documents:
            answer = {"token_ids": list(document.tokens), "loss_scale": [float(one) for one in document.targets]}
            messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": answer}]
            encoded.append(self.template.encode({"messages": messages}, return_length=True))
        return encoded if self.template.packing else encoded[0]

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        own = batch.micro_batches(dp_rank=dist.get_rank(), dp_size=self.dp, accumulation=self.accumulation)
        values = self.step([[self.example(row) for row in rows] for rows in own], on_gradients)
        logprobs: dict[int, torch.Tensor] = {}
        for rows, (logits, labels) in zip(own, self.trainer.seen, strict=True):
            at = labels[:, 1:] != -100
            every = logits[:, :-1][at].to(torch.get_default_dtype()).log_softmax(-1)
            logprobs |= parity.by_row(every.gather(-1, labels[:, 1:][at][:, None])[:, 0], rows)
        values["token_count"] = int(self.trainer.token_count)
        return parity.StepMetrics(values=values, rows={"logprob": logprobs})


def divided(scenario: parity.Scenario, by: int) -> tuple[parity.DividedLoss, ...]:
    """Returns the known defect of means over tokens, if it divides by more than 1."""
    o: Any = scenario.objective
    by = by if o.kind == "grpo" and o.loss_agg_mode == "token-mean" else 1
    return (parity.DividedLoss(by=by),) if by > 1 else ()


class ObservedGrpo(Paused, GRPOTrainer):  # type: ignore[misc]
    """Keeps the batch of each loss, with the log-probs and entropies that swift has computed for it."""

    def _engine_infer(self, infer_requests: Any, request_config: Any = None, *, use_tqdm: Any = False) -> list[Any]:
        return self.generate()

    def _log_rollout(self, samples: Any) -> None:
        """Tables of prompts and completions need prompts as text."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self.computed = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.computed

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        found = super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        self.seen.append((grpo_batch, *(one.detach() for one in self.computed)))
        return found


class SwiftGrpo(Swift):
    objectives = ("grpo",)
    conventions = (parity.AdvantageEpsilon(value=1e-4), parity.GenerationDenominator())
    expected = (
        parity.ExpectedDifference(
            reason="a mean over tokens is divided by those of all mini-batches of the rollout",
            link=FINDING,
            defects=lambda scenario, _: divided(scenario, getattr(scenario.objective, "mini_batches", 1)),
        ),
        parity.ExpectedDifference(
            reason="ms-swift before 4.6 divides a mean over tokens by the micro-batches as well",
            link=FINDING,
            defects=lambda scenario, _: divided(scenario, scenario.accumulation if RELEASE < (4, 6) else 1),
        ),
    )

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name="swift-grpo", packages=PACKAGES, url=URL)

    @classmethod
    def supports(cls, scenario: parity.Scenario, layout: parity.Layout) -> parity.Support:
        o: Any = scenario.objective
        reasons = {
            "GRPOTrainer has rows of one response; use data.packed = false": scenario.data.packed,
            "GRPOTrainer has the advantages of GRPO and RLOO; its REINFORCE++ whitens responses, not tokens": (
                o.adv_estimator not in ("grpo", "rloo")
            ),
            "GRPOTrainer has k3 in the loss; its KL in rewards is that of a whole response": (
                o.kl_coef or o.kl_loss_type != "low_var_kl"
            ),
            "GRPOTrainer has no entropy bonus; use entropy_coeff = 0": o.entropy_coeff,
            "this adapter gives no log-probs of a sampler; use recompute_old_logprobs = true": (
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
            advantage_estimator=o.adv_estimator,
            kl_in_reward=False,
            log_entropy=True,
            scale_rewards="group" if o.norm_adv_by_std_in_grpo and o.adv_estimator == "grpo" else "none",
            disable_dropout=True,
        )
        model, template = self.load_model(weights["policy"], scenario)
        template.truncation_strategy = "left"  # by default, prompts are encoded alone, and here they are empty
        reference = self.load_model(weights["reference"], scenario)[0] if "reference" in weights else None
        trainer = ObservedGrpo(
            model,
            reference and reference.requires_grad_(False).eval(),
            reward_funcs=[lambda completions, rollout_infos, **_: [one["reward"] for one in rollout_infos]],
            **{"args": args, "template": template, "train_dataset": [{}]},
        )
        trainer.generate = self.generate
        return self.start(trainer)

    def generate(self) -> list[Any]:
        """Returns the frozen responses of this rank, with their rewards."""
        found = []
        for document in (row.documents[0] for rows in self.rollout for row in rows):
            message = ChatCompletionResponseChoice(0, ChatMessage(role="assistant", content=""), "stop")
            found.append(
                RolloutOutput(
                    response=ChatCompletionResponse("frozen", [message], None),
                    response_token_ids=[list(document.tokens)],  # and the prompt, without a loss
                    response_loss_mask=[[int(target) for target in document.targets]],
                    rollout_infos={"reward": document.columns["reward"]},
                )
            )
        return found

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        deal = {"dp_rank": dist.get_rank(), "dp_size": self.dp, "accumulation": self.accumulation}
        own = batch.micro_batches(**deal)
        if batch.rollout:
            self.rollout = [rows for one in batch.rollout for rows in one.micro_batches(**deal)]
        prompts = [{"messages": [{"role": "user", "content": ""}]} for rows in self.rollout for _ in rows]
        values = self.step([prompts for _ in own], on_gradients)
        found: dict[str, dict[int, torch.Tensor]] = {}
        for rows, (of_loss, logprobs, entropies) in zip(own, self.trainer.seen, strict=True):
            columns = {
                "logprob": logprobs,
                "entropy": entropies,
                "old_logprob": of_loss.old_per_token_logps,
                "advantage": of_loss.advantages,
                "reference.logprob": of_loss.ref_per_token_logps,
            }
            for key, numbers in columns.items():
                if numbers is not None:
                    found.setdefault(key, {}).update(parity.by_row(numbers[of_loss.completion_mask], rows))
        count = sum(of_loss.completion_mask.sum() for of_loss, *_ in self.trainer.seen)
        values["token_count"] = int(self.trainer.accelerator.reduce(count))
        return parity.StepMetrics(values=values, rows=found)
