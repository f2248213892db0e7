"""Said: relative errors as a person says them, the same in verdicts, in the terminal and in all reports."""

import math
from typing import Protocol

MANY, PERCENT = 10, 1e-4  # relative errors that are said as a factor, and as percent


class Judged(Protocol):
    @property
    def observed(self) -> float: ...

    @property
    def allowed(self) -> float: ...


def number(value: float | None) -> str:
    """An error in three significant digits: ``0``, ``1.2e-7``, ``0.0153``, ``NaN``."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{float(f'{value:.3g}'):g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def size_off(error: float) -> str:
    """A relative error: ``88 % off``, ``1.2e-7 off``, ``61,000 times its size off``."""
    if math.isnan(error):
        return "not a number"
    if math.isinf(error):
        return "beyond any tolerance"
    if error >= MANY:
        return f"{float(f'{error:.2g}'):,.0f} times its size off"
    return f"{float(f'{100 * error:.2g}'):g} % off" if error >= PERCENT else f"{number(error)} off"


def off(quantity: Judged) -> str:
    """An error and its bound: ``88 % off, allowed 1e-11``."""
    allowed = number(quantity.allowed) if quantity.allowed > 0 else "nothing"
    return f"{size_off(quantity.observed)}, allowed {allowed}"
