"""Measures the differences between two records: stages in causal order, each with quantities and their bounds.

Tensors are compared by their sketches: ``|x - y| / max(|x|, |y|, floor)``, with the floor of
conformance.numerics.comparison. docs/guides/recording.md derives the bounds.

Parameters are compared by their Hugging Face names, because every framework either keeps these names or converts to
them. Prefixes and infixes of wrappers are removed.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conformance.numerics.comparison import floor_of, ratio, relative, scale_of
from parity.record_files import Arrays, Line, Run

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")  # anywhere in a name
PREFIX = re.compile(r"^(?:module\.|base_model\.model\.)+")  # torch's DDP, Megatron, DeepSpeed; PEFT

Rows = Mapping[str, slice]
"""The rows of each part of a fused parameter, under the canonical name of the part."""

Names = Callable[[str], "str | Rows"]


def canonical(name: str) -> str:
    """Remove the prefixes of wrappers (torch.compile, FSDP, DDP, checkpointing, PEFT) from a parameter's name."""
    kept = [part for part in name.split(".") if part not in WRAPPERS]
    return PREFIX.sub("", ".".join(kept))


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Find the name among ``candidates`` that is most similar to ``name``; empty if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.75)), "")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """The difference of one number or tensor between two records A and B.

    observed, allowed: relative. norms: of A and of B. scale: the factor B / A, if the two differ by a factor only.
    rows: the rows of a parameter whose norms differ, if they are few. description: the difference in words, if it is
    not a number.
    """

    what: str
    observed: float
    allowed: float
    norms: tuple[float, float] | None = None
    scale: float | None = None
    rows: str = ""
    description: str = ""

    @property
    def differs(self) -> bool:
        return not self.observed <= self.allowed  # not a number is a difference


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The quantities of one stage, in the order of the model; ``step`` is None before the first.

    undetermined: parameters that are not compared because rounding decides their updates.
    """

    name: str
    step: int | None
    quantities: tuple[Quantity, ...]
    undetermined: tuple[str, ...] = ()

    @property
    def different(self) -> tuple[Quantity, ...]:
        """The quantities that differ, the worst first."""
        return tuple(sorted((q for q in self.quantities if q.differs), key=lambda q: -q.observed))

    @property
    def worst(self) -> Quantity | None:
        return max(self.quantities, key=lambda q: ratio(q.observed, q.allowed), default=None)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The comparison of record B with record A: the stages up to the first that differs.

    because: the origin of the thresholds.
    """

    a: Run
    b: Run
    threshold: float
    loss_threshold: float
    because: str
    stages: tuple[Stage, ...]

    @property
    def divergence(self) -> Stage | None:
        """The first stage that differs; None if the records agree."""
        return next((stage for stage in self.stages if stage.different), None)


EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
COARSEST = 2.0**-3  # of any dtype that is not listed: eight bits
EXACT = 1e-9  # where there is no arithmetic: weights as loaded, settings
CLASS = "optimizer"  # a setting that is reported and not compared, because one algorithm has many classes
NEAR_ZERO = 4.0  # see ``allowed_update``
MOST = 0.9  # the largest bound of an update: a missing update differs by 1, one in another direction by 1.4

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The summaries of one kind from one record, for the parameters that both have: [P], [P, 64] and [P, 64]."""

    norms: Vector
    present: Vector
    not_finite: Vector
    rows: Vector
    sketches: Vector


def tensors(arrays: Arrays, kind: str, names: Sequence[str], chosen: Sequence[str]) -> Tensors:
    """Select the rows of ``chosen`` from arrays whose rows are ``names``."""
    places = [names.index(name) for name in chosen]
    present, squares, not_finite = arrays[f"{kind}.sums"][places].T
    return Tensors(
        norms=np.sqrt(squares),
        present=present,
        not_finite=not_finite,
        rows=np.sqrt(arrays[f"{kind}.rows"][places]),
        sketches=arrays[f"{kind}.sketch"][places],
    )


def epsilon(dtype: str) -> float:
    """Give the spacing of the numbers of a dtype next to 1."""
    return EPSILON.get(dtype, COARSEST)


def coarsest(a: Run, b: Run) -> tuple[float, str]:
    """Find the coarsest dtype in which either record keeps trained weights or computes: its rounding, and a reason."""
    found = [
        (epsilon(dtype), f"{run.name} {does} {dtype}")
        for run in (a, b)
        for does, dtypes in (
            ("keeps what it trains in", [p["dtype"] for p in run.parameters.values() if p["trained"]]),
            ("computes in", [line["computed_in"] for line in run.steps if line["computed_in"]]),
        )
        for dtype in dtypes
    ]
    return max(found, key=lambda one: one[0], default=(epsilon("float32"), "nothing is trained"))


def parameters(a: Run, b: Run) -> Iterator[Quantity]:
    """Compare names, shapes and training of parameters; a missing one is reported with the most similar name."""
    for one, other in ((a, b), (b, a)):
        for name in one.parameters:
            if name not in other.parameters:
                tied, like = other.header["tied"].get(name), nearest(name, set(other.parameters) - set(one.parameters))
                if tied and one.header["tied"].get(tied) == name:  # both tie the two, and each kept another name
                    if one is a:
                        yield _fact(name, f"is called {tied} in {other.name}; record it under one name, by names=")
                    continue
                hint = f", which ties it to {tied}" if tied else f"; the nearest name there is {like}" if like else ""
                yield _fact(name, f"not in {other.name}{hint}")
    for name in (name for name in a.parameters if name in b.parameters):
        p, q = a.parameters[name], b.parameters[name]
        differences = []
        if p["shape"] != q["shape"]:
            differences.append(f"has shape {p['shape']} in {a.name} and {q['shape']} in {b.name}")
        for run, own, its in ((a, p, q), (b, q, p)):
            if its["trained"] and not own["trained"]:
                differences.append(f"is frozen in {run.name}")
            elif own["trained"] and own["group"] is None and its["group"] is not None:
                differences.append(f"is in no optimizer of {run.name}")
        yield _fact(name, " and ".join(differences))


def _fact(what: str, description: str) -> Quantity:
    return Quantity(what=what, observed=math.inf if description else 0.0, allowed=EXACT, description=description)


def common(a: Run, b: Run, *, trained: bool) -> tuple[str, ...]:
    """Give the parameters that both records have in the same shape, in the order of A."""
    names_of_b = b.trained if trained else tuple(b.parameters)
    names = a.trained if trained else tuple(a.parameters)
    return tuple(n for n in names if n in names_of_b and a.parameters[n]["shape"] == b.parameters[n]["shape"])


def batch(a: Line, b: Line) -> Iterator[Quantity]:
    """Compare the fingerprint of the rows and the number of tokens, where both records have them."""
    if a["batch"] and b["batch"]:
        counts = f"{a['batch']['rows']} and {b['batch']['rows']} rows"
        yield _fact("rows", "" if a["batch"] == b["batch"] else f"not the same rows of tokens ({counts})")
    if a["tokens"] is not None and b["tokens"] is not None:
        yield number("tokens", a["tokens"], b["tokens"], EXACT)


def number(what: str, a: float, b: float, allowed: float) -> Quantity:
    """Compare two numbers, relative to the larger of the two."""
    observed = relative(abs(a - b), max(abs(a), abs(b)))
    return Quantity(what=what, observed=observed, allowed=allowed, norms=(a, b), scale=b / a if a and b else None)


def compared(
    names: Sequence[str], a: Tensors, b: Tensors, allowed: Sequence[float], *, runs: tuple[Run, Run]
) -> Iterator[Quantity]:
    """Compare the tensors of a stage by their sketches; ``allowed``: the bound of each of ``names``."""
    distances = np.linalg.norm(a.sketches - b.sketches, axis=1)  # [P]
    sizes = np.maximum(a.norms, b.norms)
    floor = floor_of(sizes**2)
    for i, name in enumerate(names):
        observed, description = relative(float(distances[i]), max(float(sizes[i]), floor)), ""
        if a.not_finite[i] or b.not_finite[i]:  # what is not finite on both sides has no distance, and is no agreement
            counts = " and ".join(f"{int(t.not_finite[i])} in {run.name}" for t, run in zip((a, b), runs, strict=True))
            observed, description = math.inf, f"numbers that are not finite: {counts}"
        elif a.present[i] != b.present[i] and sizes[i]:  # a gradient of zeros is as good as none
            lacking = runs[0].name if a.present[i] < b.present[i] else runs[1].name
            part = min(a.present[i], b.present[i])
            observed, description = math.inf, f"no gradient {f'of {1 - part:.0%} of it ' if part else ''}in {lacking}"
        yield Quantity(
            what=name,
            observed=observed,
            allowed=allowed[i],
            norms=(float(a.norms[i]), float(b.norms[i])),
            scale=_scale(a.sketches[i], b.sketches[i], allowed[i]),
            rows=_rows(a.rows[i], b.rows[i], allowed[i]),
            description=description,
        )


def _scale(a: Vector, b: Vector, allowed: float) -> float | None:
    """Give the factor of ``a`` that is nearest to ``b``; None if what is left without it exceeds the bound."""
    factor, left = scale_of(b, a)
    return factor if b.any() and left <= min(allowed, 0.1) * np.linalg.norm(b) else None


def _rows(a: Vector, b: Vector, allowed: float) -> str:
    """Name the groups of rows whose norms differ, as ``3 of 64``; empty if they are half of all or more."""
    size = np.maximum(a, b)
    used = int((size > 0).sum())
    places = np.flatnonzero(np.abs(a - b) > allowed * np.maximum(size, floor_of(size**2)))
    if not 0 < len(places) * 2 < used:
        return ""
    return f"row groups {', '.join(map(str, places[:4]))}{', ...' if len(places) > 4 else ''} of {len(a)}"


def noise(a: Tensors, b: Tensors) -> Vector:
    """Estimate the relative difference of each group of rows: [P, 64], 0 for a group of zeros.

    A sketch does not say which rows a difference is in; it is taken to be spread evenly over all that are not zero.
    """
    sizes = np.maximum(a.rows, b.rows)
    groups = np.maximum(1, (sizes > 0).sum(axis=1))
    distances = np.linalg.norm(a.sketches - b.sketches, axis=1) / np.sqrt(groups)
    relative: Vector = np.divide(distances[:, None], sizes, out=np.zeros_like(sizes), where=sizes > 0)
    return relative


def difference(before: Tensors, after: Tensors) -> Tensors:
    """Subtract two states of the same tensors; the norms of the difference are estimates."""
    sketches = after.sketches - before.sketches
    return Tensors(
        norms=np.linalg.norm(sketches, axis=1),
        present=after.present,
        not_finite=after.not_finite,
        rows=np.zeros_like(after.rows),
        sketches=sketches,
    )


def allowed_update(threshold: float, *, noise: Vector, stored: float, updates: tuple[float, float]) -> float | None:
    """Bound the difference of two updates of these norms: the threshold, the noise that Adam amplifies, and ``stored``.

    noise: the relative error of the gradients by group of rows [64]; empty for an optimizer that moves with the
    gradient's size. Adam divides by that size, so an element that is nearer to zero than its error moves by the sign of
    that error, wrong by twice its step. Of normally distributed elements of relative error e, 0.8 e are; gradients have
    more elements near zero than that, hence the 4. stored: the rounding of the weights when they are written back.

    None where rounding decides: where half of the elements may be turned, or what is written back rounds as much as it
    moves. Even there, a gradient by which one side does not move anything at all is a difference.
    """
    turned = np.minimum(1.0, NEAR_ZERO * noise[noise > 0])
    part = float(turned.mean()) if len(turned) else 0.0
    written = stored / max(updates) if any(updates) else 0.0
    if written >= MOST or (part >= 0.5 and all(updates)):
        return None
    return min(MOST, max(threshold, 2.0 * math.sqrt(part)) + written)


def settings(a: Run, b: Run, here: Line, there: Line, names: Sequence[str]) -> Iterator[Quantity]:
    """Compare optimizer settings parameter by parameter, because frameworks group parameters differently."""
    if here["stepped"] != there["stepped"]:
        lacking = b.name if here["stepped"] else a.name
        yield _fact("step", f"no optimizer stepped in {lacking}, as where a loss scaler skips a step")
        return
    worst: dict[str, Quantity] = {}
    for name in names:
        p, q = setting(a, here, name), setting(b, there, name)
        if bool(p) != bool(q):
            yield _fact(name, f"no optimizer stepped it in {(b if p else a).name}")
        for key in (key for key in p if key in q and key != CLASS):
            x_y = _several(p[key]), _several(q[key])
            if len(x_y[0]) != len(x_y[1]):
                worst[key] = _fact(f"{key} of {name}", f"{p[key]} and {q[key]}")
                continue
            for x, y in zip(*x_y, strict=True):
                found = number(key, x, y, EXACT)
                if key not in worst or found.observed > worst[key].observed:
                    worst[key] = found if not found.differs else number(f"{key} of {name}", x, y, EXACT)
    yield from worst.values()


def setting(run: Run, line: Line, name: str) -> Line:
    """Give the settings of a parameter's group at a step; empty if no group has it, or its optimizer did not step."""
    found: Line = line["settings"].get(line["regrouped"].get(name, run.parameters[name]["group"]), {})
    return {CLASS: "an unnamed optimizer"} | found if found else {}


def _several(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def replicas(a: Run, b: Run, here: Mapping[str, float], there: Mapping[str, float]) -> Iterator[Quantity]:
    """Report parameters that several ranks of one record hold and that differ between them."""
    for run, drift in ((a, here), (b, there)):
        for name, distance in drift.items():
            yield Quantity(
                what=name, observed=distance, allowed=EXACT, description=f"ranks of {run.name} hold different numbers"
            )
