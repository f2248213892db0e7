"""Names the weights that an engine computes with, from the log-probs that it gives: new, old, or neither.

Nothing is asked of the engine. Its log-probs are compared with those of the reference at candidate weights: known
mistakes first (``mistakes``), then every mixture of old and new tensors: by kind, by layer, one by one. A candidate is
named only if it explains the log-probs within the bound of honest ones.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from conformance.core.errors import first_few
from conformance.judge.engines import Tolerance
from conformance.models.components import Architecture, GatedDeltaNet, Layer, Linear
from conformance.oracle.primitives import NO_TAP, Function, Tap, Weights
from conformance.oracle.scoring import Change

KINDS = {  # the first pattern that a name matches
    "adapters": r"lora_[AB]",
    "biases": r"bias$",
    "norms": r"norm",
    "the embedding": r"embed_tokens",
    "the head": r"lm_head",
    "attention's q, k and v": r"\.(q|k|v|qkv)_proj",
    "attention's output": r"\.o_proj",
    "routers": r"\.(gate|router)\.",
    "experts": r"experts",
    "gate and up": r"(gate|up)_proj",
    "down": r"down_proj",
}
PARTS = ("attention's q, k and v", "attention's output", "experts", "gate and up", "down")  # linear layers
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")  # cut by rows among ranks
MOST_EXPERTS = 16  # of which pairs are tried
COLUMNS = ("o_proj", "down_proj")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUNDS = 4  # of the search among mixtures
THETAS = (10_000.0, 500_000.0, 1_000_000.0)  # bases of rotary positions that code has as defaults


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Holds weights that may explain what an engine gives, a tap that may change a module, and a change of the model.

    Each expert's tensors are slices of ``weights``, along the first dimension.
    """

    text: str
    weights: Weights
    tap: Tap = NO_TAP
    change: Change | None = None


@dataclass(frozen=True, kw_only=True)
class Synced:
    """Says which weights an engine has. left: the error of the explanation."""

    state: Literal["new", "stale", "partly new", "neither"]
    text: str
    left: float


class Head(Tap):
    """Computes the logits with another matrix, in another dtype."""

    def __init__(self, weight: Tensor, dtype: torch.dtype = torch.float64) -> None:
        self._weight, self._dtype = weight, dtype

    def module(self, name: str, function: Function, x: Tensor) -> Tensor:
        if name != "lm_head":
            return function(x)
        return (x.to(self._dtype) @ self._weight.to(self._dtype).T).to(x.dtype)


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "others")


def mistakes(weights: Weights, old: Weights | None, architecture: Architecture | None) -> Iterator[Candidate]:
    """Yields ways to load ``weights`` wrongly. old: the weights before an update, if there was one.

    architecture: None for a model that transformers runs.
    """
    for text, change in CHANGES.items():
        if architecture and change(architecture) != architecture:
            yield Candidate(text=text, weights=weights, change=change)
    for text, ordered in _experts(weights):
        yield Candidate(text=text, weights=ordered)
    for text, permuted in _fused(weights):
        yield Candidate(text=text, weights=permuted)
    if HEAD in weights:
        tap = Head(weights[HEAD], torch.bfloat16)
        yield Candidate(text="the head is computed in bf16", weights=weights, tap=tap)
    if old is None:
        return
    for number in range(max((len(weights[name]) for name in weights if is_stacked(name)), default=0)):
        mixed = {
            name: torch.cat([new[:number], old[name][number : number + 1], new[number + 1 :]])
            if is_stacked(name)
            else new
            for name, new in weights.items()
        }
        yield Candidate(text=f"expert {number} is old in all layers", weights=mixed)
    for ranks in (2, 4):
        for rank in range(ranks):
            mixed = {name: _shard_of(name, new, old[name], rank, ranks) for name, new in weights.items()}
            yield Candidate(text=f"the shards of rank {rank} of {ranks} are old", weights=mixed)


def is_stacked(name: str) -> bool:
    """Tells whether a tensor holds a matrix of each expert."""
    return re.search(r"\.experts\.\w+$", name) is not None


def _adapter(architecture: Architecture, *, power: int | None) -> Architecture:
    """Raises the scale of the adapters to a power, or leaves the adapters out."""
    lora = architecture.lora
    return replace(architecture, lora=lora and (None if power is None else replace(lora, scale=lora.scale**power)))


def _rotary(architecture: Architecture, **fields: Any) -> Architecture:
    """Changes the rotary positions of all layers that have some."""

    def changed(layer: Layer) -> Layer:
        attention = layer.attention
        if isinstance(attention, GatedDeltaNet):
            return layer
        return replace(layer, attention=replace(attention, rotary=replace(attention.rotary, **fields)))

    return replace(architecture, layers=tuple(map(changed, architecture.layers)))


CHANGES: dict[str, Change] = {
    "the adapter is left out: the base alone": partial(_adapter, power=None),
    "the adapter's scale is dropped": partial(_adapter, power=0),
    "the adapter's scale is applied twice": partial(_adapter, power=2),
    "rotary positions are not scaled": partial(_rotary, scaling=None),
    **{f"rotary positions are scaled linearly, by {f:g}": partial(_rotary, scaling=Linear(f)) for f in (2.0, 4.0, 8.0)},
    **{f"rotary positions have the base {theta:g}": partial(_rotary, theta=theta) for theta in THETAS},
}


def _experts(weights: Weights) -> Iterator[tuple[str, Weights]]:
    """Yields weights whose experts are in another order, or have gate and up in the other order."""
    stacked = [name for name in weights if is_stacked(name)]
    if not stacked:
        return
    count = len(weights[stacked[0]])
    for by in range(1, count):
        yield f"expert i has the weights of expert i + {by}", weights | {n: weights[n].roll(-by, 0) for n in stacked}
    for i, j in itertools.combinations(range(min(count, MOST_EXPERTS)), 2):
        order = [j if k == i else i if k == j else k for k in range(count)]
        yield f"experts {i} and {j} are exchanged", weights | {n: weights[n][order] for n in stacked}
    fused = {n: torch.cat(weights[n].chunk(2, 1)[::-1], 1) for n in stacked if "gate_up" in n}
    yield "gate and up of the experts were loaded in the order up, gate", weights | fused


def _fused(weights: Weights) -> Iterator[tuple[str, Weights]]:
    """Yields weights whose parts were put into a fused matrix in another order than they are read."""
    for names, title in ((("q", "k", "v"), "q, k, v"), (("gate", "up"), "gate, up")):
        first = f"{names[0]}_proj.weight"
        layers = [name.removesuffix(first) for name in weights if name.endswith(first)]
        if not layers or not all(f"{layer}{name}_proj.weight" in weights for layer in layers for name in names):
            continue
        orders = [("v", "k", "q"), ("q", "v", "k"), ("k", "q", "v"), ("k", "v", "q"), ("v", "q", "k")]
        for order in orders if len(names) == 3 else [("up", "gate")]:
            given = partial(_in_order, names=names, order=order)
            yield f"{title} were loaded in the order {', '.join(order)}", _each(weights, layers, given)


def _each(weights: Weights, layers: Sequence[str], change: Callable[[Mapping[str, Tensor]], Weights]) -> Weights:
    """Returns the weights with ``change`` applied to the projections of each layer, weights and biases."""
    changed = dict(weights)
    for layer in layers:
        for end in ("weight", "bias"):
            ending = f"_proj.{end}"
            own = {
                name.removeprefix(layer).removesuffix(ending): tensor
                for name, tensor in weights.items()
                if name.startswith(layer) and name.endswith(ending)
            }
            if len(own) > 1:
                changed |= {f"{layer}{name}{ending}": tensor for name, tensor in change(own).items()}
    return changed


def _in_order(own: Mapping[str, Tensor], *, names: Sequence[str], order: Sequence[str]) -> Weights:
    if not all(name in own for name in names):
        return {}
    fused = torch.cat([own[name] for name in order])
    return dict(zip(names, fused.split([len(own[name]) for name in names]), strict=True))


def _shard_of(name: str, new: Tensor, old: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns ``new`` with the old numbers in one rank's part."""
    dim = 0 if any(part in name for part in ROWS) else 1 if any(part in name for part in COLUMNS) else None
    if dim is None or dim >= new.dim() or new.shape[dim] % ranks:
        return new
    size = new.shape[dim] // ranks
    mixed = new.clone()
    mixed.narrow(dim, rank * size, size).copy_(old.narrow(dim, rank * size, size))
    return mixed


Chosen = Callable[[Candidate], list[Tensor]]  # log-probs of the requests' tokens, by the reference


def explain(
    observed: Sequence[Tensor],
    chosen: Chosen,
    tolerance: Tolerance,
    new: Weights,
    old: Weights | None,
    architecture: Architecture | None = None,
) -> Synced:
    """Says which weights explain ``observed``, the log-probs of the requests' tokens.

    tolerance: at the new weights. old: None if there was no update; then only mistakes of loading are tried.
    architecture: see ``mistakes``.
    """
    bound, target = tolerance.bound, torch.cat([*observed])
    if EMBEDDING in new and HEAD not in new:  # engines may hold a copy of a tied matrix, which may be stale alone
        chosen, new, old = _untied(chosen), _with_head(new), old and _with_head(old)

    def left(logprobs: Tensor) -> float:
        return float((logprobs - target).norm() / target.norm())

    def error(candidate: Candidate) -> float:
        return left(torch.cat(chosen(candidate)))

    own = error(Candidate(text="", weights=new))
    if own <= bound:
        return Synced(state="new", text="", left=own)
    if old is not None and (before := error(Candidate(text="", weights=old))) <= bound:
        return Synced(state="stale", text="all weights are old", left=before)
    nearest = Synced(state="neither", text="no mixture of old and new weights explains it", left=own)
    tried = [(error(candidate), candidate.text) for candidate in mistakes(new, old, architecture)]
    for found, text in sorted(tried):
        if found <= bound or (found < 0.2 * own and "bf16" in text):
            state: Literal["partly new", "neither"] = "partly new" if " old" in text else "neither"
            return Synced(state=state, text=text, left=found)
    if old is None:
        return Synced(state="neither", text="", left=own)
    for units in _levels(new, old):
        for starts_old in (False, True):
            mixture = _Mixture(units, new, old, chosen, target)
            stale = mixture.search({*units} if starts_old else set(), bound)
            if stale is not None:
                names = {name for unit in stale for name in units[unit]}
                return Synced(state="partly new", text=_described(names, new, old), left=mixture.left(stale))
    return nearest


def _with_head(weights: Weights) -> Weights:
    return weights | {HEAD: weights[EMBEDDING]}


def _untied(chosen: Chosen) -> Chosen:
    """Lets a tied model have a head of its own."""

    def run(candidate: Candidate) -> list[Tensor]:
        own = {name: tensor for name, tensor in candidate.weights.items() if name != HEAD}
        tap = Head(candidate.weights[HEAD]) if candidate.tap is NO_TAP else candidate.tap
        return chosen(replace(candidate, weights=own, tap=tap))

    return run


def _levels(new: Weights, old: Weights) -> Iterator[dict[str, list[str]]]:
    """Yields units that may be old as a whole: kinds, layers, and single tensors; without tensors that did not move."""
    moved = [name for name, tensor in new.items() if not torch.equal(tensor, old[name])]
    for unit_of in (kind_of, _layer_of, str):
        units: dict[str, list[str]] = {}
        for name in moved:
            units.setdefault(unit_of(name), []).append(name)
        if len(units) > 1:
            yield units


def _layer_of(name: str) -> str:
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else name


class _Mixture:
    """Searches the units that are old: by least squares over the change that each of them makes, then rounding."""

    def __init__(
        self, units: Mapping[str, Sequence[str]], new: Weights, old: Weights, chosen: Chosen, target: Tensor
    ) -> None:
        self._units, self._new, self._old, self._chosen, self._target = units, new, old, chosen, target
        self._known: dict[frozenset[str], Tensor] = {}

    def _at(self, stale: set[str]) -> Tensor:
        key = frozenset(stale)
        if key not in self._known:
            names = {name for unit in stale for name in self._units[unit]}
            mixed = {name: self._old[name] if name in names else tensor for name, tensor in self._new.items()}
            self._known[key] = torch.cat(self._chosen(Candidate(text="", weights=mixed)))
        return self._known[key]

    def left(self, stale: set[str]) -> float:
        return float((self._at(stale) - self._target).norm() / self._target.norm())

    def search(self, stale: set[str], bound: float) -> set[str] | None:
        """Returns the old units if they explain the target within ``bound``."""
        order = [*self._units]
        if len(order) > len(self._target):
            return None
        for _ in range(ROUNDS):
            if self.left(stale) <= bound:
                return stale
            base = self._at(stale)
            changes = torch.stack([self._at(stale ^ {unit}) - base for unit in order], dim=1)
            flips = torch.linalg.lstsq(changes, (self._target - base)[:, None]).solution[:, 0]
            tried = stale ^ {unit for unit, flip in zip(order, flips.tolist(), strict=True) if flip > 0.5}
            single = min((stale ^ {unit} for unit in order), key=self.left)
            better = min((tried, single), key=self.left)
            if self.left(better) >= self.left(stale):
                return None
            stale = better
        return stale if self.left(stale) <= bound else None


def _described(stale: set[str], new: Weights, old: Weights) -> str:
    """Lists the old tensors, whole kinds by their names, and says what is new."""
    moved = {name for name, tensor in new.items() if not torch.equal(tensor, old[name])}
    return f"old: {_listed(stale, moved)}; new: {_listed(moved - stale, moved)}"


def _listed(names: set[str], moved: set[str]) -> str:
    kinds = {kind: {name for name in moved if kind_of(name) == kind} for kind in [*KINDS, "others"]}
    whole = [kind for kind, own in kinds.items() if own and own <= names]
    rest = sorted(names - {name for kind in whole for name in kinds[kind]})
    linear = [kind for kind in PARTS if kinds[kind]]
    if len(linear) > 1 and {*linear} <= {*whole}:
        whole = ["all linear layers", *(kind for kind in whole if kind not in linear)]
    return ", ".join([*whole, *([first_few(rest, most=4)] if rest else [])]) or "nothing"
