"""transformers: sliding layers of Gemma 3 take the images of the first packed document for those of all.

Exit code 0: defect present. 1: gone. See gemma3-packed-images.md.
"""

import sys
from typing import Any

import torch
import transformers
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

IMAGE, IMAGE_TOKENS = 7, 4


def build() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text: dict[str, Any] = {"vocab_size": 96, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 9, **sizes}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.1}
    tower = {**sizes, "hidden_size": 32, "patch_size": 2, "image_size": 8}
    ids = {"image_token_index": IMAGE, "boi_token_index": 6, "eoi_token_index": 5, "mm_tokens_per_image": IMAGE_TOKENS}
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=tower, attn_implementation="eager", **ids)
    model = Gemma3ForConditionalGeneration(config).double().eval()
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    return model


def document(before: int, behind: int) -> torch.Tensor:
    text = torch.randint(8, 96, (1, before + behind), generator=torch.Generator().manual_seed(before))
    image = torch.tensor([[6, *[IMAGE] * IMAGE_TOKENS, 5]])
    return torch.cat([text[:, :before], image, text[:, before:]], dim=1)


def masks(model: Any, positions: torch.Tensor, is_image: torch.Tensor) -> dict[str, torch.Tensor]:
    """Masks to which the images are given after packing, in both kinds of layers."""
    begins = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    wanted = {
        "config": model.config.get_text_config(),
        "inputs_embeds": torch.empty(*positions.shape, 1, dtype=torch.float64),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
        "block_sequence_ids": torch.where(is_image, begins.cumsum(1) - 1, -1),
    }
    sliding = create_sliding_window_causal_mask(**wanted)
    return {"full_attention": create_causal_mask(**wanted), "sliding_attention": sliding}


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, tiny Gemma 3, float64")
    model, documents = build(), [document(2, 6), document(7, 5)]
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    row = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    is_image = row == IMAGE
    ways: dict[str, dict[str, Any]] = {
        "token_type_ids": {"token_type_ids": is_image.long()},
        "REMEDY: masks of images and documents": {"attention_mask": masks(model, positions, is_image)},
    }
    errors = {}
    with torch.no_grad():
        second, first = documents[1], documents[0].shape[1]
        alone = model(second, pixel_values=pixels[1:], token_type_ids=(second == IMAGE).long(), use_cache=False).logits
        for name, inputs in ways.items():
            logits = model(row, pixel_values=pixels, position_ids=positions, use_cache=False, **inputs).logits[
                :, first:
            ]
            errors[name] = ((logits - alone).abs().max() / alone.abs().max()).item()
            print(f"{name:38}: logits of the second document off by {errors[name]:.1e}")
    shipped, remedied = errors.values()
    present = shipped > 1e-3 and remedied < 1e-5
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
