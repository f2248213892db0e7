"""Expectation: what a backend says must differ, in which cells, and by which defect.

Serves claim 8. An adapter's author writes a list of ExpectedDifference. A cell has the defects of all that are about
it, and is judged against the oracle with all of these (conformance.judge.expected).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.defect import Defect, Known, Unmodelled
from conformance.layout import AXES, OPTIONS, Layout
from conformance.paths import resolve
from conformance.reading import read_json
from conformance.scenario import Precision, Scenario
from conformance.validation import UsageError

SIZES = (*AXES, "zero", "ranks", "accumulation")


@dataclass(frozen=True, kw_only=True)
class ExpectedDifference:
    """A known defect below a backend.

    reason, link: what is wrong, in one sentence, and where that is shown.
    defects: what the oracle has to get wrong as well, for a scenario and a layout; where it cannot, unmodelled. Without
        any for these, it is not about the cell.

    It is about the cells that fit all of the following; what is left out fits every cell.

    options: of the layout; it has all of them.
    at_least, at_most: sizes of the layout and the scenario by name: an axis, ``zero`` (the backend's default where the
        layout says none), ``ranks`` (all of them), ``accumulation`` (micro-batches).
    precisions, objectives, scenarios: one of these names. architectures: one of these ``model_type`` of a config.json.
    packed: whether rows hold several documents.

    Raises UsageError for a name that is none, because such an expectation would be about no cell.
    """

    reason: str
    link: str
    defects: Callable[[Scenario, Layout], tuple[Defect, ...]] | None = None
    unmodelled: Callable[[Scenario, Layout], Unmodelled] | None = None
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
        """Whether cells of this scenario in this layout must differ."""
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
        """What is known of a cell that it is about."""
        return Known(
            reason=self.reason,
            link=self.link,
            defects=self.defects(scenario, layout) if self.defects else (),
            unmodelled=self.unmodelled(scenario, layout) if self.unmodelled else None,
        )


def _is_one_of(name: str, names: tuple[str, ...]) -> bool:
    return not names or name in names


def model_config(scenario: Scenario) -> dict[str, Any]:
    """The model's config.json. Raises UsageError where it cannot be read."""
    return read_json(resolve(scenario.model) / "config.json")
