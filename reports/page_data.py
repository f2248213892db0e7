"""Packs the data of the page as gzipped JSON in base64: one block per cell, and one block that cells share.

A page with thousands of cells stays small and opens fast, because a cell is only unpacked and drawn when a reader opens
it. Strings and columns that many cells share (tensor names, bounds, configurations) are stored once in the shared
block; the blocks of cells refer to them by number.

In the heat maps, a row is a kind of parameter, and the columns are the embedding, the layers and the head. So a missing
bias of one projection shows as one square, and a wrong norm before a layer as a column.
"""

import base64
import gzip
import json
import math
import re
import shlex
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from conformance.bisect.explain import describe
from conformance.judge.tolerance import EXACT, NOISE_FACTOR, gradient_stages
from conformance.records.record_format import Line, Lines, dumps
from conformance.results.verdict import STATES, Quantity, Verdict
from conformance.spec.observables import AGAINST_REBUILT, SHARE
from reports.load import Cell
from reports.summary import Cause
from reports.wording import circumstances, first_finding, likely_causes, worst_first

# In the order of a decoder layer. Other kinds come last, under their own names.
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
SHADES = (0.01, 0.1, 0.5, 1.0)
"""Upper bounds of observed / allowed for the colour classes h1 to h4, within the tolerance."""
BEYOND = (1e-4, 0.01, 0.1, 0.5)
"""Upper bounds of the relative error for the colour classes h5 to h9, outside the tolerance. The last has no bound."""


def shade(error: float, ratio: float) -> str:
    """Returns the colour class of an error: its number, ``n`` for NaN, ``i`` for an infinite error. ratio: error /
    bound."""
    if not math.isfinite(error):
        return "n" if math.isnan(error) else "i"
    if error == 0:
        return "0"
    return str(1 + bisect_left(SHADES, ratio) if ratio <= 1 else 5 + bisect_left(BEYOND, error))


def locate(name: str) -> tuple[str, str]:
    """Returns (column, kind) of a parameter by its Hugging Face name: ``("3", "q bias")``, ``("in", "embed")``.

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


Spell = Callable[[Sequence[Quantity]], tuple[Any, ...]]
PASSED = ("conforms", "partly_observed")  # states of cells without an error outside its tolerance
DIGITS = 4  # of an error
POWER = 80  # the character of the power 0
GRADES, GRADE = 20, 35  # steps of a margin in each digit, 6 % of an error; the character of the margin 0
FINDINGS = 5  # maximum number of findings shown for the first stage that differs
NO_CONFIGURATION = ("type", "schema", "observables")  # keys of a record's header that are not shown


def pack(text: str) -> str:
    """Packs JSON text: gzip, then base64. The page's script unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


class Shared:
    """Stores strings and JSON values that cells share once, and numbers them."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._values: dict[str, int] = {}
        self._places: dict[int, tuple[str, str]] = {}

    def string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    @property
    def strings(self) -> list[str]:
        return list(self._strings)

    def value(self, value: Any) -> int:
        return self._values.setdefault(dumps(value), len(self._values))

    def tensor(self, name: str) -> int:
        """Returns the number of a tensor's name. For a parameter, also stores its position in the network."""
        number = self.string(name)
        if "." in name and number not in self._places:
            self._places[number] = locate(name)
        return number

    def to_json(self) -> str:
        """Returns everything as JSON text, for the page's first block."""
        states = {state: vars(info) for state, info in STATES.items()}
        head = {
            "strings": self.strings,
            "places": self._places,
            "kinds": PARAMETER_KINDS,
            "shades": SHADES,
            "beyond": BEYOND,
            "power": POWER,
            "grades": [GRADES, GRADE],
            "states": states,
            "rule": {"exact": EXACT, "factor": NOISE_FACTOR, "rebuilt": AGAINST_REBUILT, "share": SHARE},
        }
        return f'{dumps(head)[:-1]}, "values": [{", ".join(self._values)}]}}'


def cell_data(cell: Cell, shared: Shared, cause: Cause | None = None, *, large: bool = False) -> dict[str, Any]:
    """Returns the data of one cell that the page shows when the cell is opened. cause: of its failure. large: the run
    has so many cells that passing ones have their margins only, in steps of a 20th of a digit."""
    spell = graded if large and cell.state in PASSED else spelled
    entry = cell.entry
    drawn = [o for o in entry.observables if o.drawn]
    stages = [o.stage for o in drawn if not o.title]
    titles = [o.title or (o.stage if stages.count(o.stage) == 1 else f"{o.stage}: {o.key}") for o in drawn]
    judged = {(q.stage, q.tensor) for q in entry.verdict.quantities}
    names = [o.judged_as if (o.stage, o.judged_as) in judged else o.key for o in drawn]
    charts = [[t, o.stage, o.key, name, o.panel] for t, o, name in zip(titles, drawn, names, strict=True)]
    tensors = list(dict.fromkeys(o.stage for o in entry.observables if o.kind == "tensors" and o.when != "handover"))
    numbers = list(dict.fromkeys(o.key for o in entry.observables if o.kind in ("scalar", "setting")))
    return {
        **{
            "id": cell.id,
            "state": cell.state,
            "reason": circumstances(cell),
            "backend": entry.backend,
            "layout": entry.layout,
        },
        "conventions": [[str(c), c.words, str(c) in entry.verdict.conventions] for c in entry.conventions],
        **{"ranks": entry.world_size, "seconds": round(entry.seconds, 1), "reproduce": entry.reproduce},
        "problem": cell.problem if cell.state != "infrastructure" else "",
        "stages": shared.value(entry.stages),
        "charts": shared.value(charts),
        "maps": shared.value(tensors),
        "tables": _tables(entry.verdict.quantities, set(numbers), shared, spell),
        "strips": _strips(entry.verdict, shared),
        "first": _first_difference(cell, cause),
        "bisection": vars(describe(cell.bisection)) if cell.bisection else None,
        "alike": _bisected_alike(cell, cause),
        "untraced": _untraced(cell),
        "together": shared.string(_run_of(cause.cells) if cause else ""),
        "series": _series(cell.steps, numbers),
        "phases": [_phase(phase, shared) for phase in cell.phases],
        "oracle": {
            "series": shared.value(_series(cell.oracle.steps, numbers)),
            "noise": shared.value([_series(lines.steps, numbers) for lines in cell.noise]),
            "config": _config(cell.oracle.header, shared),
        }
        if cell.oracle
        else None,
        "logs": cell.logs,
        "files": cell.files,
        "precision": entry.variant.partition("/")[0],
    }


def _three_digits(seconds: object) -> float:
    """Rounds seconds to three digits; 0 for an invalid value in an edited record."""
    is_number = isinstance(seconds, (int, float)) and math.isfinite(seconds)
    return float(f"{seconds:.3g}") if is_number else 0.0


def _phase(lines: Lines, shared: Shared) -> dict[str, Any]:
    """Returns the data of one phase: its configuration, the batches of its ranks, and the evidence."""
    footer = lines.footer
    pieces = {shared.tensor(name): regions for name, regions in footer.get("pieces", {}).items()}
    seconds = {line["step"]: _three_digits(line.get("seconds")) for line in lines.steps}
    return {
        "first": lines.header.get("first_step", 0),
        "layout": str(lines.header.get("layout", "")),
        "config": _config(lines.header, shared),
        "evidence": shared.value(_evidence(footer.get("evidence", ()))),
        "batches": shared.value(footer.get("batches", ())),
        "pieces": shared.value(pieces),
        "memory": footer.get("memory", ()),
        "seconds": seconds,
    }


def _evidence(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the evidence of all ranks: collectives by kind, group size, dtype and pass, and matrix products by dtype
    and pass, each with the number of ranks that made any, and the largest count of a rank."""
    found: dict[str, dict[tuple[Any, ...], list[int]]] = {"collectives": {}, "products": {}}
    for what, counts in found.items():
        for rank in ranks:
            for *key, count in rank.get(what, ()):
                counts.setdefault(tuple(key), []).append(count)
    return {what: [[*key, len(each), max(each)] for key, each in counts.items()] for what, counts in found.items()}


def _tables(quantities: Sequence[Quantity], numbers: set[str], shared: Shared, spell: Spell) -> list[list[Any]]:
    """Returns for each stage its name, and columns with the tensors, the steps, the bounds and the observed errors.

    numbers: keys of scalars and settings, which have no position in the network. All columns but the last depend only
    on the scenario and its precision, so cells share them.
    """
    by_stage: dict[str, list[Quantity]] = {}
    for quantity in quantities:
        by_stage.setdefault(quantity.stage, []).append(quantity)
    tables = []
    for stage, found in by_stage.items():
        names = shared.value([(shared.string if q.tensor in numbers else shared.tensor)(q.tensor) for q in found])
        steps, allowed = shared.value([q.step for q in found]), shared.value([q.allowed for q in found])
        tables.append([shared.string(stage), names, steps, allowed, *spell(found)])
    return tables


def _strips(verdict: Verdict, shared: Shared) -> list[list[Any]]:
    """Returns the per-token errors of each quantity: names and bins (shared by cells), the colour classes of the bins,
    the largest absolute difference, its token, and the distribution (the reference's is shared)."""
    judged = {(q.stage, q.tensor, q.step): q for q in verdict.quantities}
    strips = []
    for strip in verdict.strips:
        q = judged[strip.stage, strip.tensor, strip.step]
        names = shared.string(strip.stage), shared.string(strip.tensor)
        at = shared.value([*names, strip.step, strip.tokens, strip.starts])
        classes = [shade(error, replace(q, observed=error).ratio) for error in strip.errors]
        spread = strip.spread and [strip.spread.low, strip.spread.high, strip.spread.observed, strip.spread.quantiles]
        reference = strip.spread and shared.value(strip.spread.reference)
        strips.append([at, "".join(classes), float(f"{strip.max_abs:.2e}"), strip.where, spread, reference])
    return strips


def graded(quantities: Sequence[Quantity]) -> tuple[str]:
    """Returns a character for the margin of each error, all within their tolerances; a blank for no error."""
    return ("".join(chr(GRADE - round(GRADES * math.log10(q.ratio))) if q.ratio else " " for q in quantities),)


def spelled(quantities: Sequence[Quantity]) -> tuple[str, str | list[int]]:
    """Returns the digits of all errors in one string, and their powers of ten, as characters from POWER on if they fit.
    Apart, both need half the space after compression. An error that is not finite is spelled ``nan`` or ``inf``; no
    error moves across its bound."""
    texts, powers = [], []
    for quantity in quantities:
        mantissa, _, power = f"{_rounded(quantity):.{DIGITS - 1}e}".partition("e")
        texts.append(mantissa.replace(".", "").ljust(DIGITS))
        powers.append(int(power) - DIGITS + 1 if power else 0)
    is_printable = all(32 <= POWER + power < 127 for power in powers)
    return "".join(texts), "".join(chr(POWER + power) for power in powers) if is_printable else powers


def _rounded(quantity: Quantity) -> float:
    """Returns the observed error, rounded to DIGITS so that it does not move across its bound."""
    observed, allowed = quantity.observed, quantity.allowed
    if not math.isfinite(observed) or not allowed > 0:
        return observed
    short = float(f"{observed:.{DIGITS - 1}e}")
    if (short / allowed <= 1) == (quantity.ratio <= 1):
        return short
    unit = 10.0 ** (math.floor(math.log10(short)) - DIGITS + 1)
    return float(f"{short + (unit if quantity.ratio > 1 else -unit):.{DIGITS - 1}e}")


def _bisected_alike(cell: Cell, cause: Cause | None) -> list[str] | None:
    """Returns the id and the answer of the bisected cell that begins like this one, which was not bisected itself."""
    other = cause.bisected if cause and not cell.bisection else None
    return [other.id, describe(other.bisection).answer] if other and other.bisection else None


OUTPUTS = ("logprob", "old_logprob", "value", "old_value", "entropy", "score", "routing", "old_routing")
"""Keys of the rows that a model's last module gives, without the name of the model."""
HIDDEN = {"ckpt": "recomputes modules", "compile": "compiles modules"}
"""Options of a layout in which modules are not traced."""
TOGETHER = 20  # most cells that one suggested command runs


def _untraced(cell: Cell) -> str:
    """Returns why ``parity bisect`` finds no module in a failing cell; empty if it may."""
    if not (first := first_finding(cell)):
        return ""
    if not _has_module(cell, first):
        return (
            f"The first difference is in {first.stage}, which no module computes, so no module is the first wrong one."
        )
    if (phases := len(cell.entry.records)) > 1:
        return f"It has {phases} phases, and a module is searched in cells of one: bisect such a cell of this layout."
    hidden = next((option for option in HIDDEN if option in cell.entry.layout.split(".")), None)
    return f"This layout {HIDDEN[hidden]} ({hidden}): bisect the layout without it." if hidden else ""


def _has_module(cell: Cell, first: Quantity) -> bool:
    """Whether modules compute the stage that differs first: outputs, gradients, or the first number that is judged
    after outputs or gradients that the cell does not show at this step."""
    observables = cell.entry.observables
    rows = [o for o in observables if o.kind == "rows"]
    outputs = {o.stage for o in rows if o.key.rpartition(".")[2] in OUTPUTS}
    gradients = gradient_stages(observables)
    computed = [o for o in observables if o.stage == first.stage and o.kind in ("scalar", "tensors")]
    judged = {q.stage for q in cell.entry.verdict.quantities if q.step == first.step}
    if first.stage in outputs | gradients:
        return True
    if any(o.change or o.norm_of for o in computed):
        return not judged & gradients
    return any(o.kind == "scalar" for o in computed) and not judged & outputs


def _run_of(cells: Sequence[Cell]) -> str:
    """Returns the command that runs all cells with one cause again; empty for too many of them, or one."""
    words = shlex.split(cells[0].entry.reproduce)
    if "--cells" not in words or not 1 < len(cells) <= TOGETHER:
        return ""
    place = words.index("--cells")
    asked = [word for cell in cells for word in ("--cells", cell.id)]
    return shlex.join([*words[:place], *asked, *words[place + 2 :]])


def _first_difference(cell: Cell, cause: Cause | None) -> dict[str, Any] | None:
    """Returns the worst findings and all hints of the first stage and step that differ, and the later stages that
    differ. None for a cell without findings."""
    findings = worst_first(cell)
    if not findings:
        return None
    first = findings[0]
    worst = [f for f in findings if (f.stage, f.step) == (first.stage, first.step)]
    later = {f.stage for f in cell.findings} - {first.stage}
    return {
        "stage": first.stage,
        "step": first.step,
        "findings": [[f.tensor, f.observed, f.allowed, f.max_abs, f.where] for f in worst[:FINDINGS]],
        "more": len(worst[FINDINGS:]),
        "of": sum((q.stage, q.step) == (first.stage, first.step) for q in cell.entry.verdict.quantities),
        "hints": [[tensor, hint] for hint, tensor in likely_causes(cell).items()],
        "shared": cause.shared if cause else "",
        "passing": cause.passing if cause and cause.first is cell else "",
        "later": [stage for stage in cell.entry.stages if stage in later],
    }


def _series(lines: Sequence[Line], keys: Sequence[str]) -> dict[str, Any]:
    """Returns the steps, and the values at each step by key; None if a step has no such value, or not a number."""
    values = [line.get("values") for line in lines]
    tables = [value if isinstance(value, dict) else {} for value in values]
    columns = {key: [_number(table.get(key)) for table in tables] for key in keys}
    nonempty = {key: column for key, column in columns.items() if any(value is not None for value in column)}
    return {"steps": [line["step"] for line in lines], "values": nonempty}


def _number(value: Any) -> float | str | None:
    return value if isinstance(value, int | float) or value in ("nan", "inf", "-inf") else None


def _config(header: Line, shared: Shared) -> list[int]:
    """Flattens a record's header into keys and values, in parts that cells share: environment, scenario, ..."""
    shown = {key: value for key, value in header.items() if key not in NO_CONFIGURATION}
    parts = [{key: value for key, value in shown.items() if not isinstance(value, dict)}]
    parts += [{key: value} for key, value in shown.items() if isinstance(value, dict)]
    flat = [flattened(part) for part in parts]
    return [shared.value([[shared.string(key), shared.string(value)] for key, value in part.items()]) for part in flat]


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else _short(value)
    return flat


def _short(value: Any) -> str:
    """Formats a value as JSON. Equal objects that follow each other in a list are counted: ``[12 x {...}]``."""
    if not isinstance(value, list) or not any(isinstance(item, dict) for item in value):
        return json.dumps(value)
    runs = [(text, len(list(equal))) for text, equal in groupby(map(json.dumps, value))]
    return f"[{', '.join(text if count == 1 else f'{count} x {text}' for text, count in runs)}]"
