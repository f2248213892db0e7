"""Lost gradient of the embedding: nothing comes back from the layers. docs/findings/compiled-collective-inputs.md."""

import torch

from conformance.oracle.variant import Variant, Weights

EMBEDDING = "model.embed_tokens.weight"


class WithLostEmbeddingGradient(Variant):
    def reduced(self, gradients: Weights) -> Weights:
        return gradients | {EMBEDDING: torch.zeros_like(gradients[EMBEDDING])}
