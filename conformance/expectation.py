"""Expectation: differences that a backend declares as expected, the cells that have them, and the defect behind them.

Serves claim 8. The author of an adapter writes a tuple of ExpectedDifference. A cell has the defects of all expected
differences that match it, and is judged against an oracle with all these defects (conformance.judge.expected).
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from conformance.defect import Defect, Known, Unmodelled
from conformance.layout import AXES, OPTIONS, Layout
from conformance.paths import resolve
from conformance.reading import read_json
from conformance.scenario import Precision, Scenario
from conformance.validation import UsageError

SIZES = (*AXES, "zero", "ranks", "accumulation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedDifference:
    """A known defect of the library below a backend, and the cells that have it.

    reason: what is wrong, in one sentence. link: where this is shown.
    defects: a function from scenario and layout to the defects that the oracle has to reproduce. If it returns none,
        the expectation does not apply to the cell.
    unmodelled: instead of ``defects``, for a defect that the oracle cannot reproduce; it may return None, with the same
        effect. Give exactly one of the two.

    The expectation applies to the cells that match all of the following conditions. A condition that is left out
    matches every cell.

    options: the layout has all these options.
    at_least, at_most: bounds of sizes, by name: an axis of the layout, ``zero`` (the ZeRO stage; the backend's default
        if the layout names none), ``ranks`` (the world size), ``accumulation`` (micro-batches per step).
    precisions, objectives, scenarios: the cell's is one of these names.
    architectures: ``model_type`` in the model's config.json is one of these.
    packed: whether rows hold several documents.

    Raises UsageError for an unknown name, because such an expectation would match no cell.
    """

    reason: str
    link: str
    defects: Callable[[Scenario, Layout], tuple[Defect, ...]] | None = None
    unmodelled: Callable[[Scenario, Layout], Unmodelled | None] | None = None
    options: tuple[str, ...] = ()
    at_least: Mapping[str, int] = field(default_factory=dict)
    at_most: Mapping[str, int] = field(default_factory=dict)
    precisions: tuple[Precision, ...] = ()
    architectures: tuple[str, ...] = ()
    objectives: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    packed: bool | None = None

    def __post_init__(self) -> None:
        if (self.defects is None) == (self.unmodelled is None):
            raise UsageError(f"the expected difference {self.reason!r} needs defects or unmodelled, one of the two")
        for given, known in (
            (self.options, tuple(OPTIONS)),
            ((*self.at_least, *self.at_most), SIZES),
            (self.precisions, ("exact", "fp32", "bf16", "fp16")),
        ):
            if unknown := set(given) - set(known):
                raise UsageError(
                    f"the expected difference {self.reason!r} names {', '.join(sorted(unknown))}; known are "
                    f"{', '.join(known)}"
                )

    def is_about(self, scenario: Scenario, layout: Layout, *, default_zero: int | None) -> bool:
        """Whether cells of this scenario in this layout are expected to differ."""
        zero = default_zero if layout.zero is None else layout.zero
        sizes = {axis: getattr(layout, axis) for axis in AXES}
        sizes |= {"zero": zero or 0, "ranks": layout.world_size, "accumulation": scenario.accumulation}
        return (
            set(self.options) <= set(layout.options)
            and all(sizes[name] >= size for name, size in self.at_least.items())
            and all(sizes[name] <= size for name, size in self.at_most.items())
            and _is_one_of(scenario.precision, self.precisions)
            and _is_one_of(scenario.objective.kind, self.objectives)
            and _is_one_of(scenario.name, self.scenarios)
            and (self.packed is None or self.packed == scenario.data.packed)
            and (not self.architectures or model_config(scenario).get("model_type") in self.architectures)
        )

    def known_for(self, scenario: Scenario, layout: Layout) -> Known:
        """The expected difference of one cell, which has to match (see ``is_about``)."""
        return Known(
            reason=self.reason,
            link=self.link,
            defects=self.defects(scenario, layout) if self.defects else (),
            unmodelled=self.unmodelled(scenario, layout) if self.unmodelled else None,
        )


def _is_one_of(name: str, names: tuple[str, ...]) -> bool:
    return not names or name in names


def model_config(scenario: Scenario) -> dict[str, Any]:
    """The model's config.json. Raises UsageError if it cannot be read."""
    return read_json(resolve(scenario.model) / "config.json")
