"""verl: MultiTurnSFTDataset masks the beginning of every answer where a template's prompt is longer than its header.

A tokenizer of bytes with DeepSeek-V3's published chat template (fixtures/templates); all else is the data set's. Exit
code 0: defect present. 1: gone. See verl-sft-mask.md.
"""

import importlib.metadata
import sys
import tempfile
from pathlib import Path

import pandas
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers import __version__ as HF

import parity

with parity.on_cpu(stand_ins=("vllm",)):
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

TEMPLATE = Path(__file__).resolve().parents[2] / "fixtures" / "templates" / "deepseek-v3.jinja"
TALK = [("user", "2 + 3?"), ("assistant", "The sum is 5.")]

if __name__ == "__main__":
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE(letters, []))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"additional_special_tokens": ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_, eos_token="<\uff5cend\u2581of\u2581sentence\uff5c>", **special
    )
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    config = {"max_length": 4096, "truncation": "right", "pad_mode": "no_padding"}
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"messages": [{"role": role, "content": text} for role, text in TALK]}]
        pandas.DataFrame(rows).to_parquet(file := f"{folder}/one.parquet")
        found = MultiTurnSFTDataset(file, tokenizer, config)[0]
    tokens, mask = found["input_ids"].tolist(), found["loss_mask"].bool().tolist()
    trained = tokenizer.decode([token for token, is_target in zip(tokens, mask, strict=True) if is_target])
    print(f"verl {importlib.metadata.version('verl')}, transformers {HF}; {tokenizer.decode(tokens)!r}")
    print(f"trained on: {trained!r}")
    sys.exit(0 if TALK[1][1] not in trained else 1)
