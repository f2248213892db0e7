"""torch.compile: ``x.__class__ is int`` is False in compiled code, for an int, a string, a dtype or a device.

So is ``x.__class__ == int`` with torch 2.12. ``isinstance`` and ``type()`` are right. Exit code 0: defect present.
1: gone. See compiled-class-of-constants.md.
"""

import sys
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

VALUES = {"an int": 3, "a string": "a", "a dtype": torch.float32, "a device": torch.device("cpu")}


def by_class(value: object, kind: type) -> int:
    return 1 if value.__class__ is kind else 0


def by_equality(value: object, kind: type) -> int:
    return 1 if value.__class__ == kind else 0


def by_isinstance(value: object, kind: type) -> int:
    return 1 if isinstance(value, kind) else 0


def by_type(value: object, kind: type) -> int:
    return 1 if type(value) is kind else 0


def compiled(test: Callable[[object, type], int], value: object) -> int:
    """What the test gives in compiled code; in plain Python each gives 1 for these values."""
    torch._dynamo.reset()
    kind = type(value)
    function = torch.compile(lambda x: x + test(value, kind), backend="eager")
    return int(function(torch.zeros(1)))


class Lifted(TorchFunctionMode):
    """Replaces dtypes by float64, as one would to keep a reference from rounding."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        lifted = []
        for arg in args:
            is_dtype = arg.__class__ is torch.dtype
            lifted.append(torch.float64 if is_dtype else arg)
        return func(*lifted, **(kwargs or {}))


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32)


def main() -> int:
    present = True
    for name, value in VALUES.items():
        wrong = {test.__name__ for test in (by_class, by_equality, by_isinstance, by_type) if not compiled(test, value)}
        print(f"the class of {name}: wrong {', '.join(sorted(wrong)) or 'in no way'}")
        present &= wrong in ({"by_class"}, {"by_class", "by_equality"})
    x = torch.full((1,), 1 / 3, dtype=torch.float64)
    torch._dynamo.reset()
    with Lifted():
        plain, of_compiled = rounded(x), torch.compile(rounded, backend="aot_eager")(x)
    off = (of_compiled - x).abs().item()
    print(f"a mode that keeps float64: {plain.dtype}; compiled: {of_compiled.dtype}, {off:.1e} off")
    present &= off > 0
    print(f"torch {torch.__version__}: {'defect present' if present else 'defect not as described'}")
    return 0 if present else 1


if __name__ == "__main__":
    sys.exit(main())
