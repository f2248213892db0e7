"""Finds the first wrong module of a traced cell: forward in execution order, and backward in reverse.

The oracle's values and gradients are those of each of its modules in one optimizer step. Each value that the ranks have
recorded is compared with them. In the exact tier there is no noise, so a value beyond its bound is wrong, and a value
within its bound is right. In another tier the bound is as large as rounding can be, so only a gross error is found.

The comparison is a task of a worker group of one rank. If it takes too long or too much memory, only it ends.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from conformance.bisect.explain import name_ranks
from conformance.judge.tolerance import EXACT
from conformance.numerics.comparison import common_factor, not_finite, relative, scale_of, times
from conformance.oracle.primitives import Function, Tap
from conformance.oracle.run import observe_step
from conformance.records.record_format import read_lines
from conformance.records.step_tensors import read_record
from conformance.results.bisection import Bisected, Direction, First, Key, Side, Wrong, most_telling_first
from conformance.runtime import RankContext
from conformance.spec.batch import Batch, Document, read_batches
from conformance.spec.known_defects import Defect, parse_defects
from conformance.spec.observables import Role, model_key
from conformance.spec.scenario import Scenario, parse_scenario
from conformance.worker.activation_capture import Piece, read_pieces

PLACES = 4  # most wrong tokens that are named


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The oracle's values and gradients of one step.

    values: float64 (tokens, features) by module and side; rows lie end to end. known: bool (tokens,), False in
    documents without targets, which the oracle does not run. order: inputs and outputs in the order of the forward
    pass. gradients: those of the parameters. places: the row of each token, and its position in the row.
    """

    values: dict[Key, Tensor]
    known: Tensor
    order: tuple[Key, ...]
    gradients: dict[str, Tensor]
    places: tuple[tuple[int, int], ...]


def references(
    *,
    scenario: Scenario,
    models: Mapping[str, Path],
    batches: Sequence[Batch],
    step: int,
    weights: Callable[[int, Role], dict[str, Tensor] | None],
    defects: tuple[Defect, ...] = (),
) -> dict[str, Reference]:
    """Runs the oracle on a step, for each trained model, by role; see conformance.oracle.run.observe_step."""
    batch = batches[step]
    taps = {role.name: _Recording(batch) for role in scenario.objective.roles if role.trained}
    observed = observe_step(
        scenario=scenario, models=models, batches=batches, step=step, weights=weights, taps=taps, defects=defects
    )
    places = tuple((row.index, at) for row in batch.rows for at in range(row.length))
    return {
        name: Reference(
            values=tap.values,
            known=tap.known,
            order=tuple(tap.order),
            gradients=observed.gradients[name],
            places=places,
        )
        for name, tap in taps.items()
    }


@dataclass
class _Recording(Tap):
    batch: Batch
    values: dict[Key, Tensor] = field(default_factory=dict)
    order: dict[Key, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = sum(row.length for row in self.batch.rows)
        self.known = torch.zeros(self.total, dtype=torch.bool)

    def begins(self, documents: Sequence[tuple[int, int, Document]]) -> None:
        places = []  # -1 where the batch has no token, or the document no target
        for row, number, document in documents:
            before = sum(other.length for other in self.batch.rows[:row])
            start = before + sum(len(one.tokens) for one in self.batch.rows[row].documents[:number])
            end = start + len(document.tokens)
            places.append(torch.arange(start, end) if any(document.targets) else torch.full((end - start,), -1))
        self.at = torch.cat(places)
        self.known[self.at[self.at >= 0]] = True

    def module(self, name: str, function: Function, x: Tensor) -> Tensor:
        at = self.at  # gradients arrive when ``self.at`` belongs to another document
        alias = x.view_as(x)
        self._keep((name, "input"), at, alias)
        result = function(alias)
        self._keep((name, "output"), at, result)
        return result

    def _keep(self, key: Key, at: Tensor, x: Tensor) -> None:
        self.order[key] = None
        self._set(key, at, x.detach())
        if x.requires_grad:
            gradient_key = cast(Key, (key[0], f"gradient of the {key[1]}"))
            x.register_hook(lambda gradient: self._set(gradient_key, at, gradient))

    def _set(self, key: Key, at: Tensor, x: Tensor) -> None:
        x = x if x.is_floating_point() else x[:, None]
        if key not in self.values:
            self.values[key] = torch.zeros(self.total, x.shape[1], dtype=torch.float64)
        self.values[key][at[at >= 0]] = x[at >= 0].double()


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """The compared part of a piece, ``found``, and its reference, ``right``, both (n, features)."""

    piece: Piece
    tokens: Tensor
    found: Tensor
    right: Tensor

    @property
    def error(self) -> float:
        return _rms(self.found - self.right)


def by_key(pieces: Sequence[Piece]) -> dict[Key, list[Piece]]:
    found: dict[Key, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.name, piece.side].append(piece)
    return dict(found)


def compare(
    key: Key, pieces: Sequence[Piece], reference: Reference, *, shown: Sequence[Piece], bound: float = EXACT
) -> Wrong | None:
    """Compares a value that the ranks hold in ``pieces`` with the reference; None if it is right.

    ``shown``: the pieces themselves or, for a gradient, the pieces of the tensor that it belongs to. ``bound``: of the
    relative error.
    """
    right = reference.values[key]
    size = _rms(right[reference.known])
    compared = [_align(piece, right, reference.known) for piece in pieces]
    compared = [one for one in compared if one.found.numel()]
    bad = [one for one in compared if not one.error <= bound * size]
    held = torch.zeros_like(reference.known)
    for piece in pieces:
        held[piece.tokens] = True
    missing = int((reference.known & ~held).sum())
    given = {(piece.rank, piece.micro_batch) for piece in pieces}
    due = {(piece.rank, piece.micro_batch) for piece in shown if reference.known[piece.tokens].any()}
    if not bad and not missing and due <= given:
        return None
    tokens, features = set[int](), set[int]()
    for one in bad:
        is_wrong = ~((one.found - one.right).abs() <= bound * size)  # NaN is wrong
        tokens.update(one.tokens[is_wrong.any(dim=1)].tolist())
        features.update((torch.where(is_wrong.any(dim=0))[0] + one.piece.first_feature).tolist())
    error = max((relative(one.error, size) for one in bad), default=math.inf)
    places = [reference.places[token] for token in sorted(tokens)]
    return Wrong(
        key=key,
        error=error,
        ranks=tuple(sorted({one.piece.rank for one in bad})),
        hold=tuple(sorted({piece.rank for piece in pieces})),
        silent=tuple(sorted({rank for rank, _ in due - given})),
        tokens=len(tokens),
        compared=int(reference.known.sum()),
        rows=len({row for row, _ in places}),
        places=tuple(places[:PLACES]),
        missing=missing,
        features=(min(features, default=0), max(features, default=0), right.shape[1]),
        would_be_right=_explained(compared, bad, right, bound=bound * size, is_exact=bound == EXACT) if bad else "",
    )


def _align(piece: Piece, right: Tensor, known: Tensor) -> _Compared:
    keep = known[piece.tokens]
    first, width = piece.first_feature, piece.values.shape[1]
    expected = right[piece.tokens[keep], first : first + width]
    found = piece.values[keep][:, : expected.shape[1]]
    return _Compared(piece=piece, tokens=piece.tokens[keep], found=found, right=expected)


def _explained(
    compared: Sequence[_Compared], bad: Sequence[_Compared], right: Tensor, *, bound: float, is_exact: bool
) -> str:
    """Names the likely cause of wrong pieces: the simplest change that would make them right."""
    if broken := next(filter(None, (not_finite(one.found) for one in bad)), ""):
        return f"it holds {broken}"
    if all(not one.found.any() for one in bad):
        return "it is zero"
    if not is_exact:  # too wide a bound to tell by
        return ""
    return (
        _by_factor(bad, bound)
        or _by_reduction(compared, bad, bound)
        or _by_permutation(bad, right, bound)
        or _by_vector(bad, bound)
    )


def _by_factor(bad: Sequence[_Compared], bound: float) -> str:
    """Tests whether the wrong pieces are the right ones times one factor for each rank."""
    factors: dict[int, float] = {}
    for one in bad:
        factor, left = scale_of(one.found.double(), one.right.double())
        # The factor's own rounding is in proportion to it.
        if factor is None or not left / math.sqrt(one.found.numel()) <= bound * max(1.0, abs(factor)):
            return ""
        known = factors.setdefault(one.piece.rank, factor)
        if not math.isclose(known, factor, rel_tol=1e-9):
            return ""
    if (factor := common_factor(factors.values(), within=1e-9)) is not None:
        return f"it is {times(factor, digits=10)}"
    return "; ".join(f"on rank {rank} it is {times(factor, digits=10)}" for rank, factor in factors.items())


def _by_reduction(compared: Sequence[_Compared], bad: Sequence[_Compared], bound: float) -> str:
    """Tests whether the sum or the mean over the ranks that hold the same tokens and features is right."""
    groups: dict[tuple[object, ...], list[_Compared]] = defaultdict(list)
    for one in compared:
        groups[one.piece.micro_batch, one.piece.first_feature, tuple(one.tokens.tolist())].append(one)
    concerned = [group for group in groups.values() if any(one is other for one in group for other in bad)]
    if any(len(group) == 1 for group in concerned):
        return ""
    for word, kind in (("sum", torch.sum), ("mean", torch.mean)):
        together = [(kind(torch.stack([one.found for one in group]), dim=0), group[0].right) for group in concerned]
        if all(_rms(found - right) <= bound for found, right in together):
            ranks = name_ranks(sorted({one.piece.rank for group in concerned for one in group}))
            lacks = "reduction is missing" if word == "sum" else "reduction is missing, or a mean was left out"
            return f"the {word} over {ranks} would be right: a {lacks}"
    return ""


def _by_permutation(bad: Sequence[_Compared], right: Tensor, bound: float) -> str:
    """Tests whether the wrong tokens or features have the values that other tokens or features should have."""
    moved: dict[int, int] = {}
    for one in bad:
        first, width = one.piece.first_feature, one.found.shape[1]
        is_wrong = (one.found - one.right).abs().amax(dim=1) > bound
        distance = torch.cdist(one.found[is_wrong], right[:, first : first + width], p=math.inf)
        nearest, at = distance.min(dim=1)
        if not (nearest <= bound).all():
            return _by_features(bad, right, bound)
        moved |= dict(zip(one.tokens[is_wrong].tolist(), at.tolist(), strict=True))
    here, there = next(iter(moved.items()))
    # Several tokens may have equal values; the first of these represents all.
    first_equal = {token: _first_equal(token, right, bound) for token in {*moved, *moved.values()}}
    is_order = sorted(first_equal[token] for token in moved) == sorted(first_equal[token] for token in moved.values())
    cause = "tokens are in another order" if is_order else "tokens have what others should have, and these have it too"
    return f"{cause}: token {here} has what token {there} should have"


def _first_equal(token: int, right: Tensor, bound: float) -> int:
    """Returns the first token that should have the same values as this one."""
    return int((torch.cdist(right[token : token + 1], right, p=math.inf)[0] <= bound).nonzero()[0])


def _by_features(bad: Sequence[_Compared], right: Tensor, bound: float) -> str:
    shards: list[str] = []
    should_be, are = set[tuple[int, int]](), set[tuple[int, int]]()
    for one in bad:
        width = one.found.shape[1]
        firsts = range(0, right.shape[1] - width + 1, width)
        match = [first for first in firsts if _rms(one.found - right[one.tokens, first : first + width]) <= bound]
        if not match:
            return ""
        should_be.add((one.piece.first_feature, width))
        are.add((match[0], width))
        should, has = (f"{first} to {first + width - 1}" for first in (one.piece.first_feature, match[0]))
        shards.append(f"rank {one.piece.rank} has {has} instead of {should}")
    cause = "shards are in another order" if should_be == are else "shards are those of other ranks"
    return f"{cause}: of the features, {', '.join(dict.fromkeys(shards))}"


def _by_vector(bad: Sequence[_Compared], bound: float) -> str:
    """Tests whether every token is off by the same vector."""
    for one in bad:
        errors = one.found - one.right
        if len(errors) < 2 or not _rms(errors - errors[:1]) <= bound:
            return ""
    return "every token is off by the same vector, as by a bias that is missing or added again"


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def wrong_parameters(found: Mapping[str, Tensor], reference: Reference, bound: float = EXACT) -> dict[str, float]:
    """Returns the relative errors of wrong gradients of parameters, by name; infinite for a missing gradient."""
    errors: dict[str, float] = {}
    for name, right in reference.gradients.items():
        size = float(right.norm())
        distance = float((found[name].to(right.dtype) - right).norm()) if name in found else math.inf
        if not (error := relative(distance, size)) <= bound:
            errors[name] = error
    return errors


def factor_of_all(found: Mapping[str, Tensor], reference: Reference) -> float | None:
    """Returns the one factor between the gradients of all parameters and the oracle's; None if there is none."""
    if not found.keys() >= reference.gradients.keys():
        return None
    observed = torch.cat([found[name].double().flatten() for name in reference.gradients])
    expected = torch.cat([right.flatten() for right in reference.gradients.values()])
    factor, left = scale_of(observed, expected)
    return factor if factor is not None and left <= EXACT * abs(factor) * float(expected.norm()) else None


def bisect(
    model: str,
    pieces: Sequence[Piece],
    gradients: Mapping[str, Tensor],
    reference: Reference,
    bound: float = EXACT,
) -> Bisected:
    """Compares the values that all ranks have recorded, and the ``gradients`` of parameters, with the oracle's."""
    found = by_key(pieces)
    forward = [key for key in reference.order if key in found]
    back = [cast(Key, (name, f"gradient of the {side}")) for name, side in reversed(reference.order)]
    shown = {name for name, _ in found}
    backward = [key for key in back if key in reference.values and key[0] in shown]
    first = _first("forward", forward, found, reference, bound)
    parameters = wrong_parameters(gradients, reference, bound)
    unseen = tuple(dict.fromkeys(name for name, _ in reference.order if name not in shown))
    return Bisected(
        model=model,
        forward=first,
        backward=None if first else _first("backward", backward, found, reference, bound),
        compared=(len(forward), len(backward)),
        unseen=unseen,
        unknown=tuple(name for name in unseen if not _around(name, found)),
        parameters=parameters,
        gradients=len(reference.gradients),
        factor=factor_of_all(gradients, reference) if parameters and bound == EXACT else None,
    )


def _first(
    direction: Direction,
    order: Sequence[Key],
    found: Mapping[Key, Sequence[Piece]],
    reference: Reference,
    bound: float,
) -> First | None:
    leaves = "output" if direction == "forward" else "gradient of the input"
    before: Key | None = None
    for key in order:
        name, side = key
        shown = found[name, cast(Side, side.removeprefix("gradient of the "))]
        if wrong := compare(key, found.get(key, []), reference, shown=shown, bound=bound):
            around = _around(name, found) if side != leaves else name
            return First(
                direction=direction,
                module=around or name,
                inside=bool(around),
                before=before,
                given_by=tuple(sorted({piece.rank for piece in found[before]})) if before else (),
                wrong=wrong,
            )
        before = key
    return None


def _around(name: str, found: Mapping[Key, Sequence[Piece]]) -> str:
    """Returns the smallest recorded module that contains the module; empty if there is none."""
    return max((other for other, _ in found if name.startswith(f"{other}.")), key=len, default="")


def find(
    rank: RankContext,
    *,
    scenario: dict[str, Any],
    models: dict[str, str],
    batches: str,
    oracle: str,
    traced: str,
    step: int,
    bound: float,
) -> list[dict[str, Any]]:
    """Bisects each trained model of a cell that was traced at ``step``; returns JSON values, the most telling first.

    oracle: the oracle's record of the cell. traced: the folder of the traced values. bound: of their relative errors.
    The oracle begins the step with its own weights.
    """
    rank.beat(f"step {step}")
    parsed, record = parse_scenario(scenario), Path(oracle)

    def weights(before: int, role: Role) -> dict[str, Tensor] | None:
        if not before or not role.trained:
            return None
        return _of_key(model_key(role.prefix, "weight"), record, before - 1)

    right = references(
        scenario=parsed,
        models={role: Path(folder) for role, folder in models.items()},
        batches=read_batches(Path(batches)),
        step=step,
        weights=weights,
        defects=parse_defects(read_lines(record).header["backend"]["defects"]),
    )
    roles = [role for role in parsed.objective.roles if role.trained]
    trace, own = Path(traced) / "trace", Path(traced) / "record"
    gradients = {role.name: _of_key(model_key(role.prefix, "gradient"), own, step) for role in roles}
    found = [bisect(name, read_pieces(trace / name), gradients[name], right[name], bound) for name in gradients]
    return [asdict(one) for one in most_telling_first(found)]


def _of_key(key: str, record: Path, step: int) -> dict[str, Tensor]:
    """Reads the tensors of an observable at a step of a record, by the parameter's name."""
    tensors = read_record(record).steps[step].tensors()
    return {name.removeprefix(f"{key}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{key}/")}
