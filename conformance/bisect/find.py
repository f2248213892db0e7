"""Find: the first wrong module, forward in execution order and backward in reverse."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor

from conformance.bisect.capture import Piece, Side
from conformance.bisect.reference import Key, Reference
from conformance.bisect.values import Wrong, by_key, common_factor, compare, wrong_parameters

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class First:
    """The first wrong value of a direction.

    wrong: the value. Everything that was before it in this direction is right, the last of it ``before``, which the
    ranks ``given_by`` have.
    module: the Hugging Face module inside which the defect is if ``inside``. Otherwise it is the module that gets
    the wrong value, and the defect is between ``before`` and it; without ``before`` it is outside of the model.
    """

    direction: Direction
    module: str
    inside: bool
    before: Key | None
    given_by: tuple[int, ...]
    wrong: Wrong


@dataclass(frozen=True, kw_only=True)
class Bisected:
    """What was found in one step.

    forward, backward: None if every value is right. ``backward`` is also None if the forward pass is wrong, because
    wrong gradients follow from that. compared: numbers of values that were compared, forward and backward.
    unseen: modules of the oracle that no rank has shown. unknown: those of them that are no part of one that was shown,
    so nothing is known of them. parameters: errors of wrong gradients of parameters, by name,
    of ``gradients`` in all. factor: of the gradients of all parameters, if they are wrong by one factor.
    """

    forward: First | None
    backward: First | None
    compared: tuple[int, int]
    unseen: tuple[str, ...]
    unknown: tuple[str, ...]
    parameters: Mapping[str, float]
    gradients: int
    factor: float | None

    @property
    def where(self) -> str:
        """The module with the defect, ``between A and B``, ``gradients of parameters`` where only their sum or
        reduction is wrong, ``outside the model``, or ``unknown``."""
        first = self.forward or self.backward
        if first is None and self.unknown:
            return "unknown"
        if first is None and self.parameters and self.factor is None:
            return "gradients of parameters"
        if first is None or (first.before is None and not first.inside):
            return "outside the model"
        if first.inside:
            return first.module
        assert first.before is not None
        return f"between {first.before[0]} and {first.module}"


def bisect(pieces: Sequence[Piece], gradients: Mapping[str, Tensor], reference: Reference) -> Bisected:
    """Compare what all ranks have shown, and the ``gradients`` of parameters, with the oracle's."""
    found = by_key(pieces)
    forward = [key for key in reference.order if key in found]
    back = [cast(Key, (name, f"gradient of the {side}")) for name, side in reversed(reference.order)]
    seen = {name for name, _ in found}
    backward = [key for key in back if key in reference.values and key[0] in seen]
    first = _first("forward", forward, found, reference)
    parameters = wrong_parameters(gradients, reference)
    unseen = tuple(dict.fromkeys(name for name, _ in reference.order if name not in seen))
    return Bisected(
        forward=first,
        backward=None if first else _first("backward", backward, found, reference),
        compared=(len(forward), len(backward)),
        unseen=unseen,
        unknown=tuple(name for name in unseen if not _around(name, found)),
        parameters=parameters,
        gradients=len(reference.gradients),
        factor=common_factor(gradients, reference) if parameters else None,
    )


def _first(
    direction: Direction, order: Sequence[Key], found: Mapping[Key, Sequence[Piece]], reference: Reference
) -> First | None:
    leaves = "output" if direction == "forward" else "gradient of the input"
    before: Key | None = None
    for key in order:
        name, side = key
        shown = found[name, cast(Side, side.removeprefix("gradient of the "))]
        if wrong := compare(key, found.get(key, []), reference, shown=shown):
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
    """The smallest of the modules that were seen of which the module is a part; empty if there is none."""
    return max((other for other, _ in found if name.startswith(f"{other}.")), key=len, default="")
