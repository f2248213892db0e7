"""What a model's folder has beside parameters. Apart from models.py, because it needs no transformers."""

import torch


def published_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a model's folder has beside parameters, by name: it is not trained, and is exported with them."""
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
