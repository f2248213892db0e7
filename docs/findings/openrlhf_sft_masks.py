"""OpenRLHF: SFTDataset trains on users' messages, loses the beginning of an answer, adds an end, or drops tools.

A tokenizer of bytes with published chat templates (fixtures/templates); all else is SFTDataset's. Exit code 0: all five
defects are present. 1: one is gone. See openrlhf-sft-masks.md.
"""

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers import __version__ as HF

import parity

with parity.on_cpu(stand_ins=("vllm", "ring_flash_attn")):
    from openrlhf.datasets.sft_dataset import SFTDataset

TEMPLATES = Path(__file__).resolve().parents[2] / "fixtures" / "templates"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TALK = [("user", "2 + 3?"), ("assistant", "2 + 3 is 5."), ("user", "And 5 more?"), ("assistant", "That is 10.")]


def tokenizer_of(template: str, end: str) -> PreTrainedTokenizerFast:
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(letters, []))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token=end)
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def texts(template: str, end: str, turns: int, *, multiturn: bool) -> tuple[str, str, str]:
    """Returns three texts of the first turns: the template's own, SFTDataset's, and what is trained on of that one."""
    tokenizer = tokenizer_of(template, end)
    messages = [{"role": role, "content": text} for role, text in TALK[:turns]]
    data = SimpleNamespace(input_key="messages", output_key=None, apply_chat_template=True)
    rows = Dataset.from_list([{"messages": messages, "tools": [TOOL]}])
    strategy = SimpleNamespace(args=SimpleNamespace(data=data))
    found = SFTDataset(rows, tokenizer, 4096, strategy, num_processors=None, multiturn=multiturn)
    tokens, _, mask = found[0]
    trained = [t for t, is_target in zip(tokens[0][1:], mask[0].bool(), strict=False) if is_target]
    own = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    return str(own), str(tokenizer.decode(tokens[0])), str(tokenizer.decode(trained))


if __name__ == "__main__":
    print(f"OpenRLHF {importlib.metadata.version('openrlhf')}, transformers {HF}")
    *_, shifted = texts("qwen3", "<|im_end|>", 4, multiturn=True)
    print(f"Qwen3, two answers, trained on: {shifted!r}")
    *_, cut = texts("deepseek-v3", "<\uff5cend\u2581of\u2581sentence\uff5c>", 2, multiturn=False)
    print(f"DeepSeek-V3, one answer, trained on: {cut!r}")
    rendered, ended = texts("gemma2", "<eos>", 2, multiturn=True)[:2]
    print(f"Gemma 2, one answer: {ended!r}, rendered {rendered!r}")
    own, asked, question = texts("qwen2.5", "<|im_end|>", 3, multiturn=False)
    print(f"Qwen2.5, a question at the end: {asked!r}, trained on {question!r}")
    print(f"Qwen2.5, a tool: written by the template {'<tools>' in own}, by SFTDataset {'<tools>' in asked}")
    of_end = ended.endswith("<end_of_turn> <eos>") and "<eos>" not in rendered
    of_question = "And 5 more?" not in asked and question.startswith(" more?")
    of_tools = "<tools>" in own and "<tools>" not in asked
    sys.exit(0 if "user" in shifted and "2 + 3 is" not in cut and of_end and of_question and of_tools else 1)
