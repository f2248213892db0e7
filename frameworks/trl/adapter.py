"""TRL's SFTTrainer, GRPOTrainer and DPOTrainer on DDP, as a user writes them: their own ``train()`` runs whole, and
pauses where the loader asks for the rows of the next step. Frozen rows stand in for the data set, frozen responses for
generation.

What else is TRL's own: the collator, padding-free packing, the token count, the LM head in chunks, accumulation, the
losses, advantages and old log-probs, clipping, optimizer, schedule, checkpoints and the log that the metrics are from.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import trl.trainer.grpo_trainer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import parity

BACKENDS = ("TrlSft", "TrlGrpo")  # TrlDpo: cells of the profile full
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


class TrlSft(parity.TrainerAdapter):
    preload = PRELOAD

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name="trl-sft", packages=PACKAGES, url=URL)

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


class TrlGrpo(parity.GrpoTrainerAdapter):
    preload = PRELOAD
    conventions = (*parity.GrpoTrainerAdapter.conventions, parity.EntropyByMicroBatch())
    prompt: ClassVar = {"prompt": ""}

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name="trl-grpo", packages=PACKAGES, url=URL)

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


class TrlDpo(parity.TrainerAdapter):
    """Trains on pairs of padded rows; the collator puts all chosen answers before all rejected ones."""

    preload = PRELOAD
    objectives: ClassVar = ("dpo",)

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name="trl-dpo", packages=PACKAGES, url=URL)

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
        policy, reference = (load_model(weights[role], scenario) for role in ("policy", "reference"))
        self.trainer = self.paused(DPOTrainer)(
            policy,
            reference,
            args,
            train_dataset=Dataset.from_list([{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}]),  # only looked at
            processing_class=AutoTokenizer.from_pretrained(weights["policy"]),
        )
        for model in (policy, reference):
            model.register_forward_hook(self.note)
        return self.start()

    def note(self, model: Any, inputs: Any, output: Any) -> None:
        """Keeps the log-probs of a micro-batch in the order of its rows."""
        found = [row[mask] for row, mask in zip(output.log_probs.detach(), output.label_mask, strict=True)]
        pairs = len(found) // 2
        in_turn = [one for pair in zip(found[:pairs], found[pairs:], strict=True) for one in pair]
        self.seen.append((model is self.trainer.model, torch.cat(in_turn)))

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        own = self.own(batch)
        values = self.step([[pair_of(*rows[n : n + 2]) for n in range(0, len(rows), 2)] for rows in own], on_gradients)
        found: dict[str, dict[int, torch.Tensor]] = {"logprob": {}, "reference.logprob": {}}
        for key, is_policy in (("logprob", True), ("reference.logprob", False)):
            of_model = [numbers for trained, numbers in self.seen if trained == is_policy]
            for rows, numbers in zip(own, of_model, strict=True):
                found[key] |= parity.by_row(numbers, rows)
        count = torch.tensor(float(sum(len(numbers) for numbers in found["logprob"].values())))
        torch.distributed.all_reduce(count)
        return parity.StepMetrics(values={**values, "token_count": count.item()}, rows=found)


def pair_of(chosen: parity.Row, rejected: parity.Row) -> dict[str, list[int]]:
    """Returns an example as the collator of preferences takes it."""
    (good,), (bad,) = chosen.documents, rejected.documents
    start = good.targets.index(True)
    return {
        "prompt_ids": list(good.tokens[:start]),
        "chosen_ids": list(good.tokens[start:]),
        "rejected_ids": list(bad.tokens[start:]),
    }
