"""Heat map: the row (kind of parameter) and the column (layer) of a parameter's square in the page's heat maps.

Serves claim 1: gradients are judged per parameter, so a missing bias of one projection shows as one square, and a wrong
norm before a layer as a column. The columns are the embedding, the layers, and the head.
"""

import math
import re

# In the order of a decoder layer. A kind that is not in this list comes last, under its own name.
PARAMETER_KINDS = (
    "embed",
    "attn norm",
    *("q", "q bias", "q norm", "k", "k bias", "k norm", "v", "v bias", "qkv", "qkv bias", "o", "o bias"),
    "mlp norm",
    *("router", "gate", "gate bias", "up", "up bias", "down", "down bias"),
    *("expert gate", "expert up", "expert down"),
    "final norm",
    *("head", "head bias", "value head"),
)
_NAMES = {
    "embed_tokens": "embed",
    "wte": "embed",
    "lm_head": "head",
    "score": "value head",
    "input_layernorm": "attn norm",
    "post_attention_layernorm": "mlp norm",
    "norm": "final norm",
}
SHADES = (0.01, 0.1, 0.5, 1.0, 10.0)
"""Upper bounds of observed / allowed for the colour classes h1, h2, ... The hue changes at the tolerance, 1."""


def shade(error: float, ratio: float) -> str:
    """The colour class of an error: its number, ``n`` for NaN, ``i`` for an infinite error. ``ratio``: of the error to
    its bound."""
    if not math.isfinite(error):
        return "n" if math.isnan(error) else "i"
    if error == 0:
        return "0"
    return str(1 + next((number for number, top in enumerate(SHADES) if ratio <= top), len(SHADES)))


def locate(name: str) -> tuple[str, str]:
    """(column, kind) of a parameter by its Hugging Face name: ``("3", "q bias")``, ``("in", "embed")``.

    A remark in brackets after the name, such as ``(missing)``, is ignored.
    """
    layer = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
    module, _, leaf = name.partition(" (")[0].rpartition(".")
    last = module.rpartition(".")[2]
    kind = "router" if module.endswith("mlp.gate") else _NAMES.get(last, last.removesuffix("_proj").replace("_", " "))
    if ".experts." in name:
        kind = f"expert {kind}"
    if leaf == "bias":
        kind += " bias"
    column = layer[1] if layer else "in" if kind == "embed" else "out"
    return column, kind
