"""TRL's trainers for SFT, GRPO, DPO, KTO, rewards and GKD on DDP, as a user writes them: their own ``train()`` runs
whole, and pauses where the loader asks for the rows of the next step. Frozen rows stand in for the data set, frozen
responses for generation.

What else is TRL's own: the collator, padding-free packing, the token count, the LM head in chunks, accumulation, the
losses, advantages and old log-probs, clipping, optimizer, schedule, checkpoints and the log that the metrics are from.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import trl.trainer.grpo_trainer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gkd import GKDConfig, GKDTrainer

import parity

BACKENDS = ("TrlSft", "TrlGrpo", "TrlDpo", "TrlKto", "TrlReward", "TrlGkd")
PACKAGES = ("torch", "transformers", "accelerate", "trl")
PRELOAD = ("torch", "transformers", "trl.trainer.sft_trainer", "trl.trainer.grpo_trainer", "datasets")
URL = "https://github.com/huggingface/trl"  # no default_zero: TRL gathers metrics where ZeRO gathers weights
HEAD: Any = sys.modules.get("trl.kernels.chunked_logprob")  # with its twin in torch, since 1.16


def refuses(scenario: parity.Scenario) -> str:
    """Returns why this release has no loss for the scenario; empty if it has."""
    if not hasattr(HEAD, "_TRITON_AVAILABLE") and (scenario.precision == "exact" or not torch.cuda.is_available()):
        return "TRL 1.15 has the loss as a Triton kernel alone, in float32 and on GPUs; use 1.16, or bf16 on a GPU"
    return ""


def load_model(folder: Path, scenario: parity.Scenario) -> Any:
    """Loads master weights: in float64 in the exact tier, else in float32."""
    if scenario.precision == "exact":  # the Triton kernel, for GPUs, computes in float32; its twin in torch not
        HEAD._TRITON_AVAILABLE = False
    code = parity.runs_code(folder, trusted=scenario.trust_remote_code)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.get_default_dtype(), trust_remote_code=code)


class Described:
    """Describes an adapter by its ``name``."""

    preload = PRELOAD
    name: ClassVar[str]

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name=cls.name, packages=PACKAGES, url=URL)


class TrlSft(Described, parity.TrainerAdapter):
    name = "trl-sft"

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        return super().refuses(scenario, layout) or refuses(scenario)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        self.packed, folder = scenario.data.packed, weights["policy"]
        args = SFTConfig(
            **self.options(scenario, layout, device),
            packing=self.packed,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},  # the suite's rows have tokens and labels
        )
        self.trainer = self.paused(SFTTrainer)(
            load_model(folder, scenario),
            args,
            train_dataset=Dataset.from_list([{"input_ids": [1, 2], "labels": [-100, 2]}]),  # only looked at
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        self.trainer.model.register_forward_hook(
            lambda module, inputs, output: self.seen.append(output.log_probs.detach()[output.label_mask])
        )
        return self.start()

    def example(self, row: parity.Row) -> dict[str, list[int]]:
        """Returns a row as TRL's packing leaves it."""
        flat = parity.flatten([row])
        lengths = {"seq_lengths": [len(document.tokens) for document in row.documents]} if self.packed else {}
        return {"input_ids": flat.tokens[0].tolist(), "labels": flat.labels[0].tolist(), **lengths}


class ObservedGrpo(GRPOTrainer):  # type: ignore[misc]
    """Shows the inputs of each loss, with the log-probs and entropies that TRL has computed for it."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self.computed = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.computed

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss, mask = super()._compute_loss(model, inputs), inputs["completion_mask"]
        logprobs, entropies, *_ = self.computed
        columns = {
            "logprob": logprobs,
            "entropy": entropies,
            "old_logprob": inputs.get("old_per_token_logps", logprobs),
            "advantage": inputs["advantages"][:, None].expand(mask.shape),
            "reference.logprob": inputs.get("ref_per_token_logps"),
        }
        self.adapter.seen.append((mask, columns))
        return loss


class TrlGrpo(Described, parity.GrpoTrainerAdapter):
    name = "trl-grpo"
    conventions = (*parity.GrpoTrainerAdapter.conventions, parity.EntropyByMicroBatch())
    prompt: ClassVar = {"prompt": ""}

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        if scenario.objective.adv_estimator != "grpo":
            return "GRPOTrainer has the advantages of GRPO; TRL's RLOO is another trainer, with other ratios"
        return super().refuses(scenario, layout) or refuses(scenario)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        args = GRPOConfig(
            **self.options(scenario, layout, device),
            use_bias_correction_kl=False,  # on by default
            entropy_coef=scenario.objective.entropy_coeff,
        )
        model = load_model(folder := weights["policy"], scenario)
        model.config._name_or_path = str(weights.get("reference", folder))  # from where TRL loads the reference
        self.trainer = self.paused(ObservedGrpo)(
            model,
            lambda completions, reward, **_: reward,
            args,
            train_dataset=Dataset.from_list([self.prompt]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_func=self.generate,
        )
        trl.trainer.grpo_trainer.shuffle_sequence_dict = lambda samples: samples  # else by chance
        return self.start()

    def generate(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Gives the frozen responses of this rank, with their rewards."""
        both = [(document, document.targets.index(True)) for document in self.rollout]
        return {
            "prompt_ids": [list(document.tokens[:start]) for document, start in both],
            "completion_ids": [list(document.tokens[start:]) for document, start in both],
            "logprobs": [list(document.columns["rollout_logprob"][start:]) for document, start in both],
            "reward": [document.columns["reward"] for document in self.rollout],
        }


class TrlDpo(Described, parity.TrainerAdapter):
    """Trains on pairs of padded rows; the collator puts all chosen answers before all rejected ones."""

    name = "trl-dpo"
    objectives: ClassVar = ("dpo",)

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        o = scenario.objective
        if scenario.data.packed:
            return "DPOTrainer pads; use data.packed=false"
        if o.reference_free or o.length_normalised != (o.loss_type == "ipo"):
            return "DPOTrainer has a reference, and means of log-probs with ipo alone; TRL's CPO is another trainer"
        if o.label_smoothing and o.loss_type == "sigmoid":
            return "DPOTrainer smooths no labels of its loss sigmoid; use robust"
        return super().refuses(scenario, layout) or refuses(scenario)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        o = scenario.objective
        args = DPOConfig(
            **self.options(scenario, layout, device),
            beta=o.beta,
            label_smoothing=o.label_smoothing,
            loss_type=[o.loss_type, *["sft"] * bool(o.sft_coef)],
            loss_weights=[1.0, *[o.sft_coef] * bool(o.sft_coef)],
            max_length=None,
        )
        return self.start_with(DPOTrainer, args, weights, [{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}])

    def start_with(self, trainer: Any, args: Any, weights: Mapping[str, Path], examples: list[Any]) -> dict[str, Any]:
        """Starts a trainer of a policy and a reference. It only looks at the ``examples``."""
        policy, reference = (load_model(weights[role], self.scenario) for role in ("policy", "reference"))
        tokenizer, data = AutoTokenizer.from_pretrained(weights["policy"]), Dataset.from_list(examples)
        self.trainer = self.paused(trainer)(policy, reference, args, train_dataset=data, processing_class=tokenizer)
        for model in (policy, reference):
            model.register_forward_hook(self.note)
        return self.start()

    def note(self, model: Any, inputs: Any, output: Any) -> None:
        """Keeps the log-probs of a micro-batch in the order of its rows."""
        self.seen.append((model is self.trainer.model, torch.cat(in_turn(by_answer(output)))))

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        own = self.own(batch)
        values = self.step([[pair_of(*pair) for pair in in_pairs(rows)] for rows in own], on_gradients)
        return metrics_of(self.seen, own, values)


class TrlKto(TrlDpo):
    """Trains on labelled answers in padded rows; each is followed by the mismatched answer of the KL."""

    name = "trl-kto"
    objectives: ClassVar = ("kto",)

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        if scenario.data.packed or scenario.accumulation > 1:
            return "KTOTrainer pads, and has a KL of each micro-batch; use data.packed=false, accumulation=1"
        return parity.TrainerAdapter.refuses.__func__(cls, scenario, layout) or refuses(scenario)  # type: ignore[attr-defined]

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        o = scenario.objective
        args = KTOConfig(
            **self.options(scenario, layout, device),
            beta=o.beta,
            desirable_weight=o.desirable_weight,
            undesirable_weight=o.undesirable_weight,
            max_length=None,
        )
        answers = [{"prompt": "1 + 1?", "completion": text, "label": text == "2"} for text in ("2", "3", "4", "5")]
        return self.start_with(KTOTrainer, args, weights, answers * scenario.data.rows)

    def note(self, model: Any, inputs: Any, output: Any) -> None:
        """Keeps log-probs of answers, of which the mismatched ones of a micro-batch come first."""
        self.seen.append((model is self.trainer.model, by_answer(output)))

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        own = self.own(batch)
        examples = [[labelled(*pair) for pair in in_pairs(rows)] for rows in own]
        values = self.step(examples, on_gradients)
        seen = []
        for is_policy in (True, False):
            other, answers = (numbers for trained, numbers in self.seen if trained == is_policy)
            seen.append((is_policy, torch.cat(in_turn([*answers, *other]))))
        return metrics_of(seen, own, values)


class TrlReward(Described, parity.TrainerAdapter):
    """Trains a reward model on pairs of padded rows."""

    name = "trl-reward"
    objectives: ClassVar = ("reward",)
    trained: ClassVar = "reward"

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        padded = "" if not scenario.data.packed else "RewardTrainer pads; use data.packed=false"
        return padded or super().refuses(scenario, layout)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        args = RewardConfig(
            **self.options(scenario, layout, device),
            center_rewards_coefficient=scenario.objective.center_coef or None,
            max_length=None,
        )
        folder = weights["reward"]
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.get_default_dtype())
        self.trainer = self.paused(RewardTrainer)(
            model,
            args,
            train_dataset=Dataset.from_list([{"chosen_ids": [1, 2], "rejected_ids": [1, 3]}]),  # only looked at
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        model.register_forward_hook(lambda module, inputs, output: self.seen.append(output.logits.detach()[:, 0]))
        return self.start()

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        own, found = self.own(batch), dict[int, torch.Tensor]()
        values = self.step([[scored(*pair) for pair in in_pairs(rows)] for rows in own], on_gradients)
        for rows, scores in zip(own, self.seen, strict=True):
            numbers = [one.expand(row.target_count) for row, one in zip(rows, in_turn(list(scores)), strict=True)]
            found |= parity.by_row(torch.cat(numbers), rows)
        return parity.StepMetrics(values={**values, "token_count": count_of(found)}, rows={"score": found})


class TrlGkd(Described, parity.TrainerAdapter):
    """Trains a student on padded texts of the data set; nothing is generated."""

    name = "trl-gkd"
    expected = (
        parity.ExpectedDifference(
            reason="loss and gradients are divided by the number of ranks",
            link="docs/findings/trl-gkd-world-size.md",
            defects=lambda scenario, layout: (parity.DividedGradients(by=layout.dp, loss=True),),
            at_least={"dp": 2},
        ),
    )
    objectives: ClassVar = ("distillation",)

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        o = scenario.objective
        if scenario.data.packed:
            return "GKDTrainer pads; use data.packed=false"
        if o.top_k or o.temperature != 1:
            return "GKDTrainer has whole distributions, and its temperature is only that of sampling; use 1"
        return super().refuses(scenario, layout)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        args = GKDConfig(
            **self.options(scenario, layout, device),
            lmbda=0.0,
            beta=scenario.objective.beta,
            temperature=1.0,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        student, teacher = (load_model(weights[role], scenario) for role in ("policy", "teacher"))
        self.trainer = self.paused(GKDTrainer)(
            student,
            teacher,
            args,
            data_collator=padded,
            train_dataset=Dataset.from_list([{"input_ids": [1, 2], "labels": [-100, 2]}]),  # only looked at
            processing_class=AutoTokenizer.from_pretrained(weights["policy"]),
        )
        student.register_forward_hook(self.note)
        return self.start()

    def note(self, model: Any, inputs: Any, output: Any) -> None:
        """Keeps the logits that predict each token."""
        self.seen.append(output.logits.detach()[:, :-1])

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        own, found = self.own(batch), dict[int, torch.Tensor]()
        values = self.step([list(rows) for rows in own], on_gradients)
        for rows, logits in zip(own, self.seen, strict=True):
            labels = padded(rows)["labels"][:, 1:].to(logits.device)
            chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            found |= parity.by_row(chosen[labels >= 0], rows)
        return parity.StepMetrics(values=values, rows={"logprob": found})

    def tensors(self, kind: Any, model: str) -> Any:
        role = self.trainer.teacher_model if model == "teacher" else self.trainer.model
        for name, parameter in role.named_parameters():
            yield name.removeprefix("module."), parameter if kind == "weight" else parameter.grad


def padded(rows: Sequence[parity.Row]) -> dict[str, torch.Tensor]:
    """Collates rows of one document each as GKDTrainer takes them."""
    documents = [row.documents[0] for row in rows]
    width = max(len(document.tokens) for document in documents)

    def column(numbers: Callable[[Any], Any], filling: int) -> torch.Tensor:
        return torch.tensor([[*numbers(one), *[filling] * (width - len(one.tokens))] for one in documents])

    return {
        "input_ids": column(lambda one: one.tokens, 0),
        "attention_mask": column(lambda one: [1] * len(one.tokens), 0),
        "labels": column(lambda one: [t if y else -100 for t, y in zip(one.tokens, one.targets, strict=True)], -100),
    }


def by_answer(output: Any) -> list[torch.Tensor]:
    """Returns the log-probs of the targets of each row of a model's output."""
    return [row[mask] for row, mask in zip(output.log_probs.detach(), output.label_mask, strict=True)]


def in_turn(numbers: list[Any]) -> list[Any]:
    """Puts a first and a second half, such as chosen and rejected answers, in turn."""
    half = len(numbers) // 2
    return [one for pair in zip(numbers[:half], numbers[half:], strict=True) for one in pair]


def in_pairs(rows: Sequence[parity.Row]) -> list[Sequence[parity.Row]]:
    return [rows[n : n + 2] for n in range(0, len(rows), 2)]


def metrics_of(
    seen: Sequence[tuple[bool, torch.Tensor]], own: Sequence[Sequence[parity.Row]], values: Mapping[str, float]
) -> parity.StepMetrics:
    """Returns the metrics of a step from the log-probs of its micro-batches, of the policy or else the reference."""
    found: dict[str, dict[int, torch.Tensor]] = {"logprob": {}, "reference.logprob": {}}
    for key, is_policy in (("logprob", True), ("reference.logprob", False)):
        of_model = [numbers for trained, numbers in seen if trained == is_policy]
        for rows, numbers in zip(own, of_model, strict=True):
            found[key] |= parity.by_row(numbers, rows)
    return parity.StepMetrics(values={**values, "token_count": count_of(found["logprob"])}, rows=found)


def count_of(rows: Mapping[int, torch.Tensor]) -> float:
    """Counts the targets of all ranks."""
    count = torch.tensor(float(sum(map(len, rows.values()))))
    torch.distributed.all_reduce(count)
    return count.item()


def pair_of(chosen: parity.Row, rejected: parity.Row) -> dict[str, list[int]]:
    """Returns an example as the collator of preferences takes it."""
    (good,), (bad,) = chosen.documents, rejected.documents
    start = good.targets.index(True)
    return {
        "prompt_ids": list(good.tokens[:start]),
        "chosen_ids": list(good.tokens[start:]),
        "rejected_ids": list(bad.tokens[start:]),
    }


def labelled(answer: parity.Row, mismatched: parity.Row) -> dict[str, Any]:
    """Returns an example as the collator of labelled answers takes it."""
    found = pair_of(answer, mismatched)
    return {
        "prompt_ids": found["prompt_ids"],
        "completion_ids": found["chosen_ids"],
        "KL_completion_ids": found["rejected_ids"],
        "label": answer.documents[0].columns["label"] == 1,
    }


def scored(chosen: parity.Row, rejected: parity.Row) -> dict[str, Any]:
    """Returns an example as the collator of RewardTrainer takes it."""
    (good,), (bad,) = chosen.documents, rejected.documents
    margin = {"margin": good.columns["margin"]} if "margin" in good.columns else {}
    return {"chosen_ids": list(good.tokens), "rejected_ids": list(bad.tokens), **margin}
