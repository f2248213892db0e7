"""vLLM on a CPU: a request with a seed raises when its prompt is prefilled in chunks."""

import sys
import tempfile
from importlib.metadata import version
from typing import Any

from vllm_cpu_half_new import TOKENS, model  # it sets vLLM's environment

# isort: split
from vllm import LLM, SamplingParams

LONG, CHUNK = TOKENS * 3, 16


def answer(llm: Any, seed: int | None) -> str:
    """Samples twice; returns vLLM's error, or whether the responses are equal."""
    sampling = SamplingParams(max_tokens=4, seed=seed, detokenize=False, ignore_eos=True)
    found = []
    for _ in range(2):
        try:
            (output,) = llm.generate([{"prompt_token_ids": LONG}], sampling, use_tqdm=False)
        except RuntimeError as error:
            return f"RuntimeError: {error}"
        found.append(output.outputs[0].token_ids)
    return "the same tokens" if found[0] == found[1] else "other tokens"


def main() -> int:
    print(f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}; prompt of {len(LONG)} tokens, chunks of {CHUNK}")
    given = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "skip_tokenizer_init": True}
    with tempfile.TemporaryDirectory() as folder:
        model(tied=True).save_pretrained(folder)
        whole = LLM(model=folder, **given)
        chunked = LLM(model=folder, max_num_batched_tokens=CHUNK, max_num_seqs=8, enable_prefix_caching=False, **given)
    found = {
        "whole prompt, seed 0": answer(whole, 0),
        "chunks, no seed": answer(chunked, None),
        "chunks, seed 0": answer(chunked, 0),
        "chunks, no seed, after the error": answer(chunked, None),
    }
    for name, text in found.items():
        print(f"{name}: {text}")
    present = "CPU Generator does not use offset" in found["chunks, seed 0"]
    print("defect present" if present else "defect not as described")
    return 0 if present else 1


if __name__ == "__main__":
    sys.exit(main())
