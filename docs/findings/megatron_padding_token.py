"""megatron-core: the embedding of the padding token is trained, where transformers leaves it alone.

Two ranks, CPU, the embedding sharded over both. The reference is torch.nn.Embedding as transformers makes it.
Exit code 0: defect present (rows of the padding token inside a document differ, all others agree), and the remedy
mends it. 1: gone. See megatron-padding-token.md.
"""

import megatron_on_cpu as on_cpu
import torch
import transformers
from megatron.core import parallel_state
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig

VOCABULARY, HIDDEN, TOKENS = 16, 8, 64
PADDING = 2  # many models pad with the token that ends a turn, which then also occurs inside of conversations
HALF = VOCABULARY // 2


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def upstream() -> torch.Tensor:
    """The gradient of the loss with respect to the embedded tokens, (1, tokens, hidden)."""
    return torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def of_transformers() -> torch.Tensor:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        pad_token_id=PADDING,
    )  # fmt: skip
    embedding = transformers.LlamaForCausalLM(config).get_input_embeddings()
    embedding(tokens()).backward(upstream())
    gradient: torch.Tensor = embedding.weight.grad
    return gradient


def of_megatron(*, remedy: bool) -> torch.Tensor:
    """This rank's half of the gradient of the embedding, (vocabulary / 2, hidden)."""
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, use_cpu_initialization=True)
    embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, init_method=torch.nn.init.normal_, config=config)
    embedded = embedding(tokens())
    if remedy:
        embedded = torch.where((tokens() == PADDING)[..., None], embedded.detach(), embedded)
    embedded.backward(upstream())
    gradient: torch.Tensor = embedding.weight.grad
    return gradient


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    right = of_transformers()[rank * HALF : (rank + 1) * HALF]
    wrong, mended = of_megatron(remedy=False), of_megatron(remedy=True)
    others = [row for row in range(HALF) if rank * HALF + row != PADDING]
    if rank == 0:
        count = int((tokens() == PADDING).sum())
        print(f"padding token {PADDING}, {count} times among {TOKENS}: gradient {wrong[PADDING].norm():.3f}", end=" ")
        print(f"with megatron-core, {right[PADDING].norm():.3f} with transformers, whole embedding", end=" ")
        print(f"{on_cpu.error(wrong, right):.2f} off; REMEDY {on_cpu.error(mended, right):.1e}", flush=True)
    there = rank != 0 or (bool(wrong[PADDING].norm() > 0.1) and not right[PADDING].any())
    return there and on_cpu.error(wrong[others], right[others]) < 1e-6 and on_cpu.error(mended, right) < 1e-6


if __name__ == "__main__":
    on_cpu.two_ranks(present)
