"""Error by layer and kind of parameter as inline SVG: where in the network a difference sits.

Serves claim 1: gradients are judged per parameter, so a dropped bias of one projection is one square, and a wrong norm
in front of a layer is a column. Columns run from the embedding through the layers to the head.
"""

import math
import re

import pandas as pd
from markupsafe import Markup, escape

from reports.load import Cell
from reports.words import number, ratio

# In the order of a decoder layer; a kind that is not listed comes last, under its own name.
KINDS = (
    "embed",
    "attn norm",
    *("q", "q bias", "q norm", "k", "k bias", "k norm", "v", "v bias", "qkv", "qkv bias", "o", "o bias"),
    "mlp norm",
    *("router", "gate", "gate bias", "up", "up bias", "down", "down bias"),
    *("expert gate", "expert up", "expert down"),
    "final norm",
    *("head", "head bias"),
)
_NAMES = {
    "embed_tokens": "embed",
    "wte": "embed",
    "lm_head": "head",
    "input_layernorm": "attn norm",
    "post_attention_layernorm": "mlp norm",
    "norm": "final norm",
    "mlp.gate": "router",
}
# Upper ends of the colour classes h1, h2, ...; h0 is an error of exactly 0. The tolerance, 1, is the change of hue.
CLASSES = (0.01, 0.1, 0.5, 1.0, 10.0, math.inf)
ROW, LABEL, HEAD = 17, 66, 16


def locate(name: str) -> tuple[str, str]:
    """(column, kind) of a parameter by its Hugging Face name: ``("3", "q bias")``, ``("in", "embed")``."""
    layer = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
    module, _, leaf = name.rpartition(".")
    last = module.rpartition(".")[2]
    kind = "router" if module.endswith("mlp.gate") else _NAMES.get(last, last.removesuffix("_proj").replace("_", " "))
    if ".experts." in name:
        kind = f"expert {kind}"
    if leaf == "bias":
        kind += " bias"
    column = layer[1] if layer else "in" if kind == "embed" else "out"
    return column, kind


def heat_map(cell: Cell, stage: str, label: str) -> Markup:
    """Worst observed / allowed of every parameter in ``stage``; empty when none was compared."""
    rows = [
        (
            *locate(q.tensor),
            q.ratio,
            f"{q.tensor}\n{_when(q.step)}error {number(q.observed)}, allowed {number(q.allowed)}",
        )
        for q in cell.quantities
        if q.stage == stage and "." in q.tensor
    ]
    if not rows:
        return Markup("")
    table = pd.DataFrame(rows, columns=["column", "kind", "ratio", "tip"])
    worst = table.sort_values("ratio", kind="stable").groupby(["kind", "column"], sort=False).tail(1)
    order = {kind: index for index, kind in enumerate(KINDS)}
    kinds = sorted(dict.fromkeys(table["kind"]), key=lambda kind: order.get(kind, len(order)))
    columns = sorted(dict.fromkeys(table["column"]), key=_depth)
    width = 46 if len(columns) <= 8 else 24 if len(columns) <= 16 else 10
    body = [
        f'<text x="{LABEL - 6}" y="{HEAD + ROW * i + 12}" text-anchor="end">{escape(kind)}</text>'
        for i, kind in enumerate(kinds)
    ]
    stride = 1 if width > 10 else 8
    body += [
        f'<text x="{LABEL + width * (i + 0.5):g}" y="{HEAD - 5}" text-anchor="middle">{column}</text>'
        for i, column in enumerate(columns)
        if not column.isdigit() or int(column) % stride == 0
    ]
    for column, kind, value, tip in worst.itertuples(index=False):
        x, y = LABEL + width * columns.index(column), HEAD + ROW * kinds.index(kind)
        body.append(f'<g class="h{_class(value)}" data-tip="{escape(tip)}">')
        body.append(f'<rect x="{x}" y="{y}" width="{width - 1}" height="{ROW - 1}"/>')
        if width > 10:
            text = ratio(value) if width == 46 else "✗" if value > 1 else ""
            body.append(f'<text x="{x + (width - 1) / 2:g}" y="{y + 12}" text-anchor="middle">{escape(text)}</text>')
        body.append("</g>")
    size = LABEL + width * len(columns), HEAD + ROW * len(kinds)
    return Markup(
        f'<svg class="heat" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}" role="img" '
        f'aria-label="{escape(label)} of {escape(cell.id)} by layer and kind of parameter">{"".join(body)}</svg>'
    )


def _class(value: float) -> int:
    return 0 if value == 0 else 1 + next(i for i, top in enumerate(CLASSES) if value <= top)


def _when(step: int | None) -> str:
    return "" if step is None else "as loaded: " if step < 0 else f"step {step}: "


def _depth(column: str) -> int:
    return {"in": -1, "out": 1_000_000}.get(column) if not column.isdigit() else int(column)  # type: ignore[return-value]
