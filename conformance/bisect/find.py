"""Find: the first wrong module, forward in execution order and backward in reverse."""

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from conformance.bisect.capture import Piece
from conformance.bisect.reference import Reference
from conformance.bisect.values import by_key, common_factor, compare, wrong_parameters
from conformance.record.bisection import Bisected, Direction, First, Key, Side


def bisect(model: str, pieces: Sequence[Piece], gradients: Mapping[str, Tensor], reference: Reference) -> Bisected:
    """Compare what all ranks have shown of a model, and the ``gradients`` of its parameters, with the oracle's."""
    found = by_key(pieces)
    forward = [key for key in reference.order if key in found]
    back = [cast(Key, (name, f"gradient of the {side}")) for name, side in reversed(reference.order)]
    seen = {name for name, _ in found}
    backward = [key for key in back if key in reference.values and key[0] in seen]
    first = _first("forward", forward, found, reference)
    parameters = wrong_parameters(gradients, reference)
    unseen = tuple(dict.fromkeys(name for name, _ in reference.order if name not in seen))
    return Bisected(
        model=model,
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
