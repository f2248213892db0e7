"""Writes a Hugging Face folder with random weights for a configuration, to measure a model's size without its weights.

python benchmarks/random_model.py CONFIG SMALL OUT [--device cuda]

CONFIG: a folder with config.json, such as fixtures/models/openpangu-embedded-1b. SMALL: a folder of the same
architecture, whose tokenizer and Python code are copied, such as fixtures/models/pangu. Weights are float32, as
transformers initialises them.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
import transformers

from impl.interface.sharded_safetensors import TensorWriter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("small", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", help="where the numbers are drawn")
    options = parser.parse_args()
    shutil.copytree(options.small, options.out, ignore=shutil.ignore_patterns("*.safetensors*"))
    shutil.copy(options.config / "config.json", options.out)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(options.out, trust_remote_code=True)
    config.dtype = torch.float32
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    with TensorWriter(options.out) as writer:
        for name, weight in model.named_parameters():  # of tied ones the first
            writer.add(name, weight)
    numbers = sum(weight.numel() for weight in model.parameters())
    print(json.dumps({"model": str(options.out), "numbers": numbers}))


if __name__ == "__main__":
    main()
