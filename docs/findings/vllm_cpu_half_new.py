"""vLLM on a CPU: after reload_weights, a model with a tied head computes its logits with the old matrix."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

REMEDY = "new, after the head was packed again"
TOKENS = [5, 17, 99, 200, 33, 42, 7, 8, 9, 10, 11, 250, 300, 399]


def model(tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=400,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    made = Qwen3ForCausalLM(config)
    for parameter in made.parameters():
        parameter.data = 0.05 * torch.randn_like(parameter) + (parameter.dim() == 1)
    return made


@torch.no_grad()
def expected(made: Qwen3ForCausalLM, head: Tensor | None = None) -> Tensor:
    """Returns log-probs after TOKENS in float64, with another matrix as the head if one is given."""
    made = made.double().eval()
    hidden = made.model(torch.tensor([TOKENS])).last_hidden_state[0, -1]
    logits: Tensor = hidden @ (made.lm_head.weight if head is None else head.double()).T
    return logits.log_softmax(-1)


def given(llm: Any) -> Tensor:
    sampling = SamplingParams(max_tokens=1, logprobs=-1, detokenize=False)
    at = llm.generate([{"prompt_token_ids": TOKENS}], sampling, use_tqdm=False)[0].outputs[0].logprobs[0]
    return torch.tensor([at[token].logprob for token in range(400)], dtype=torch.float64)


def distances(folder: Path, *, tied: bool) -> dict[str, float]:
    """Reloads a model whose every number has moved, and compares with it, with the old one, and with the mixture."""
    old, new = model(tied), model(tied)
    for parameter in new.parameters():
        parameter.data *= 1 + 0.05 * torch.randn_like(parameter)
    for name, one in (("old", old), ("new", new)):
        one.save_pretrained(folder / name)
    llm = LLM(
        model=str(folder / "old"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        skip_tokenizer_init=True,
        max_logprobs=-1,
        enable_prefix_caching=False,
    )
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / "new")})
    found, old_head = given(llm), old.lm_head.weight.detach().clone()
    references = {"new": expected(new), "old": expected(old), "new with the old head": expected(new, old_head)}
    off = {name: float((found - reference).abs().max()) for name, reference in references.items()}
    llm.collective_rpc(pack_head)
    return off | {REMEDY: float((given(llm) - references["new"]).abs().max())}


def pack_head(worker: Any) -> None:
    head = worker.get_model().lm_head
    head.quant_method.process_weights_after_loading(head)


if __name__ == "__main__":
    shown = True
    for tied in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            off = distances(Path(folder), tied=tied)
        print(f"tied={tied}: after reload_weights the log-probs are off by")
        for name, distance in off.items():
            print(f"    {distance:.1e} from the weights: {name}")
        right = off["new with the old head" if tied else "new"]
        shown = shown and right < 1e-5 and off[REMEDY] < 1e-5 and (not tied or off["new"] > 1e-3)
    sys.exit(0 if shown else 1)
