"""Shows LLaMA-Factory's text stages: converter, template by name, processor, packing, and its trainer's order."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import parity

with parity.on_cpu(stand_ins=("torchaudio",)):
    from llamafactory.data.converter import DATASET_CONVERTERS
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor import PackedSupervisedDatasetProcessor, SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, FinetuningArguments, TrainingArguments
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
IGNORED = -100


class LlamaFactory(parity.HuggingFaceText):
    """Reads ShareGPT conversations, and renders them by LLaMA-Factory's template for the model."""

    formatting = "sharegpt"

    @classmethod
    def describe(cls) -> parity.TextInfo:
        return parity.TextInfo(
            name=f"llamafactory{'-openai' * (cls.formatting == 'openai')}",
            packages=("llamafactory", "transformers", "accelerate"),
            trains=("scaffold", "content", "end", "space"),
            truncates="turns",
            packs="knapsack",
            own_templates=True,
        )

    def load(self, folder: Path, template: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.template = get_template_and_fix_tokenizer(self.tokenizer, DataArguments(template=template or None))
        names = {"messages": "messages", "role_tag": "role", "content_tag": "content", "tools": "tools"}
        tags = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool"}
        attributes = DatasetAttr("file", "the suite's", formatting=self.formatting, **names, **tags)
        self.convert = DATASET_CONVERTERS[self.formatting](attributes, DataArguments())

    def processor(self, kind: type, **options: Any) -> Any:
        arguments = DataArguments(**options)
        return kind(template=self.template, tokenizer=self.tokenizer, processor=None, data_args=arguments)

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], max_len: int) -> dict[str, Any]:
        turns = [self.turn(one) for one in messages]
        aligned = self.convert(
            {"messages": turns, "tools": json.dumps([one["function"] for one in tools]) if tools else ""}
        )
        processor = self.processor(SupervisedDatasetProcessor, cutoff_len=max_len)
        found = processor.preprocess_dataset({key: [value] for key, value in aligned.items()})
        return {} if not found else example(found)

    def turn(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a turn of ShareGPT's form, which has a role for calls of tools."""
        if not message.get("tool_calls") or self.formatting == "openai":
            return message
        calls = [call["function"] for call in message["tool_calls"]]
        return {"role": "function_call", "content": json.dumps(calls)}

    def pack(self, documents: Sequence[Mapping[str, Any]], max_len: int) -> list[dict[str, Any]]:
        one_more = max_len + 1  # for the token of padding that every row has
        processor = self.processor(PackedSupervisedDatasetProcessor, cutoff_len=one_more, neat_packing=True)
        processor._encode_data_example = lambda prompt, **_: prompt[0]
        labelled = [
            [([*one["tokens"]], [t if on else IGNORED for t, on in zip(one["tokens"], one["targets"], strict=True)])]
            for one in documents
        ]
        nothing = [None] * len(documents)
        columns = defaultdict(lambda: nothing, _prompt=labelled, _response=[[None]] * len(documents))
        found = processor.preprocess_dataset(columns)
        return [example(found, number) for number in range(len(found["input_ids"]))]

    def make_trainer(self, dataset: Sequence[Mapping[str, Any]], **options: Any) -> CustomSeq2SeqTrainer:
        args = TrainingArguments(tempfile.mkdtemp(prefix="parity-lf-"), report_to="none", use_cpu=True, **options)
        return CustomSeq2SeqTrainer(
            finetuning_args=FinetuningArguments(),
            processor=None,
            model=LlamaForCausalLM(LlamaConfig(vocab_size=len(self.tokenizer), **SHAPE)),
            args=args,
            train_dataset=Dataset.from_list(dataset),
            tokenizer=self.tokenizer,
        )


class LlamaFactoryOpenAI(LlamaFactory):
    """Reads conversations in OpenAI's form."""

    formatting = "openai"


def example(found: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """Returns an encoded example or a packed row; its padding is the token -1."""
    attended, labels = found["attention_mask"][number], found["labels"][number]
    shown = {
        "tokens": [t if on else -1 for t, on in zip(found["input_ids"][number], attended, strict=True)],
        "targets": [label != IGNORED for label in labels],
    }
    return shown | ({"positions": found["position_ids"][number]} if "position_ids" in found else {})
