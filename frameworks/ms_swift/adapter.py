"""ms-swift's Seq2SeqTrainer and GRPOTrainer on DDP: their own ``train()`` runs whole, and pauses where the loader asks
for the rows of the next step. Frozen tokens go through swift's template; frozen responses stand in for its engine.

What else is swift's own: encoding with masks, collator, padding-free packing, logits to keep, both losses of SFT (the
model's, and its own per token for rows with a loss scale: here the packed ones), accumulation, everything of GRPO but
the sampling, clipping, optimizer, schedule, checkpoints. On the command line its packing asks for flash-attention.
"""

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
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
PRELOAD = ("torch", "transformers", "swift.trainers.seq2seq_trainer", "swift.rlhf_trainers.grpo_trainer")
OPTIONS = {"check_model": False, "dataloader_num_workers": 0}
URL = "https://github.com/modelscope/ms-swift"
FINDING = "docs/findings/swift-divided-loss.md"
RELEASE = tuple(int(part) for part in importlib.metadata.version("ms-swift").split(".")[:2])
register_template(TemplateMeta("tokens", prefix=[], prompt=["{{QUERY}}"], chat_sep=None, suffix=[]))


def load_model(folder: Path, scenario: parity.Scenario) -> tuple[Any, Any]:
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


class ObservedSft(Seq2SeqTrainer):  # type: ignore[misc]
    """Shows the log-probs of each loss."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None) -> Any:
        labels = inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        self.adapter.seen.append(parity.label_logprobs(outputs.logits, labels))
        return loss


class SwiftSft(parity.TrainerAdapter):
    preload = PRELOAD
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
        options = self.options(scenario, layout, device)
        args = Seq2SeqTrainingArguments(**options, **OPTIONS, remove_unused_columns=False)
        model, self.template = load_model(weights["policy"], scenario)
        self.trainer = self.paused(ObservedSft)(model, args, self.template, train_dataset=[{}])
        return self.start()

    def example(self, row: parity.Row) -> Any:
        """Returns a row as swift's template encodes it, and a packed one as its PackingDataset gives it."""
        encoded = []
        for document in row.documents:
            answer = {"token_ids": list(document.tokens), "loss_scale": [float(one) for one in document.targets]}
            messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": answer}]
            encoded.append(self.template.encode({"messages": messages}, return_length=True))
        return encoded if self.template.packing else encoded[0]


def divided(scenario: parity.Scenario, by: int) -> tuple[parity.DividedLoss, ...]:
    """Returns the known defect of means over tokens, if it divides by more than 1."""
    o: Any = scenario.objective
    by = by if o.kind == "grpo" and o.loss_agg_mode == "token-mean" else 1
    return (parity.DividedLoss(by=by),) if by > 1 else ()


class ObservedGrpo(GRPOTrainer):  # type: ignore[misc]
    """Shows the batch of each loss, with the log-probs and entropies that swift has computed for it."""

    def _engine_infer(self, infer_requests: Any, request_config: Any = None, *, use_tqdm: Any = False) -> list[Any]:
        return self.adapter.generate()  # type: ignore[no-any-return]

    def _log_rollout(self, samples: Any) -> None:
        """Tables of prompts and completions need prompts as text."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self.computed = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.computed

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        found = super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        logprobs, entropies = self.computed
        columns = {
            "logprob": logprobs,
            "entropy": entropies,
            "old_logprob": grpo_batch.old_per_token_logps,
            "advantage": grpo_batch.advantages,
            "reference.logprob": grpo_batch.ref_per_token_logps,
        }
        self.adapter.seen.append((grpo_batch.completion_mask, columns))
        return found


class SwiftGrpo(parity.GrpoTrainerAdapter):
    preload = PRELOAD
    prompt: ClassVar = {"messages": [{"role": "user", "content": ""}]}
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
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        o: Any = scenario.objective
        if o.adv_estimator not in ("grpo", "rloo"):
            return "GRPOTrainer has the advantages of GRPO and RLOO; its REINFORCE++ whitens responses, not tokens"
        if o.entropy_coeff:
            return "GRPOTrainer has no entropy bonus; use entropy_coeff = 0"
        return super().refuses(scenario, layout)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        own = {"advantage_estimator": scenario.objective.adv_estimator, "kl_in_reward": False, "log_entropy": True}
        args = GRPOConfig(**self.options(scenario, layout, device), **OPTIONS, **own)
        model, template = load_model(weights["policy"], scenario)
        template.truncation_strategy = "left"  # by default, prompts are encoded alone, and here they are empty
        reference = load_model(weights["reference"], scenario)[0] if "reference" in weights else None
        self.trainer = self.paused(ObservedGrpo)(
            model,
            reference and reference.requires_grad_(False).eval(),
            reward_funcs=[lambda completions, rollout_infos, **_: [one["reward"] for one in rollout_infos]],
            **{"args": args, "template": template, "train_dataset": [{}]},
        )
        return self.start()

    def generate(self) -> list[Any]:
        """Returns the frozen responses of this rank, with their rewards."""
        message = ChatCompletionResponseChoice(0, ChatMessage(role="assistant", content=""), "stop")
        return [
            RolloutOutput(
                response=ChatCompletionResponse("frozen", [message], None),
                response_token_ids=[list(document.tokens)],  # and the prompt, without a loss
                response_loss_mask=[[int(target) for target in document.targets]],
                rollout_infos={"reward": document.columns["reward"]},
            )
            for document in self.rollout
        ]
