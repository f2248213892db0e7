"""Error by layer and kind of parameter as a table of colours: where in the network a difference sits.

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
WIDE = 8  # up to so many columns there is room for the ratio in each square


def locate(name: str) -> tuple[str, str]:
    """(column, kind) of a parameter by its Hugging Face name: ``("3", "q bias")``, ``("in", "embed")``.

    A remark in brackets after the name, such as ``(missing)``, is not part of it.
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


def heat_map(cell: Cell, stage: str) -> Markup:
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
    table = table.sort_values("ratio", kind="stable").drop_duplicates(["kind", "column"], keep="last")
    squares = {(kind, column): (value, tip) for column, kind, value, tip in table.itertuples(index=False)}
    kinds = sorted(table["kind"].unique(), key=lambda kind: KINDS.index(kind) if kind in KINDS else len(KINDS))
    columns = sorted(table["column"].unique(), key=_depth)
    wide = len(columns) <= WIDE
    head = "".join(f"<th>{c if wide or not c.isdigit() or int(c) % 4 == 0 else ''}" for c in columns)
    body = "".join(
        f"<tr><th>{escape(kind)}" + "".join(_square(squares.get((kind, column)), wide) for column in columns)
        for kind in kinds
    )
    return Markup(f'<table class="heat{" fine" * (not wide)}"><tr><th>{head}{body}</table>')


def _square(square: tuple[float, str] | None, wide: bool) -> str:
    if square is None:
        return "<td>"
    value, tip = square
    text = ratio(value) if wide else "\N{MULTIPLICATION SIGN}" if value > 1 else ""
    return f'<td class="{shade(value)}" data-tip="{escape(tip)}">{escape(text)}'


def shade(value: float) -> str:
    """The class of the colour of a ratio."""
    return "h0" if value == 0 else f"h{1 + next(i for i, top in enumerate(CLASSES) if value <= top)}"


def _when(step: int | None) -> str:
    return "" if step is None else "as loaded: " if step < 0 else f"step {step}: "


def _depth(column: str) -> float:
    return int(column) if column.isdigit() else -1 if column == "in" else math.inf
