"""TRL: with assistant_only_loss, templates for training mark the header of an answer, or write a text of their own.

A tokenizer of bytes with published chat templates (fixtures/templates); all else is SFTTrainer's. Exit code 0: all
three defects are present. 1: one is gone. See trl-training-templates.md.
"""

import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import __version__ as HF
from trl import SFTConfig, SFTTrainer, __version__

TEMPLATES = Path(__file__).resolve().parents[2] / "fixtures" / "templates"
SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
TALK = [("user", "2 + 3?"), ("assistant", "2 + 3 is 5."), ("user", "And 5 more?"), ("assistant", "That is 10.")]
MESSAGES = [{"role": role, "content": text} for role, text in TALK]


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(letters, []))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|im_end|>")
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def prepared(template: str) -> tuple[str, str, str, str]:
    """Returns the template's own text, SFTTrainer's, the part of it that is trained on, and the prompt's ending."""
    tokenizer = tokenizer_of(template)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    prompt = tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False, add_generation_prompt=True)
    header = prompt.removeprefix(tokenizer.apply_chat_template(MESSAGES[:1], tokenize=False))
    options = {"report_to": "none", "use_cpu": True, "bf16": False, "max_length": None, "assistant_only_loss": True}
    trainer = SFTTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SHAPE)),
        SFTConfig(output_dir=tempfile.mkdtemp(), **options),
        train_dataset=Dataset.from_list([{"messages": MESSAGES}]),
        processing_class=tokenizer,
    )
    row = trainer.train_dataset[0]
    trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    return text, tokenizer.decode(row["input_ids"]), tokenizer.decode(trained), header


if __name__ == "__main__":
    print(f"TRL {__version__}, transformers {HF}")
    found = {template: prepared(template) for template in ("qwen2.5", "deepseek-v3", "qwen3")}
    for template, (text, own, trained, header) in found.items():
        print(f"{template}: a prompt ends with {header!r}; trained on: {trained!r}")
        print(f"  text {'as rendered' if own == text else f'{own!r}, rendered {text!r}'}")
    of_line = found["qwen2.5"][2].startswith("\n") and found["qwen2.5"][3].endswith("\n")
    of_role = found["deepseek-v3"][2].startswith("<\uff5cAssistant\uff5c>")
    of_block = found["qwen3"][1].count("<think>") == 2 and found["qwen3"][0].count("<think>") == 1
    sys.exit(0 if of_line and of_role and of_block else 1)
