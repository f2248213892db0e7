"""LLaMA-Factory's SFT on torch DDP: ``run_sft`` runs whole, with its model, processors, collator, trainer, checkpoint.

The suite's documents take the place of encoded examples, and the loop pauses where it asks for the rows of a step.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import parity

with parity.on_cpu(stand_ins=("torchaudio",)):
    from llamafactory.data.processor import PackedSupervisedDatasetProcessor, SupervisedDatasetProcessor
    from llamafactory.hparams import get_train_args
    from llamafactory.model import loader
    from llamafactory.train.sft import workflow

BACKENDS = ("LlamaFactory",)
PACKAGES = ("torch", "transformers", "accelerate", "llamafactory")


class ObservedTrainer(workflow.CustomSeq2SeqTrainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        rows, places = next(self.adapter.waiting), self.adapter.places
        logits = torch.cat([one[places[row.index]] for one, row in zip(outputs.logits, rows, strict=True)])
        self.adapter.seen.append(parity.target_logprobs(logits[None], parity.flatten(rows)))
        return loss


class LlamaFactory(parity.TrainerAdapter):
    @classmethod
    def describe(cls) -> parity.BackendInfo:
        url = "https://github.com/hiyouga/LLaMA-Factory"
        return parity.BackendInfo(name="llamafactory", packages=PACKAGES, url=url, default_zero=0)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        data, folder = scenario.data, weights["policy"]
        args = {
            **self.options(scenario, layout, device),
            **{"stage": "sft", "do_train": True, "finetuning_type": "full", "disable_gradient_checkpointing": True},
            **{"model_name_or_path": str(folder), "dataset": "the suite's", "template": "empty"},
            **{"trust_remote_code": parity.runs_code(folder, trusted=scenario.trust_remote_code)},
            # A packed row is padded to cutoff_len and has a token of padding at least; the collator pads to eights.
            **{"neat_packing": data.packed, "cutoff_len": 8 * math.ceil((data.max_len + 1) / 8)},
        }
        self.args = get_train_args(args)
        return self.args[2].to_sanitized_dict() | self.start()

    def train(self, checkpoint: str | None) -> None:
        model_args, data_args, training_args, finetuning_args, _ = self.args
        training_args.resume_from_checkpoint = checkpoint
        if (dtype := torch.get_default_dtype()) == torch.float64:  # instead of float32, for masters and for masks
            model_args.compute_dtype, finetuning_args.pure_bf16 = dtype, True
        processor = PackedSupervisedDatasetProcessor if data_args.neat_packing else SupervisedDatasetProcessor

        def config(_: Any) -> Any:  # load_model follows its dtype
            folder, code = model_args.model_name_or_path, model_args.trust_remote_code
            return transformers.AutoConfig.from_pretrained(folder, dtype=dtype, trust_remote_code=code)

        def dataset(template: Any, *_: Any, stage: str, **tokenizer_module: Any) -> dict[str, Any]:
            self.processor, self.places = processor(template, data_args=data_args, **tokenizer_module), {}
            self.processor._encode_data_example = lambda prompt, **_: prompt[0]
            return {"train_dataset": []}

        replaced = {"CustomSeq2SeqTrainer": self.paused(ObservedTrainer), "get_dataset": dataset}
        with mock.patch.multiple(workflow, **replaced), mock.patch.object(loader, "load_config", config):
            workflow.run_sft(*self.args)

    def example(self, row: parity.Row) -> dict[str, Any]:
        """Lays out a row with the processor, and notes the places of its tokens: packing sorts documents by length."""
        flat, lengths = parity.flatten([row]), [len(document.tokens) for document in row.documents]
        pairs = zip(flat.tokens[0].split(lengths), flat.labels[0].split(lengths), strict=True)
        documents = [[(tokens.tolist(), labels.tolist())] for tokens, labels in pairs]
        numbers = [[number] for number in range(len(documents))]  # as images, which move with their document
        examples = defaultdict(lambda: [None] * len(documents), _prompt=documents, _response=documents, _images=numbers)
        columns = self.processor.preprocess_dataset(examples)
        (order,) = columns.pop("images")
        places = torch.arange(sum(lengths)).split([lengths[number] for number in order])
        self.places[row.index] = torch.cat([places[order.index(number)] for number in range(len(order))])
        return {key: value for key, (value,) in columns.items()}

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        self.waiting = iter(self.own(batch))
        return super().train_step(batch, on_gradients)
