"""Shows TRL's text stages: the data set that SFTTrainer prepares, its packing and collator, and its loader's order."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer, pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import parity

disable_progress_bars()
SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
PACKAGES = ("trl", "transformers", "accelerate")
QUESTION, ANSWER = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
IGNORED = -100


class Trl(parity.HuggingFaceText):
    """Trains on all answers (``assistant_only_loss``), by the marks of the template or of TRL's version of it."""

    options: ClassVar = {"assistant_only_loss": True}
    example: ClassVar = {"messages": [QUESTION, ANSWER]}

    @classmethod
    def describe(cls) -> parity.TextInfo:
        trains = ("scaffold", "content", "end", "space")
        return parity.TextInfo(name="trl", packages=PACKAGES, trains=trains, marks=True, packs="best fit")

    def make_trainer(self, dataset: Sequence[Mapping[str, Any]], **options: Any) -> SFTTrainer:
        common = {"report_to": "none", "use_cpu": True, "bf16": False, "max_length": None}
        args = SFTConfig(output_dir=tempfile.mkdtemp(prefix="parity-trl-"), **common, **options)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(self.tokenizer), **SHAPE))
        return SFTTrainer(model, args, train_dataset=Dataset.from_list(dataset), processing_class=self.tokenizer)

    def load(self, folder: Path, template: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.trainer = self.make_trainer([self.example], **self.options)

    def row(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"messages": messages}

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], max_len: int) -> dict[str, Any]:
        rows = Dataset.from_list([self.row(messages) | ({"tools": tools} if tools else {})])
        self.trainer.args.max_length = max_len
        prepared = self.trainer._prepare_dataset(rows, self.tokenizer, self.trainer.args, False, None, "train")
        if not len(prepared):
            return {}
        tokens, labels = prepared[0]["input_ids"], prepared[0]["labels"]
        return {"tokens": tokens, "targets": [label != IGNORED for label in labels]}

    def pack(self, documents: Sequence[Mapping[str, Any]], max_len: int) -> list[dict[str, Any]]:
        rows = [
            {"input_ids": one["tokens"], "labels": [t if is_target else IGNORED for t, is_target in pairs(one)]}
            for one in documents
        ]
        packed = pack_dataset(Dataset.from_list(rows), max_len, "bfd")
        collate = DataCollatorForLanguageModeling(pad_token_id=-1, padding_free=True)
        return [row_of(collate([packed[number]])) for number in range(len(packed))]


class TrlCompletion(Trl):
    """Trains on the last answer, as the completion of a prompt (``completion_only_loss``); needs no marks."""

    options: ClassVar = {"completion_only_loss": True}
    example: ClassVar = {"prompt": [QUESTION], "completion": [ANSWER]}

    @classmethod
    def describe(cls) -> parity.TextInfo:
        trains = ("scaffold", "content", "end", "space")
        return parity.TextInfo(name="trl-completion", packages=PACKAGES, trains=trains, turns="last", packs="best fit")

    def row(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] != "assistant":
            raise ValueError("a conversation that ends with a question has no completion")
        return {"prompt": messages[:-1], "completion": messages[-1:]}


def pairs(document: Mapping[str, Any]) -> list[tuple[int, bool]]:
    return list(zip(document["tokens"], document["targets"], strict=True))


def row_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of a collator that flattens."""
    labels = batch["labels"][0].tolist()
    return {
        "tokens": batch["input_ids"][0].tolist(),
        "targets": [label != IGNORED for label in labels],
        "positions": batch["position_ids"][0].tolist(),
    }
