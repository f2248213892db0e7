"""LLaMA-Factory: OpenAI's form adds a system message; Gemma 2's labels are not the tokens that follow.

A tokenizer of bytes; all else is LLaMA-Factory's converter, template and processor. Exit code 0: both defects are
present. 1: one is gone. See llamafactory-templates.md.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers import __version__ as HF

import parity

with parity.on_cpu(stand_ins=("torchaudio",)):
    from llamafactory.data.converter import DATASET_CONVERTERS
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

TEMPLATES = Path(__file__).resolve().parents[2] / "fixtures" / "templates"
TALK = [("user", "2 + 3?"), ("assistant", "2 + 3 is 5."), ("user", "And 5 more?"), ("assistant", "That is 10.")]
MESSAGES = [{"role": role, "content": text} for role, text in TALK]
IGNORED = -100


def tokenizer_of(template: str, end: str) -> PreTrainedTokenizerFast:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(letters, []))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token=end, bos_token="<bos>", pad_token="<pad>")
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def encoded(tokenizer: PreTrainedTokenizerFast, template: str, formatting: str, messages: Any) -> tuple[Any, Any]:
    """Returns tokens and labels."""
    own = get_template_and_fix_tokenizer(tokenizer, DataArguments(template=template))
    names = {"messages": "messages", "role_tag": "role", "content_tag": "content", "tools": "tools"}
    tags = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool"}
    attributes = DatasetAttr("file", "ours", formatting=formatting, **names, **tags)
    aligned = DATASET_CONVERTERS[formatting](attributes, DataArguments())({"messages": messages, "tools": ""})
    processor = SupervisedDatasetProcessor(template=own, tokenizer=tokenizer, processor=None, data_args=DataArguments())
    found = processor.preprocess_dataset({key: [value] for key, value in aligned.items()})
    return found["input_ids"][0], found["labels"][0]


if __name__ == "__main__":
    print(f"LLaMA-Factory {importlib.metadata.version('llamafactory')}, transformers {HF}")
    tokenizer = tokenizer_of("qwen2.5", "<|im_end|>")
    texts = {form: tokenizer.decode(encoded(tokenizer, "qwen", form, MESSAGES)[0]) for form in ("sharegpt", "openai")}
    asked = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    texts["openai with a system message"] = tokenizer.decode(encoded(tokenizer, "qwen", "openai", asked)[0])
    for form, text in texts.items():
        print(f"Qwen2.5, {form}: {text[: text.index('<|im_start|>user')]!r}")

    tokenizer = tokenizer_of("gemma2", "<eos>")
    tokens, labels = encoded(tokenizer, "gemma2", "sharegpt", MESSAGES)
    wrong = [i for i, label in enumerate(labels) if label not in (IGNORED, tokens[i])]
    for i in wrong:
        before, here = tokenizer.decode(tokens[i - 24 : i]), tokenizer.decode(tokens[i : i + 15])
        print(f"Gemma 2: behind {before!r} is {here!r}, and its first label {tokenizer.decode([labels[i]])!r}")
    print(f"Gemma 2 ends with {tokenizer.decode(tokens[-18:])!r}")
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    added = [form for form, text in texts.items() if "detailed thinking off" in text]
    is_added = added == ["openai", "openai with a system message"]
    is_another = len(wrong) == 1 and tokens[-1] == tokenizer.eos_token_id and "<eos>" not in rendered
    sys.exit(0 if is_added and is_another else 1)
